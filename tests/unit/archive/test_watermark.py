"""The watermark says no more than the consumer's state allows, and never goes back."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from jetcapture_py.archive import watermark
from jetcapture_py.archive.incarnations import Origin
from jetcapture_py.archive.watermark import MARGIN, Filters, Watermark, decode
from jetcapture_py.capture.watermark import Observer, update_watermark
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.jetstream.consumer import ConsumerState, consumer_state
from jetcapture_py.store.archive import ArchiveFiles

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def state(
    floor: int,
    *,
    pending: int = 0,
    unacked: int = 0,
    max_deliver: int = -1,
    delivered: int = 0,
    filters: tuple[str, ...] = (),
) -> ConsumerState:
    return consumer_state(
        {
            "config": {"ack_policy": "explicit", "max_deliver": max_deliver, "filter_subjects": list(filters)},
            "num_pending": pending,
            "num_ack_pending": unacked,
            "ack_floor": {"stream_seq": floor},
            "delivered": {"stream_seq": delivered},
            "ts": "2026-05-01T12:00:00.123456789Z",
        }
    )


def mark(
    seq: int = 5, time: datetime = NOON, created: str = "2026-01-01T00:00:00Z", filters: tuple[Filters, ...] = ()
) -> Watermark:
    return Watermark(stream="S", consumer="C", created=created, seq=seq, time=time, filters=filters)


def micros(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000)


def test_the_time_ends_before_the_last_message_known_at_the_floor() -> None:
    observer = Observer("S", "C")
    for seq in (10, 20, 30):
        observer.saw(seq, micros(NOON) + seq)
    found = observer.watermark(state(25, unacked=7), Origin("created"))
    assert found is not None
    assert (found.seq, found.time) == (25, NOON + 20 * MICROSECOND - MICROSECOND)


def test_a_message_with_the_timestamp_of_one_at_the_floor_is_not_promised() -> None:
    observer = Observer("S", "C")
    observer.saw(10, micros(NOON))
    observer.saw(11, micros(NOON))
    found = observer.watermark(state(10, unacked=1), Origin("created"))
    assert found is not None
    assert found.time < NOON


def test_a_redelivered_message_does_not_take_the_place_of_a_later_one() -> None:
    observer = Observer("S", "C")
    observer.saw(20, micros(NOON) + 20)
    observer.saw(3, micros(NOON) + 3)
    found = observer.watermark(state(19, unacked=1), Origin("created"))
    assert found is None
    found = observer.watermark(state(20, unacked=1), Origin("created"))
    assert found is not None
    assert found.time == NOON + 19 * MICROSECOND


def test_nothing_is_said_before_anything_is_known() -> None:
    assert Observer("S", "C").watermark(state(0, pending=3), Origin("created")) is None


def test_with_nothing_left_it_follows_the_servers_clock() -> None:
    found = Observer("S", "C").watermark(state(9), Origin("created"))
    assert found is not None
    assert (found.seq, found.time) == (9, NOON + timedelta(microseconds=123456) - MARGIN)


def test_a_timestamp_from_a_clock_that_was_ahead_promises_nothing_beyond_the_servers_present_time() -> None:
    observer = Observer("S", "C")
    observer.saw(10, micros(NOON + timedelta(days=1000)))
    found = observer.watermark(state(10, unacked=1), Origin("created"))
    assert found is not None
    assert found.time == NOON + timedelta(microseconds=123456)


def test_a_message_that_is_older_than_the_one_before_it_is_not_promised() -> None:
    """A server's clock has gone back between them."""
    observer = Observer("S", "C")
    observer.saw(10, micros(NOON))
    observer.saw(11, micros(NOON) - 3_600_000_000)
    found = observer.watermark(state(10, unacked=1), Origin("created"))
    assert found is not None
    assert found.time < NOON - timedelta(hours=1)


def test_a_consumer_that_gives_messages_up_has_none() -> None:
    assert Observer("S", "C").watermark(state(9, max_deliver=3), Origin("created")) is None


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
    found = observer.watermark(state(99_990, unacked=10), Origin("created"))
    assert found is not None
    assert found.time == NOON + 99_989 * MICROSECOND
    assert len(observer._samples) <= 5000


