"""Merge the rows of overlapping objects, sorted and without copies, in bounded memory.

A row's identity is its sequence, its timestamp and its position in the message. `survey` reads only these columns of
all objects and counts the distinct rows of each range; `Rows` then reads whole rows, one range of sequences at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.bundles import with_keys
from jetcapture_py.archive.schema import conform
from jetcapture_py.compaction.files import Files, Footer, RowGroup
from jetcapture_py.compaction.plan import Source, Unit
from jetcapture_py.errors import JetcaptureError

_BATCH_ROWS = 1 << 18
_BATCH_OBJECTS = 256
_READ_TOGETHER = 8
"""Row groups of an object in a bundle that are in memory at once."""
_IDENTITY = (layout.SEQ, layout.TIMESTAMP, layout.ROW)
_MICROSECONDS = pa.timestamp("us", "UTC")


@dataclass(frozen=True, slots=True)
class Identities:
    """Row identities as int64 arrays: sequence, timestamp in microseconds, position in the message."""

    seqs: Any
    times: Any
    rows: Any

    @classmethod
    def of(cls, table: pa.Table) -> Identities:
        """Return the identities of a table's rows. Raises ArrowException if a sequence or timestamp is null."""
        rows = np.zeros(table.num_rows, np.int64)
        if layout.ROW in table.schema.names:
            rows = pc.fill_null(table[layout.ROW].cast(pa.int64()), 0).to_numpy()
        if table[layout.SEQ].null_count or table[layout.TIMESTAMP].null_count:
            raise pa.ArrowInvalid("a message has no sequence or no timestamp")
        times = table[layout.TIMESTAMP].cast(_MICROSECONDS).cast(pa.int64()).to_numpy()
        return cls(table[layout.SEQ].cast(pa.int64()).to_numpy(), times, rows)

    @classmethod
    def concat(cls, parts: Sequence[Identities]) -> Identities:
        """Concatenate identities."""
        columns = ([part.seqs for part in parts], [part.times for part in parts], [part.rows for part in parts])
        return cls(*(np.concatenate(column) for column in columns))

    def take(self, order: Any) -> Identities:
        """Select by an array of indexes or a mask."""
        return Identities(self.seqs[order], self.times[order], self.rows[order])

    def order(self, sources: Any) -> Any:
        """Return the indexes that sort the identities; equal ones by `sources`, the number of the object of each."""
        order = np.argsort(self.seqs, kind="stable")
        seqs = self.seqs[order]
        if (seqs[1:] == seqs[:-1]).any():
            order = np.lexsort((sources, self.rows, self.times, self.seqs))
        return order

    def repeated(self) -> Any:
        """Return a mask of identities that are equal to the previous one; they must be sorted."""
        again = np.zeros(len(self.seqs), bool)
        again[1:] = (np.diff(self.seqs) == 0) & (np.diff(self.times) == 0) & (np.diff(self.rows) == 0)
        return again

    def checks(self) -> Any:
        """Return a 64-bit hash of each; sums of them compare sets."""
        mixed = _mixed(self.rows.astype(np.uint64))
        return _mixed(self.seqs.astype(np.uint64) ^ _mixed(self.times.astype(np.uint64) ^ mixed))


