"""Lets only so much be worked on at once, by weight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


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
