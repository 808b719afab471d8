"""Rate limit for log events."""

from __future__ import annotations


class LogLimit:
    """Allows one event every `every` seconds, with the count since the last one."""

    def __init__(self, every: float = 10.0) -> None:
        self._every = every
        self._last = float("-inf")
        self._count = 0

    def due(self, now: float, count: int = 1) -> int:
        """Add `count`; return the count to log now, 0 to log nothing."""
        self._count += count
        if not self._count or now - self._last < self._every:
            return 0
        self._last, self._count, count = now, 0, self._count
        return count
