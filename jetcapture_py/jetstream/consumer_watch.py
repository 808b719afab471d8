"""Detects a recreated consumer, and distinguishes a deleted one from an unreachable one."""

from __future__ import annotations

from jetcapture_py.archive.incarnations import Progress

SETTLED_AFTER_S = 5.0
"""Seconds after which a killed server has certainly written a consumer's state; it writes several times a second."""
CONFIRMATIONS = 3
CONFIRM_EVERY_S = 0.5
"""Seconds between answers that count: a cluster that has just lost its leader may wrongly say "not found"."""


class ConsumerWatch:
    """Follows one consumer; `now` is the time of a server's answer, in seconds of a monotonic clock.

    Servers move the creation time. A new consumer has delivered and acknowledged less than the old one had some seconds
    ago. Its latest progress does not count, because a killed server forgets the last moments.
    """

    def __init__(self, progress: Progress, now: float) -> None:
        self._settled = self._candidate = progress
        self._candidate_at = now
        self._missing: list[float] = []

    def continues(self, progress: Progress, now: float) -> bool | None:
        """Whether the consumer may be the same; None if it had delivered nothing earlier."""
        self._missing.clear()
        if now - self._candidate_at >= SETTLED_AFTER_S:
            self._settled, self._candidate, self._candidate_at = self._candidate, progress, now
        if not self._settled.delivered:
            return None
        return progress.continues(self._settled)

    def is_gone(self, now: float) -> bool:
        """Record a "not found" answer; True once `CONFIRMATIONS` answers at distinct times agree."""
        if not self._missing or now - self._missing[-1] >= CONFIRM_EVERY_S:
            self._missing.append(now)
        return len(self._missing) >= CONFIRMATIONS
