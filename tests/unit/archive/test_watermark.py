"""The watermark says no more than the consumer's state allows, and never goes back."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed

from jetcapture_py.archive.incarnations import Origin, Sample
from jetcapture_py.archive.watermark import (
    MARGIN,
    NEVER,
    ConsumerWatermark,
    Filters,
    StreamMessage,
    Watermark,
    minimum,
    path,
)
from jetcapture_py.capture.watermark import Observer, WatermarkUpdate, update_watermark
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.jetstream.consumer import ConsumerState, consumer_state
from jetcapture_py.store import removal_of
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


OWN = (Filters(after=0, subjects=()),)


def mark(
    seq: int = 5, time: datetime = NOON, created: str = "2026-01-01T00:00:00Z", filters: tuple[Filters, ...] = OWN
) -> ConsumerWatermark:
    return ConsumerWatermark(stream="S", consumer="C", created=created, seq=seq, time=time, filters=filters)


def update(
    stored: ConsumerWatermark | None, now: ConsumerWatermark, *states: ConsumerState, idle: timedelta = timedelta()
) -> WatermarkUpdate:
    return update_watermark(stored and stored.encode(), now, states or (state(9),), idle)


def micros(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000)


def observed(observer: Observer, state: ConsumerState) -> tuple[int, datetime]:
    """Sequence and time of the watermark."""
    found = observer.watermark(state, Origin(NEW))
    assert found is not None
    return found.seq, found.time


def test_the_time_ends_before_the_last_message_known_at_the_floor() -> None:
    observer = Observer("S", "C")
    for seq in (10, 20, 30):
        observer.saw(seq, micros(NOON) + seq)
    assert observed(observer, state(25, unacked=7)) == (25, NOON + 20 * MICROSECOND - MICROSECOND)


def test_a_redelivered_message_does_not_take_the_place_of_a_later_one() -> None:
    observer = Observer("S", "C")
    observer.saw(20, micros(NOON) + 20)
    observer.saw(3, micros(NOON) + 3)
    assert observed(observer, state(19, unacked=1)) == (19, NEVER)
    assert observed(observer, state(20, unacked=1)) == (20, NOON + 19 * MICROSECOND)
    assert observer.overtaken is None


def test_a_later_message_with_a_lower_sequence_tells_that_the_server_lost_one() -> None:
    observer = Observer("S", "C")
    for seq, time in ((20, 20), (19, 21), (21, 22), (20, 23)):
        observer.saw(seq, time)
    assert observer.overtaken == (20, 20)
    observer.forget()
    assert observer.overtaken is None


def test_a_timestamp_from_a_clock_that_was_ahead_promises_nothing_beyond_the_servers_present_time() -> None:
    observer = Observer("S", "C")
    observer.saw(10, micros(NOON + timedelta(days=1000)))
    assert observed(observer, state(10, unacked=1)) == (10, NOON + timedelta(microseconds=123456))


def test_a_message_that_is_older_than_the_one_before_it_is_not_promised() -> None:
    """A server's clock has gone back between them."""
    observer = Observer("S", "C")
    observer.saw(10, micros(NOON))
    observer.saw(11, micros(NOON) - 3_600_000_000)
    assert observed(observer, state(10, unacked=1)) == (10, NOON - timedelta(hours=1) - MICROSECOND)


def test_a_consumer_that_gives_messages_up_has_none() -> None:
    assert Observer("S", "C").watermark(state(9, max_deliver=3), Origin(NEW)) is None


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
    assert observed(observer, state(99_990, unacked=10)) == (99_990, NOON + 99_989 * MICROSECOND)
    assert len(observer._samples) <= 5000


def test_a_file_that_would_only_go_back_is_not_written() -> None:
    later = NOON + timedelta(hours=1)
    for now, after in (
        (mark(5), None),
        (mark(4, NEVER), None),
        (mark(6, NOON - timedelta(hours=1)), mark(6)),
        (mark(4, later), mark(5, later)),
    ):
        result = update(mark(5), now, replace(state(9), asked=later))
        assert (result.content, result.data) == (after or mark(5), after and after.encode())


def test_the_object_stored_last_is_the_last_one_of_all_replicas() -> None:
    early, late = NOON, NOON + timedelta(seconds=1)
    for one, other in ((early, late), (late, early)):
        result = update(changed(mark(5), last_stored=one), changed(mark(6), last_stored=other))
        assert result.content == changed(mark(6), last_stored=late)


def test_a_recreated_streams_filters_start_again() -> None:
    stored = mark(500, filters=(Filters(after=0, subjects=("a",)), Filters(after=300, subjects=())))
    result = update(stored, mark(2, created="2026-03-01T00:00:00Z"), state(2, delivered=0))
    assert result.content.filters == (Filters(after=0, subjects=()),)


