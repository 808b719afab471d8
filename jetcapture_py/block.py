"""Blocks: what has been received and not yet stored, and the rules that close a block for good.

Routed batches are kept whole as chunks, in which every block's rows are one run; a block is a list of (chunk, run).
So ten thousand keys cost ten thousand short lists and not ten thousand tables. A chunk's memory is freed when its
last run is, and a chunk that is mostly freed is rewritten, so one slow key cannot hold the memory of the fast ones.

Pure: no clock, no I/O. Times are seconds of the caller's monotonic clock, sizes are bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py import layout
from jetcapture_py.batch import REPLY
from jetcapture_py.route import Run

CHUNK_OVERHEAD = 8192
"""Bytes that a chunk costs beside its columns' buffers (measured: a record batch's objects and buffers)."""
BLOCK_OVERHEAD = 1024
"""Bytes that an open block costs beside its rows."""


class Memory:
    """Bytes held by chunks, kept up to date by them."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class Chunk:
    """A routed batch: `rows`, and where in it each run lies that a block still needs."""

    __slots__ = ("_memory", "live", "nbytes", "rows", "runs")

    def __init__(self, rows: pa.RecordBatch, runs: Sequence[tuple[int, int]], memory: Memory) -> None:
        self._memory = memory
        self.runs: list[tuple[int, int]] = list(runs)
        self.live = rows.num_rows
        self.nbytes = 0
        self._hold(rows)

    def _hold(self, rows: pa.RecordBatch) -> None:
        nbytes = int(rows.get_total_buffer_size()) + CHUNK_OVERHEAD if rows.num_rows else 0
        self._memory.bytes += nbytes - self.nbytes
        self.rows, self.nbytes = rows, nbytes

    def run(self, index: int) -> pa.RecordBatch:
        """The rows of one run, without a copy."""
        return self.rows.slice(*self.runs[index])

    def release(self, index: int) -> None:
        """Run `index` is not needed any more; rewrite the chunk when less than half of it is."""
        self.live -= self.runs[index][1]
        self.runs[index] = (0, 0)
        if not self.live:
            self._hold(EMPTY)
        elif self.live * 2 < self.rows.num_rows:
            self._rewrite()

    def _rewrite(self) -> None:
        kept = [(index, *run) for index, run in enumerate(self.runs) if run[1]]
        slices = [self.rows.slice(start, length) for _, start, length in kept]
        self._hold(concat(slices))
        position = 0
        for index, _, length in kept:
            self.runs[index] = (position, length)
            position += length


EMPTY = pa.RecordBatch.from_arrays([], names=[])


