"""The watermark says no more than the consumer's state allows, and never goes back."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsspec
import pytest

from jetcapture_py import watermark
from jetcapture_py.admin import ConsumerState, consumer_state
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.watermark import MARGIN, Observer, Watermark, decode

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def state(floor: int, *, pending: int = 0, unacked: int = 0, max_deliver: int = -1) -> ConsumerState:
    return consumer_state(
        {
            "config": {"ack_policy": "explicit", "max_deliver": max_deliver},
            "num_pending": pending,
            "num_ack_pending": unacked,
            "ack_floor": {"stream_seq": floor},
            "ts": "2026-05-01T12:00:00.123456789Z",
        }
    )


def mark(seq: int = 5, time: datetime = NOON, created: str = "2026-01-01T00:00:00Z") -> Watermark:
    return Watermark(stream="S", consumer="C", created=created, seq=seq, time=time)


def micros(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000)


def test_the_time_ends_before_the_last_message_known_at_the_floor() -> None:
    observer = Observer("S", "C")
    for seq in (10, 20, 30):
        observer.saw(seq, micros(NOON) + seq)
    found = observer.watermark(state(25, unacked=7), "created")
    assert found is not None
    assert (found.seq, found.time) == (25, NOON + 20 * MICROSECOND - MICROSECOND)


def test_a_message_with_the_timestamp_of_one_at_the_floor_is_not_promised() -> None:
    observer = Observer("S", "C")
    observer.saw(10, micros(NOON))
    observer.saw(11, micros(NOON))
    found = observer.watermark(state(10, unacked=1), "created")
    assert found is not None
    assert found.time < NOON


def test_a_redelivered_message_does_not_take_the_place_of_a_later_one() -> None:
    observer = Observer("S", "C")
    observer.saw(20, micros(NOON) + 20)
    observer.saw(3, micros(NOON) + 3)
    found = observer.watermark(state(19, unacked=1), "created")
    assert found is None
    found = observer.watermark(state(20, unacked=1), "created")
    assert found is not None
    assert found.time == NOON + 19 * MICROSECOND


def test_nothing_is_said_before_anything_is_known() -> None:
    assert Observer("S", "C").watermark(state(0, pending=3), "created") is None


def test_with_nothing_left_it_follows_the_servers_clock() -> None:
    found = Observer("S", "C").watermark(state(9), "created")
    assert found is not None
    assert (found.seq, found.time) == (9, NOON + timedelta(microseconds=123456) - MARGIN)


def test_a_consumer_that_gives_messages_up_has_none() -> None:
    assert Observer("S", "C").watermark(state(9, max_deliver=3), "created") is None


def test_the_lag_is_the_age_of_the_oldest_message_beyond_the_floor() -> None:
    observer = Observer("S", "C")
    assert observer.lag(state(0, pending=3)) == timedelta()
    for seq in (10, 20, 30):
        observer.saw(seq, micros(NOON) - (100 - seq) * 1_000_000)
    late = timedelta(microseconds=123456)  # of the state's own time
    assert observer.lag(state(10, unacked=2)) == timedelta(seconds=80) + late
    assert observer.lag(state(5, unacked=2)) == timedelta(seconds=90) + late
    assert observer.lag(state(30, pending=2)) == timedelta(seconds=70) + late
    assert observer.lag(state(30)) == timedelta()


def test_many_messages_leave_enough_to_know_the_time_roughly() -> None:
    observer = Observer("S", "C")
    for seq in range(1, 100_001):
        observer.saw(seq, micros(NOON) + seq)
    found = observer.watermark(state(99_990, unacked=10), "created")
    assert found is not None
    assert found.time == NOON + 99_989 * MICROSECOND
    assert len(observer._samples) <= 5000


def test_it_only_moves_forward() -> None:
    assert mark(5).after(mark(5)) is None
    assert mark(4).after(mark(5)) is None
    assert mark(6, NOON - timedelta(hours=1)).after(mark(5)) == mark(6)
    assert mark(4, NOON + timedelta(hours=1)).after(mark(5)) == mark(5, NOON + timedelta(hours=1))


def test_the_object_stored_last_is_the_last_one_of_all_replicas() -> None:
    early, late = ("a.parquet", NOON), ("b.parquet", NOON + timedelta(seconds=1))
    assert replace(mark(6), last_object=early).after(replace(mark(5), last_object=late)) == replace(
        mark(6), last_object=late
    )
    assert replace(mark(5), last_object=late).after(replace(mark(5), last_object=early)) == replace(
        mark(5), last_object=late
    )
    assert mark(5).after(replace(mark(5), last_object=late)) is None


@pytest.mark.parametrize("created", ["2026-03-01T00:00:00Z", ""])
def test_a_recreated_stream_starts_its_sequence_again(created: str) -> None:
    later = NOON + timedelta(hours=1)
    assert mark(2, later, created).after(mark(5)) == mark(2, later, created)


def test_it_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = replace(mark(7, NOON + 3 * MICROSECOND), last_object=("S/key=a/x.parquet", NOON))
    assert decode(written.encode()) == written
    assert decode(mark(7).encode()) == mark(7)
    file = tmp_path / watermark.path("S")
    file.parent.mkdir()
    file.write_bytes(written.encode())
    assert watermark.read(fsspec.filesystem("file"), str(tmp_path), "S") == written
    assert watermark.read(fsspec.filesystem("file"), str(tmp_path), "OTHER") is None


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"seq": 1}', b"\xff"])
def test_a_damaged_file_is_an_error_of_one_line(data: bytes) -> None:
    with pytest.raises(JetcaptureError, match="the watermark is damaged"):
        decode(data)
