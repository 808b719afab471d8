"""The watermark says no more than the consumer's state allows, and never goes back."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from msgspec.structs import replace as changed

from jetcapture_py.archive.incarnations import Origin
from jetcapture_py.archive.watermark import MARGIN, NEVER, ConsumerWatermark, Filters, Watermark, minimum, path
from jetcapture_py.capture.watermark import SILENT, Observer, WatermarkUpdate, update_watermark
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.jetstream.consumer import ConsumerState, consumer_state
from jetcapture_py.store import removal_of
from jetcapture_py.store.archive import ArchiveFiles

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def state(
    floor: int, *, pending: int = 0, unacked: int = 0, delivered: int = 0, filters: tuple[str, ...] = (), **config: int
) -> ConsumerState:
    info = {"num_pending": pending, "num_ack_pending": unacked, "ts": "2026-05-01T12:00:00.123456789Z"}
    places = {"ack_floor": {"stream_seq": floor}, "delivered": {"stream_seq": delivered}}
    return consumer_state({"config": {"filter_subjects": list(filters), **config}, **info, **places})


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


def asked(unacked: int, seconds: int) -> ConsumerState:
    """The consumer's state, asked for so long after the epoch."""
    moment = (datetime.fromtimestamp(0, UTC) + timedelta(seconds=seconds)).isoformat()
    return consumer_state({"config": {}, "num_ack_pending": unacked, "ts": moment})


