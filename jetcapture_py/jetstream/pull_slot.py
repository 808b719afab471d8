"""A lane: a subscription with at most one open pull, so that it is known how much may still come."""

from __future__ import annotations

from dataclasses import dataclass

from jetcapture_py.jetstream.wire.inbox import Inbox


@dataclass(slots=True, eq=False)
class PullSlot:
    """A subscription to the inbox and the pull under way on it; `batch` and `max_bytes` are what the pull asked for.

    A pull for a `single` message waits for one that is too large for other pulls.
    """

    subject: str
    sid: int
    inbox: Inbox
    pull: int = 0
    active: bool = False
    single: bool = False
    batch: int = 0
    max_bytes: int = 0
    start: int = 0
    start_bytes: int = 0
    heard: float = 0.0
    expires: float = 0.0
    not_before: float = 0.0

    @property
    def left(self) -> int:
        """Messages that the pull may still bring."""
        return max(0, self.batch - (self.inbox.by_sid[self.sid][0] - self.start)) if self.active else 0

    @property
    def brought(self) -> int:
        """Bytes that the pull has brought, as the server counts them."""
        return self.inbox.by_sid[self.sid][1] - self.start_bytes

    @property
    def left_bytes(self) -> int:
        """Bytes that the pull may still bring."""
        return max(0, self.max_bytes - self.brought) if self.left else 0
