"""Blocks: messages received and not yet stored. `sealing` says when one is sealed.

A routed batch is kept whole as a chunk, in which each block's rows are one run; a block is a list of (chunk, run).
Ten thousand keys cost ten thousand short lists, not ten thousand tables. A chunk's memory is freed with its last run,
and a mostly freed chunk is rewritten, so one slow key cannot hold the memory of fast ones. Small chunks are merged, so
messages that arrive one by one do not hold a batch each.

Sizes are measured: a chunk takes its buffers and a constant for each. Pure: no clock, no I/O. Times are seconds of the
caller's monotonic clock, sizes are bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, islice
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import BlockId
from jetcapture_py.archive.schema import REPLY, conform, shared_nulls, unify
from jetcapture_py.archive.writer import EncodedBlock
from jetcapture_py.capture.sealing import Amount, Reason, SealRules
from jetcapture_py.ledger import Ledger
from jetcapture_py.transform.keys import Run

CHUNK_OVERHEAD = 2048
"""Bytes of a chunk besides its buffers."""
BUFFER_OVERHEAD = 512
"""Bytes of a buffer besides its content (measured: 700 to 1,000 for a column with two)."""
SMALL = 4
"""A chunk is small when its content is less than this many times its overhead."""
TOGETHER = 8
"""Number of small chunks merged at once. Merged chunks have eight times the rows and are merged with their like, so a
row is copied once per power of eight."""
_EMPTY = pa.RecordBatch.from_arrays([], names=[])


class _Columns:
    """Numbers all columns, including nested ones, so that a set of columns is a bit mask."""

    def __init__(self) -> None:
        self._bits: dict[tuple[int, str, int], int] = {}
        self._in_lists = 0
        self._last: tuple[pa.Schema, int] = pa.schema([]), 0

    def of(self, schema: pa.Schema) -> int:
        if not schema.equals(self._last[0]):
            self._last = schema, self._nested(-1, schema, in_list=False)
        return self._last[1]

    def values(self, columns: int, rows: float, items: float) -> float:
        """Count the values that rows have in `columns`, where their lists have `items` items."""
        in_lists = (columns & self._in_lists).bit_count() if self._in_lists else 0
        return (columns.bit_count() - in_lists) * rows + in_lists * items

    def _nested(self, parent: int, fields: Iterable[pa.Field], *, in_list: bool) -> int:
        columns = 0
        for column in fields:
            dtype = column.type
            bit = self._bits.setdefault((parent, column.name, dtype.id), len(self._bits))
            self._in_lists |= in_list << bit
            columns |= 1 << bit
            if dtype.num_fields:
                inner = (dtype.field(index) for index in range(dtype.num_fields))
                columns |= self._nested(bit, inner, in_list=in_list or not pa.types.is_struct(dtype))
        return columns


class Chunk:
    """A routed batch. Each of its runs belongs to one of `owners` until it is released.

    `rows` are in memory or, except for their ack subjects, `spooled`. `runs` has the start and length of each owner's
    rows, and `sizes` their bytes. `live` counts the unreleased rows and `size` their bytes; `open_size` is the share of
    open blocks. `memory` is the chunk's memory, and `resident` the open blocks' share of it. Only chunks of one
    `family` are merged.
    """

    __slots__ = (
        "family",
        "live",
        "memory",
        "open_size",
        "owners",
        "resident",
        "rows",
        "runs",
        "size",
        "sizes",
        "spooled",
    )

    def __init__(
        self, runs: Sequence[tuple[int, int]], owners: Sequence[Block], sizes: Sequence[int], family: object
    ) -> None:
        self.rows, self.runs, self.sizes, self.family = _EMPTY, list(runs), list(sizes), family
        self.owners: list[Block | None] = list(owners)
        self.live, self.size = sum(length for _, length in runs), sum(sizes)
        self.open_size = sum(size for size, owner in zip(sizes, owners, strict=True) if not owner.sealed_by)
        self.memory = self.resident = 0
        self.spooled = False

    def run(self, index: int) -> pa.RecordBatch:
        """Return the rows of one run, without a copy."""
        return self.rows.slice(*self.runs[index])

    def kept(self) -> tuple[list[tuple[int, int]], list[pa.RecordBatch]]:
        """Return index and length of each run that is not released, and their rows in this order, without a copy."""
        kept = [(index, run[1]) for index, run in enumerate(self.runs) if run[1]]
        whole = self.live == self.rows.num_rows
        return kept, [self.rows] if whole else [self.run(index) for index, _ in kept]


_Piece = tuple[Chunk, int]


@dataclass(slots=True, kw_only=True, eq=False)
class Block:
    """The messages of one `BlockId`, which become one object."""

    id: BlockId
    opened: float
    """Time of the first message."""
    messages: int = 0
    rows: int = 0
    """More than `messages` where messages have several."""
    bytes: int = 0
    """Its share of the content of its chunks."""
    items: float = 0
    """Items in lists, which have values in the columns nested in them."""
    columns: int = 0
    values: float = 0
    """Values in the columns that the rows arrived with."""
    sealed_by: Reason = ""
    sealed_at: float = 0.0
    """Time of sealing."""
    pieces: list[_Piece] = field(default_factory=list)
    _replies: pa.BinaryArray | None = None

    @property
    def spooled(self) -> bool:
        """Whether some of its rows are spooled."""
        return any(chunk.spooled for chunk, _ in self.pieces)

    def batches(self) -> list[pa.RecordBatch]:
        """Return the block's rows in order of arrival, without a copy."""
        return [chunk.run(index) for chunk, index in self.pieces]

    def replies(self) -> list[pa.BinaryArray]:
        """Return the ack subject of each of the block's messages, also after its rows were released."""
        return [_replies(batch) for batch in self.batches()] if self._replies is None else [self._replies]

    def keep_replies(self) -> None:
        """Keep only the ack subjects."""
        self._replies = pa.concat_arrays(self.replies())
        self.pieces = []


