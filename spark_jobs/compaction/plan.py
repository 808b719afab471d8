"""What a compaction merges, keeps and may remove, decided from names, sizes and counts of messages. Pure.

A unit is what is handled together: objects of one group, no message of which lies in objects outside of it. It is cut
into spans of sequences. A span either is held whole by one of its objects, which is kept, or becomes new objects.

One rule makes removal safe, also beside other compactions that chose otherwise from what they saw: **an object gives
way only to objects that have more rows than it has.** Of all objects that ever held a message, the one with the most
rows could give way to none, so it stays. The rule is about names alone, so all who follow it agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Protocol

import numpy as np

from jetcapture_py.archive.layout import ObjectName

TARGET_SIZE = 128 << 20
"""Bytes of an object that a compaction aims at."""
TOLERANCE = 1.5
"""An object this many times smaller or larger than the target is still of the target size."""
UNIT_TARGETS = 16
"""Objects of the target size in a unit, about, where a group's sequences allow to divide it."""

_UNSURE = 0.75
"""Estimated sizes below this part of the target count as too small: the object may turn out smaller than estimated."""


@dataclass(frozen=True, slots=True)
class Source:
    """An object of the archive and its size in bytes."""

    name: ObjectName
    size: int


@dataclass(frozen=True, slots=True)
class Span:
    """Sequences from `first` up to, not including, `end`; `kept` is the index of the source that holds all of them."""

    first: int
    end: int
    kept: int | None = None


class Tally(Protocol):
    """What is known of the distinct rows of a unit with sequences from `first` up to, not including, `end`."""

    def rows(self, first: int, end: int) -> int:
        """Their number."""
        ...

    def size(self, first: int, end: int) -> float:
        """About how many bytes they take as one object."""
        ...


class Unit:
    """Objects of one group in the order of their sequences, as arrays; `ends` are exclusive.

    For a unit whose objects do not overlap it is a `Tally`, too.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        self.sources = sorted(sources, key=lambda source: (source.name.first_seq, source.name.path))
        names = [source.name for source in self.sources]
        self.firsts = np.array([name.first_seq for name in names], np.int64)
        self.ends = np.array([name.last_seq + 1 for name in names], np.int64)
        self.counts = np.array([name.rows for name in names], np.int64)
        self.sizes = np.array([source.size for source in self.sources], np.int64)
        self.first = int(self.firsts[0])
        self.end = int(self.ends.max())

    @property
    def overlaps(self) -> bool:
        """Whether any of its objects may share a message."""
        return bool((np.maximum.accumulate(self.ends)[:-1] > self.firsts[1:]).any())

    def within(self, first: int, end: int) -> Any:
        """Which objects lie in the span, as a mask."""
        return (self.firsts >= first) & (self.ends <= end)

    def touching(self, first: int, end: int) -> Any:
        """Which objects may have messages in the span, as a mask."""
        return (self.firsts < end) & (self.ends > first)

    def crossing(self, first: int, end: int) -> Any:
        """Which objects may have messages in the span and outside of it, as a mask."""
        return self.touching(first, end) & ~self.within(first, end)

    def may_hold(self, first: int, end: int, rows: int) -> bool:
        """Whether all objects with messages in the span could give way to one of it that has so many rows.

        Those that lie in it can: they hold less, or the same and then have its name.
        """
        return rows > int(self.counts[self.crossing(first, end)].max(initial=0))

    def rows(self, first: int, end: int) -> int:
        """Rows in the span, of objects that lie in it."""
        return int(self.counts[self.within(first, end)].sum())

    def size(self, first: int, end: int) -> float:
        """Bytes in the span, of objects that lie in it."""
        return float(self.sizes[self.within(first, end)].sum())


def units(objects: Iterable[Source], target: int) -> Iterator[Unit]:
    """The objects that a compaction to objects of `target` bytes has work with."""
    ordered = sorted(objects, key=lambda source: (repr(source.name.group), source.name.first_seq))
    for _, group in groupby(ordered, key=lambda source: source.name.group):
        for part in _parts(list(group), target):
            if len(part) == 1:
                continue
            unit = Unit(part)
            if unit.overlaps or any(span.kept is None for span in spans(unit, target, unit)):
                yield unit


def _parts(group: Sequence[Source], target: int) -> Iterator[list[Source]]:
    """A group, ordered by sequence, in parts that share no message and are not too large, where that is possible."""
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


def spans(unit: Unit, target: int, tally: Tally) -> list[Span]:
    """Divide a unit: what is kept as it is, and what is to be written anew, in order, without what holds no message."""
    large = _large(unit, target, tally)
    while True:
        found = _around(unit, large, tally)
        needed = _needed(unit, large, found, target, tally)
        if needed is None:
            return found
        large.remove(needed)


def _large(unit: Unit, target: int, tally: Tally) -> list[int]:
    """Objects of the target size that hold all there is in their range, and have more rows than any other there."""
    return [
        index
        for index in np.flatnonzero(unit.sizes >= target / TOLERANCE).tolist()
        if tally.rows(int(unit.firsts[index]), int(unit.ends[index])) == unit.counts[index]
        and (unit.counts[unit.touching(unit.firsts[index], unit.ends[index])] >= unit.counts[index]).sum() == 1
    ]


def _around(unit: Unit, large: Sequence[int], tally: Tally) -> list[Span]:
    """The large objects' spans and those between them."""
    edges = [unit.first, *(int(edge) for index in large for edge in (unit.firsts[index], unit.ends[index])), unit.end]
    found = []
    for number, (first, end) in enumerate(pairwise(edges)):
        rows = tally.rows(first, end) if first < end else 0
        if rows:
            held = np.flatnonzero(unit.within(first, end) & (unit.counts == rows))
            found.append(Span(first, end, large[number // 2] if number % 2 else next(iter(held.tolist()), None)))
    return found


def _needed(unit: Unit, large: Sequence[int], found: Sequence[Span], target: int, tally: Tally) -> int | None:
    """A large object that must be merged with what is beside it, because that would be too small without it."""
    for number, span in enumerate(found):
        beside = [each.kept for each in (*found[max(number - 1, 0) : number], *found[number + 1 : number + 2])]
        neighbours = [index for index in beside if index is not None and index in large]
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


def removable(unit: Unit, holders: Iterable[ObjectName]) -> list[int]:
    """Indexes of the sources that may be removed once `holders` together hold all messages of the unit.

    A holder is not among them: it has no more rows than itself.
    """
    names = list(holders)
    firsts = np.array([name.first_seq for name in names], np.int64)
    lasts = np.array([name.last_seq for name in names], np.int64)
    counts = np.array([name.rows for name in names], np.int64)
    found = []
    for index, source in enumerate(unit.sources):
        taking = counts[(firsts <= source.name.last_seq) & (lasts >= source.name.first_seq)]
        if len(taking) and (taking > source.name.rows).all():
            found.append(index)
    return found