def test_the_lag_is_that_of_the_first_message_while_nothing_is_stored() -> None:
    for batches in (1, 20):
        observer, ended = Observer("S", "c"), 21 * 60
        for index in range(ended * batches):
            observer.saw(1 + 50 * index, index * 1_000_000 // batches)
        assert observer.lag(asked(1, ended)) == timedelta(seconds=ended)


def test_the_lag_grows_while_the_server_does_not_answer() -> None:
    observer = Observer("S", "c")
    observer.saw(1, 0)
    for unacked, age in ((1, 51), (0, 0)):
        for silence, counted in ((SILENT / 2, 0), (1200, 1200)):
            lag = observer.lag(replace(asked(unacked, 51), answered=monotonic() - silence)).total_seconds()
            assert age + counted <= lag < age + counted + SILENT / 2


def test_many_messages_leave_enough_to_know_the_time_roughly() -> None:
    observer = Observer("S", "C")
    for seq in range(1, 100_001):
        observer.saw(seq, micros(NOON) + seq)
    assert observed(observer, state(99_990, unacked=10)) == (99_990, NOON + 99_989 * MICROSECOND)
    assert len(observer._samples) <= 5000


def test_a_file_that_would_only_go_back_is_not_written_and_the_last_object_is_that_of_all_replicas() -> None:
    early, late = NOON, NOON + timedelta(seconds=1)
    for now, after in ((mark(5), None), (mark(4, NEVER), None), (mark(4, late), mark(5, late))):
        result = update(mark(5), now, replace(state(9), asked=late))
        assert (result.content, result.data) == (after or mark(5), after and after.encode())
    for one, other in ((early, late), (late, early)):
        result = update(changed(mark(5), last_stored=one), changed(mark(6), last_stored=other))
        assert result.content == changed(mark(6), last_stored=late)


def test_a_time_in_the_future_is_replaced_and_one_that_another_servers_clock_gave_is_kept() -> None:
    for created, seq in (("2026-01-01T00:00:00Z", 5), ("2026-03-01T00:00:00Z", 4), ("", 4)):
        wrong = mark(5, NOON + timedelta(days=27_000), created)
        result = update(wrong, mark(4, NOON - MARGIN), idle=timedelta(hours=1))
        assert result.data is not None
        assert (result.content.seq, result.content.time) == (seq, NOON - MARGIN)
        assert [name for name, _ in result.warnings] == ["watermark.corrected"]
        assert "2100" in result.warnings[0][1]["was"]
    ahead = mark(5, NOON + MARGIN)  # and the state is later than noon
    result = update(ahead, mark(5, NOON - MARGIN))
    assert (result.content, result.data, result.warnings) == (ahead, None, ())


def test_what_cannot_be_believed_at_all_is_replaced() -> None:
    for data in (b"{half", changed(mark(99), stream="OTHER").encode()):
        result = update_watermark(data, mark(4), (state(9),), timedelta(hours=1))
        assert result.data == mark(4).encode()
        assert [name for name, _ in result.warnings] == ["watermark.failed"]


BOTH, ONE = ("a", "b"), ("a",)


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


def test_what_another_consumers_overlapping_pattern_may_have_skipped_is_doubtful() -> None:
    before = (Filters(after=0, subjects=("a.*",), consumer="2026-01-02T00:00:00Z"),)
    again = replace(state(2, delivered=2, filters=("*.b",)), created="2026-01-03T00:00:00Z", deliveries=2)
    content = update(changed(mark(5, filters=before), deliveries=5), mark(2, NEVER), again).content
    assert (content.seq, content.time, content.filters[-1].doubtful) == (2, NEVER, (3, 5))


def test_it_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = changed(mark(7, NOON + 3 * MICROSECOND), last_stored=NOON, key_rule="{id}", interval=900, deliveries=9)
    filters = (
        Filters(after=0, subjects=(), consumer="2026-01-02T00:00:00Z"),
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


WIDENED = part("all", "o.*", 700, 7, after=300, doubtful=(300, None))
MINIMUM: dict[str, tuple[list[ConsumerWatermark], list[str], int, int]] = {
    "one": ([EU], ["eu"], 500, 5),
    "the slowest": ([EU, US], ["eu", "us"], 400, 4),
    "not as far": ([US, part("all", "o.*", 300, 9)], ["all", "us"], 300, 4),
    "all are covered": ([EU, US, ALL], ["all"], 700, 7),
    "one is ahead": ([ALL, EU, part("us", "o.us", 800, 8)], ["all", "us"], 700, 7),
    "alike": ([part("a", "o.us", 400, 4), US], ["us"], 400, 4),
    "widened later": ([US, part("all", "o.*", 700, 7, after=450)], ["all", "us"], 400, 4),
    "just widened": ([US, WIDENED], ["all", "us"], 400, 4),
    "narrowed while more was on its way": ([NARROWED, US], ["eu", "us"], 100, 1),
    "of an earlier stream": ([EU, part("us", "o.us", 3, 6, created=NEW)], ["eu", "us"], 0, 5),
    "covered by one of the new stream": ([EU, part("all", "o.*", 3, 6, created=NEW)], ["all"], 3, 6),
}
"""Watermarks, the consumers whose counts, and the sequence and the minutes of the minimum."""


def test_readers_take_the_minimum_of_what_counts() -> None:
    for name, (files, counted, seq, minutes) in MINIMUM.items():
        for order in (files, files[::-1]):
            found = minimum(order)
            assert found is not None
            assert (found.seq, found.time) == (seq, NOON + timedelta(minutes=minutes)), name
            assert len(found.counted) == len(counted), name
            assert order is not files or sorted(mark.consumer for mark in found.counted) == counted, name
            assert found.created == max(mark.created for mark in files)
            assert found.files == tuple(order)


def test_readers_refuse_one_from_the_future(tmp_path: Path) -> None:
    file = tmp_path / path("S", "C")
    file.parent.mkdir(parents=True)
    file.write_bytes(mark(7, datetime.now(UTC) + timedelta(days=1)).encode())
    with pytest.raises(JetcaptureError, match=r"^_watermark/S/C\.json says that .* which is in the future"):
        ArchiveFiles(str(tmp_path), {}).watermark("S")


def test_a_damaged_file_is_an_error_of_one_line_with_its_path(tmp_path: Path) -> None:
    fields = [b'"filters": [1]', b'"filters": [{"after": 1, "subjects": [], "doubtful": [1]}]', b'"seq": Infinity']
    fields += [b'"time": "0001-01-01T00:00:00+23:59"', b'"stream_created": "x"']
    fields += [b'"stream_created": "2026-01-01T00:00:00"']
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
