"""Plan a compaction: decide from names, sizes and footers which objects to merge, keep and remove. Pure.

`units` divides the objects of a bucket by their names. A unit is processed as a whole: objects of one group that share
no message with objects outside the unit. `mergeable` divides it by the footers, and `spans` divides each part into
spans of sequences. A span is either complete in one of its objects, which is kept, or becomes new objects.

One rule makes removal safe even if other compactions run at the same time and plan differently: **an object may only be
replaced by objects with more rows.** Of all objects that ever had a message, the one with the most rows can never be
replaced, so it stays. The rule depends on names alone, so all compactions agree on it. Removing messages from an object
breaks it; `rewrite` says how that is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from jetcapture_py.archive.arrays import Mask
from jetcapture_py.archive.common_type import common
from jetcapture_py.archive.info import ObjectInfo
from jetcapture_py.archive.layout import MAX_INTERVAL, ObjectName
from jetcapture_py.archive.schema import fields_in, unify

T = TypeVar("T")

TARGET_SIZE = 128 << 20
"""Default target size of an object in bytes."""
TOLERANCE = 1.5
"""Factor by which an object may be smaller or larger than the target size."""
UNIT_TARGETS = 16
"""Approximate number of objects of the target size per unit, if the group can be divided."""

OPEN = "the time slice is not closed yet"
DRIFTED = "incompatible column types; only objects with compatible types were merged"
REPLACING = "an erasure or redecoding of its rows is unfinished: run it again"
SEVERAL = "objects from layouts with different bundle counts; only objects with the same count were merged"

_UNSURE = 0.75
"""Share of the target size below which an estimated size counts as too small: the object may turn out smaller."""


@dataclass(frozen=True, slots=True)
class Source:
    """An object of the archive and its size in bytes."""

    name: ObjectName
    size: int


S = TypeVar("S", bound=Source | ObjectInfo)


@dataclass(frozen=True, slots=True)
class Span:
    """Sequences from `first` to `end` (exclusive); `kept` is the index of the source that is complete in this range."""

    first: int
    end: int
    kept: int | None = None


class Tally(Protocol):
    """Count and size of a unit's distinct rows with sequences from `first` to `end` (exclusive)."""

    def rows(self, first: int, end: int) -> int: ...

    def size(self, first: int, end: int) -> float:
        """Estimated size of the rows as one object, in bytes."""
        ...


class Unit(Generic[S]):
    """Objects of one group as arrays in the order of their sequences; `ends` are exclusive.

    If its objects do not overlap, it is also a `Tally`. In `sizes`, a row counts as at least `row_bytes`, so that an
    object with as many rows as fit in memory is large.
    """

    def __init__(self, sources: Iterable[S], row_bytes: float = 0.0) -> None:
        self.sources: list[S] = sorted(sources, key=lambda source: (source.name.first_seq, source.name.path))
        names = [source.name for source in self.sources]
        self.firsts = np.array([name.first_seq for name in names], np.int64)
        self.ends = np.array([name.last_seq + 1 for name in names], np.int64)
        self.counts = np.array([name.rows for name in names], np.int64)
        sizes = np.array([source.size for source in self.sources], np.int64)
        self.sizes = np.maximum(sizes, self.counts * row_bytes)
        self.first = int(self.firsts[0])
        self.end = int(self.ends.max())

    @property
    def overlaps(self) -> bool:
        """Whether objects may share messages."""
        return bool((np.maximum.accumulate(self.ends)[:-1] > self.firsts[1:]).any())

    def within(self, first: int, end: int) -> Mask:
        """Return a mask of the objects inside the span."""
        inside: Mask = (self.firsts >= first) & (self.ends <= end)
        return inside

    def touching(self, first: int, end: int) -> Mask:
        """Return a mask of the objects that may have messages in the span."""
        touching: Mask = (self.firsts < end) & (self.ends > first)
        return touching

    def crossing(self, first: int, end: int) -> Mask:
        """Return a mask of the objects that may have messages both in the span and outside of it."""
        return self.touching(first, end) & ~self.within(first, end)

    def may_hold(self, first: int, end: int, rows: int) -> bool:
        """Whether an object of the span with `rows` rows may replace all objects with messages in the span.

        Objects inside the span can always be replaced: they have fewer rows, or the same rows and thus the same name.
        """
        return rows > int(self.counts[self.crossing(first, end)].max(initial=0))

    def rows(self, first: int, end: int) -> int:
        """Return the number of rows of the objects inside the span."""
        return int(self.counts[self.within(first, end)].sum())

    def size(self, first: int, end: int) -> float:
        """Return the bytes of the objects inside the span."""
        return float(self.sizes[self.within(first, end)].sum())