def test_a_time_in_the_future_is_replaced() -> None:
    """A server's clock was wrong when it was written."""
    for created, seq in (("2026-01-01T00:00:00Z", 5), ("2026-03-01T00:00:00Z", 4), ("", 4)):
        wrong = mark(5, NOON + timedelta(days=27_000), created)
        result = update(wrong, mark(4, NOON - MARGIN), idle=timedelta(hours=1))
        assert result.data is not None
        assert (result.content.seq, result.content.time) == (seq, NOON - MARGIN)
        assert [name for name, _ in result.warnings] == ["watermark.corrected"]
        assert "2100" in result.warnings[0][1]["was"]


def test_a_time_that_another_servers_clock_gave_is_kept() -> None:
    ahead = mark(5, NOON + MARGIN)  # and the state is later than noon
    result = update(ahead, mark(5, NOON - MARGIN))
    assert (result.content, result.data, result.warnings) == (ahead, None, ())


def test_what_cannot_be_believed_at_all_is_replaced() -> None:
    for data in (b"{half", changed(mark(99), stream="OTHER").encode()):
        result = update_watermark(data, mark(4), (state(9),), timedelta(hours=1))
        assert result.data == mark(4).encode()
        assert [name for name, _ in result.warnings] == ["watermark.failed"]


# ------------------------------------------------------------------ filters


BOTH, ONE = ("a", "b"), ("a",)


def test_filters_are_known_from_where_the_consumer_was_at_the_start() -> None:
    start, later = (state(floor, delivered=seq, filters=("b", "a")) for floor, seq in ((250, 300), (700, 700)))
    result = update(None, mark(700), start, later)
    assert result.content.filters == (Filters(after=300, subjects=BOTH),)


def test_of_replicas_that_start_together_the_first_one_knows_from_where_the_filters_hold() -> None:
    stored = update(None, mark(5), state(5, delivered=400)).content
    assert update(stored, mark(5), state(5, delivered=0)).content.filters == OWN
    assert update(mark(5), mark(5), state(5, delivered=400)).content.filters == OWN


def test_what_a_change_may_have_skipped_is_doubtful_until_a_message_was_delivered_after_it() -> None:
    before, after = Filters(after=0, subjects=BOTH), Filters(after=8, subjects=ONE, doubtful=(6, None))
    narrowed = update(mark(5, filters=(before,)), mark(7), state(7, delivered=8, filters=ONE))
    assert narrowed.content.filters == (before, after)
    assert narrowed.warnings == (("watermark.filters", {"seq": 5, "before": BOTH, "now": ONE}),)
    still = update(narrowed.content, mark(8), state(8, delivered=8, filters=ONE))
    assert (still.content.filters, still.warnings) == ((before, after), ())
    known = update(still.content, mark(11), state(9, delivered=12, filters=ONE))
    assert known.content.filters == (before, changed(after, doubtful=(6, 12)))
    later = update(known.content, mark(13), state(13, delivered=14, filters=ONE))
    assert later.content.filters == known.content.filters


def test_the_time_starts_over_when_more_is_selected() -> None:
    """Nothing was left to deliver, so the time has passed messages that are selected only now."""
    stored = mark(5, filters=(Filters(after=0, subjects=ONE),))
    assert update(stored, mark(5, NEVER), state(5, delivered=5, filters=BOTH)).content.time == NEVER
    assert update(mark(5), mark(5, NEVER), state(5, delivered=5, filters=ONE)).content.time == NOON


CREATED, AGAIN = "2026-01-02T00:00:00Z", "2026-01-03T00:00:00Z"


def consumer(
    created: str, delivered: int, deliveries: int, floor: int = 0, filters: tuple[str, ...] = ()
) -> ConsumerState:
    return replace(state(floor, delivered=delivered, filters=filters), created=created, deliveries=deliveries)


def selected(after: int, *subjects: str, consumer: str = CREATED, doubtful: Any = None) -> Filters:
    return Filters(after=after, subjects=subjects, consumer=consumer, doubtful=doubtful)


@pytest.mark.parametrize(
    ("start", "seq", "filters"),
    [
        pytest.param(consumer(AGAIN, 8, 5, 5), 5, (selected(0),), id="moved"),
        pytest.param(consumer(AGAIN, 0, 0), 5, (selected(0, consumer=AGAIN),), id="same again"),
        pytest.param(
            consumer(AGAIN, 7, 0, 7), 7, (selected(0), selected(7, consumer=AGAIN, doubtful=(6, 7))), id="starts later"
        ),
    ],
)
def test_another_consumer_may_have_skipped_messages(
    start: ConsumerState, seq: int, filters: tuple[Filters, ...]
) -> None:
    archived = changed(mark(5, filters=(selected(0),)), deliveries=5)
    later = replace(start, deliveries=992)  # before the first watermark
    result = update(archived, mark(start.ack_floor), start, later)
    assert (result.content.seq, result.content.filters) == (seq, filters)