def test_it_only_moves_forward() -> None:
    assert mark(5).after(mark(5)) is None
    assert mark(4).after(mark(5)) is None
    assert mark(6, NOON - timedelta(hours=1)).after(mark(5)) == mark(6)
    assert mark(4, NOON + timedelta(hours=1)).after(mark(5)) == mark(5, NOON + timedelta(hours=1))


def test_the_object_stored_last_is_the_last_one_of_all_replicas() -> None:
    early, late = NOON, NOON + timedelta(seconds=1)
    assert replace(mark(6), last_stored=early).after(replace(mark(5), last_stored=late)) == replace(
        mark(6), last_stored=late
    )
    assert replace(mark(5), last_stored=late).after(replace(mark(5), last_stored=early)) == replace(
        mark(5), last_stored=late
    )
    assert mark(5).after(replace(mark(5), last_stored=late)) is None


@pytest.mark.parametrize("created", ["2026-03-01T00:00:00Z", ""])
def test_a_recreated_stream_starts_its_sequence_again(created: str) -> None:
    later = NOON + timedelta(hours=1)
    assert mark(2, later, created).after(mark(5)) == mark(2, later, created)


@pytest.mark.parametrize("life", ["2026-01-01T00:00:00Z", "2026-03-01T00:00:00Z", ""])
def test_a_time_in_the_future_is_replaced(life: str) -> None:
    """A server's clock was wrong when it was written."""
    wrong = mark(5, NOON + timedelta(days=27_000), life)
    result = update_watermark(wrong.encode(), mark(4, NOON - MARGIN), state(9), timedelta(hours=1))
    assert result.data is not None
    assert result.content.time == NOON - MARGIN
    assert result.content.seq == (5 if life == "2026-01-01T00:00:00Z" else 4)
    assert [name for name, _ in result.warnings] == ["watermark.corrected"]
    assert "2100" in result.warnings[0][1]["was"]


def test_a_time_that_another_servers_clock_gave_is_kept() -> None:
    ahead = mark(5, NOON + MARGIN)  # and the state is later than noon
    result = update_watermark(ahead.encode(), mark(5, NOON - MARGIN), state(9), timedelta())
    assert (result.content, result.data, result.warnings) == (ahead, None, ())


@pytest.mark.parametrize("data", [b"{half", replace(mark(99), stream="OTHER").encode()])
def test_what_cannot_be_believed_at_all_is_replaced(data: bytes) -> None:
    result = update_watermark(data, mark(4), state(9), timedelta(hours=1))
    assert result.data == mark(4).encode()
    assert [name for name, _ in result.warnings] == ["watermark.failed"]


def test_a_file_of_another_stream_is_an_error_that_says_so() -> None:
    with pytest.raises(JetcaptureError, match="the watermark belongs to stream S, not OTHER"):
        decode(mark().encode(), "OTHER")


# ------------------------------------------------------------------ filters


BOTH, ONE = ("a", "b"), ("a",)


def test_filters_are_known_from_where_the_consumer_was_at_the_start() -> None:
    observer = Observer("S", "C")
    observer.began(state(250, delivered=300, filters=("b", "a")))
    found = observer.watermark(state(700, delivered=700, filters=("b", "a")), Origin("created"))
    assert found is not None
    assert found.filters == (Filters(after=300, subjects=BOTH),)


def test_changed_filters_are_sure_once_a_message_was_delivered_that_they_selected() -> None:
    before, own = Filters(after=0, subjects=BOTH), Filters(after=3, subjects=ONE)
    there = mark(5, filters=(before,)).encode()
    changed = update_watermark(there, mark(7, filters=(own,)), state(7, delivered=8), timedelta())
    doubtful = (Filters(after=5, subjects=ONE, sure=False), Filters(after=8, subjects=ONE, sure=False))
    assert changed.content.filters == (before, *doubtful)
    assert changed.warnings == (("watermark.filters", {"seq": 5, "before": BOTH, "now": ONE}),)
    assert changed.data is not None
    still = update_watermark(changed.data, mark(8, filters=(own,)), state(8, delivered=8), timedelta())
    assert still.content.filters == (before, *doubtful)
    assert still.warnings == ()
    assert still.data is not None
    sure = update_watermark(still.data, mark(11, filters=(own,)), state(9, delivered=12), timedelta())
    assert sure.content.filters == (before, *doubtful, Filters(after=12, subjects=ONE))
    assert sure.data is not None
    asleep = update_watermark(sure.data, mark(13, filters=(own,)), state(13, delivered=14), timedelta())
    assert asleep.content.filters == sure.content.filters


