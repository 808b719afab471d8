"""The watermark promises no message that is not stored, and merging forgets nothing that was true."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import hypothesis.strategies as st
from hypothesis import given
from msgspec.structs import replace

from jetcapture_py.archive.incarnations import Origin
from jetcapture_py.archive.watermark import MARGIN, NEVER, ConsumerWatermark
from jetcapture_py.capture.watermark import Observer, update_watermark
from jetcapture_py.jetstream.consumer import consumer_state

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BASE = datetime(2026, 1, 1, tzinfo=UTC)


def at(micros: int) -> datetime:
    return BASE + timedelta(microseconds=micros)


marks = st.builds(
    lambda created, seq, time: ConsumerWatermark(stream="S", consumer="c", created=created, seq=seq, time=at(time)),
    st.sampled_from(["", "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"]),
    st.integers(0, 5),
    st.integers(0, 5),
)
lives = marks.map(lambda mark: replace(mark, created="2026-01-01T00:00:00Z"))


def merged(marks: list[ConsumerWatermark]) -> ConsumerWatermark | None:
    """What is in the file after these were written one after another."""
    data: bytes | None = None
    state = consumer_state({"config": {}, "ts": at(100).isoformat()})
    for mark in marks:
        data = update_watermark(data, mark, [state], timedelta()).data or data
    return None if data is None else ConsumerWatermark.decode(data, "S", "")


@given(st.lists(lives, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_within_one_incarnation_the_order_of_writing_is_the_same(found: list[ConsumerWatermark], chance: Any) -> None:
    shuffled = found.copy()
    chance.shuffle(shuffled)
    assert merged(found) == merged(shuffled) == merged([*shuffled, *found])


@given(st.lists(st.tuples(marks, st.integers(0, 10**8)), min_size=1, max_size=6))
def test_no_time_lies_further_in_the_future_than_clocks_differ(written: list[tuple[ConsumerWatermark, int]]) -> None:
    """Whatever the clocks were when the others were written."""
    data: bytes | None = None
    for mark, now in written:
        asked = at(now)
        state = consumer_state({"config": {}, "ts": asked.isoformat()})
        result = update_watermark(data, replace(mark, time=min(mark.time, asked)), [state], timedelta(minutes=1))
        data = result.data or data
        assert data is not None
        assert result.content == ConsumerWatermark.decode(data, "S", "")
        assert result.content.time <= asked + MARGIN


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12), st.integers(0, 3)), max_size=12),
    st.integers(0, 5),
)
def test_no_time_is_promised_above_the_floor(gaps: list[int], history: list[tuple[int, int, int]], ahead: int) -> None:
    """`gaps` are microseconds between a stream's messages; `history` says which were seen, and where the floor was."""
    times = [sum(gaps[: n + 1]) for n in range(len(gaps))]  # of sequence 1, 2, …
    observer = Observer("S", "c")
    floor = 0
    for seen, advance, more in history:
        seq = (seen - 1) % len(times) + 1
        observer.saw(seq, (at(times[seq - 1]) - EPOCH) // timedelta(microseconds=1))
        floor = max(floor, advance % (len(times) + 1))
        pending = max(0, len(times) - floor - more)
        info = {
            "config": {},
            "num_pending": pending,
            "num_ack_pending": len(times) - floor - pending,
            "ack_floor": {"stream_seq": floor},
            "ts": (at(times[-1] + 1) + timedelta(seconds=ahead)).isoformat(),
        }
        found = observer.watermark(consumer_state(info), Origin("2026-05-01T00:00:00Z"))
        assert found is not None
        assert found.seq == floor
        if found.time == NEVER:
            continue
        if floor < len(times):
            assert found.time < at(times[floor]), "the first message above the floor is not stored"
        else:
            before = at(times[-1] + 1) + timedelta(seconds=ahead) - MARGIN
            assert before <= found.time <= max(before, at(times[-1])), "a message may come with any later timestamp"
