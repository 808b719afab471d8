"""Detects a recreated consumer, and distinguishes a deleted one from an unreachable one.

Pure: the caller says what the server answered, and when, in seconds of a monotonic clock.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from jetcapture_py.jetstream.admin import ConsumerState

CREATED_TOLERANCE = timedelta(milliseconds=100)
"""Servers before 2.12 report the creation time from memory until their first restart and from disk afterwards, which is
0.1 to 0.4 ms later (measured with 2.10 and 2.11)."""
SETTLED_AFTER = 5.0
"""Seconds after which a killed server has certainly written a consumer's state; it writes several times a second."""
CONFIRMATIONS = 3
CONFIRM_EVERY = 0.5
"""Seconds between answers that count: a cluster that has just lost its leader may say "not found", and be wrong."""


class ConsumerWatch:
    """Follows one consumer from `state` on, its first known state.

    A creation time that moves by more than `CREATED_TOLERANCE` means another consumer. One that moves by less is a
    server's restart, unless the consumer also starts again: a new one has delivered and acknowledged less than the old
    one had some seconds ago. What it had just now does not count, because a killed server forgets the last moments.
    """

    def __init__(self, state: ConsumerState, now: float) -> None:
        self._created = state.created
        self._settled = self._candidate = state
        self._candidate_at = now
        self._missing: list[float] = []

    def is_same(self, state: ConsumerState, now: float) -> bool:
        """Whether this answer is about the consumer that is followed."""
        self._missing.clear()
        if now - self._candidate_at >= SETTLED_AFTER:
            self._settled, self._candidate, self._candidate_at = self._candidate, state, now
        if state.created == self._created:
            return True
        settled = self._settled
        started_again = state.deliveries < settled.deliveries or state.ack_floor < settled.ack_floor
        if started_again or not _close(state.created, self._created):
            return False
        self._created = state.created
        return True

    def is_gone(self, now: float) -> bool:
        """Record an answer that there is no such consumer; True once `CONFIRMATIONS` distinct moments agree."""
        if not self._missing or now - self._missing[-1] >= CONFIRM_EVERY:
            self._missing.append(now)
        return len(self._missing) >= CONFIRMATIONS


def _close(one: str, other: str) -> bool:
    try:
        return abs(datetime.fromisoformat(one) - datetime.fromisoformat(other)) <= CREATED_TOLERANCE
    except (ValueError, TypeError):  # TypeError: one of them without a time zone
        return False