@pytest.mark.parametrize(
    ("before", "now", "added"),
    [
        pytest.param([selected(0, *ONE)], BOTH, [selected(2, *BOTH), selected(5, *BOTH, consumer=AGAIN)], id="more"),
        pytest.param(
            [selected(3, *ONE)], BOTH, [selected(5, *BOTH, consumer=AGAIN, doubtful=(3, 5))], id="unknown before"
        ),
        pytest.param(
            [selected(0, "a.*")],
            ("*.b",),
            [selected(5, "*.b", consumer=AGAIN, doubtful=(3, 5))],
            id="patterns that overlap",
        ),
    ],
)
def test_another_consumer_that_starts_earlier_and_selects_more_starts_over(
    before: list[Filters], now: tuple[str, ...], added: list[Filters]
) -> None:
    archived = changed(mark(5, filters=tuple(before)), deliveries=5)
    content = update(archived, mark(2, NEVER), consumer(AGAIN, 2, 2, 2, now)).content
    assert (content.seq, content.time, content.filters) == (2, NEVER, (*before, *added))


def test_filters_that_were_widened_before_are_joined_from_where_another_consumer_starts() -> None:
    before = (selected(0, *ONE), selected(4, *BOTH))
    archived = changed(mark(5, filters=before), deliveries=5)
    content = update(archived, mark(2, NEVER), consumer(AGAIN, 2, 2, 2, BOTH)).content
    joined = (selected(2, *BOTH), selected(4, *BOTH), selected(5, *BOTH, consumer=AGAIN))
    assert content.filters == (before[0], *joined)


# ------------------------------------------------------------------ readers


def test_it_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = changed(mark(7, NOON + 3 * MICROSECOND), last_stored=NOON, key_rule="{id}", interval=900, deliveries=9)
    filters = (
        Filters(after=0, subjects=(), consumer=CREATED),
        Filters(after=3, subjects=("a", "b.>"), doubtful=(2, 4)),
        Filters(after=5, subjects=("a",), doubtful=(5, None)),
    )
    file = tmp_path / path("S", "C")
    file.parent.mkdir(parents=True)
    for mark_ in (written, mark(7), changed(written, filters=filters)):
        file.write_bytes(mark_.encode())
        assert read(tmp_path).files == (mark_,)
    (file.parent / ".C.json.1234.tmp").write_text("half")
    assert read(tmp_path).files == (mark_,)
    assert ArchiveFiles(str(tmp_path), {}).watermark("OTHER") is None
    file.parent.rename(tmp_path / "_watermark" / "OTHER")  # as a copy by hand may be named
    with pytest.raises(JetcaptureError, match=r"_watermark/OTHER/C\.json belongs to stream S, not OTHER"):
        ArchiveFiles(str(tmp_path), {}).watermark("OTHER")


def read(root: Path) -> Watermark:
    found = ArchiveFiles(str(root), {}).watermark("S")
    assert found is not None
    return found


def part(consumer: str, subject: str, seq: int, minutes: int, **other: Any) -> ConsumerWatermark:
    filters = (Filters(after=other.pop("after", 0), subjects=(subject,), doubtful=other.pop("doubtful", None)),)
    return changed(mark(seq, NOON + timedelta(minutes=minutes), filters=filters), consumer=consumer, **other)


NEW = "2026-05-01T12:05:30Z"
NARROWED = changed(
    part("eu", "o.us", 100, 1),
    filters=(Filters(after=0, subjects=("o.*",)), Filters(after=120, subjects=("o.us",), doubtful=(101, None))),
)
EU, US, ALL = part("eu", "o.eu", 500, 5), part("us", "o.us", 400, 4), part("all", "o.*", 700, 7)


