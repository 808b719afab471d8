"""Every share of a budget, with its reason, and what keeps work within it.

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
"""A block takes at most this part of the memory, or one alone could fill what is for all."""
DECODE_SHARE, DECODE_MOST = 8, 16 << 20
"""Columns made of received messages at once: this part of the memory, and no more bytes than usually lie in one piece
of received memory."""
ENCODING_SHARE = 8
"""Blocks that are encoded at the same time take this part of the memory."""
RELEASE_SHARE = 8
"""The process may grow by this part of the memory before the allocator gives back what it kept."""
OPEN_SHARE = 2
"""Open blocks take at most this part of the memory; the rest is for what is on its way to the store."""
OPEN_UNACKED_SHARE = 3
"""Open blocks hold at most this part of the unacknowledged messages. It is less than of the memory, because a server
that waits for acks is slow to take them."""
SEALED_UNACKED_SHARE, SEALED_MEMORY_SHARE, SEALED_BLOCKS_SHARE = 32, 8, 8
"""When there is too much of something open, so much more of it is sealed, so that it is not too much again at once."""
PREPARING_COPIES = 3
"""A batch in preparation lies in memory as received, as columns, and as routed columns."""
ENCODING_COPIES = 3
"""A block that is being encoded lies in memory in one piece, sorted and encoded, too."""
SMALL_BLOCK, TOGETHER = 64 << 10, 64
"""Blocks below so many bytes share a worker thread's turn, up to so many of them."""
LARGE_BLOCKS_WAITING = 2
"""Larger blocks that may wait for each worker."""
FIRST_BATCH = 4096
"""Messages decoded at once while nothing is known of their columns."""


class Excess(TypedDict):
    """What to seal at least, see `Blocks.seal_most`."""

    rows: int
    size: int
    blocks: int


def excess(blocks: Blocks, limits: LimitsConfig, unacked_limit: int, *, starved: bool) -> Excess:
    """Compute how much of the open blocks to seal, so that each budget has room for what is being stored.

    Everything, when `starved`: a pull is waiting for memory alone. Of large messages, a few already fill the budget.
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
