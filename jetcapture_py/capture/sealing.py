"""Decide when a block is sealed: reasons and limits. `Blocks` holds blocks, `Archiver` seals them.

    bytes      the next message would make it larger than `block.max_bytes` (or a part of the memory), or give it too
               many nulls, because its columns are others
    messages   it has `block.max_messages` rows
    age        its first message came `block.max_age` ago
    pressure   all open blocks together hold too many bytes, messages, or blocks; or pulls wait for memory only; or, in
               the ordered mode, later messages cannot be acknowledged before it
    columns    a column has another name or type in the next message, by those of another replica
    drain      the capture stops
    caught_up  nothing is left to deliver, and `--until-caught-up` waits for what is held
    released   another replica has taken over: the block is dropped, not stored
    repair, redecode   everything that these commands found has been read

`SEALED_BY` in `monitoring/facts.py` lists those that the metric counts. Pure: no clock, no I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jetcapture_py.config.model import LimitsConfig
from jetcapture_py.config.shares import (
    LARGE_BLOCKS_WAITING,
    OPEN_UNACKED_SHARE,
    SEALED_BLOCKS_SHARE,
    SEALED_MEMORY_SHARE,
    SEALED_UNACKED_SHARE,
    SMALL_BLOCK_BYTES,
    SMALL_BLOCKS,
)

Reason = Literal[
    "", "bytes", "messages", "age", "pressure", "columns", "drain", "caught_up", "released", "repair", "redecode"
]

MAX_NULLS = 1 << 25
"""Values that rows of a block may lack because other rows have more columns. They take no memory while they are held,
but each costs time when the object is made (60,000 rows beside one with 10,000 columns: 98 s, and a footer of 250 MB).
"""
_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class SealRules:
    """Limits of one block: seconds since its first message, bytes and rows."""

    max_age: float
    max_bytes: int
    max_rows: int

    def fitting(self, size: int, before: Sequence[int], start: int, stop: int) -> int:
        """Return the end of the rows from `start` to `stop` that fit into a block of `size` bytes.

        `before` are the bytes of the rows before each one.
        """
        room = before[start] + self.max_bytes - size
        return stop if before[stop] <= room else bisect_right(before, room, start, stop) - 1

    def with_others(self, lacking: float, more: float) -> int:
        """Return how many rows with other columns fit into a block with `lacking` nulls; each adds `more`."""
        return int((MAX_NULLS - lacking) // max(more, MAX_NULLS / self.max_rows))

    def full(self, rows: int, size: int) -> Reason:
        """Return the reason why a block of this size is full; "" if it is not."""
        return "messages" if rows >= self.max_rows else "bytes" if size >= self.max_bytes else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The source's conditions for receiving more messages."""

    unacked_limit: int = _UNLIMITED
    """Maximum held messages."""
    starved: bool = False
    """Whether a pull waits only for memory, which a few large messages can fill."""
    idle: bool = True
    """Whether no received message is waiting."""
    overdue: float | None = None
    """Blocks opened up to this time hold back the acks of too many later messages; None for none."""


class Amount(NamedTuple):
    """An amount of blocks, messages and bytes: held, or to be sealed."""

    messages: int = 0
    bytes: int = 0
    blocks: int = 0


def excess(
    opened: Amount, limits: LimitsConfig, unacked_limit: int = _UNLIMITED, *, max_bytes: int, everything: bool = False
) -> Amount:
    """Return the amount of open blocks to seal, so that each budget has room for the blocks being stored.

    `max_bytes` is the memory limit of open blocks; with `everything`, seal all of them.
    """
    messages = opened.messages - unacked_limit // OPEN_UNACKED_SHARE
    size = opened.bytes - (0 if everything else max_bytes)
    blocks = opened.blocks - limits.open_blocks
    return Amount(
        messages=messages + unacked_limit // SEALED_UNACKED_SHARE if messages > 0 else 0,
        bytes=size + limits.memory // SEALED_MEMORY_SHARE if size > 0 else 0,
        blocks=blocks + limits.open_blocks // SEALED_BLOCKS_SHARE if blocks > 0 else 0,
    )


def room(workers: int, waiting: int, waiting_bytes: int) -> int:
    """Return how many more blocks may be sealed under pressure, given the number waiting for the store."""
    small = waiting_bytes < workers * SMALL_BLOCKS * SMALL_BLOCK_BYTES
    return workers * (SMALL_BLOCKS if small else LARGE_BLOCKS_WAITING) - waiting