class StoredBlock(NamedTuple):
    """A stored block that waits for its acks. It does not hold the object's data."""

    block: Block
    name: layout.ObjectName | None = None
    """None if all of its messages were erased, so that nothing was stored."""
    messages: int = 0
    bytes: int = 0
    location: str = ""

    @classmethod
    def of(cls, block: Block, encoded: EncodedBlock | None, location: str) -> Self:
        """Describe the object of a block."""
        if encoded is None:
            return cls(block)
        return cls(block, encoded.name, encoded.messages, encoded.data.size, location)


class Blocks:
    """All unacknowledged blocks: open ones, and sealed ones being stored."""

    together = TOGETHER

    def __init__(self, rules: SealRules, ledger: Ledger) -> None:
        self.rules, self._ledger = rules, ledger
        self.messages = self.rows = self.bytes = 0
        """Of open blocks."""
        self.large: dict[Chunk, None] = {}
        """Chunks in memory that are not small, oldest first."""
        self.spooled: dict[Chunk, None] = {}
        self._columns = _Columns()
        self._small: dict[tuple[object, int], list[Chunk]] = {}
        self._open: dict[BlockId, Block] = {}  # in the order of opening
        self._sealed: dict[Block, None] = {}

    def __iter__(self) -> Iterator[Block]:
        yield from self._open.values()
        yield from self._sealed

    @property
    def memory(self) -> int:
        """Memory of all chunks, in bytes."""
        return self._ledger["open"] + self._ledger["sealed"]

    @property
    def resident(self) -> int:
        """The open blocks' share of it."""
        return self._ledger["open"]

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def sealed(self) -> int:
        """Number of blocks that are sealed and not acknowledged."""
        return len(self._sealed)

    def open_keys(self) -> int:
        """Count the distinct keys of the open blocks."""
        return len({name.key for name in self._open if not (name.quarantine or name.bundle)})

    @property
    def opened(self) -> float | None:
        """Arrival time of the oldest open block's first message; None without one."""
        return next((block.opened for block in self._open.values()), None)

    def oldest_age(self, now: float) -> float:
        """Seconds since the oldest open block's first message; 0 without one."""
        return 0.0 if self.opened is None else now - self.opened

    def oldest(self, count: int) -> list[Block]:
        """Return the oldest open blocks, at most `count`."""
        return list(islice(self._open.values(), count))

    def largest(self, count: int) -> list[Block]:
        """Return the largest open blocks, at most `count`."""
        return heapq.nlargest(count, self._open.values(), key=lambda block: block.bytes)

    # ------------------------------------------------------------------ adding

    def add(self, rows: pa.RecordBatch, runs: Sequence[Run], now: float, *, quarantine: bool = False) -> list[Block]:
        """Put routed rows into their blocks; return the blocks that this filled and sealed."""
        if not runs:
            return []
        full: list[Block] = []
        numbers = rows.column(layout.ROW).to_numpy() if layout.ROW in rows.schema.names else None
        before = _bytes_before(rows)
        columns, items = self._columns.of(rows.schema), sum(map(_items, rows.columns)) / rows.num_rows
        values = self._columns.values(columns, 1, items)
        parts: list[tuple[int, int]] = []
        owners: list[Block] = []
        for run in runs:
            name = BlockId(key=run.key, bucket=run.bucket, quarantine=quarantine, bundle=run.bundle)
            start, stop = run.start, run.start + run.length
            while start < stop:
                block = self._open.get(name)
                if block is None:
                    block = self._open[name] = Block(id=name, opened=now)
                fitting = self.rules.fitting(block.bytes, before, start, stop)
                if block.columns != columns:
                    fitting = min(fitting, start + self._more_rows(block, columns, items, values))
                if fitting <= start and block.rows:
                    full += self.seal([block], "bytes")
                    continue
                end = min(max(fitting, start + 1), start + self.rules.max_rows - block.rows)
                while numbers is not None and end < stop and numbers[end]:
                    end += 1  # a message's rows stay together, because the first object would acknowledge it
                later = 0 if numbers is None else int(np.count_nonzero(numbers[start:end]))
                block.columns |= columns
                block.items += items * (end - start)
                block.values += values * (end - start)
                self._grow(block, end - start - later, end - start, before[end] - before[start])
                parts.append((start, end - start))
                owners.append(block)
                start = end
                if reason := self.rules.full(block.rows, block.bytes):
                    full += self.seal([block], reason)
        sizes = [before[start + length] - before[start] for start, length in parts]
        chunk = Chunk(parts, owners, sizes, family=(quarantine, numbers is not None))
        for index, block in enumerate(owners):
            block.pieces.append((chunk, index))
        self._hold(chunk, rows)
        self._merge_small()
        return full

    def _more_rows(self, block: Block, columns: int, items: float, values: float) -> int:
        """Return how many rows with these columns fit into a block with other columns, given the nulls they cause."""
        both, count = block.columns | columns, self._columns.values
        lacking = count(both, block.rows, block.items) - block.values
        return self.rules.with_others(lacking, count(both, 1, items) - values)

    def _grow(self, block: Block, messages: int, rows: int, size: int) -> None:
        """Count messages added to a block."""
        block.messages += messages
        block.rows += rows
        block.bytes += size
        self.messages += messages
        self.rows += rows
        self.bytes += size
        self._ledger.unacked += messages

    # ------------------------------------------------------------------ memory

    def _hold(self, chunk: Chunk, rows: pa.RecordBatch, *, spooled: bool = False) -> None:
        """Measure `rows` and put them into `chunk`."""
        self.large.pop(chunk, None)
        self.spooled.pop(chunk, None)
        chunk.rows, chunk.spooled = rows, spooled
        overhead, content = _overhead(rows), (rows.select([REPLY]) if spooled else rows).get_total_buffer_size()
        self._count(chunk, int(content) + overhead)
        if spooled:
            self.spooled[chunk] = None
        elif content >= SMALL * overhead:
            self.large[chunk] = None
        else:
            power = (chunk.live.bit_length() - 1) // (self.together.bit_length() - 1)
            self._small.setdefault((chunk.family, power), []).append(chunk)

    def _count(self, chunk: Chunk, memory: int) -> None:
        """Count the memory of a chunk, and the open blocks' share of it."""
        resident = memory * chunk.open_size // max(chunk.size, 1)
        grown, opened = memory - chunk.memory, resident - chunk.resident
        self._ledger["open"] += opened
        self._ledger["sealed"] += grown - opened
        chunk.memory, chunk.resident = memory, resident

    def move(
        self, chunk: Chunk, rows: pa.RecordBatch, kept: Iterable[tuple[int, int]], *, spooled: bool = False
    ) -> None:
        """Replace the rows of `chunk` by `rows`, which are those of the runs `kept`. Runs released meanwhile stay
        released."""
        position = 0
        for index, length in kept:
            if chunk.runs[index][1]:
                chunk.runs[index] = (position, length)
            position += length
        if chunk.live:
            self._hold(chunk, rows, spooled=spooled)

    def rewrite(self, chunk: Chunk) -> None:
        """Copy the unreleased rows of a chunk, in memory."""
        kept, slices = chunk.kept()
        self.move(chunk, pa.concat_batches(slices), kept)

    def release(self, block: Block) -> None:
        """Free a block's rows; keep only the ack subjects."""
        pieces = block.pieces
        block.keep_replies()
        self._release(pieces)

    def _release(self, pieces: Iterable[_Piece]) -> None:
        """Free runs; rewrite a chunk that is mostly released."""
        for chunk, index in pieces:
            owner, size = chunk.owners[index], chunk.sizes[index]
            chunk.live -= chunk.runs[index][1]
            chunk.size -= size
            chunk.open_size -= 0 if owner is None or owner.sealed_by else size
            chunk.runs[index], chunk.owners[index], chunk.sizes[index] = (0, 0), None, 0
            if not chunk.live:
                self.large.pop(chunk, None)
                self.spooled.pop(chunk, None)
                chunk.rows = _EMPTY
                self._count(chunk, 0)
            elif chunk.live * 2 < chunk.rows.num_rows and not chunk.spooled:
                self.rewrite(chunk)
            else:
                self._count(chunk, chunk.memory)

    def _merge_small(self) -> None:
        """Merge small chunks until too few are alike."""
        while alike := next((alike for alike in self._small.values() if len(alike) >= self.together), None):
            chunks, alike[:] = [chunk for chunk in dict.fromkeys(alike) if chunk.live and not chunk.spooled], []
            if len(chunks) > 1:
                self._merge(chunks)

    def _merge(self, chunks: Sequence[Chunk]) -> None:
        """Merge the open blocks' rows of `chunks` into one chunk, if that takes less memory.

        Consecutive pieces of a block become one.
        """
        schema = unify([chunk.rows.schema for chunk in chunks], lossless=True)
        owners = dict.fromkeys(owner for chunk in chunks for owner in chunk.owners if owner and not owner.sealed_by)
        if schema is None or not owners:
            return
        nulls = shared_nulls()
        batches = [conform(chunk.rows, schema, nulls) for chunk in chunks]
        merged_bytes = sum(batch.nbytes for batch in batches) + _overhead(batches[0])  # nulls count as copies
        if merged_bytes >= sum(chunk.memory for chunk in chunks):
            return
        starts = dict(zip(chunks, accumulate(map(len, batches), initial=0), strict=False))
        groups = [
            (block, merging, list(pieces))
            for block in owners
            for merging, pieces in groupby(block.pieces, key=lambda piece: piece[0] in starts)
        ]
        merging_groups = [(block, pieces) for block, merging, pieces in groups if merging]
        order = [
            np.arange(start, start + length) + starts[chunk]
            for _, pieces in merging_groups
            for chunk, index in pieces
            for start, length in [chunk.runs[index]]
        ]
        lengths = [sum(chunk.runs[index][1] for chunk, index in pieces) for _, pieces in merging_groups]
        sizes = [sum(chunk.sizes[index] for chunk, index in pieces) for _, pieces in merging_groups]
        runs = list(zip(accumulate(lengths, initial=0), lengths, strict=False))
        merged = Chunk(runs, [block for block, _ in merging_groups], sizes, chunks[0].family)
        for block in owners:
            block.columns |= self._columns.of(schema)
            block.pieces = []
        numbers = iter(range(len(runs)))
        for block, merging, pieces in groups:
            block.pieces += [(merged, next(numbers))] if merging else pieces
        self._hold(merged, pa.concat_batches(batches).take(pa.array(np.concatenate(order))))
        self._release(piece for _, pieces in merging_groups for piece in pieces)

    # ------------------------------------------------------------------ sealing

    def seal(self, blocks: Iterable[Block], reason: Reason) -> list[Block]:
        """Seal `blocks`."""
        sealed = list(blocks)
        for block in sealed:
            del self._open[block.id]
            self._sealed[block] = None
            self.messages -= block.messages
            self.rows -= block.rows
            self.bytes -= block.bytes
            block.sealed_by = reason
            for chunk, index in block.pieces:
                chunk.open_size -= chunk.sizes[index]
                self._count(chunk, chunk.memory)
        return sealed

    def seal_due(self, now: float, age: float | None = None, reason: Reason = "age") -> list[Block]:
        """Seal the blocks that have reached `age`, by default the maximum."""
        due: list[Block] = []
        for block in self._open.values():
            if block.opened + (self.rules.max_age if age is None else age) > now:
                break
            due.append(block)
        return self.seal(due, reason)

    def seal_all(self, reason: Reason) -> list[Block]:
        """Seal every open block."""
        return self.seal(list(self._open.values()), reason)

    def seal_largest(self, amount: Amount, limit: int = 1 << 30) -> list[Block]:
        """Seal the largest blocks, at most `limit`, until `amount` is sealed."""
        messages, size, blocks = amount
        if limit <= 0 or (messages <= 0 and size <= 0 and blocks <= 0):
            return []
        by_bytes = size > 0
        chosen: list[Block] = []
        for block in heapq.nlargest(limit, self._open.values(), key=lambda b: b.bytes if by_bytes else b.messages):
            if messages <= 0 and size <= 0 and len(chosen) >= blocks:
                break
            chosen.append(block)
            messages -= block.messages
            size -= block.bytes
        return self.seal(chosen, "pressure")

    def forget(self, block: Block) -> None:
        """Forget a sealed block that was stored and acknowledged."""
        del self._sealed[block]
        self._ledger.unacked -= block.messages


