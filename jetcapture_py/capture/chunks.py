"""Chunks: routed batches shared by blocks, their cost, and which are small enough to merge.

Pure: no clock, no I/O. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from jetcapture_py.archive.schema import REPLY

CHUNK_OVERHEAD = 2048
"""Overhead of a chunk in bytes, besides its columns."""
ARRAY_OVERHEAD = 1024
"""Overhead in bytes of a column, and of each nested one, besides its content (measured: 700 to 1,000)."""
SMALL = 4
"""A chunk is small when its content is less than this many times its overhead."""
TOGETHER = 8
"""Small chunks that are merged at once. Merged ones have eight times the rows and are merged with their like, so a row
is copied once for each power of eight."""
MOST_KNOWN = 256


class Widths:
    """The cost of columns. A set of columns is an int with a bit per column and per nested column."""

    def __init__(self) -> None:
        self._bits: dict[tuple[int, str, int], int] = {}
        self._bytes: list[float] = []
        self._in_lists = 0
        self._known: dict[int, tuple[float, float]] = {}
        self._last: tuple[pa.Schema, int] = pa.schema([]), 0

    def columns(self, schema: pa.Schema) -> int:
        """The columns of a schema."""
        if not schema.equals(self._last[0]):
            self._last = schema, self._set_of(-1, schema, in_list=False)
        return self._last[1]

    def null_bytes(self, columns: int, rows: float, items: float) -> float:
        """Bytes that these columns take at least in `rows` rows, of which those that are lists hold `items` items."""
        found = self._known.get(columns)
        if found is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known[columns] = self._sum(columns & ~self._in_lists), self._sum(columns & self._in_lists)
        return rows * found[0] + items * found[1]

    def _sum(self, columns: int) -> float:
        total = 0.0
        while columns:
            lowest = columns & -columns
            total += self._bytes[lowest.bit_length() - 1]
            columns ^= lowest
        return total

    def _set_of(self, parent: int, fields: Iterable[pa.Field], *, in_list: bool) -> int:
        """The `fields` nested in the column `parent`."""
        found = 0
        for field in fields:
            kind = field.type
            bit = self._bits.setdefault((parent, field.name, kind.id), len(self._bytes))
            if bit == len(self._bytes):
                self._bytes.append(_null_bytes(kind))
                self._in_lists |= in_list << bit
            found |= 1 << bit
            if kind.num_fields:
                inner = (kind.field(index) for index in range(kind.num_fields))
                found |= self._set_of(bit, inner, in_list=in_list or not pa.types.is_struct(kind))
        return found


def _null_bytes(kind: pa.DataType) -> float:
    """Bytes of a null in a column: a bit that says so, and a value or an offset."""
    if pa.types.is_struct(kind) or pa.types.is_null(kind):
        return 1 / 8
    try:
        return (1 + int(kind.bit_width)) / 8
    except ValueError:
        return 4 + 1 / 8


class ChunkMemory:
    """Bytes held by chunks, kept up to date by them, and the small ones among them, of which `together` are merged.

    `large` are the others in memory, oldest first; `sparse` those in files of which less than half is still needed.
    `open_away` is what of the bytes of open blocks lies in files.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.together = TOGETHER
        self.widths = Widths()
        self.open_away = 0
        self.large: dict[Chunk, None] = {}
        self.sparse: dict[Chunk, None] = {}
        self._small: dict[tuple[object, int], list[Chunk]] = {}

    def note(self, chunk: Chunk) -> None:
        """Account for a chunk's current size."""
        self.large.pop(chunk, None)
        self.sparse.pop(chunk, None)
        if chunk.file is not None and chunk.live * 2 < chunk.rows.num_rows:
            self.sparse[chunk] = None
        elif chunk.file is None and chunk.live and not chunk.small:
            self.large[chunk] = None
        if chunk.small:
            power = (chunk.live.bit_length() - 1) // (self.together.bit_length() - 1)
            self._small.setdefault((chunk.family, power), []).append(chunk)

    def to_merge(self) -> list[Chunk]:
        """Remove and return the small chunks to merge now; empty while there are too few alike."""
        for alike in self._small.values():
            if len(alike) >= self.together:
                chunks, alike[:] = [chunk for chunk in dict.fromkeys(alike) if chunk.live], []
                if len(chunks) > 1:
                    return chunks
        return []


class RowFile(Protocol):
    """A file that rows lie in instead of memory."""

    def release(self) -> None:
        """Remove it; the rows are not needed any more."""
        ...