def _mixed(values: Any) -> Any:
    """Apply splitmix64's finalizer to each value."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Survey:
    """Counts, uncompressed bytes and hash sums of distinct rows between any two of its `marks`, which are sequences."""

    def __init__(self, marks: Any, counts: Any, weights: Any, checks: Any) -> None:
        self.marks = marks
        self._counts = counts
        self._weights = weights
        self._checks = checks

    def rows(self, first: int, end: int) -> int:
        """Return the number of distinct rows from mark `first` to mark `end` (exclusive)."""
        return int(self._counts[self._at(end)] - self._counts[self._at(first)])

    def weight(self, first: int, end: int) -> float:
        """Return their approximate uncompressed bytes."""
        return float(self._weights[self._at(end)] - self._weights[self._at(first)])

    def check(self, first: int, end: int) -> int:
        """Return the sum of their hashes, modulo 2⁶⁴."""
        return (int(self._checks[self._at(end)]) - int(self._checks[self._at(first)])) % (1 << 64)

    def ahead(self, first: int, weight: float) -> int:
        """Return the first mark at least `weight` bytes after mark `first`, or the last mark."""
        at = self._at(first)
        found = int(np.searchsorted(self._weights, self._weights[at] + weight))
        return int(self.marks[min(max(found, at + 1), len(self.marks) - 1)])

    def _at(self, mark: int) -> int:
        at = int(np.searchsorted(self.marks, mark))
        if at == len(self.marks) or self.marks[at] != mark:
            raise ValueError(f"{mark} is not a mark")
        return at


def survey(files: Files, unit: Unit, footers: Sequence[Footer], step: float) -> Survey:
    """Read the identities of all rows of a unit. Marks are the edges of its objects, and, where possible, every `step`
    uncompressed bytes. Raises JetcaptureError if an object's rows do not match its name or are not distinct."""
    weights = np.array([footer.weight / max(footer.rows, 1) for footer in footers])
    found = _Surveyor(np.unique(np.concatenate((unit.firsts, unit.ends))), weights, step)
    held: list[tuple[Identities, Any]] = []
    for batch, frontier in _batches(unit):
        read = files.each(lambda index: _identities(files, unit.sources[index]), batch)
        held += [(each, np.full(len(each.seqs), index)) for index, each in zip(batch, read, strict=True)]
        every = Identities.concat([each for each, _ in held])
        sources = np.concatenate([numbers for _, numbers in held])
        ready = every.seqs < frontier
        try:
            found.add(every.take(ready), sources[ready], frontier)
        except _RepeatedError as error:
            path = unit.sources[error.source].name.path
            raise JetcaptureError(f"{files.shown}/{path} contains a message twice") from error
        held = [(every.take(~ready), sources[~ready])]
    return found.survey()


def _batches(unit: Unit) -> Iterator[tuple[list[int], int]]:
    """Yield sources to read together, and the sequence (exclusive) up to which all rows are known afterwards."""
    batch: list[int] = []
    rows = 0
    for index in range(len(unit.sources)):
        batch.append(index)
        rows += int(unit.counts[index])
        if rows >= _BATCH_ROWS or len(batch) == _BATCH_OBJECTS or index + 1 == len(unit.sources):
            yield batch, int(unit.firsts[index + 1]) if index + 1 < len(unit.sources) else unit.end + 1
            batch, rows = [], 0


def _identities(files: Files, source: Source) -> Identities:
    found = Identities.of(files.rows(source, columns=_IDENTITY))
    name = source.name
    if len(found.seqs) != name.rows or found.seqs.min() < name.first_seq or found.seqs.max() > name.last_seq:
        raise JetcaptureError(f"the rows of {files.shown}/{name.path} do not match its name")
    return found


class _RepeatedError(Exception):
    """An object contains a row twice."""

    def __init__(self, source: int) -> None:
        super().__init__()
        self.source = source


