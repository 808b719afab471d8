"""Sets of sequences against plain Python sets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetcapture_py.verify import ranges as verify_ranges
from jetcapture_py.verify.ranges import Sequences

CHUNK = 1 << 10
TOP = 3 * CHUNK + 100
EDGES = [0, 1, 7, 8, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 3 * CHUNK - 1, 3 * CHUNK]
near = st.one_of(st.sampled_from(EDGES), st.integers(0, TOP), st.integers(CHUNK - 20, CHUNK + 20))
lengths = st.one_of(st.integers(0, 40), st.integers(CHUNK // 2, 2 * CHUNK))
spans = st.tuples(near, lengths).map(lambda pair: (pair[0], pair[0] + pair[1]))
additions = st.lists(st.one_of(spans, st.lists(near, min_size=1, max_size=30)), max_size=12)


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    """Chunks of a size at which a test meets many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_ranges, "CHUNK", CHUNK)
        patch.setattr(verify_ranges, "_BITS", CHUNK.bit_length() - 1)
        patch.setattr(verify_ranges, "FEW", CHUNK // 64)
        yield


def filled(parts: list[tuple[int, int] | list[int]]) -> tuple[Sequences, set[int]]:
    found, reference = Sequences(), set[int]()
    for part in parts:
        if isinstance(part, tuple):
            found.add_range(*part)
            reference |= set(range(part[0], part[1] + 1))
        else:
            found.add(np.array(part, np.int64))
            reference |= set(part)
    return found, reference


def ranges(of: Sequences, first: int, last: int) -> list[tuple[int, int]]:
    return [pair for starts, ends in of.gaps(first, last) for pair in zip(starts.tolist(), ends.tolist(), strict=True)]


def check(found: Sequences, reference: set[int], first: int, last: int) -> None:
    assert len(found) == len(reference)
    assert (found.first, found.last) == (min(reference, default=None), max(reference, default=None))
    inside = {seq for seq in reference if first <= seq <= last}
    assert found.count(first, last) == len(inside)
    gaps = ranges(found, first, last)
    assert all(first <= start <= end <= last for start, end in gaps)
    assert all(before[1] + 1 < after[0] for before, after in pairwise(gaps)), "gaps that touch are one"
    assert sum(end - start + 1 for start, end in gaps) == max(0, last - first + 1) - len(inside)
    assert not any(start <= seq <= end for seq in inside for start, end in gaps)
    asked = np.array(sorted({*inside, first, last, *(start for start, _ in gaps)}), np.int64)
    assert found.contains(asked).tolist() == [int(seq) in reference for seq in asked]


@given(additions, additions, near, near)
def test_what_was_there_before_is_told_and_sets_can_be_joined(
    parts: list[tuple[int, int] | list[int]], others: list[tuple[int, int] | list[int]], one: int, other: int
) -> None:
    found, reference = Sequences(), set[int]()
    for part in parts:
        again = found.add_range(*part) if isinstance(part, tuple) else found.add(np.array(part, np.int64))
        new = set(range(part[0], part[1] + 1)) if isinstance(part, tuple) else set(part)
        assert again.tolist() == sorted(reference & new)
        assert again.dtype == np.int64
        reference |= new
    first, last = min(one, other), max(one, other)
    inside = sorted(seq for seq in reference if first <= seq <= last)
    assert found.within(first, last).tolist() == inside
    assert found.near(first, last) >= bool(inside)
    assert not found.near(max(reference, default=0) + 8, 10 * TOP)
    windows = list(found.windows())
    assert sorted(seq for start, end in windows for seq in found.within(start, end)) == sorted(reference)
    more, extra = filled(others)
    found.update(more)
    check(found, reference | extra, first, last)


@given(additions)
def test_many_ranges_are_added_at_once(parts: list[tuple[int, int] | list[int]]) -> None:
    _, reference = filled(parts)
    firsts = np.array(sorted(seq for seq in reference if seq - 1 not in reference), np.int64)
    lasts = np.array(sorted(seq for seq in reference if seq + 1 not in reference), np.int64)
    found = Sequences()
    found.add_ranges(firsts, lasts)
    check(found, reference, 0, TOP)


@settings(deadline=None)
@given(additions, st.integers(0, 50))
def test_stretches_hold_all_gaps_and_nothing_far_from_one(parts: list[tuple[int, int] | list[int]], close: int) -> None:
    found, _ = filled(parts)
    gaps, stretches = ranges(found, 1, TOP), list(found.stretches(1, TOP, close))
    assert all(any(start <= gap[0] and gap[1] <= end for start, end in stretches) for gap in gaps)
    assert {start for start, _ in stretches} <= {start for start, _ in gaps}
    assert {end for _, end in stretches} <= {end for _, end in gaps}
    assert all(after[0] - before[1] > close for before, after in pairwise(stretches))
    for before, after in pairwise(gaps):
        together = any(start <= before[0] and after[1] <= end for start, end in stretches)
        assert together == (after[0] - before[1] <= close)
