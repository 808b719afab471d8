"""Keeps an event that may happen at any rate from filling the log."""

from __future__ import annotations


class LogLimit:
    """Lets one event through every `every` seconds, with the count of what happened since the last one."""

    def __init__(self, every: float = 10.0) -> None:
        self._every = every
        self._last = float("-inf")
        self._count = 0

    def due(self, now: float, count: int = 1) -> int:
        """Count `count` more; how many to log now, 0 for nothing."""
        self._count += count
        if not self._count or now - self._last < self._every:
            return 0
        self._last, self._count, count = now, 0, self._count
        return count