class _Surveyor:
    """Takes identities in order of their sequences, and computes cumulative sums at every mark."""

    def __init__(self, edges: Any, weights: Any, step: float) -> None:
        self._edges = edges
        self._weights = weights
        self._step = step
        self._sums: list[tuple[Any, Any, Any, Any]] = []
        self._count, self._weight, self._check = 0, 0.0, np.zeros(1, np.uint64)

    def add(self, found: Identities, sources: Any, frontier: int) -> None:
        """Add all rows below `frontier` that have not been added before."""
        order = found.order(sources)
        found, sources = found.take(order), sources[order]
        again = found.repeated()
        twice = again.copy()
        twice[1:] &= sources[1:] == sources[:-1]
        if twice.any():
            raise _RepeatedError(int(sources[twice][0]))
        found, sources = found.take(~again), sources[~again]
        weights = self._weight + np.concatenate(([0.0], np.cumsum(self._weights[sources])))
        checks = self._check + np.concatenate((np.zeros(1, np.uint64), np.cumsum(found.checks())))
        edges = self._edges[self._edges < frontier]
        self._edges = self._edges[len(edges) :]
        steps = np.flatnonzero(np.diff(weights // self._step))
        marks = np.unique(np.concatenate((edges, found.seqs[steps])))
        at = np.searchsorted(found.seqs, marks)
        self._sums.append((marks, self._count + at, weights[at], checks[at]))
        self._count, self._weight, self._check = self._count + len(found.seqs), weights[-1], checks[-1:]

    def survey(self) -> Survey:
        """Return the sums."""
        marks, counts, weights, checks = (np.concatenate(column) for column in zip(*self._sums, strict=True))
        return Survey(marks, counts, weights, checks)


class Rows:
    """The distinct rows of a unit with sequences from `first` to `end` (exclusive), sorted by identity.

    They have the columns of `schema`, the unified schema of the objects, with the keys of objects under keys where it
    has a column for them. Of equal rows, the first object's is used. Rows with a column of keys, which are sorted by it
    as a whole, lie in a file instead of in memory.
    """

    def __init__(
        self, files: Files, unit: Unit, footers: Sequence[Footer], schema: pa.Schema, first: int, end: int
    ) -> None:
        self._files = files
        self._unit = unit
        self._schema = schema
        self._first, self._end = first, end
        parts = ((index, group) for index, footer in enumerate(footers) for group in footer.row_groups)
        self._unread = sorted(
            ((index, group) for index, group in parts if group.first < end and group.last >= first),
            key=lambda part: -part[1].first,
        )
        self._held: list[tuple[int, pa.Table]] = []

    def take(self, end: int) -> pa.Table:
        """Return the rows before sequence `end` that have not been taken yet."""
        wanted = []
        while self._unread and self._unread[-1][1].first < end:
            wanted.append(self._unread.pop())
        if with_keys(self._schema):
            return self._in_file(wanted, end)
        parts = self._held + self._files.each(self._read, wanted)
        taken, self._held = [], []
        for source, table in parts:
            before, after = _divided(table, end)
            taken.append((source, before))
            if after.num_rows:
                self._held.append((source, after))
        return self._merged(taken)

    def _in_file(self, wanted: Sequence[tuple[int, RowGroup]], end: int) -> pa.Table:
        """Return the rows before `end` as a mapped file without a name, in the order of their objects, copies included.

        Later rows are dropped: each range has its own `Rows`.
        """
        wanted = sorted(wanted, key=lambda part: (part[0], part[1].index))
        with NamedTemporaryFile(prefix="jetcapture-compact-") as file:
            with pa.OSFile(file.name, "wb") as sink, pa.ipc.new_file(sink, self._schema) as writer:
                for start in range(0, len(wanted), _READ_TOGETHER):
                    for _, table in self._files.each(self._read, wanted[start : start + _READ_TOGETHER]):
                        writer.write_table(_divided(table, end)[0])
            return pa.ipc.open_file(pa.memory_map(file.name)).read_all()

    def _read(self, part: tuple[int, RowGroup]) -> tuple[int, pa.Table]:
        source, group = part
        name = self._unit.sources[source].name
        table = self._files.rows(self._unit.sources[source], group.index)
        if with_keys(self._schema) and not name.bundle:
            table = table.append_column(layout.KEY, pa.repeat(pa.scalar(name.key, pa.string()), table.num_rows))
        batches = [conform(batch, self._schema) for batch in table.to_batches()]
        table = pa.Table.from_batches(batches, self._schema)
        if group.first >= self._first and group.last < self._end:
            return source, table
        seqs = table[layout.SEQ].to_numpy()
        return source, table.filter(pa.array((seqs >= self._first) & (seqs < self._end)))

    def _merged(self, parts: Iterable[tuple[int, pa.Table]]) -> pa.Table:
        tables = [(source, table) for source, table in parts if table.num_rows]
        if not tables:
            return self._schema.empty_table()
        table = pa.concat_tables([table for _, table in tables]).combine_chunks()
        found = Identities.of(table)
        order = found.order(np.concatenate([np.full(table.num_rows, source) for source, table in tables]))
        order = order[~found.take(order).repeated()]
        return table if np.array_equal(order, np.arange(table.num_rows)) else table.take(pa.array(order))


def _divided(table: pa.Table, end: int) -> tuple[pa.Table, pa.Table]:
    """Return the rows with sequences before `end`, and the others."""
    seqs = table[layout.SEQ].to_numpy()
    before = seqs < end
    if before.all():
        return table, table.slice(0, 0)
    return table.filter(pa.array(before)), table.filter(pa.array(~before))
