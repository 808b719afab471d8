"""Blocks: messages received and not yet stored, and the rules that seal a block.

Routed batches are kept whole as chunks, in which every block's rows are one run; a block is a list of (chunk, run).
Ten thousand keys cost ten thousand short lists, not ten thousand tables. A chunk's memory is freed with its last run,
and a mostly freed chunk is rewritten, so one slow key cannot hold the memory of fast ones. Small chunks are merged, so
messages that arrive one by one do not hold a batch each.

Pure: no clock, no I/O. Times are seconds of the caller's monotonic clock, sizes are bytes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import BlockId
from jetcapture_py.archive.schema import REPLY, conform, unify_losslessly
from jetcapture_py.capture.chunks import Chunk, ChunkMemory, concat, cost, list_items, overhead
from jetcapture_py.transform.keys import Run

BLOCK_OVERHEAD = 1024
"""Overhead of an open block in bytes."""
MOST_NULLS = 4
"""A block is sealed before nulls for missing columns would take this share of its maximum size."""


@dataclass(slots=True, kw_only=True, eq=False)
class Block:
    """The messages of one `BlockId`, which become one object; `opened` is the time of the first one.

    `rows` is more than `messages` where messages have several. `bytes` is its share of the chunks, of which `away` lies
    in files. As one table, its rows have all of `columns`, for which the chunks hold `filled` bytes already; `items`
    counts what is in lists. Once it is sealed, `table_bytes` is the size of that table, and `sealed_at` when it was
    handed on.
    """

    id: BlockId
    opened: float
    messages: int = 0
    rows: int = 0
    bytes: int = BLOCK_OVERHEAD
    away: int = 0
    table_bytes: int = 0
    items: int = 0
    columns: int = 0
    filled: float = 0.0
    sealed_by: str = ""
    sealed_at: float = 0.0
    _pieces: list[tuple[Chunk, int]] = field(default_factory=list)
    _replies: pa.BinaryArray | None = None

    def attach(self, chunk: Chunk, index: int) -> None:
        """Add run `index` of `chunk`, whose rows and bytes are already counted."""
        self._pieces.append((chunk, index))

    def pieces_in(self, chunks: Container[Chunk]) -> list[list[tuple[Chunk, int]]]:
        """Return its pieces in `chunks`, grouping consecutive ones."""
        groups = groupby(self._pieces, key=lambda piece: piece[0] in chunks)
        return [list(pieces) for among, pieces in groups if among]

    def replace(self, chunks: Container[Chunk], pieces: Iterator[tuple[Chunk, int]]) -> None:
        """Replace each group of `pieces_in` by the next of `pieces`."""
        groups = groupby(self._pieces, key=lambda piece: piece[0] in chunks)
        self._pieces = [new for among, old in groups for new in ([next(pieces)] if among else old)]

    def batches(self) -> list[pa.RecordBatch]:
        """Return the block's rows in order of arrival, without a copy."""
        return [chunk.run(index) for chunk, index in self._pieces]

    def replies(self) -> list[pa.BinaryArray]:
        """Return the ack subject of each of the block's messages, also after `release`."""
        return [_replies(batch).column(0) for batch in self.batches()] if self._replies is None else [self._replies]

    def release(self) -> None:
        """Free the rows' memory; keep only the ack subjects."""
        if self._replies is None:
            self._replies = concat([_replies(batch) for batch in self.batches()]).column(0)
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
    """All blocks that are not acknowledged yet: open ones, and sealed ones being stored.

    `messages`, `rows` and `bytes` count what is open, `unacked` all messages; `memory` is what their columns hold.
    """

    def __init__(self, rules: SealRules) -> None:
        self.rules = rules
        self.memory = ChunkMemory()
        self.messages = self.rows = self.bytes = self.unacked = 0
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

    @property
    def resident(self) -> int:
        """Bytes of open blocks that lie in memory."""
        return self.bytes - self.memory.open_away

    def open_keys(self) -> int:
        """Count the distinct keys of the open blocks."""
        return len({name.key for name in self._open if not (name.quarantine or name.bundle)})

    def oldest_age(self, now: float) -> float:
        """Seconds since the oldest open block's first message; 0 without one."""
        return next((now - block.opened for block in self._open.values()), 0.0)

    def oldest(self, count: int) -> list[Block]:
        """Return the oldest open blocks, at most `count`."""
        return list(islice(self._open.values(), count))

    def largest(self, count: int) -> list[Block]:
        """Return the largest open blocks, at most `count`."""
        return heapq.nlargest(count, self._open.values(), key=lambda block: block.bytes)

    def add(self, rows: pa.RecordBatch, runs: Sequence[Run], now: float, *, quarantine: bool = False) -> list[Block]:
        """Put routed rows into their blocks; return the blocks that were sealed because they are full."""
        if not runs:
            return []
        full: list[Block] = []
        columns = self.memory.widths.columns(rows.schema)
        numbers = rows.column(layout.ROW).to_numpy() if layout.ROW in rows.schema.names else None
        places = [(run.start, run.length) for run in runs]
        measured = zip(runs, _run_sizes(rows, places, cost(rows, columns)), list_items(rows, places), strict=True)
        parts: list[tuple[int, int]] = []
        owners: list[Block] = []
        sizes: list[int] = []
        held: list[int] = []
        for run, size, items in measured:
            name = BlockId(key=run.key, bucket=run.bucket, quarantine=quarantine, bundle=run.bundle)
            start, stop, row = run.start, run.start + run.length, (size / run.length, items / run.length)
            while start < stop:
                block = self._block(name, now, columns, (stop - start, row[1] * (stop - start)), full)
                row_bytes = row[0] + self._padding(block.columns, columns, 1, row[1])
                count = min(stop - start, self._room(block, row_bytes))
                while numbers is not None and start + count < stop and numbers[start + count]:
                    count += 1  # a message's rows stay together, because the first object would acknowledge it
                parts.append((start, count))
                owners.append(block)
                sizes.append(int(count * row[0]))
                held.append(int(count * row[1]))
                messages = count if numbers is None else count - int(np.count_nonzero(numbers[start : start + count]))
                self._grow(block, (messages, count), sizes[-1], columns, held[-1])
                start += count
                if block.rows >= self.rules.max_rows:
                    full += self.seal([block], "messages")
                elif self._table_bytes(block) + row_bytes > self.rules.max_bytes:
                    full += self.seal([block], "bytes")
        chunk = Chunk(rows, parts, owners, sizes, held, self.memory, family=(quarantine, numbers is not None))
        for index, block in enumerate(owners):
            block.attach(chunk, index)
        while chunks := self.memory.to_merge():
            self._merge(chunks)
        return full

    def _block(self, name: BlockId, now: float, columns: int, more: tuple[int, float], full: list[Block]) -> Block:
        """Return the block for these columns; a new one where the columns would fill the old one with nulls.

        `more` counts the rows to be added, and the items in their lists.
        """
        block = self._open.get(name)
        if block is not None and columns != block.columns:
            both = block.columns | columns
            nulls = self._padding(both, columns, *more) + self._padding(both, block.columns, block.rows, block.items)
            if nulls > self.rules.max_bytes // MOST_NULLS:
                full += self.seal([block], "bytes")
                block = None
            else:
                block.columns = both
        if block is None:
            block = self._open[name] = Block(id=name, opened=now, columns=columns)
            self.bytes += block.bytes
        return block

    def _grow(self, block: Block, more: tuple[int, int], size: int, columns: int, items: int) -> None:
        """Count what is added to a block; `more` are messages and rows."""
        messages, rows = more
        block.messages += messages
        block.rows += rows
        block.bytes += size
        block.items += items
        block.filled += self.memory.widths.null_bytes(columns, rows, items)
        self.messages += messages
        self.rows += rows
        self.bytes += size
        self.unacked += messages

    def _padding(self, columns: int, less: int, rows: float, items: float) -> float:
        """Return the bytes of nulls that rows with the columns `less` need for all of `columns`."""
        if columns == less:
            return 0.0
        null_bytes = self.memory.widths.null_bytes
        return null_bytes(columns, rows, items) - null_bytes(less, rows, items)

    def _table_bytes(self, block: Block) -> int:
        """Bytes of a block's rows as one table."""
        nulls = self.memory.widths.null_bytes(block.columns, block.rows, block.items) - block.filled
        return block.bytes + int(nulls)

    def _room(self, block: Block, row_bytes: float) -> int:
        """Return how many rows of `row_bytes` bytes fit into `block`; at least one."""
        by_bytes = int((self.rules.max_bytes - self._table_bytes(block)) / max(row_bytes, 1))
        return max(1, min(self.rules.max_rows - block.rows, by_bytes))

    def _merge(self, chunks: list[Chunk]) -> None:
        """Merge the open blocks' rows of `chunks` into one chunk, if that takes less memory."""
        schema = unify_losslessly([chunk.rows.schema for chunk in chunks])
        among = set(chunks)
        owners = dict.fromkeys(owner for chunk in chunks for owner in chunk.owners if owner and not owner.sealed_by)
        groups = [(block, pieces) for block in owners for pieces in block.pieces_in(among)]
        if schema is None or not groups or not self._pays(schema, chunks):
            return
        rows, places = _gathered(chunks, [pieces for _, pieces in groups], schema)
        columns = self.memory.widths.columns(schema)
        sizes = [int(size) for size in _run_sizes(rows, places, cost(rows, columns))]
        items = [sum(chunk.items[index] for chunk, index in pieces) for _, pieces in groups]
        merged = Chunk(rows, places, [block for block, _ in groups], sizes, items, self.memory, chunks[0].family)
        now: defaultdict[Block, list[tuple[Chunk, int]]] = defaultdict(list)
        released: defaultdict[Chunk, list[int]] = defaultdict(list)
        for number, (block, pieces) in enumerate(groups):
            now[block].append((merged, number))
            block.columns |= columns
            for chunk, index in pieces:
                block.filled += self._padding(columns, chunk.columns, chunk.runs[index][1], chunk.items[index])
                released[chunk].append(index)
            change = sizes[number] - sum(chunk.sizes[index] for chunk, index in pieces)
            block.bytes += change
            self.bytes += change
        for block, replacing in now.items():
            block.replace(among, iter(replacing))
        for chunk, indexes in released.items():
            chunk.release(*indexes)

    def _pays(self, schema: pa.Schema, chunks: list[Chunk]) -> bool:
        """Whether `chunks` would take less memory as one of this schema."""
        columns = self.memory.widths.columns(schema)
        saved = sum(overhead(chunk.columns) for chunk in chunks) - overhead(columns)
        return saved > sum(self._padding(columns, chunk.columns, len(chunk.rows), sum(chunk.items)) for chunk in chunks)

    def seal(self, blocks: Iterable[Block], reason: str) -> list[Block]:
        """Seal `blocks`."""
        sealed = list(blocks)
        for block in sealed:
            block.table_bytes = self._table_bytes(block)
            del self._open[block.id]
            self._sealed[block] = None
            self.messages -= block.messages
            self.rows -= block.rows
            self.bytes -= block.bytes
            self.memory.open_away -= block.away
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

    def seal_most(self, *, messages: int = 0, size: int = 0, blocks: int = 0, most: int = 1 << 30) -> list[Block]:
        """Seal the largest blocks, at most `most`, until this much is sealed: messages, bytes (`size`) and blocks."""
        if most <= 0 or (messages <= 0 and size <= 0 and blocks <= 0):
            return []
        by_bytes = size > 0
        chosen: list[Block] = []
        for block in heapq.nlargest(most, self._open.values(), key=lambda b: b.bytes if by_bytes else b.messages):
            if messages <= 0 and size <= 0 and len(chosen) >= blocks:
                break
            chosen.append(block)
            messages -= block.messages
            size -= block.bytes
        return self.seal(chosen, "pressure")

    def forget(self, block: Block) -> None:
        """Forget a sealed block that was stored and acknowledged."""
        del self._sealed[block]
        self.unacked -= block.messages


