"""How many bytes pulls ask for: little enough for the server to keep, and enough for the next message.

Pure: no clock, no I/O. Sizes are bytes as the server counts them against a pull's `max_bytes` (subject, ack subject,
headers and payload), times are seconds of the caller's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from jetcapture_py.config.shares import PULLED_LEAST, PULLED_MOST, PULLED_SHARE, UNLIMITED_PULL_FROM

RECOVERY = 60.0
"""Seconds after which a reduced limit doubles."""
SUBSTANTIAL = 1 << 20
"""Bytes lost with a connection from which on pulls are likely to have asked for too much."""
REMEMBERED = 30.0
"""Pulls are sized for the largest message of the last one to two periods of this many seconds."""
STUCK_AFTER = 2.0
"""Seconds without progress after which a message that fits no pull is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one pull asks for. `batch` 0 means as configured; without `limited`, `max_bytes` is only a guess."""

    max_bytes: int
    batch: int = 0
    limited: bool = True


class PullLimits:
    """Sizes the pulls of `slots` pull slots that share `memory` bytes.

    As a rule a pull asks for its share of `limit`, or for as much as the largest recent message has. When a pull brings
    nothing because the next message is larger, one pull at a time asks for that message alone, with twice the bytes,
    and in the end with no limit.
    """

    def __init__(self, memory: int, slots: int) -> None:
        self.limit = PULLED_MOST
        self._memory, self._slots = memory, slots
        self._reduced_at = 0.0
        self._largest = self._largest_before = 0
        self._largest_since = 0.0
        self._single: Ask | None = None
        self._stuck_since: float | None = None

    def next(self, *, free: int, held: bool, in_flight: int, ceiling: int, now: float) -> Ask | None:
        """What the next pull may ask for, if it may be made.

        `free` bytes of memory are left, `held` says whether any is used: one message must always fit. Open pulls may
        still bring `in_flight` bytes. `ceiling` is the most that the consumer lets a pull ask for, 0 without a limit.
        """
        while self.limit < PULLED_MOST and now - self._reduced_at >= RECOVERY:
            self.limit = min(PULLED_MOST, self.limit * 2)
            self._reduced_at += RECOVERY
        ask = self._single or Ask(max_bytes=self._usual(ceiling))
        if in_flight and (self._single or in_flight + ask.max_bytes > self.limit):
            return None
        return ask if ask.max_bytes <= free or not held else None

    def _usual(self, ceiling: int) -> int:
        share = min(self.limit, self._memory // PULLED_SHARE) // self._slots
        size = max(share, self._largest, self._largest_before)
        return min(size, ceiling) if ceiling else size

    def received(self, largest: int, now: float) -> None:
        """Messages have been received, the largest of which has `largest` bytes; 0 when there were none."""
        if now - self._largest_since >= REMEMBERED:
            self._largest_before, self._largest, self._largest_since = self._largest, 0, now
        self._largest = max(self._largest, largest)

    def too_small(self, asked: int, ceiling: int, now: float) -> bool:
        """A pull for `asked` bytes brought nothing, because the next message is larger. True if that was not known."""
        current = self._single.max_bytes if self._single else self._usual(ceiling)
        if asked < current:
            return False  # several pulls meet the same message: one for more is due, or open
        size = 2 * asked
        self._single = Ask(
            max_bytes=size, batch=1, limited=size <= min(UNLIMITED_PULL_FROM, ceiling or UNLIMITED_PULL_FROM)
        )
        if self._stuck_since is None:
            self._stuck_since = now
        return True

    def single_received(self, size: int, ceiling: int) -> None:
        """The pull for a single message brought one of `size` bytes."""
        self._stuck_since = None
        if not ceiling or size <= ceiling:  # otherwise the next one is likely to need the same
            self._single = None

    def single_idle(self, *, ended: bool) -> None:
        """The pull for a single message waits for one, or has `ended` without: the large message went elsewhere."""
        self._stuck_since = None
        if ended:
            self._single = None

    def lost(self, size: int, now: float) -> bool:
        """About `size` bytes were lost with a connection. True if that is much: pulls ask for less for a while."""
        if size < SUBSTANTIAL:
            return False
        self._reduced_at = now
        self.limit = max(PULLED_LEAST, self.limit // 2)
        return True

    def stuck(self, now: float) -> str | None:
        """Why nothing can be delivered just now, in one line; None when nothing is known to stand in the way."""
        single, since = self._single, self._stuck_since  # read once: other threads ask
        if single is None or since is None or now - since < STUCK_AFTER:
            return None
        return f"the next message exceeds {single.max_bytes // 2:,} bytes and could not be delivered yet"
