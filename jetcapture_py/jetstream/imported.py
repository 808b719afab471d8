"""Pulls through an API that is imported from another account.

A pull is one request with many answers. The account that exports the API decides how many pass: all (`response_type:
stream`), or only the first (the default). In both cases the server forgets where answers go after an empty one, without
headers and payload, and with it the pull (nats-server: `processServiceImport`).
"""

from __future__ import annotations

from jetcapture_py.errors import SourceError


class PullAnswers:
    """Counts the answers to pulls, messages and statuses, to find out whether only the first of each arrives.

    That is certain after `enough` pulls with one answer: more than are open at a time, because a server that hangs
    also leaves all of those unanswered.
    """

    def __init__(self, enough: int) -> None:
        self._enough = enough
        self._several = False
        self._single = 0

    def ended(self, answers: int, *, silent: bool) -> bool:
        """Record a pull that ended normally or fell `silent`; return True if only one answer ever passes."""
        self._several |= answers > 1
        self._single += silent and answers == 1
        return not self._several and self._single >= self._enough


class OneAnswerError(SourceError):
    """Only the first answer to a request passes from the account that has the stream."""

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"pulls from stream {stream} get one message at most; "
            "the account that has the stream must export $JS.API.> with response_type: stream"
        )
