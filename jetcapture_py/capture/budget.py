"""Limits of what is worked on at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

FIRST = 4096
"""Messages decoded at once while nothing is known of their columns."""


class Gate:
    """Work of at most `limit` together, first come, first served; what is heavier by itself goes alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.within = 0
        self._turn = asyncio.Lock()
        self._left = asyncio.Condition()

    @asynccontextmanager
    async def of(self, weight: int) -> AsyncIterator[None]:
        """Wait for room; inside the block it is taken."""
        async with self._turn, self._left:
            await self._left.wait_for(lambda: self.within + weight <= self.limit or not self.within)
            self.within += weight
        try:
            yield
        finally:
            self.within -= weight
            async with self._left:
                self._left.notify_all()


class AtOnce:
    """How many messages to decode at once so that their columns take about `size` bytes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.messages = FIRST

    def were(self, messages: int, size: int) -> None:
        """So many messages took so many bytes."""
        self.messages = max(1, messages * self._size // max(size, 1))

    def too_many(self, messages: int) -> None:
        """So many messages were refused."""
        self.messages = max(1, messages // 2)