def test_of_replicas_that_start_together_the_first_one_knows_from_where_the_filters_hold() -> None:
    late, early = (mark(5, filters=(Filters(after=after, subjects=("a",)),)) for after in (400, 0))
    assert update_watermark(late.encode(), early, state(9), timedelta()).content == early
    assert update_watermark(early.encode(), late, state(9), timedelta()).content == early


def test_a_recreated_streams_filters_start_again() -> None:
    there = mark(500, filters=(Filters(after=0, subjects=("a",)), Filters(after=300, subjects=())))
    new = mark(2, created="2026-03-01T00:00:00Z", filters=(Filters(after=0, subjects=()),))
    assert update_watermark(there.encode(), new, state(9), timedelta()).content == new


@pytest.mark.parametrize(("at_start", "begins_again"), [(0, True), (5, False)], ids=["recreated", "created moved"])
def test_a_consumer_is_recognized_by_what_it_had_delivered_at_the_start(at_start: int, begins_again: bool) -> None:
    there = replace(mark(5, filters=(Filters(after=0, subjects=(), consumer="2026-01-02T00:00:00Z"),)), deliveries=5)
    observer, now = Observer("S", "C"), "2026-01-03T00:00:00Z"
    observer.began(replace(state(5, delivered=8), created=now, deliveries=at_start))
    later = replace(state(1000, delivered=1000), created=now, deliveries=992)  # before the first watermark
    current = observer.watermark(later, Origin(there.created))
    assert current is not None
    filters = update_watermark(there.encode(), current, later, timedelta()).content.filters
    assert [entry.until for entry in filters] == ([5, None] if begins_again else [None])


def test_it_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = replace(mark(7, NOON + 3 * MICROSECOND), last_stored=NOON, key_rule="{id}", interval=900)
    filtered = replace(
        written, filters=(Filters(after=0, subjects=()), Filters(after=3, subjects=("a", "b.>"), sure=False))
    )
    for each in (written, mark(7), filtered):
        assert decode(each.encode()) == each
    file = tmp_path / watermark.path("S")
    file.parent.mkdir()
    file.write_bytes(written.encode())
    assert ArchiveFiles(str(tmp_path), {}).watermark("S") == written
    assert ArchiveFiles(str(tmp_path), {}).watermark("OTHER") is None
    file.rename(file.with_name("OTHER.json"))  # as a copy by hand may be named
    with pytest.raises(JetcaptureError, match="the watermark belongs to stream S, not OTHER"):
        ArchiveFiles(str(tmp_path), {}).watermark("OTHER")


def part(consumer: str, subject: str, seq: int, minutes: int, after: int = 0) -> tuple[Watermark, ConsumerState]:
    """What a capture of one subject knows."""
    filters = (Filters(after=after, subjects=(subject,)),)
    time = NOON + timedelta(minutes=minutes)
    state_ = replace(state(seq, delivered=seq, filters=(subject,)), asked=time + MARGIN)
    return replace(mark(seq, time, filters=filters), consumer=consumer), state_


def written(*parts: tuple[Watermark, ConsumerState], data: bytes | None = None) -> bytes:
    """The file after each capture has written its own."""
    for current, of_consumer in parts:
        data = update_watermark(data, current, of_consumer, timedelta()).data or data
    assert data is not None
    return data


def test_captures_of_different_subjects_promise_what_the_slowest_has_stored() -> None:
    eu, us = part("eu", "orders.eu.>", 50_000, 60), part("us", "orders.us.>", 1000, 0)
    for order in ((eu, us), (us, eu), (eu, us, eu)):
        found = decode(written(*order))
        assert (found.consumer, found.seq, found.time) == ("us", 1000, NOON)
        assert [entry.subjects for entry in found.filters] == [("orders.eu.>", "orders.us.>")]
        assert (found.of("eu").seq, found.of("us").seq) == (50_000, 1000)
    found = decode(written(part("us", "orders.us.>", 60_000, 61), data=written(eu, us)))
    assert (found.consumer, found.seq, found.time) == ("eu", 50_000, NOON + timedelta(minutes=60))


