"""Keep work within its share of a budget: when blocks are sealed early."""

from __future__ import annotations

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
    SMALL_BLOCK_BYTES,
    SMALL_BLOCKS,
)

_UNLIMITED = 1 << 62


def seal(
    blocks: Blocks,
    limits: LimitsConfig,
    unacked_limit: int = _UNLIMITED,
    *,
    open_bytes: int | None = None,
    starved: bool = False,
    idle: bool = True,
    spooling: Spooling | None = None,
    room: int = _UNLIMITED,
) -> list[Block]:
    """Seal the largest open blocks, so that each budget has room for what is being stored; at most `room` blocks.

    `open_bytes` is the maximum memory of open blocks, by default their share of `limits.memory`.

    `starved` says that a pull waits for memory only: a few large messages can fill the budget. Then all are sealed,
    unless spooling frees memory, or what is not `idle`: blocks on their way to the store, and messages into blocks.
    """
    spools = spooling is not None and spooling.begin(starved=starved)
    starved = starved and (spooling is None or idle)
    messages = blocks.messages - unacked_limit // OPEN_UNACKED_SHARE
    most = limits.memory // OPEN_SHARE if open_bytes is None else open_bytes
    size = blocks.resident if starved else blocks.resident - most
    count = blocks.open - limits.open_blocks
    return blocks.seal_largest(
        messages=messages + unacked_limit // SEALED_UNACKED_SHARE if messages > 0 else 0,
        size=size + limits.memory // SEALED_MEMORY_SHARE if size > 0 and not spools else 0,
        blocks=count + limits.open_blocks // SEALED_BLOCKS_SHARE if count > 0 else 0,
        limit=room,
    )


def room(workers: int, waiting: int, waiting_bytes: int) -> int:
    """Return how many more blocks may wait for the store, where so many do."""
    small = waiting_bytes < workers * SMALL_BLOCKS * SMALL_BLOCK_BYTES
    return workers * (SMALL_BLOCKS if small else LARGE_BLOCKS_WAITING) - waiting