def _replies(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the ack subjects of a batch: one per message, that of its first row."""
    replies = batch.select([REPLY])
    if layout.ROW not in batch.schema.names:
        return replies
    return replies.filter(pc.equal(pc.fill_null(batch.column(layout.ROW), 0), 0))


def _gathered(
    chunks: Sequence[Chunk], groups: Sequence[Sequence[tuple[Chunk, int]]], schema: pa.Schema
) -> tuple[pa.RecordBatch, list[tuple[int, int]]]:
    """The rows of the pieces of `chunks` in `groups`, each group's together, and where each group lies."""
    starts = dict(zip(chunks, accumulate((len(chunk.rows) for chunk in chunks), initial=0), strict=False))
    order: list[Any] = []
    places: list[tuple[int, int]] = []
    position = 0
    for pieces in groups:
        lengths = [chunk.runs[index][1] for chunk, index in pieces]
        for (chunk, index), length in zip(pieces, lengths, strict=True):
            start = starts[chunk] + chunk.runs[index][0]
            order.append(np.arange(start, start + length))
        places.append((position, sum(lengths)))
        position += sum(lengths)
    rows = pa.concat_batches([conform(chunk.rows, schema) for chunk in chunks])
    return rows.take(pa.array(np.concatenate(order))), places


def _run_sizes(rows: pa.RecordBatch, places: Sequence[tuple[int, int]], total: int) -> list[float]:
    """Return the bytes of each run: its payloads, and an equal share of the rest of `total` per row."""
    if layout.PAYLOAD not in rows.schema.names:
        return [length * total / rows.num_rows for _, length in places]
    ends = np.concatenate(
        [[0], np.cumsum(pc.binary_length(rows.column(layout.PAYLOAD)).fill_null(0).to_numpy(zero_copy_only=False))]
    )
    share = max(total - int(ends[-1]), 0) / rows.num_rows
    return [float(ends[start + length] - ends[start] + length * share) for start, length in places]
