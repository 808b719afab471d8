"""Holes and gaps against plain Python."""

from __future__ import annotations

from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetcapture_py.archive.messages import MessageSet
from jetcapture_py.archive.removed import Erased, Tombstone
from jetcapture_py.config.units import moment_of
from jetcapture_py.verify import holes
from jetcapture_py.verify.holes import HoleFinder, find_gaps
from jetcapture_py.verify.ranges import Sequences

Ranges = list[tuple[int, int, int]]  # first, last, messages


def archive(seqs: set[int]) -> Sequences:
    found = Sequences()
    found.add(np.array(sorted(seqs), np.int64))
    return found


def looked(
    stored: set[int], batches: list[tuple[bool, list[int]]], floor: int, top: int, *, seq: int = 0, time: int = 0
) -> HoleFinder:
    """What is found when these batches of the stream's messages come, some as the first of a range."""
    missing = HoleFinder(archive(stored), Erased(), floor, seq=seq, time=time)
    for begins, batch in batches:
        seqs = np.array(batch, np.int64)
        if begins:
            missing.close()
        missing.compare(seqs, seqs * 1_000_000, 1, top)
    missing.close()
    return missing


def expected(stored: set[int], batches: list[tuple[bool, list[int]]], floor: int) -> Ranges:
    part, found = 0, []
    for begins, batch in batches:
        part += begins
        found += [(part, seq in stored, seq) for seq in batch if seq <= floor]
    runs: Ranges = []
    for (_, there), run in groupby(found, key=lambda each: each[:2]):
        seqs = [seq for _, _, seq in run]
        if not there:
            runs.append((seqs[0], seqs[-1], len(seqs)))
    return runs


@settings(deadline=None)
@given(st.sets(st.integers(1, 60)), st.sets(st.integers(1, 60)), st.data())
def test_holes_are_runs_of_missing_messages(stored: set[int], stream: set[int], data: st.DataObject) -> None:
    messages = sorted(stream)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(messages)), max_size=5)) | {0, len(messages)})
    batches = [(data.draw(st.booleans()), messages[start:end]) for start, end in pairwise(cuts) if end > start]
    floor, top = sorted((data.draw(st.integers(0, 60)), data.draw(st.integers(0, 60))))
    promised, time = data.draw(st.integers(0, 70)), data.draw(st.integers(0, 70_000))
    missing = looked(stored, batches, floor, top, seq=promised, time=time)
    runs = expected(stored, batches, floor)
    assert [(each.first, each.last, each.messages) for each in missing.listed] == runs
    assert (missing.count, missing.ranges) == (sum(run[2] for run in runs), len(runs))
    beyond = [seq for seq in messages if seq not in stored and floor < seq <= top]
    assert missing.promised == len([seq for seq in beyond if seq <= promised])
    overdue = [seq for seq in beyond if seq > promised and seq * 1000 <= time]
    assert missing.overdue.tolist() == overdue
    for each in missing.listed:
        assert (each.first_time, each.last_time) == (moment_of(each.first * 1000), moment_of(each.last * 1000))


@settings(deadline=None)
@given(st.sets(st.integers(1, 60)), st.integers(0, 60), st.integers(0, 60))
def test_gaps_are_runs_of_sequences_that_are_not_there(stored: set[int], first: int, last: int) -> None:
    gaps = list(find_gaps(archive(stored), first, last))
    runs = expected(stored, [(True, list(range(first, last + 1)))], 60)
    assert len(gaps) == (1 if runs else 0)
    for gap in gaps:
        assert [(each.first, each.last) for each in gap.ranges] == [run[:2] for run in runs]
        assert (gap.range_count, gap.count) == (len(runs), sum(run[2] for run in runs))


def test_what_is_not_listed_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holes, "MAX_LISTED", 3)
    odd = set(range(1, 100, 2))
    missing = looked(odd, [(True, list(range(1, 100)))], 100, 100)
    assert (len(missing.listed), missing.ranges, missing.count) == (3, 49, 49)
    (hole,) = missing.findings(stored=True)
    (gap,) = find_gaps(archive(odd), 1, 99)
    for finding in (hole, gap):
        assert (len(finding.ranges), finding.range_count, finding.count) == (3, 49, 49)


def test_a_later_message_with_the_sequence_of_an_erased_one_is_missing() -> None:
    """A rewound stream gives it away again; the erased message itself may still be in the stream."""
    seqs, micros = np.arange(1, 5), np.array([10, 20, 30, 40])
    erased = MessageSet(seqs, micros)
    stone = Tombstone(stream="ORDERS", time=moment_of(0), by="ops@host", reason="asked for", messages=erased)
    finder = HoleFinder(archive(set()), Erased({stone.path: stone}), 4)
    finder.compare(seqs, (micros + np.array([0, 7, 7, 0])) * 1000, 1, 4)
    finder.close()
    assert [(hole.first, hole.last, hole.messages) for hole in finder.listed] == [(2, 3, 2)]
