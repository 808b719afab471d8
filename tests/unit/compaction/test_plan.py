from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as some

from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.compaction.plan import TOLERANCE, UNIT_TARGETS, Source, Unit, classes, removable, spans, units

TARGET = 100


def source(first: int, last: int, size: int, rows: int | None = None, *, key: str = "a", digest: int = 0) -> Source:
    """An object that is named so; it has a row for every sequence unless it is said to have others."""
    where: dict[str, Any] = {"stream": "S", "key": key, "bucket": 0, "digest": f"{digest:016x}"}
    rows = last - first + 1 if rows is None else rows
    return Source(ObjectName(first_seq=first, last_seq=last, rows=rows, **where), size)


def row_of(*sizes: int) -> list[Source]:
    """Objects of these sizes one after the other, with as many rows as bytes."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [source(end - size, end - 1, size) for end, size in zip(ends, sizes, strict=True)]


def planned(sources: Sequence[Source]) -> list[list[int]]:
    """The sizes of what goes together into new objects, for objects that do not overlap."""
    new = [(unit, span) for unit in units(sources, TARGET) for span in spans(unit, TARGET, unit) if span.kept is None]
    return [unit.sizes[unit.within(span.first, span.end)].tolist() for unit, span in new]


PLANNED: list[tuple[list[int], list[list[int]]]] = [
    ([10, 20, 140, 30, 5, 5, 140], [[10, 20], [30, 5, 5]]),
    *(([110, 20, 90], [[20, 90]]), ([110, 20, 145], [[110, 20]]), ([140, 20, 140], [])),
    *(([100, 67, 149, 500], []), ([1], []), ([], [])),
]
"""Sizes side by side; a small object alone joins the smaller large one beside it where that fits."""


def test_small_neighbours_are_merged_and_large_objects_left_unless_they_overlap() -> None:
    for sizes, merged in PLANNED:
        assert planned(row_of(*sizes)) == merged
    assert planned([source(0, 5, 10), source(6, 9, 10, key="b")]) == []
    assert len(planned([*row_of(10, 10), *(source(n, n, 10, key="b") for n in (3, 4))])) == 2
    (unit,) = units([source(0, 50, 100), source(50, 99, 100)], TARGET)
    assert unit.overlaps


def test_a_large_group_is_divided_where_its_objects_do_not_overlap() -> None:
    sources = [source(number * 10, number * 10 + 9, 10) for number in range(UNIT_TARGETS * 10 * 3)]
    found = list(units(sources, TARGET))
    assert [len(unit.sources) for unit in found] == [UNIT_TARGETS * 10] * 3
    assert all(left.end <= right.first for left, right in pairwise(found))
    (unit,) = units([*sources, source(0, 10**6, 1)], TARGET)
    assert len(unit.sources) == len(sources) + 1


def test_what_has_no_more_rows_than_an_object_cannot_take_its_place_nor_can_it_itself() -> None:
    unit = Unit([source(0, 99, 100, 50)])
    holders = [source(0, 49, 50, 51).name, source(50, 99, 50, 50).name]
    assert removable(unit, holders) == []
    assert removable(unit, [holders[0], source(50, 99, 50, 51).name]) == [0]
    assert removable(unit, [holders[0]]) == [0]
    assert removable(unit, []) == []
    unit = Unit([source(0, 9, 10), source(0, 4, 5)])
    assert [unit.sources[index].name.last_seq for index in removable(unit, [source(0, 9, 10).name])] == [4]


@dataclass(frozen=True)
class Sets:
    """What lies where, counted from the messages themselves; `size` is a byte for each."""

    every: frozenset[int]

    def rows(self, first: int, end: int) -> int:
        return sum(first <= seq < end for seq in self.every)

    def size(self, first: int, end: int) -> float:
        return self.rows(first, end)


sets_of_messages = some.lists(some.frozensets(some.integers(0, 40), min_size=1), min_size=1, max_size=12, unique=True)


@given(contents=sets_of_messages, target=some.integers(1, 60))
def test_spans_hold_everything_once_and_what_is_not_kept_can_go(contents: list[frozenset[int]], target: int) -> None:
    holding = {
        source(min(each), max(each), len(each), len(each), digest=number): each for number, each in enumerate(contents)
    }
    unit = Unit(holding)
    every = frozenset().union(*contents)
    found = spans(unit, target, Sets(every))
    assert all(left.end <= right.first for left, right in pairwise(found))
    assert sorted(seq for span in found for seq in every if span.first <= seq < span.end) == sorted(every)
    holders = []
    for span in found:
        within = {seq for seq in every if span.first <= seq < span.end}
        if span.kept is None:
            holders.append(source(min(within), max(within), 0, len(within), digest=99).name)
        else:
            kept = unit.sources[span.kept]
            assert holding[kept] == within
            holders.append(kept.name)
        assert unit.may_hold(span.first, span.end, len(within))
    staying = {unit.sources[span.kept].name for span in found if span.kept is not None}
    gone = {unit.sources[index].name for index in removable(unit, holders)}
    assert gone == {each.name for each in unit.sources} - staying


@given(sizes=some.lists(some.integers(1, 250), min_size=1, max_size=30))
def test_merging_as_planned_ends_and_leaves_no_two_small_neighbours(sizes: list[int]) -> None:
    rounds = 0
    while merged := planned(row_of(*sizes)):
        rounds += 1
        assert rounds < 3
        for group in merged:
            at = next(n for n in range(len(sizes)) if sizes[n : n + len(group)] == group)
            count = max(1, round(sum(group) / TARGET))
            assert count <= len(group)
            sizes[at : at + len(group)] = [sum(group) // count] * count
    small = [size < TARGET / TOLERANCE for size in sizes]
    assert not any(left and right for left, right in pairwise(small))


INT, BIG, TEXT, NOTHING = pa.int32(), pa.int64(), pa.string(), pa.null()


COLUMNS: list[tuple[dict[str, pa.DataType], dict[str, pa.DataType], dict[str, pa.DataType] | None]] = [
    ({"a": INT}, {"a": INT}, {"a": INT}),
    ({"a": INT}, {"b": TEXT}, {"a": INT, "b": TEXT}),
    ({"a": NOTHING}, {"a": TEXT}, {"a": TEXT}),
    ({"a": INT}, {"a": BIG}, {"a": BIG}),
    ({"a": BIG}, {"a": pa.float64()}, None),
    ({"a": pa.float32()}, {"a": pa.float64()}, None),
    ({"a": pa.uint32()}, {"a": BIG}, None),
    ({"a": BIG}, {"a": TEXT}, None),
    ({"a": BIG}, {"A": BIG}, None),
    ({"a": pa.struct({"x": BIG})}, {"a": pa.struct({"y": TEXT})}, {"a": pa.struct({"x": BIG, "y": TEXT})}),
    ({"a": pa.struct({"x": INT})}, {"a": pa.struct({"x": BIG})}, None),
    ({"a": pa.struct({"x": INT})}, {"a": pa.struct({"X": INT})}, None),
    ({"a": pa.struct({"x": INT})}, {"a": TEXT}, None),
    ({"a": pa.list_(NOTHING)}, {"a": pa.list_(TEXT)}, {"a": pa.list_(TEXT)}),
    ({"a": pa.list_(INT)}, {"a": pa.list_(BIG)}, None),
    ({"a": pa.map_(TEXT, INT)}, {"a": pa.map_(TEXT, BIG)}, None),
    ({"a": pa.timestamp("ms", "UTC")}, {"a": pa.timestamp("us", "UTC")}, None),
]


def parts(kind: pa.DataType) -> Any:
    return {field.name: field.type for field in kind} if pa.types.is_struct(kind) else kind


def test_columns_go_together_only_where_no_reader_sees_a_difference() -> None:
    for first, second, together in COLUMNS:
        for left, right in ((first, second), (second, first)):
            found = classes([pa.schema(left), pa.schema(right)])
            if together is None:
                assert found == [(pa.schema(left), [0]), (pa.schema(right), [1])]
            else:
                ((schema, members),) = found
                assert {field.name: parts(field.type) for field in schema} == {n: parts(together[n]) for n in together}
                assert members == [0, 1]
