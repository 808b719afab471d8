"""Keep work within its share of a budget: when blocks are sealed early, and what may be done at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from jetcapture_py.capture.blocks import Block, Blocks
from jetcapture_py.capture.spool import Spooling
from jetcapture_py.config.model import LimitsConfig
from jetcapture_py.config.shares import (
    LARGE_BLOCKS_WAITING,
    OPEN_SHARE,
    OPEN_UNACKED_SHARE,
    SEALED_BLOCKS_SHARE,
    SEALED_MEMORY_SHARE,
    SEALED_UNACKED_SHARE,
    SMALL_BLOCK,
    TOGETHER,
)

_UNLIMITED = 1 << 62


def seal(
    blocks: Blocks,
    limits: LimitsConfig,
    unacked_limit: int = _UNLIMITED,
    *,
    starved: bool = False,
    idle: bool = True,
    spooling: Spooling | None = None,
    room: int = _UNLIMITED,
) -> list[Block]:
    """Seal the largest open blocks, so that each budget has room for what is being stored; at most `room` blocks.

    `starved` says that a pull waits for memory only: a few large messages can fill the budget. Then all are sealed,
    unless spooling frees memory, or what is not `idle`: blocks on their way to the store, and messages into blocks.
    """
    spools = spooling is not None and spooling.begin(starved=starved)
    starved = starved and (spooling is None or idle)
    messages = blocks.messages - unacked_limit // OPEN_UNACKED_SHARE
    size = blocks.resident if starved else blocks.resident - limits.memory // OPEN_SHARE
    count = blocks.open - limits.open_blocks
    return blocks.seal_largest(
        messages=messages + unacked_limit // SEALED_UNACKED_SHARE if messages > 0 else 0,
        size=size + limits.memory // SEALED_MEMORY_SHARE if size > 0 and not spools else 0,
        blocks=count + limits.open_blocks // SEALED_BLOCKS_SHARE if count > 0 else 0,
        limit=room,
    )


def room(workers: int, waiting: int, waiting_bytes: int) -> int:
    """Return how many more blocks may wait for the store, where so many do."""
    small = waiting_bytes < workers * TOGETHER * SMALL_BLOCK
    return workers * (TOGETHER if small else LARGE_BLOCKS_WAITING) - waiting


class WeightedSemaphore:
    """Admit work up to a total weight of `limit`, first come, first served; heavier work runs alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._turn = asyncio.Lock()
        self._left = asyncio.Condition()

    @asynccontextmanager
    async def acquire(self, weight: int) -> AsyncIterator[None]:
        """Wait for room; inside the block it is taken."""
        async with self._turn, self._left:
            await self._left.wait_for(lambda: self.taken + weight <= self.limit or not self.taken)
            self.taken += weight
        try:
            yield
        finally:
            self.taken -= weight
            async with self._left:
                self._left.notify_all()
