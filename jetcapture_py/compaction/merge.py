"""Merge the rows of overlapping objects, sorted and without copies, in bounded memory.

A row's identity is its sequence, its timestamp and its position in the message. `survey` reads only these columns of
all objects and counts the distinct rows of each range; `read_rows` then reads one range of sequences at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from mmap import ACCESS_READ, mmap
from tempfile import TemporaryFile
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Floats, Hashes, Int64s, Seqs
from jetcapture_py.archive.info import ObjectInfo, RowGroup
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.messages import RowIds
from jetcapture_py.compaction.checked import rows_to_write
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.plan import Unit, batches
from jetcapture_py.errors import JetcaptureError

_BATCH_ROWS = 1 << 18
_BATCH_OBJECTS = 256
_PIECE_BYTES, _PIECE_ROWS = 32 << 20, 1 << 18
"""Limits of the rows read before their copies are dropped: uncompressed bytes, and number. Repeated values take few
bytes in an object and many in memory."""
_IDENTITY = (layout.SEQ, layout.TIMESTAMP, layout.ROW)


class Survey:
    """Counts, uncompressed bytes and hash sums of the distinct rows between any two `marks` (sequences)."""

    def __init__(self, marks: Seqs, counts: Int64s, weights: Floats, checks: Hashes) -> None:
        self.marks = marks
        self._counts = counts
        self._weights = weights
        self._checks = checks

    def rows(self, first: int, end: int) -> int:
        """Return the number of distinct rows from mark `first` to mark `end` (exclusive)."""
        return int(self._counts[self._at(end)] - self._counts[self._at(first)])

    def weight(self, first: int, end: int) -> float:
        """Approximate uncompressed size of the rows between two marks."""
        return float(self._weights[self._at(end)] - self._weights[self._at(first)])

    def check(self, first: int, end: int) -> int:
        """Sum of the hashes of the rows between two marks, modulo 2⁶⁴."""
        return (int(self._checks[self._at(end)]) - int(self._checks[self._at(first)])) % (1 << 64)

    def ahead(self, first: int, weight: float) -> int:
        """Return the first mark at least `weight` bytes after mark `first`, or the last mark."""
        at = self._at(first)
        reached = int(np.searchsorted(self._weights, self._weights[at] + weight))
        return int(self.marks[min(max(reached, at + 1), len(self.marks) - 1)])

    def _at(self, mark: int) -> int:
        at = int(np.searchsorted(self.marks, mark))
        if at == len(self.marks) or self.marks[at] != mark:
            raise ValueError(f"{mark} is not a mark")
        return at


def survey(files: Files, unit: Unit[ObjectInfo], step: float) -> Survey:
    """Read the identities of all rows of a unit. Marks are the edges of its objects, and, where possible, every `step`
    uncompressed bytes. Raises JetcaptureError if an object's rows do not match its name or are not distinct."""
    row_weights = np.array([info.details.size / max(info.details.rows, 1) for info in unit.sources])
    edges = np.unique(np.concatenate((unit.firsts, unit.ends)))
    sums: list[tuple[Seqs, Int64s, Floats, Hashes]] = []
    count, weight, check = 0, 0.0, np.zeros(1, np.uint64)
    for ids, sources, frontier in _swept(files, unit):
        order = ids.order(sources)
        ids, sources = ids.take(order), sources[order]
        again = ids.repeated()
        twice = np.flatnonzero(again[1:] & (sources[1:] == sources[:-1]))
        if len(twice):
            raise JetcaptureError(f"{files.shown}/{unit.sources[sources[twice[0]]].name.path} contains a message twice")
        ids, sources = ids.take(~again), sources[~again]
        weights = weight + np.concatenate(([0.0], np.cumsum(row_weights[sources])))
        checks = check + np.concatenate((np.zeros(1, np.uint64), np.cumsum(ids.hashes())))
        steps = ids.seqs[np.flatnonzero(np.diff(weights // step))]
        marks = np.unique(np.concatenate((edges[edges < frontier], steps)))
        edges = edges[edges >= frontier]
        at = np.searchsorted(ids.seqs, marks)
        sums.append((marks, count + at, weights[at], checks[at]))
        count, weight, check = count + len(ids), weights[-1], checks[-1:]
    marks, counts, weights, checks = (np.concatenate(column) for column in zip(*sums, strict=True))
    return Survey(marks, counts, weights, checks)


def disjoint(files: Files, unit: Unit[ObjectInfo]) -> list[ObjectName] | None:
    """Return objects that together have each row of a unit once; None if some must be compared row by row.

    Raises JetcaptureError if an object's rows do not match its name.
    """
    ranks = np.argsort(np.argsort(-unit.counts, kind="stable"))  # the largest objects stay
    further = np.zeros(len(unit.sources), np.int64)  # rows of each object that are in no larger one
    for rows, sources, _ in _swept(files, unit):
        order = rows.order(ranks[sources])
        first = ~rows.take(order).repeated()
        further += np.bincount(sources[order][first], minlength=len(further))
    if ((further > 0) & (further < unit.counts)).any():
        return None
    return [source.name for source, count in zip(unit.sources, further, strict=True) if count]


def _swept(files: Files, unit: Unit[ObjectInfo]) -> Iterator[tuple[RowIds, Int64s, int]]:
    """Yield identities by rising sequence with their objects' numbers, and the sequence at which they end."""
    held: list[tuple[RowIds, Int64s]] = []
    for batch, frontier in _batches(unit):
        read = files.archive.map(lambda part: _identities(files, unit.sources[part.source], part), batch)
        held += [(ids, np.full(len(ids), part.source)) for part, ids in zip(batch, read, strict=True)]
        rows = RowIds.concat([ids for ids, _ in held])
        sources = np.concatenate([numbers for _, numbers in held])
        ready = rows.seqs < frontier
        yield rows.take(ready), sources[ready], frontier
        held = [(rows.take(~ready), sources[~ready])]


class _Part(NamedTuple):
    """A small object, or one row group of a large one: the unit of a survey."""

    first: int
    """The first sequence."""
    source: int
    """The number of the object."""
    rows: int
    group: int | None
    """The number of the row group; None for the whole object."""


def _parts(unit: Unit[ObjectInfo]) -> list[_Part]:
    """Return the parts of a unit to read, by sequence."""
    parts = []
    for index, info in enumerate(unit.sources):
        name, groups = info.name, info.details.groups
        if name.rows < _BATCH_ROWS or len(groups) == 1 or info.details.rows != name.rows:
            parts.append(_Part(name.first_seq, index, name.rows, None))
            continue
        rows = name.rows // len(groups)
        parts += [_Part(group.first, index, rows, group.index) for group in groups]
    return sorted(parts, key=lambda part: part.first)


def _batches(unit: Unit[ObjectInfo]) -> Iterator[tuple[list[_Part], int]]:
    """Yield parts to read together, and the sequence (exclusive) up to which they complete the rows."""
    batch: list[_Part] = []
    rows = 0
    parts = _parts(unit)
    for part, following in zip_longest(parts, parts[1:]):
        batch.append(part)
        rows += part.rows
        if rows >= _BATCH_ROWS or len(batch) == _BATCH_OBJECTS or following is None:
            yield batch, unit.end + 1 if following is None else following.first
            batch, rows = [], 0


def _identities(files: Files, source: ObjectInfo, part: _Part) -> RowIds:
    ids = RowIds.of(files.rows(source, part.group, columns=_IDENTITY))
    name = source.name
    complete = part.group is not None or len(ids) == name.rows
    if not complete or ids.seqs.min() < max(part.first, name.first_seq) or ids.seqs.max() > name.last_seq:
        raise JetcaptureError(f"the rows of {files.shown}/{name.path} do not match its name")
    return ids


def read_rows(
    files: Files, unit: Unit[ObjectInfo], schema: pa.Schema, first: int, end: int, *, in_file: bool
) -> pa.Table:
    """Return the rows of a unit with sequences from `first` to `end` (exclusive), object by object.

    They have the columns of `schema`, the unified schema. Copies are dropped while reading, because all of them would
    not fit in memory. With `in_file`, all rows are read into a mapped file without a name.
    """
    parts = [
        (index, group)
        for index in np.flatnonzero(unit.touching(first, end)).tolist()
        for group in unit.sources[index].details.groups
        if group.first < end and group.last >= first
    ]

    def read(part: tuple[int, RowGroup]) -> pa.Table:
        index, group = part
        table = rows_to_write(files.rows(unit.sources[index], group.index), schema)
        if group.first >= first and group.last < end:
            return table
        seqs = table[layout.SEQ].to_numpy()
        return table.filter(pa.array((seqs >= first) & (seqs < end)))

    some = batches(parts, lambda part: max(part[1].size / _PIECE_BYTES, part[1].rows / _PIECE_ROWS), 1.0)
    pieces = (pa.concat_tables(files.archive.map(read, batch)) for batch in some)
    if not in_file:
        return pa.concat_tables([schema.empty_table(), *_without_copies(pieces)])
    with TemporaryFile() as file:  # without a name, so that it disappears after a kill
        with pa.ipc.new_file(file, schema) as writer:
            for table in pieces:
                writer.write_table(table)
        file.flush()
        return pa.ipc.open_file(pa.py_buffer(mmap(file.fileno(), 0, access=ACCESS_READ))).read_all()


def _without_copies(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield tables with the first copy of each row."""
    seen = RowIds.concat([])
    for table in tables:
        rows = RowIds.concat([seen, RowIds.of(table)])
        order = rows.order(np.arange(len(rows)))
        again = np.empty(len(rows), np.bool_)
        again[order] = rows.take(order).repeated()
        new = ~again[len(seen) :]
        yield table if new.all() else table.filter(pa.array(new))
        seen = rows.take(~again)