class Chunk:
    """A routed batch: `rows`, and where in it each run lies that a block still needs.

    The rows are in memory, or, but for their ack subjects, in `file`, and then each run's owner counts its bytes as
    `away`.

    `owners`, `sizes` and `items` have each run's block, its bytes, and how many items are in its lists of structs.
    Only chunks of one `family` are merged.
    """

    __slots__ = (
        "_away",
        "_memory",
        "columns",
        "family",
        "file",
        "items",
        "live",
        "nbytes",
        "owners",
        "rows",
        "runs",
        "sizes",
        "small",
    )

    def __init__(
        self,
        rows: pa.RecordBatch,
        runs: Sequence[tuple[int, int]],
        owners: Sequence[Any],
        sizes: Sequence[int],
        items: Sequence[int],
        memory: ChunkMemory,
        family: object = None,
    ) -> None:
        self._memory = memory
        self.family = family
        self.runs: list[tuple[int, int]] = list(runs)
        self.owners = list(owners)
        self.sizes = sizes
        self.items = items
        self.live = rows.num_rows
        self.columns = self.nbytes = 0
        self.file: RowFile | None = None
        self._away = [0] * len(self.runs)
        self._hold(rows)

    def _hold(self, rows: pa.RecordBatch, file: RowFile | None = None) -> None:
        memory, nbytes, old = self._memory, 0, self.file
        if rows.num_rows:
            self.columns = memory.widths.columns(rows.schema)
            nbytes = cost(rows if file is None else rows.select([REPLY]), self.columns)
        memory.bytes += nbytes - self.nbytes
        self.rows, self.nbytes, self.file = rows, nbytes, file
        self.small = file is None and 0 < nbytes < (1 + SMALL) * overhead(self.columns)
        memory.note(self)
        if old is not None:
            old.release()

    def run(self, index: int) -> pa.RecordBatch:
        """The rows of one run, without a copy."""
        return self.rows.slice(*self.runs[index])

    def release(self, *indexes: int) -> None:
        """Free these runs; rewrite the chunk when less than half of it is still needed."""
        for index in indexes:
            self.live -= self.runs[index][1]
            self.runs[index] = (0, 0)
            self._count_away(index, 0)
            self.owners[index] = None
        if not self.live:
            self._hold(EMPTY)
        elif self.live * 2 < self.rows.num_rows:
            if self.file is None:
                self.rewrite()
            else:
                self._memory.note(self)

    @property
    def live_bytes(self) -> int:
        """Bytes of the runs that are still needed."""
        return sum(size for size, run in zip(self.sizes, self.runs, strict=True) if run[1])

    def kept(self) -> tuple[list[tuple[int, int]], list[pa.RecordBatch]]:
        """Index and length of each run that is still needed, and their rows in this order, without a copy."""
        kept = [(index, run[1]) for index, run in enumerate(self.runs) if run[1]]
        whole = self.live == self.rows.num_rows
        return kept, [self.rows] if whole else [self.run(index) for index, _ in kept]

    def rewrite(self) -> None:
        """Keep only what is still needed, in memory."""
        kept, slices = self.kept()
        self.move(concat(slices), kept)

    def move(self, rows: pa.RecordBatch, kept: Iterable[tuple[int, int]], file: RowFile | None = None) -> None:
        """Hold `rows` instead, which are those of the runs `kept`; runs that were released since then stay released."""
        position = 0
        for index, length in kept:
            if self.runs[index][1]:
                self.runs[index] = (position, length)
            position += length
        whole = self.live_bytes
        self._hold(rows, file)
        share = max(0.0, 1 - self.nbytes / max(whole, 1)) if file is not None else 0.0
        for index, run in enumerate(self.runs):
            if run[1]:
                self._count_away(index, int(self.sizes[index] * share))

    def _count_away(self, index: int, size: int) -> None:
        """Have the owner of a run count `size` bytes of it as away."""
        change = size - self._away[index]
        if change:
            owner = self.owners[index]
            owner.away += change
            self._memory.open_away += 0 if owner.sealed_by else change
            self._away[index] = size


EMPTY = pa.RecordBatch.from_arrays([], names=[])


def overhead(columns: int) -> int:
    """Bytes that a chunk of these columns costs beside their content."""
    return CHUNK_OVERHEAD + columns.bit_count() * ARRAY_OVERHEAD


def cost(rows: pa.RecordBatch, columns: int) -> int:
    """Bytes that rows of these columns cost as a chunk."""
    return int(rows.get_total_buffer_size()) + overhead(columns)


def list_items(rows: pa.RecordBatch, runs: Sequence[tuple[int, int]]) -> Any:
    """How many items lists of structs have in each run: a struct has all fields of its column in every item."""
    starts, lengths = np.array(runs).T
    columns = [column for column in rows.columns if _has_structs_in_lists(column.type)]
    return sum((_items(column, starts, starts + lengths) for column in columns), np.zeros(len(runs), np.int64))


def _has_structs_in_lists(kind: pa.DataType) -> bool:
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    if pa.types.is_list(kind) and pa.types.is_struct(inner[0]):
        return True
    return any(map(_has_structs_in_lists, inner)) and not pa.types.is_map(kind)


def _items(array: pa.Array, starts: Any, stops: Any) -> Any:
    if pa.types.is_list(array.type):
        offsets = array.offsets.to_numpy()
        starts, stops = offsets[starts], offsets[stops]
        return (stops - starts) + _items(array.values, starts, stops)
    if pa.types.is_struct(array.type):
        fields = (array.field(index) for index in range(array.type.num_fields))
        return sum((_items(field, starts, stops) for field in fields), np.zeros(len(starts), np.int64))
    return np.zeros(len(starts), np.int64)


def concat(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of all rows, copied; the batches have one schema."""
    if len(batches) == 1:  # Arrow would keep the slice, and the buffers it belongs to
        return batches[0].take(pa.array(np.arange(len(batches[0]))))
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