def batches(items: Iterable[T], size: Callable[[T], float], limit: float) -> Iterator[list[T]]:
    """Divide items into batches whose sizes add up to at most `limit`, or of one item."""
    batch: list[T] = []
    total = 0.0
    for item in items:
        item_size = size(item)
        if batch and total + item_size > limit:
            yield batch
            batch, total = [], 0.0
        batch.append(item)
        total += item_size
    if batch:
        yield batch


def units(objects: Iterable[Source], target: int, row_bytes: float = 0.0) -> Iterator[Unit[Source]]:
    """Yield the units that a compaction to objects of `target` bytes would change."""
    ordered = sorted(objects, key=lambda source: (repr(source.name.group), source.name.first_seq))
    for _, group in groupby(ordered, key=lambda source: source.name.group):
        for part in _parts(list(group), target):
            if len(part) == 1:
                continue
            unit = Unit(part, row_bytes)
            if unit.overlaps or any(span.kept is None for span in spans(unit, target, unit)):
                yield unit


def _parts(group: Sequence[Source], target: int) -> Iterator[list[Source]]:
    """Divide a group, ordered by sequence, into parts of limited size that share no message, where possible."""
    total = sum(source.size for source in group)
    quota = total / max(1, total // (UNIT_TARGETS * target))
    part: list[Source] = []
    size, last = 0, -1
    for source in group:
        if size >= quota and source.name.first_seq > last:
            yield part
            part, size = [], 0
        part.append(source)
        size += source.size
        last = max(last, source.name.last_seq)
    yield part


def is_open(bucket: int, infos: Iterable[ObjectInfo], closed: float, *, unreadable: bool = False) -> bool:
    """Whether messages may still be added to a bucket, judging by its objects' interval, or a day if unknown."""
    return bucket + (MAX_INTERVAL if unreadable else max(info.interval for info in infos)) > closed


def mergeable(infos: Sequence[ObjectInfo]) -> tuple[list[tuple[pa.Schema, list[ObjectInfo]]], list[str]]:
    """Divide the objects of a unit into mergeable sets, each with the columns of its result.

    Also return the reasons why other objects are not merged.
    """
    digests = {info.name.digest for info in infos}
    if not all(digests.isdisjoint(info.details.replaces) for info in infos):
        return [], [REPLACING]
    layouts = sorted({info.bundles for info in infos})
    reasons = [SEVERAL] if len(layouts) > 1 else []
    parts: list[tuple[pa.Schema, list[ObjectInfo]]] = []
    for bundles in layouts:
        members = [info for info in infos if info.bundles == bundles]
        classes_ = classes([info.schema for info in members])
        reasons += [DRIFTED] if len(classes_) > 1 else []
        several = [(schema, indexes) for schema, indexes in classes_ if len(indexes) > 1]
        parts += [(schema, [members[index] for index in indexes]) for schema, indexes in several]
    return parts, reasons


def classes(schemas: Sequence[pa.Schema]) -> list[tuple[pa.Schema, list[int]]]:
    """Divide schemas into mergeable classes; return each class's unified schema and the indexes of its members.

    `read_archive` must return the same values and types before and after. A column may be missing or all null, an
    integer may become wider, a struct may gain fields. Objects with other differences, such as integers and floats, are
    not merged: the reader resolves these from all objects that it reads. If other objects' types make a column text,
    structs that gained fields show them as null.
    """
    parts: list[tuple[pa.Schema, list[int]]] = []
    for index, schema in enumerate(schemas):
        for number, (unified, members) in enumerate(parts):
            if unified.equals(schema):
                members.append(index)
                break
            if _go_together(unified, schema):
                parts[number] = (unify([unified, schema]), [*members, index])
                break
        else:
            parts.append((schema, [index]))
    return parts


def _go_together(one: pa.Schema, other: pa.Schema) -> bool:
    names: dict[str, str] = {}
    if any(names.setdefault(path.lower(), path) != path for path, _ in (*fields_in(one), *fields_in(other))):
        return False  # a column or field would change its name
    integer = pa.types.is_signed_integer
    types = {field.name: field.type for field in one}
    pairs = [(types[field.name], field.type) for field in other if field.name in types]
    return all(common(pair, lossless=True) is not None or all(map(integer, pair)) for pair in pairs)


def spans(unit: Unit[S], target: int, tally: Tally) -> list[Span]:
    """Divide a unit into spans to keep and spans to rewrite, in order. Ranges without messages are in none."""
    large = _large(unit, target, tally)
    while True:
        division = _around(unit, large, tally)
        needed = _needed(unit, large, division, target, tally)
        if needed is None:
            return division
        large.remove(needed)


def _large(unit: Unit[S], target: int, tally: Tally) -> list[int]:
    """Find objects of the target size that are complete in their range and have more rows than all others there."""
    return [
        index
        for index in np.flatnonzero(unit.sizes >= target / TOLERANCE).tolist()
        if tally.rows(int(unit.firsts[index]), int(unit.ends[index])) == unit.counts[index]
        and (unit.counts[unit.touching(unit.firsts[index], unit.ends[index])] >= unit.counts[index]).sum() == 1
    ]


def _around(unit: Unit[S], large: Sequence[int], tally: Tally) -> list[Span]:
    """Return the large objects' spans and the spans between them."""
    edges = [unit.first, *(int(edge) for index in large for edge in (unit.firsts[index], unit.ends[index])), unit.end]
    division = []
    for number, (first, end) in enumerate(pairwise(edges)):
        rows = tally.rows(first, end) if first < end else 0
        if rows:
            complete = np.flatnonzero(unit.within(first, end) & (unit.counts == rows)).tolist()
            division.append(Span(first, end, large[number // 2] if number % 2 else next(iter(complete), None)))
    return division


def _needed(unit: Unit[S], large: Sequence[int], division: Sequence[Span], target: int, tally: Tally) -> int | None:
    """Find a large object to merge with a neighbor that would be too small; None without one."""
    for number, span in enumerate(division):
        beside = (*division[max(number - 1, 0) : number], *division[number + 1 : number + 2])
        neighbours = [other.kept for other in beside if other.kept is not None and other.kept in large]
        if span.kept in large or not neighbours:
            continue
        if not unit.may_hold(span.first, span.end, tally.rows(span.first, span.end)):
            larger = int(np.where(unit.crossing(span.first, span.end), unit.counts, 0).argmax())
            before = unit.firsts[larger] < span.first
            return neighbours[0] if before else neighbours[-1]
        nearest = min(neighbours, key=lambda index: int(unit.sizes[index]))
        size = tally.size(span.first, span.end) if span.kept is None else float(unit.sizes[span.kept])
        enough = target * _UNSURE if span.kept is None else target / TOLERANCE
        if size < enough and size + unit.sizes[nearest] <= target * TOLERANCE:
            return nearest
    return None


def removable(unit: Unit[S], holders: Iterable[ObjectName]) -> list[int]:
    """Return the indexes of the sources that may be removed once `holders` together have all messages of the unit.

    A holder is never among them, because no object has more rows than itself.
    """
    names = list(holders)
    firsts = np.array([name.first_seq for name in names], np.int64)
    lasts = np.array([name.last_seq for name in names], np.int64)
    counts = np.array([name.rows for name in names], np.int64)
    replaced = []
    for index, source in enumerate(unit.sources):
        taking = counts[(firsts <= source.name.last_seq) & (lasts >= source.name.first_seq)]
        if len(taking) and (taking > source.name.rows).all():
            replaced.append(index)
    return replaced
