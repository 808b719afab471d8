"""Which stream is the one that an archive or a checkpoint knows, though servers move its creation time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from jetcapture_py.archive.incarnations import (
    Ends,
    Incarnation,
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


def test_a_stream_with_another_creation_time_is_known_by_a_message() -> None:
    emptied = replace(STREAM, first=51, last=50, last_time=KNOWN)
    for ends, at, same in (
        (STREAM, KNOWN, True),
        (STREAM, KNOWN + 1, False),
        # the message is gone, or may not be read: the order of times decides
        (STREAM, None, True),
        (replace(STREAM, first_time=KNOWN + 1), None, False),
        (replace(STREAM, last_time=KNOWN - 1), None, False),
        # the stream ends before the message, or with it
        (replace(STREAM, last=49), KNOWN, False),
        (replace(STREAM, last=50, last_time=KNOWN), None, True),
        (replace(STREAM, last=50), None, False),
        (emptied, None, True),
        # it begins after the message
        (replace(STREAM, first=51, first_time=KNOWN + 1), None, True),
        (replace(STREAM, first=51, first_time=KNOWN - 1), None, False),
        (replace(STREAM, first=51, first_time=201 * HOUR), None, False),
        (replace(STREAM, first=91), None, False),
    ):
        assert is_same(ends, at) is same, ends
        assert is_same(replace(ends, created=ORIGIN.created), at), "with the same creation time, it may lack messages"
        assert is_same(ends, at, origin=Origin("x", Sample(50, KNOWN, MOVED))), "it has been recognized before"


def test_without_a_common_message_the_consumers_progress_decides_or_the_creation_time() -> None:
    for ends, origin in [
        (replace(STREAM, first=51, first_time=201 * HOUR), ORIGIN),
        (STREAM, replace(ORIGIN, sample=None)),
    ]:
        assert is_same(ends, origin=origin, progressed=True)
        assert not is_same(ends, origin=origin)
    assert not is_same(STREAM, KNOWN + 1, progressed=True), "a message says more"


def test_a_consumer_that_has_come_less_far_is_a_new_one() -> None:
    assert [now for now in [(9, 5), (12, 5), (12, 8)] if not Progress(*now).continues(Progress(9, 5))] == []
    assert [now for now in [(8, 5), (12, 4), (0, 0)] if Progress(*now).continues(Progress(9, 5))] == []


def test_an_incarnation_continues_those_whose_messages_end_before_it() -> None:
    for bounds, anew, first in (
        *(({1: (1, 5), 2: (6, 9)}, (), 1), ({1: (1, 5), 2: (5, 9)}, (), 2), ({1: (1, 5), 2: (6, 9)}, (2,), 2)),
        *(({1: (1, 9), 2: (1, 3), 3: (4, 6)}, (), 2), ({1: (1, 3), 3: (4, 6)}, (), 1), ({}, (), 1)),
        *(({1: (1, 3), 3: (3, 6)}, (), 2), ({1: (1, 3), 3: (4, 5)}, (2,), 2)),
    ):
        assert continued([1, 2, 3], bounds, anew)[0] == first, bounds


def test_messages_belong_to_the_last_incarnation_before_them_and_the_oldest_has_all_earlier_ones() -> None:
    seqs, times = np.array([1, 2, 1, 5, 2]), np.array([7, 10, 20, 29, 40])
    assert bounds_by_incarnation([10, 20, 30], seqs, times) == {10: (1, 2), 20: (1, 5), 30: (2, 2)}


def test_an_object_with_messages_of_others_is_divided_by_time() -> None:
    first, second, third = (f"2026-05-01T1{hour}:00:00Z" for hour in range(3))
    assert span([first, second], [first, second]) is None
    assert span([first, second, third], [second]) == (moment(second), moment(third))
    assert span([first, second, third], [first]) == (-1 << 62, moment(second))
    assert span([first, second], [second]) == (moment(second), 1 << 62)


RESTORED: list[tuple[dict[str, int], list[tuple[str, int]]]] = [
    ({}, [("30", 0)]),
    ({"30": 15}, [("30", 15), ("20", 0)]),
    ({"30": 15, "20": 8}, [("30", 15), ("20", 8), ("10", 0)]),
    ({"30": 15, "20": 25}, [("30", 15), ("20", 15), ("10", 0)]),
    ({"30": 15, "20": 8, "10": 5}, [("30", 15), ("20", 8), ("10", 5)]),
    ({"20": 8}, [("30", 0)]),
]


def test_a_restored_stream_has_of_earlier_incarnations_what_each_had_when_it_was_restored() -> None:
    seqs, times = (grid.ravel() for grid in np.meshgrid(np.arange(1, 40), [5, 15, 25, 35]))
    for restored, expected in RESTORED:
        chosen = lineage(["30", "20", "10"], lambda created, last=restored: last.get(created, 0))
        assert [(incarnation.created, incarnation.restored) for incarnation in chosen] == expected
        assert [one.last for one in chosen[1:]] == [later.restored for later in chosen[:-1]]
        last_of = {int(incarnation.created): incarnation.last for incarnation in chosen}
        last_of[0] = chosen[-1].restored if len(chosen) == 3 else 0  # of one before those that are known
        messages = zip(seqs.tolist(), times.tolist(), strict=True)
        belong = [seq <= last_of.get(time // 10 * 10, 0) for seq, time in messages]
        lives = [(int(incarnation.created), incarnation.restored) for incarnation in chosen]
        assert are_of(lives, seqs, times).tolist() == belong


def test_origins_are_one_stream_if_they_have_a_message_or_a_creation_time_in_common() -> None:
    moved, later = replace(ORIGIN, created=MOVED), Sample(51, KNOWN + 1)
    assert Origin("x").continues(Origin("x", Sample(1, 1)))
    assert moved.continues(ORIGIN)
    assert not Origin(MOVED, Sample(50, KNOWN + 1)).continues(ORIGIN), "another message has that sequence"
    assert not Origin(MOVED, later).continues(ORIGIN), "nothing in common"
    assert Origin(MOVED, replace(later, created=ORIGIN.created)).continues(ORIGIN)
    assert not Origin("", later).continues(Origin("x", ORIGIN.sample)), "an unknown creation time is none in common"


def test_an_objects_messages_are_of_an_incarnation_all_in_part_or_not_at_all() -> None:
    created = format_time(moment_of(10 * HOUR))
    now = Incarnation.of(created, mirror=False)
    for low, high, holds in (
        (10 * HOUR, 11 * HOUR, True),
        (8 * HOUR, 9 * HOUR, False),
        (9 * HOUR, 10 * HOUR, None),
        (None, 11 * HOUR, None),
        (11 * HOUR, None, None),
    ):
        assert now.holds("", low, high) is holds
        assert now.holds(created, low, high) is True, "the footer says it"
    ended = replace(now, until=20 * HOUR)
    held = [ended.holds("", low * HOUR, high * HOUR) for low, high in ((11, 19), (19, 20), (20, 21))]
    assert held == [True, None, False]
    restored = replace(now, restored=5, oldest=7 * HOUR)
    assert restored.holds("", 8 * HOUR, 9 * HOUR) is None
    assert restored.holds("", 5 * HOUR, 6 * HOUR) is False
    seqs, times = np.array([1, 1, 5, 6, 1]), np.array([6, 8, 9, 9, 10]) * HOUR
    assert restored.includes(seqs, times).tolist() == [False, True, True, False, True]
    assert now.includes(seqs, times).tolist() == [False, False, False, False, True]
    assert ended.includes(seqs, times + 10 * HOUR).tolist() == [True, True, True, True, False]
    mirror = replace(now, mirror=True)
    assert mirror.includes(seqs, times).all()
    assert [mirror.holds(text, 0, 1) for text in ("", f"x,{created}", "x", "x,y")] == [True, True, False, False]
    assert now.holds(f"x,{created}", 9 * HOUR, 10 * HOUR) is None, "of a merged object, its rows decide"
