"""Size pulls in bytes: small enough for the server's buffers, and large enough for the next message.

Pure: no clock, no I/O. Sizes are bytes as the server counts them against a pull's `max_bytes` (subject, ack subject,
headers and payload), times are seconds of the caller's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from jetcapture_py.config.shares import MAX_PULLED, MIN_PULLED, PULLED_SHARE, UNLIMITED_PULL_FROM

RECOVERY = 60.0
"""Seconds after which a reduced limit doubles."""
SUBSTANTIAL = 1 << 20
"""Minimum bytes lost with a connection that suggest that pulls asked for too much."""
REMEMBERED = 30.0
"""Seconds; pulls are sized for the largest message of the last one to two such periods."""
STUCK_AFTER = 2.0
"""Seconds without progress after which a message that fits no pull is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Size of one pull. `batch` 0 means as configured; without `limited`, `max_bytes` is only an estimate."""

    max_bytes: int
    batch: int = 0
    limited: bool = True


class PullLimits:
    """Sizes the pulls of `slots` pull slots that share `memory` bytes.

    Normally a pull asks for its share of `limit`, or for the size of the largest recent message. If a pull brings
    nothing because the next message is larger, pulls ask for that message alone, one at a time, with twice the bytes
    each time and finally without a limit.
    """

    def __init__(self, memory: int, slots: int) -> None:
        self.limit = MAX_PULLED
        self._memory, self._slots = memory, slots
        self._reduced_at = 0.0
        self._largest = self._largest_before = 0
        self._largest_since = 0.0
        self._single: Ask | None = None
        self._stuck_since: float | None = None

    def next(self, *, free: int, held: bool, in_flight: int, ceiling: int, now: float) -> Ask | None:
        """Return the size of the next pull, or None if there must be none now.

        `free` bytes of memory are left; `held`: some memory is in use (if not, one message must always fit). Open pulls
        may still bring `in_flight` bytes. `ceiling` is the consumer's limit for a pull's bytes, 0 without a limit.
        """
        while self.limit < MAX_PULLED and now - self._reduced_at >= RECOVERY:
            self.limit = min(MAX_PULLED, self.limit * 2)
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
        """Record the size of the largest message received since the last call, 0 for none."""
        if now - self._largest_since >= REMEMBERED:
            self._largest_before, self._largest, self._largest_since = self._largest, 0, now
        self._largest = max(self._largest, largest)

    def too_small(self, asked: int, ceiling: int, now: float) -> bool:
        """Record that the next message is larger than the `asked` bytes of a pull. True if that was not known."""
        current = self._single.max_bytes if self._single else self._usual(ceiling)
        if asked < current:
            return False  # several pulls met the same message: a larger pull is due or open
        size = 2 * asked
        self._single = Ask(
            max_bytes=size, batch=1, limited=size <= min(UNLIMITED_PULL_FROM, ceiling or UNLIMITED_PULL_FROM)
        )
        if self._stuck_since is None:
            self._stuck_since = now
        return True

    def single_received(self, size: int, ceiling: int) -> None:
        """Record that the pull for a single message brought one of `size` bytes."""
        self._stuck_since = None
        if not ceiling or size <= ceiling:  # otherwise the next message probably needs the same
            self._single = None

    def single_idle(self, *, ended: bool) -> None:
        """Record that the pull for a single message waits, or has `ended` without one: it went to another replica."""
        self._stuck_since = None
        if ended:
            self._single = None

    def lost(self, size: int, now: float) -> bool:
        """Record that about `size` bytes were lost with a connection. True if that is substantial: reduce `limit`."""
        if size < SUBSTANTIAL:
            return False
        self._reduced_at = now
        self.limit = max(MIN_PULLED, self.limit // 2)
        return True

    def stuck(self, now: float) -> str | None:
        """Return why nothing can be delivered now, in one line; None without a known reason."""
        single, since = self._single, self._stuck_since  # read once: called from other threads
        if single is None or since is None or now - since < STUCK_AFTER:
            return None
        return f"the next message exceeds {single.max_bytes // 2:,} bytes and could not be delivered yet"