def test_a_capture_of_all_subjects_replaces_those_of_some_once_it_has_got_as_far() -> None:
    data = written(part("eu", "orders.eu.>", 500, 5), part("us", "orders.us.>", 1000, 10))
    data = written(part("all", "orders.>", 700, 7), data=data)
    found = decode(data)
    assert ([each.consumer for each in found.parts], found.seq) == (["all", "us"], 700)
    data = written(part("all", "orders.>", 1000, 10), data=data)
    found = decode(data)
    assert (found.consumer, found.seq, found.parts) == ("all", 1000, ())


def test_of_two_captures_that_are_alike_one_is_left() -> None:
    data = written(part("eu", "orders.eu.>", 500, 5), part("us", "orders.us.>", 400, 4))
    found = decode(written(part("other", "orders.us.>", 400, 4), data=data))
    assert ([each.consumer for each in found.parts], found.seq) == (["eu", "other"], 400)


def test_a_capture_that_was_widened_does_not_replace_what_it_did_not_select_then() -> None:
    data = written(part("eu", "orders.eu.>", 500, 5), part("us", "orders.us.>", 100, 1))
    wide, of_consumer = part("eu", "orders.>", 900, 9)
    found = decode(written((wide, of_consumer), data=data))
    assert (found.consumer, found.seq) == ("us", 100)


def test_of_captures_of_a_recreated_stream_the_first_one_promises_nothing_for_the_others() -> None:
    data = written(part("eu", "orders.eu.>", 500, 5), part("us", "orders.us.>", 400, 4))
    eu, of_consumer = part("eu", "orders.eu.>", 3, 6)
    found = decode(written((replace(eu, created="2026-05-01T12:05:30Z"), of_consumer), data=data))
    assert (found.created, found.seq, found.time) == ("2026-05-01T12:05:30Z", 0, NOON + timedelta(minutes=4))
    assert [entry.subjects for entry in found.filters] == [("orders.eu.>", "orders.us.>")]


def test_a_consumer_of_a_recreated_stream_takes_the_place_of_one_of_the_earlier_stream() -> None:
    data = written(part("old", "v1.>", 500, 5))
    new, of_consumer = part("new", "v2.>", 3, 6)
    found = decode(written((replace(new, created="2026-05-01T12:05:30Z"), of_consumer), data=data))
    assert (found.consumer, found.seq, found.time, found.parts) == ("new", 3, NOON + timedelta(minutes=6), ())


def test_a_capture_that_was_just_widened_does_not_replace_what_the_server_may_have_passed_over() -> None:
    data = written(part("eu", "orders.eu.>", 50, 0), part("us", "orders.us.>", 60, 1))
    filters = (Filters(after=50, subjects=("orders.>",)),)
    current = replace(mark(90, NOON + timedelta(minutes=9), filters=filters), consumer="eu")
    widened = replace(state(90, delivered=50, filters=("orders.>",)), asked=NOON + timedelta(minutes=10))
    found = decode(written((current, widened), data=data))
    assert (found.seq, [each.consumer for each in found.parts]) == (60, ["eu", "us"])


def test_a_consumer_that_takes_the_place_of_another_continues_its_watermark() -> None:
    data = written(part("old", "orders.>", 500, 5), part("new", "orders.eu.>", 20, 1))
    found = decode(data)
    assert (found.consumer, found.seq, found.parts) == ("new", 500, ())


def test_readers_refuse_one_from_the_future(tmp_path: Path) -> None:
    file = tmp_path / watermark.path("S")
    file.parent.mkdir()
    file.write_bytes(mark(7, datetime.now(UTC) + timedelta(days=1)).encode())
    with pytest.raises(JetcaptureError, match="which is in the future"):
        ArchiveFiles(str(tmp_path), {}).watermark("S")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'{"seq": 1}',
        b"\xff",
        mark().encode().replace(b"}", b', "filters": [1]}'),
        mark().encode().replace(b"}", b', "seq": Infinity}'),
        mark().encode().replace(b"}", b', "time": "0001-01-01T00:00:00+23:59"}'),
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_an_error_of_one_line(data: bytes) -> None:
    with pytest.raises(JetcaptureError, match="the watermark is damaged"):
        decode(data)
