"""Which stream is the one that an archive or a checkpoint knows, though servers move its creation time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from jetcapture_py.archive.incarnations import (
    Ends,
    Origin,
    Progress,
    Sample,
    are_of,
    bounds_by_incarnation,
    continued,
    is_same_stream,
    lineage,
    moment,
    span,
)
from jetcapture_py.config.units import format_time, moment_of

HOUR = 3_600_000_000
BEGAN, KNOWN = 100 * HOUR, 150 * HOUR
"""When the stream's messages begin, and when the sample was stored."""
MOVED = format_time(moment_of(200 * HOUR))
"""After a restart."""
ORIGIN = Origin(format_time(moment_of(99 * HOUR)), Sample(50, KNOWN))
STREAM = Ends(created=MOVED, first=1, first_time=BEGAN, last=90, last_time=190 * HOUR)


def is_same(ends: Ends, at: int | None = None, *, origin: Origin = ORIGIN, progressed: bool = False) -> bool:
    """`at` is the time of the message at the sample's sequence; None without it, or without permission."""

    async def time_of(seq: int) -> int | None:
        assert origin.sample is not None
        assert seq == origin.sample.seq
        return at

    return asyncio.run(is_same_stream(origin, ends, time_of, progressed=progressed))


@pytest.mark.parametrize(
    ("ends", "at", "same"),
    [
        pytest.param(STREAM, KNOWN, True, id="the message is there"),
        pytest.param(STREAM, KNOWN + 1, False, id="another message is there"),
        pytest.param(STREAM, None, True, id="it is gone, or may not be read, and the order of times fits"),
        pytest.param(replace(STREAM, first_time=KNOWN + 1), None, False, id="all messages are newer"),
        pytest.param(replace(STREAM, last_time=KNOWN - 1), None, False, id="all messages are older"),
        pytest.param(replace(STREAM, last=49), KNOWN, False, id="it ends before"),
        pytest.param(replace(STREAM, last=50, last_time=KNOWN), None, True, id="it ends there"),
        pytest.param(replace(STREAM, first=51, last=50, last_time=KNOWN), None, True, id="empty, and it ended there"),
        pytest.param(replace(STREAM, last=50), None, False, id="it ends there with another message"),
        pytest.param(replace(STREAM, first=51, first_time=KNOWN + 1), None, True, id="its first is older than created"),
        pytest.param(replace(STREAM, first=51, first_time=KNOWN - 1), None, False, id="its first is older than ours"),
        pytest.param(replace(STREAM, first=51, first_time=201 * HOUR), None, False, id="nothing in common"),
        pytest.param(replace(STREAM, first=91), None, False, id="empty, nothing in common"),
    ],
)
def test_a_stream_with_another_creation_time_is_known_by_a_message(ends: Ends, at: int | None, same: bool) -> None:
    assert is_same(ends, at) is same
    assert is_same(replace(ends, created=ORIGIN.created), at), "with the same creation time, it may have lost messages"
    assert is_same(ends, at, origin=Origin("x", Sample(50, KNOWN, MOVED))), "it has been recognized before"


def test_without_a_common_message_the_consumers_progress_decides_or_the_creation_time() -> None:
    for ends, origin in [
        (replace(STREAM, first=51, first_time=201 * HOUR), ORIGIN),
        (STREAM, replace(ORIGIN, sample=None)),
    ]:
        assert is_same(ends, origin=origin, progressed=True)
        assert not is_same(ends, origin=origin)
    assert not is_same(STREAM, KNOWN + 1, progressed=True), "a message says more"


@pytest.mark.parametrize(
    ("now", "continues"),
    [((9, 5), True), ((12, 5), True), ((12, 8), True), ((8, 5), False), ((12, 4), False), ((0, 0), False)],
)
def test_a_consumer_that_has_come_less_far_is_a_new_one(now: tuple[int, int], continues: bool) -> None:
    assert Progress(*now).continues(Progress(9, 5)) is continues


@pytest.mark.parametrize(
    ("bounds", "anew", "first"),
    [
        ({1: (1, 5), 2: (6, 9)}, (), 1),
        ({1: (1, 5), 2: (5, 9)}, (), 2),
        ({1: (1, 5), 2: (6, 9)}, (2,), 2),
        ({1: (1, 9), 2: (1, 3), 3: (4, 6)}, (), 2),
        ({1: (1, 3), 3: (4, 6)}, (), 1),
        ({1: (1, 3), 3: (3, 6)}, (), 2),
        ({1: (1, 3)}, (), 1),
        ({1: (1, 3), 3: (4, 5)}, (2,), 2),
        ({}, (), 1),
    ],
)
def test_an_incarnation_continues_those_whose_messages_end_before_it(
    bounds: dict[int, tuple[int, int]], anew: tuple[int, ...], first: int
) -> None:
    assert continued([1, 2, 3], bounds, anew)[0] == first


def test_messages_belong_to_the_last_incarnation_before_them_and_the_oldest_has_all_earlier_ones() -> None:
    seqs, times = np.array([1, 2, 1, 5, 2]), np.array([7, 10, 20, 29, 40])
    assert bounds_by_incarnation([10, 20, 30], seqs, times) == {10: (1, 2), 20: (1, 5), 30: (2, 2)}


def test_an_object_with_messages_of_others_is_divided_by_time() -> None:
    first, second, third = (f"2026-05-01T1{hour}:00:00Z" for hour in range(3))
    assert span([first, second], [first, second]) is None
    assert span([first, second, third], [second]) == (moment(second), moment(third))
    assert span([first, second], [first]) == (-1 << 62, moment(second))
    assert span([first, second], [second]) == (moment(second), 1 << 62)


@pytest.mark.parametrize(
    ("restored", "lives"),
    [
        ({}, [("30", 0)]),
        ({"30": 15}, [("30", 15), ("20", 0)]),
        ({"30": 15, "20": 8}, [("30", 15), ("20", 8), ("10", 0)]),
        ({"30": 15, "20": 25}, [("30", 15), ("20", 15), ("10", 0)]),
        ({"30": 15, "20": 8, "10": 5}, [("30", 15), ("20", 8), ("10", 5)]),
        ({"20": 8}, [("30", 0)]),
    ],
)
def test_a_restored_stream_has_of_earlier_incarnations_what_each_had_when_it_was_restored(
    restored: dict[str, int], lives: list[tuple[str, int]]
) -> None:
    chosen = lineage(["30", "20", "10"], lambda created: restored.get(created, 0))
    assert [(life.created, life.restored) for life in chosen] == lives
    assert [life.last for life in chosen[1:]] == [life.restored for life in chosen[:-1]]
    seqs, times = (grid.ravel() for grid in np.meshgrid(np.arange(1, 40), [5, 15, 25, 35]))
    last_of = {int(life.created): life.last for life in chosen}
    last_of[0] = chosen[-1].restored if len(chosen) == 3 else 0  # of one from before those that are known
    expected = [seq <= last_of.get(time // 10 * 10, 0) for seq, time in zip(seqs.tolist(), times.tolist(), strict=True)]
    assert are_of([(int(life.created), life.restored) for life in chosen], seqs, times).tolist() == expected