def replies_of(stored: Sequence[StoredBlock]) -> pa.BinaryArray:
    """Return the ack subjects of the messages of stored blocks."""
    return pa.concat_arrays([replies for block, *_ in stored for replies in block.replies()])


def _replies(batch: pa.RecordBatch) -> pa.BinaryArray:
    """Return the ack subjects of a batch: one per message, that of its first row."""
    replies = batch.column(REPLY)
    if layout.ROW not in batch.schema.names:
        return replies
    return replies.filter(pc.equal(pc.fill_null(batch.column(layout.ROW), 0), 0))


def _items(array: pa.Array) -> int:
    """Count the items of the lists in an array, at any depth."""
    if pa.types.is_list(array.type):
        return len(array.flatten()) + _items(array.flatten())
    return sum(map(_items, array.flatten())) if pa.types.is_struct(array.type) else 0


def _overhead(rows: pa.RecordBatch) -> int:
    """Return the overhead of rows in bytes: their memory beyond the content of their buffers."""
    return CHUNK_OVERHEAD + BUFFER_OVERHEAD * sum(len(column.buffers()) for column in rows.columns)


def _bytes_before(rows: pa.RecordBatch) -> list[int]:
    """Return the bytes of the rows before each one, and of all: their payloads, and an equal share of the rest."""
    payloads: Any = np.zeros(rows.num_rows)
    if layout.PAYLOAD in rows.schema.names:
        lengths = pc.binary_length(rows.column(layout.PAYLOAD))
        payloads = pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False)
    share = max(rows.get_total_buffer_size() - int(payloads.sum()), 0) / max(rows.num_rows, 1)
    before = np.concatenate([[0], np.cumsum(payloads)]) + share * np.arange(rows.num_rows + 1)
    sizes: list[int] = before.astype(np.int64).tolist()
    return sizes