def concat(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of all rows, copied; the batches have one schema."""
    if len(batches) == 1:  # Arrow would keep the slice, and with it the buffers it was cut from
        return batches[0].take(pa.array(np.arange(len(batches[0]))))
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockId:
    """What messages of one block have in common. `bucket` is the interval's start in seconds since the epoch."""

    key: str | None
    bucket: int
    quarantine: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Block:
    """The messages of one (key, bucket) that become one object; `opened` is when its first message came."""

    id: BlockId
    opened: float
    rows: int = 0
    bytes: int = BLOCK_OVERHEAD
    sealed_by: str = ""
    _pieces: list[tuple[Chunk, int]] = field(default_factory=list)
    _replies: pa.BinaryArray | None = None

    def attach(self, chunk: Chunk, index: int) -> None:
        """Take run `index` of `chunk`, whose rows and bytes are counted already."""
        self._pieces.append((chunk, index))

    def batches(self) -> list[pa.RecordBatch]:
        """The block's rows, in the order of arrival, without a copy."""
        return [chunk.run(index) for chunk, index in self._pieces]

    def replies(self) -> list[pa.BinaryArray]:
        """The ack subjects of the block's messages, also after `release`."""
        return [batch.column(REPLY) for batch in self.batches()] if self._replies is None else [self._replies]

    def release(self) -> None:
        """Give the rows' memory back; only the ack subjects are kept."""
        if self._replies is None:
            self._replies = concat([batch.select([REPLY]) for batch in self.batches()]).column(0)
        for chunk, index in self._pieces:
            chunk.release(index)
        self._pieces = []


@dataclass(frozen=True, slots=True, kw_only=True)
class SealRules:
    """When a block is sealed: `max_age` in seconds since its first message, or by size in bytes or rows."""

    max_age: float
    max_bytes: int
    max_rows: int


class Blocks:
    """All blocks that are not acknowledged yet: the open ones, and the sealed ones on their way to the store.

    `rows` and `bytes` count what is open, `unacked` all rows; `memory` is what their columns hold.
    """

    def __init__(self, rules: SealRules) -> None:
        self.rules = rules
        self.memory = Memory()
        self.rows = self.bytes = self.unacked = 0
        self._open: dict[BlockId, Block] = {}  # in the order of opening
        self._sealed: dict[Block, None] = {}

    def __iter__(self) -> Iterator[Block]:
        yield from self._open.values()
        yield from self._sealed

    @property
    def open(self) -> int:
        """How many blocks are open."""
        return len(self._open)

    @property
    def sealed(self) -> int:
        """How many blocks are sealed and not acknowledged yet."""
        return len(self._sealed)

    def oldest_age(self, now: float) -> float:
        """Seconds since the oldest open block's first message; 0 without one."""
        return next((now - block.opened for block in self._open.values()), 0.0)

    def add(self, rows: pa.RecordBatch, runs: Sequence[Run], now: float, *, quarantine: bool = False) -> list[Block]:
        """Put routed rows into their blocks. Returns the blocks that are sealed because they are full."""
        full: list[Block] = []
        parts: list[tuple[int, int]] = []
        owners: list[Block] = []
        numbers = rows.column(layout.ROW).to_numpy() if layout.ROW in rows.schema.names else None
        for run, size in zip(runs, _run_sizes(rows, runs), strict=True):
            name = BlockId(key=run.key, bucket=run.bucket, quarantine=quarantine)
            start, stop, row_bytes = run.start, run.start + run.length, size / run.length
            while start < stop:
                block = self._open.get(name)
                if block is None:
                    block = self._open[name] = Block(id=name, opened=now)
                    self.bytes += block.bytes
                count = min(stop - start, self._room(block, row_bytes))
                while numbers is not None and start + count < stop and numbers[start + count]:
                    count += 1  # a message's rows stay together, because the first object would acknowledge it
                parts.append((start, count))
                owners.append(block)
                block.rows += count
                block.bytes += int(count * row_bytes)
                self.rows += count
                self.bytes += int(count * row_bytes)
                self.unacked += count
                start += count
                if block.rows >= self.rules.max_rows:
                    full += self.seal([block], "messages")
                elif block.bytes + row_bytes > self.rules.max_bytes:
                    full += self.seal([block], "bytes")
        chunk = Chunk(rows, parts, self.memory)
        for index, block in enumerate(owners):
            block.attach(chunk, index)
        return full

    def _room(self, block: Block, row_bytes: float) -> int:
        """How many rows of `row_bytes` bytes `block` takes before it is full; at least one."""
        by_bytes = int((self.rules.max_bytes - block.bytes) / max(row_bytes, 1))
        return max(1, min(self.rules.max_rows - block.rows, by_bytes))

    def seal(self, blocks: Iterable[Block], reason: str) -> list[Block]:
        """Close `blocks` for good."""
        sealed = list(blocks)
        for block in sealed:
            del self._open[block.id]
            self._sealed[block] = None
            self.rows -= block.rows
            self.bytes -= block.bytes
            block.sealed_by = reason
        return sealed

    def seal_due(self, now: float) -> list[Block]:
        """Seal the blocks that have reached their age."""
        due: list[Block] = []
        for block in self._open.values():
            if now - block.opened < self.rules.max_age:
                break
            due.append(block)
        return self.seal(due, "age")

    def seal_all(self, reason: str) -> list[Block]:
        """Seal every open block."""
        return self.seal(list(self._open.values()), reason)

    def seal_most(self, *, rows: int = 0, size: int = 0, blocks: int = 0, most: int = 1 << 30) -> list[Block]:
        """Seal the largest blocks until `rows` rows, `size` bytes and `blocks` blocks are sealed, at most `most`."""
        if most <= 0 or (rows <= 0 and size <= 0 and blocks <= 0):
            return []
        by_bytes = size > 0
        chosen: list[Block] = []
        for block in heapq.nlargest(most, self._open.values(), key=lambda b: b.bytes if by_bytes else b.rows):
            if rows <= 0 and size <= 0 and len(chosen) >= blocks:
                break
            chosen.append(block)
            rows -= block.rows
            size -= block.bytes
        return self.seal(chosen, "pressure")

    def forget(self, block: Block) -> None:
        """A sealed block is stored and acknowledged."""
        del self._sealed[block]
        self.unacked -= block.rows


def _run_sizes(rows: pa.RecordBatch, runs: Sequence[Run]) -> list[float]:
    """Bytes of each run: its payloads', and an equal share of the rest for every row."""
    if not runs:
        return []
    total = rows.get_total_buffer_size() + CHUNK_OVERHEAD
    if layout.PAYLOAD not in rows.schema.names:
        return [run.length * total / rows.num_rows for run in runs]
    ends = np.concatenate(
        [[0], np.cumsum(pc.binary_length(rows.column(layout.PAYLOAD)).to_numpy(zero_copy_only=False))]
    )
    share = max(total - int(ends[-1]), 0) / rows.num_rows
    return [float(ends[run.start + run.length] - ends[run.start] + run.length * share) for run in runs]