@pytest.mark.parametrize(
    ("files", "counted", "seq", "minutes"),
    [
        pytest.param([EU], ["eu"], 500, 5, id="one"),
        pytest.param([EU, US], ["eu", "us"], 400, 4, id="the slowest"),
        pytest.param([US, part("all", "o.*", 300, 9)], ["us", "all"], 300, 4, id="not as far"),
        pytest.param([EU, US, ALL], ["all"], 700, 7, id="all are covered"),
        pytest.param([ALL, EU, part("us", "o.us", 800, 8)], ["all", "us"], 700, 7, id="one is ahead"),
        pytest.param([part("a", "o.us", 400, 4), US], ["us"], 400, 4, id="alike"),
        pytest.param([US, part("all", "o.*", 700, 7, after=450)], ["us", "all"], 400, 4, id="widened later"),
        pytest.param(
            [US, part("all", "o.*", 700, 7, after=300, doubtful=(300, None))], ["us", "all"], 400, 4, id="just widened"
        ),
        pytest.param([NARROWED, US], ["eu", "us"], 100, 1, id="narrowed while more was on its way"),
        pytest.param([EU, part("us", "o.us", 3, 6, created=NEW)], ["eu", "us"], 0, 5, id="of an earlier stream"),
        pytest.param([EU, part("all", "o.*", 3, 6, created=NEW)], ["all"], 3, 6, id="covered by one of the new stream"),
    ],
)
def test_readers_take_the_minimum_of_what_counts(
    files: list[ConsumerWatermark], counted: list[str], seq: int, minutes: int
) -> None:
    for order in (files, files[::-1]):
        found = minimum(order)
        assert found is not None
        assert (found.seq, found.time) == (seq, NOON + timedelta(minutes=minutes))
        assert len(found.counted) == len(counted)
        assert found.created == max(mark.created for mark in files)
        assert found.files == tuple(order)
    found = minimum(files)
    assert found is not None
    assert sorted(mark.consumer for mark in found.counted) == sorted(counted)


def test_a_stream_whose_creation_time_a_server_moved_is_known_by_its_messages() -> None:
    sample = Sample(900, micros(NOON), NEW)
    one, other = (
        changed(EU, stream_message=StreamMessage.of(sample)),
        changed(US, created=NEW, stream_message=StreamMessage.of(replace(sample, seq=901, time=micros(NOON) + 1))),
    )
    found = minimum([one, other])
    assert found is not None
    assert (found.created, found.seq, found.sample) == (EU.created, 400, other.sample)


def test_the_filters_of_all_captures_are_known_over_time() -> None:
    filtered = changed(US, filters=(*US.filters, Filters(after=30, subjects=("o.cn",), doubtful=(20, 50))))
    found = minimum([EU, filtered])
    assert found is not None
    assert found.filters == ((0, ("o.eu", "o.us")), (19, ("o.cn", "o.eu", "o.us")), (30, ("o.cn", "o.eu")))


def test_readers_refuse_one_from_the_future(tmp_path: Path) -> None:
    file = tmp_path / path("S", "C")
    file.parent.mkdir(parents=True)
    file.write_bytes(mark(7, datetime.now(UTC) + timedelta(days=1)).encode())
    with pytest.raises(JetcaptureError, match=r"^_watermark/S/C\.json says that .* which is in the future"):
        ArchiveFiles(str(tmp_path), {}).watermark("S")


def test_a_damaged_file_is_an_error_of_one_line_with_its_path(tmp_path: Path) -> None:
    fields = (
        b'"filters": [1]',
        b'"filters": [{"after": 1, "subjects": [], "doubtful": [1]}]',
        b'"seq": Infinity',
        b'"time": "0001-01-01T00:00:00+23:59"',
        b'"stream_created": "x"',
        b'"stream_created": "2026-01-01T00:00:00"',
    )
    damaged = [mark().encode().replace(b"}\n", b", " + field + b"}\n") for field in fields]
    (tmp_path / path("S", "A")).parent.mkdir(parents=True)
    (tmp_path / path("S", "A")).write_bytes(mark().encode())
    for data in (b"", b"{}", b"[]", b"\xff", b"[" * 100_000, *damaged):
        (tmp_path / path("S", "C")).write_bytes(data)
        with pytest.raises(JetcaptureError, match=r"^_watermark/S/C\.json is damaged: [^\n]*$"):
            ArchiveFiles(str(tmp_path), {}).watermark("S")


def test_the_command_that_removes_a_file() -> None:
    name = "_watermark/S/C.json"
    azure = "az storage blob delete --account-name"
    for url, command in (
        ("/data/my archive", f"rm '/data/my archive/{name}'"),
        ("file:///data", f"rm /data/{name}"),
        ("s3a://bucket/nats/", f"aws s3 rm s3://bucket/nats/{name}"),
        ("abfs://box@acct.dfs.core.windows.net/nats", f"{azure} acct --container-name box --name nats/{name}"),
        ("az://box", f"{azure} own --container-name box --name {name}"),
        ("gs://bucket/nats", f"gcloud storage rm gs://bucket/nats/{name}"),
    ):
        assert removal_of(url, {"account_name": "own"}, path("S", "C")) == command
    for options in (
        {"endpoint_url": "http://minio:9000"},
        {"client_kwargs": {"endpoint_url": "http://minio:9000"}},
        {"driver": "obstore", "aws_endpoint": "http://minio:9000"},
    ):
        command = f"aws s3 rm s3://bucket/{name} --endpoint-url http://minio:9000 --profile lab"
        assert removal_of("s3://bucket", {"profile": "lab", **options}, path("S", "C")) == command
