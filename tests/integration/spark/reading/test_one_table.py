"""An archive and its stream as one table, each message once: `read_stream`, and the source `jetcapture`.

A query of the source begins in the archive and goes on in the stream. `test_histories.py` has random histories of it.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nats.js.api import RetentionPolicy, StreamConfig

from jetcapture_py.archive import layout, watermark
from jetcapture_py.config.units import moment_of
from jetcapture_py.errors import ConfigError, JetcaptureError, SourceError
from jetcapture_py.verify.proof import verify
from spark_jobs.archive import read_archive, read_stream
from spark_jobs.datasource.combined import CombinedSource, JetcaptureDataSource
from tests.integration.spark.live import Captured, Live
from tests.integration.spark.live import CombinedQuery as Query
from tests.support.running import CONSUMER, STREAM, status_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = {"n": "int64", "at": "timestamp", "tags": "list<string>", "region": "string"}
DECODED = {"decode": {"format": "json", "columns": COLUMNS}, "key": "{region}", "block": {"interval": "1h"}}
INFERRED = {**DECODED, "decode": {"format": "json"}, "block": {"interval": "1h", "bundles": 3}}
BY_EVENT = {**DECODED, "block": {"interval": "1h", "time": "at", "time_fallback": "timestamp"}}


@pytest.fixture
def captured(live: Live, tmp_path: Path, request: pytest.FixtureRequest) -> Captured:
    return Captured(live, tmp_path / "archive", getattr(request, "param", {}))


def sequences(frame: DataFrame) -> list[int]:
    return sorted(row[0] for row in frame.select(layout.SEQ).collect())


def message(number: int) -> tuple[str, bytes]:
    fields = {"n": number, "at": f"2026-05-01T12:00:{number % 60:02}Z", "region": "eu" if number % 2 else None}
    return f"orders.{number}", json.dumps({**fields, "tags": ["a", str(number)]}).encode()


# ---------------------------------------------------------------------- read_stream


@pytest.mark.spark
def test_archive_and_stream_are_one_table_up_to_the_sequence_that_was_there(
    spark: SparkSession, captured: Captured
) -> None:
    captured.live.fill(10)
    captured.capture()
    captured.live.fill(5)
    frame = read_stream(spark, captured.config)
    captured.live.fill(3)
    captured.capture()  # while the frame is kept
    assert sequences(frame) == list(range(1, 16))
    assert captured.live.consumers() == ["archive"]
    captured.live.purge()
    assert sequences(read_stream(spark, captured.config)) == list(range(1, 19))
    captured.live.fill(10)
    captured.live.purge(seq=26)
    with pytest.raises(JetcaptureError, match="messages 19 to 25 of stream ORDERS are gone: it starts at 26; "):
        read_stream(spark, captured.config)
    without = read_stream(spark, captured.config, fail_on_data_loss=False)
    assert sequences(without) == [*range(1, 19), *range(26, 29)]


@pytest.mark.spark
@pytest.mark.parametrize("captured", [INFERRED, BY_EVENT], indirect=True, ids=["in bundles", "by event time"])
def test_a_message_has_the_same_row_before_and_after_it_is_archived(spark: SparkSession, captured: Captured) -> None:
    nothing = read_stream(spark, captured.config)
    assert nothing.count() == 0
    captured.live.send([message(number) for number in range(20)])
    captured.capture()
    captured.live.send([message(number) for number in range(20, 40)])
    headers = [("Trace", ["1", "2"])]
    others = [("orders.bad", b"{"), ("orders.a", message(41)[1], headers), ("orders.b", b'{"n": null}')]
    captured.live.send(others)
    before = read_stream(spark, captured.path)
    rows = sorted(map(repr, before.collect()))
    assert len(rows) == 42
    times = dict(before.selectExpr(layout.SEQ, f"unix_micros({layout.TIMESTAMP})").collect())
    read: dict[str, Any] = {"keys": ["eu"], "start": moment_of(times[15]), "end": moment_of(times[38])}
    assert sequences(read_stream(spark, captured.config, **read)) == list(range(16, 38, 2))
    captured.capture()
    after = read_archive(spark, f"file://{captured.root}", STREAM)
    assert (before.schema, rows) == (after.schema, sorted(map(repr, after.collect())))
    assert captured.sections is INFERRED or nothing.schema == after.schema


@pytest.mark.spark
def test_a_stream_that_was_restored_has_no_message_of_its_former_end_and_one_that_loses_messages_is_refused(
    spark: SparkSession, captured: Captured
) -> None:
    captured.live.fill(20, "orders.old.{}")
    captured.capture()
    captured.restore(12)
    captured.live.fill(4, "orders.new.{}")
    for _ in range(2):
        frame = read_stream(spark, captured.config)
        rows = sorted((row[0], row[1].split(".")[1]) for row in frame.select(layout.SEQ, layout.SUBJECT).collect())
        assert rows == [*((seq, "old") for seq in range(1, 13)), *((seq, "new") for seq in range(13, 17))]
        captured.capture()
    captured.live.do(lambda stream: stream.delete_stream(STREAM))
    config = StreamConfig(name=STREAM, subjects=["orders.>"], retention=RetentionPolicy.INTEREST)
    captured.live.do(lambda stream: stream.add_stream(config))
    with pytest.raises(JetcaptureError, match=r"^stream ORDERS has retention interest: .* read_archive has what is"):
        read_stream(spark, captured.config)


# ---------------------------------------------------------------------- the source


def test_a_query_goes_from_the_archive_to_the_stream_and_on_from_its_offset(captured: Captured) -> None:
    captured.live.fill(100)
    captured.capture()
    captured.live.fill(50)
    query = Query(captured, maxOffsetsPerTrigger="40")
    batches = query.batches()
    assert [seq for batch in batches for seq in batch] == list(range(1, 151))
    assert max(map(len, batches)) == 40
    captured.live.fill(20)
    later = Query(captured, query.end)
    assert later.plan()
    captured.capture()
    captured.live.purge()  # a batch that was planned in the stream, and is in the archive alone
    assert later.run() == list(range(151, 171))
    assert later.batches() == []
    captured.live.fill(15)
    captured.live.purge(seq=181)
    with pytest.raises(SourceError, match="messages 171 to 180 of stream ORDERS are gone"):
        Query(captured, later.end).plan()
    assert Query(captured, later.end, failOnDataLoss="false").batches() == [list(range(181, 186))]
    first, second = Query(captured, startingOffsets="168", failOnDataLoss="false").batches()
    assert (first, second) == ([168, 169, 170], list(range(181, 186)))


@pytest.mark.parametrize("left", [True, False])
def test_a_query_goes_on_in_a_restored_stream_and_not_in_another_one(captured: Captured, left: bool) -> None:
    captured.live.fill(20, "orders.old.{}")
    captured.capture()
    query = Query(captured, maxOffsetsPerTrigger="12")
    assert query.plan()
    assert query.run() == list(range(1, 13))
    query.reader.stop()
    ahead = Query(captured)
    assert ahead.batches() == [list(range(1, 21))]
    captured.restore(15)
    captured.live.fill(3 if left else 0, "orders.new.{}")
    captured.capture()
    captured.live.purge()
    if left:
        captured.live.fill(1)
        assert [seq for batch in Query(captured, query.end).batches() for seq in batch] == list(range(13, 20))
        assert [seq for batch in Query(captured).batches() for seq in batch] == list(range(1, 20))
    with pytest.raises(SourceError, match="ORDERS was deleted and created again"):
        Query(captured, ahead.end).batches()


def test_what_a_stream_was_restored_with_is_read_though_the_capture_does_not_select_it_now(captured: Captured) -> None:
    captured.live.fill(15, "orders.old.{}")
    captured.capture()
    captured.restore()
    captured.sections["source"] = {"filter_subjects": ["orders.new.*"]}
    captured.capture()
    captured.live.fill(2, "orders.old.{}")
    mark = captured.root / watermark.path(STREAM, CONSUMER)
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "seq": 10}))  # it is not known to reach further
    query = Query(captured)
    assert [seq for batch in query.batches() for seq in batch] == list(range(1, 16))
    captured.live.fill(2, "orders.new.{}")
    assert Query(captured, query.end).batches() == [[18, 19]]


def test_what_does_not_fit_a_checkpoint_and_options_that_do_not_fit_each_other_are_refused_in_one_line(
    captured: Captured, tmp_path: Path
) -> None:
    captured.live.fill(3)
    captured.capture()
    query = Query(captured)
    query.batches()
    assert query.end is not None
    (tmp_path / "other").symlink_to(captured.root)
    other = tmp_path / "other.yaml"
    other.write_text(Path(captured.path).read_text().replace(str(captured.root), f"{tmp_path}/other"))
    for end, changed, text in (
        (query.end, {"config": str(other)}, f"one of url file://{captured.root}, not of file://{tmp_path}/other: "),
        (query.end, {"keys": "a"}, "one of keys none, not of a: "),
        ({**query.end, "seq": 15}, {}, "^stream ORDERS ends at 3, before 15: the server has lost messages"),
    ):
        with pytest.raises(SourceError, match=text):
            Query(captured, end, **changed).plan()
    for given, text in (
        ({"url": "file:///a"}, "^config: name the capture's configuration, which says how its messages are decoded$"),
        ({"config": "a", "strat": "a"}, r"strat: unknown option; did you mean start\?"),
        ({"config": "a", "startingOffsets": "first"}, "startingOffsets: expected earliest, latest or a sequence from"),
    ):
        with pytest.raises(ConfigError, match=text):
            CombinedSource(given)


def test_an_archive_and_checkpoints_that_know_another_creation_time_know_the_stream_by_a_message(
    captured: Captured,
) -> None:
    """Servers move it, though nothing was created again."""
    live, other = captured.live, "2026-01-01T00:00:00.123456789Z"
    live.fill(100)
    captured.capture()
    stream, combined = live.query(), Query(captured)
    assert [stream.batch()] == combined.batches() == [list(range(1, 101))]
    mark = captured.root / watermark.path(STREAM, CONSUMER)
    moved = re.sub('(?<="stream_created":")[^"]*', other, mark.read_text())
    mark.write_text(moved)
    assert other in moved
    for end in (stream.end, combined.end):
        assert end is not None
        end["message"][2] = end["created"] = other
    live.fill(20)
    for capture in (False, True):
        if capture:
            state = captured.capture()
            assert (state.marks.stream.losses.total(), state.source.origin.created) == (0, other)
            assert asyncio.run(verify(captured.config)).exit_code() == 0
            assert asyncio.run(status_of(captured.config)).problems == ()
            assert json.loads(mark.read_text())["stream_created"] == other
        with live.query(stream.end) as query:
            assert query.batch() == list(range(101, 121))
        assert Query(captured, combined.end).batches() == [list(range(101, 121))]


@pytest.mark.spark
def test_spark_reads_the_source_in_sql_and_in_a_streaming_query(
    spark: SparkSession, captured: Captured, tmp_path: Path
) -> None:
    captured.sections = DECODED
    captured.live.send([message(number) for number in range(30)])
    captured.capture()
    captured.live.send([message(number) for number in range(30, 40)])
    spark.dataSource.register(JetcaptureDataSource)
    options = {"config": captured.path}
    texts = ", ".join(f"'{name}' '{value}'" for name, value in options.items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW one_table USING jetcapture OPTIONS ({texts})")
    query = f"SELECT {layout.SEQ}, key, n, tags, hour FROM one_table ORDER BY 1"
    expected = read_stream(spark, captured.config).orderBy(layout.SEQ)
    assert spark.sql(query).collect() == expected.select(layout.SEQ, "key", "n", "tags", "hour").collect()
    frame = spark.readStream.format("jetcapture").options(**options, maxOffsetsPerTrigger=25).load()
    writer = frame.select(layout.SEQ, "n").writeStream.format("parquet").trigger(availableNow=True)
    streaming = writer.option("checkpointLocation", f"{tmp_path}/checkpoint").start(f"{tmp_path}/files")
    assert streaming.awaitTermination(120)
    rows = spark.read.parquet(f"{tmp_path}/files").orderBy(layout.SEQ).collect()
    assert [(row[0], row[1]) for row in rows] == [(seq, seq - 1) for seq in range(1, 41)]
