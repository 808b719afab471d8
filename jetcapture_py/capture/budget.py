"""The shares of each budget, with their reasons, and the limits that keep work within them.

The budgets are `limits.memory` in bytes, `limits.open_blocks`, and the messages that may be unacknowledged: the
consumer's `max_ack_pending`, less what other replicas hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from jetcapture_py.capture.blocks import Blocks
    from jetcapture_py.config.model import LimitsConfig

BLOCK_SHARE = 4
"""Maximum share of the memory for one block, so that one cannot take it all."""
DECODE_SHARE, DECODE_MOST = 8, 16 << 20
"""Columns made of received messages at once: this part of the memory, and no more bytes than usually lie in one piece
of received memory."""
ENCODING_SHARE = 8
"""Share of the memory for blocks being encoded at the same time."""
RELEASE_SHARE = 8
"""Growth of the process, as a share of the memory, after which the allocator returns unused memory."""
OPEN_SHARE = 2
"""Maximum share of the memory for open blocks; the rest is for blocks being stored."""
OPEN_UNACKED_SHARE = 3
"""Open blocks hold at most this part of the unacknowledged messages. It is less than of the memory, because a server
that waits for acks is slow to take them."""
SEALED_UNACKED_SHARE, SEALED_MEMORY_SHARE, SEALED_BLOCKS_SHARE = 32, 8, 8
"""Seal this much more than the excess, so that the limit is not reached again immediately."""
PREPARING_COPIES = 3
"""A batch in preparation is in memory three times: as received, as columns, and as routed columns."""
ENCODING_COPIES = 3
"""A block being encoded is also in memory as one table, sorted, and encoded."""
SMALL_BLOCK, TOGETHER = 64 << 10, 64
"""Size below which blocks share a worker thread's turn, and how many share one."""
LARGE_BLOCKS_WAITING = 2
"""Larger blocks that may wait for each worker."""
FIRST_BATCH = 4096
"""Messages decoded at once while the size of their columns is unknown."""


class Excess(TypedDict):
    """What to seal at least, see `Blocks.seal_most`."""

    rows: int
    size: int
    blocks: int


def excess(blocks: Blocks, limits: LimitsConfig, unacked_limit: int, *, starved: bool) -> Excess:
    """Compute how much of the open blocks to seal, so that each budget has room for what is being stored.

    All of them when `starved`: a pull waits for memory only. A few large messages can fill the budget.
    """
    rows = blocks.rows - unacked_limit // OPEN_UNACKED_SHARE
    size = blocks.bytes if starved else blocks.bytes - limits.memory // OPEN_SHARE
    count = blocks.open - limits.open_blocks
    return {
        "rows": rows + unacked_limit // SEALED_UNACKED_SHARE if rows > 0 else 0,
        "size": size + limits.memory // SEALED_MEMORY_SHARE if size > 0 else 0,
        "blocks": count + limits.open_blocks // SEALED_BLOCKS_SHARE if count > 0 else 0,
    }


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


class BatchSize:
    """How many messages to decode at once so that their columns take about `size` bytes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.messages = FIRST_BATCH

    def measured(self, messages: int, size: int) -> None:
        """Adapt: this many messages took this many bytes."""
        self.messages = max(1, messages * self._size // max(size, 1))

    def refused(self, messages: int) -> None:
        """Adapt: this many messages were too many."""
        self.messages = max(1, messages // 2)
