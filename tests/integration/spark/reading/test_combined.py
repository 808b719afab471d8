"""The source `jetcapture`: a query that begins in the archive and goes on in the stream, each message once."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jetcapture_py.archive import layout, watermark
from jetcapture_py.errors import ConfigError, JetcaptureError, SourceError
from spark_jobs.datasource.combined import CombinedSource, CombinedStreamReader, JetcaptureDataSource
from tests.integration.spark.live import Live
from tests.integration.spark.reading.test_read_stream import DECODED, Captured, message
from tests.support.archives import merge
from tests.support.running import CONSUMER, STREAM, objects

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def captured(live: Live, tmp_path: Path) -> Captured:
    return Captured(live, tmp_path / "archive", {})


class Query:
    """Asks a reader what Spark asks it; offsets go through JSON, partitions through pickle."""

    def __init__(self, captured: Captured, end: dict[str, Any] | None = None, **options: str) -> None:
        source = CombinedSource({"config": captured.path, **options})
        self.reader, self.end = CombinedStreamReader(source, source.schema()), end
        self.start: dict[str, Any] = {}

    def plan(self) -> bool:
        """Find the end of the next batch; whether there is one."""
        self.start = self.end or _stored(self.reader.initialOffset())
        self.next_end = _stored(self.reader.latestOffset(self.start, self.reader.getDefaultReadLimit()))
        return self.next_end != self.start

    def run(self) -> list[int]:
        """Read the batch that was planned; the sequences in it."""
        return [seq for seq, _ in self.rows()]

    def rows(self) -> list[tuple[int, bytes]]:
        """Read the batch that was planned; sequences and payloads, in order."""
        found: list[tuple[int, bytes]] = []
        for part in pickle.loads(pickle.dumps(self.reader.partitions(self.start, self.next_end))):
            for batch in pickle.loads(pickle.dumps(self.reader)).read(part):
                columns = (batch.column(name).to_pylist() for name in (layout.SEQ, layout.PAYLOAD))
                found += zip(*columns, strict=True)
        self.end = self.next_end
        return sorted(found)

    def batches(self) -> list[list[int]]:
        """The sequences of all batches until nothing is new."""
        found = []
        while self.plan():
            found.append(self.run())
        self.reader.stop()
        return found


def _stored(offset: dict[str, Any]) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(json.dumps(offset))
    return stored


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
    captured.live.fill(5)
    assert Query(captured, later.end).batches() == [list(range(171, 176))]
    assert Query(captured, startingOffsets="168").batches() == [[168, 169, 170], list(range(171, 176))]


def test_what_is_in_neither_ends_a_query_and_is_skipped_if_told_so(captured: Captured) -> None:
    captured.live.fill(10)
    captured.capture()
    captured.live.fill(10)
    captured.live.purge(seq=16)
    query = Query(captured)
    assert query.plan()
    assert query.run() == list(range(1, 11))
    with pytest.raises(SourceError, match="messages 11 to 15 of stream ORDERS are gone"):
        query.plan()
    query.reader.stop()
    assert Query(captured, failOnDataLoss="false").batches() == [list(range(1, 11)), list(range(16, 21))]


def test_a_query_goes_on_in_a_restored_stream_and_not_in_another_one(captured: Captured) -> None:
    captured.live.fill(20, "orders.old.{}")
    captured.capture()
    query = Query(captured, maxOffsetsPerTrigger="12")
    assert query.plan()
    assert query.run() == list(range(1, 13))
    query.reader.stop()
    ahead = Query(captured)
    assert ahead.batches() == [list(range(1, 21))]
    captured.restore(15)
    captured.live.fill(3, "orders.new.{}")
    captured.capture()
    captured.live.purge()
    captured.live.fill(1)
    assert [seq for batch in Query(captured, query.end).batches() for seq in batch] == list(range(13, 20))
    assert [seq for batch in Query(captured).batches() for seq in batch] == list(range(1, 20))
    behind = Query(captured, ahead.end)
    with pytest.raises(SourceError, match="ORDERS was deleted and created again"):
        behind.plan()
    behind.reader.stop()


def test_a_restored_stream_of_whose_messages_none_is_left_continues_no_further_than_it_was_restored(
    captured: Captured,
) -> None:
    captured.live.fill(20)
    captured.capture()
    ahead = Query(captured)
    assert ahead.batches() == [list(range(1, 21))]
    captured.restore(15)
    captured.capture()
    captured.live.purge()
    behind = Query(captured, ahead.end)
    with pytest.raises(SourceError, match="ORDERS was deleted and created again"):
        behind.plan()
    behind.reader.stop()


def test_a_stream_that_ends_before_the_checkpoint_has_lost_messages(captured: Captured) -> None:
    captured.live.fill(10)
    captured.capture()
    query = Query(captured)
    assert query.batches() == [list(range(1, 11))]
    assert query.end is not None
    behind = Query(captured, {**query.end, "seq": 15})
    with pytest.raises(SourceError, match=r"^stream ORDERS ends at 10, before 15: the server has lost messages"):
        behind.plan()
    behind.reader.stop()


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


def test_a_restored_stream_that_has_new_messages_alone_is_read_as_the_capture_selects(captured: Captured) -> None:
    captured.live.fill(15, "orders.new.{}")
    captured.capture()
    captured.restore()
    captured.sections["source"] = {"filter_subjects": ["orders.new.*"]}
    captured.capture()
    captured.live.purge()
    captured.live.fill(2, "orders.old.{}")
    assert [seq for batch in Query(captured).batches() for seq in batch] == list(range(1, 16))


def test_of_a_stream_that_was_created_again_everything_is_read_that_the_capture_selects_now(
    captured: Captured,
) -> None:
    captured.sections["source"] = {"filter_subjects": ["orders.old.*"]}
    captured.live.fill(5, "orders.old.{}")
    captured.capture()
    captured.live.recreate()
    del captured.sections["source"]
    captured.live.fill(3, "orders.new.{}")
    assert Query(captured).batches() == [[1, 2, 3]]


def test_options_that_do_not_fit_a_checkpoint_or_each_other_are_refused_in_one_line(
    captured: Captured, tmp_path: Path
) -> None:
    captured.live.fill(3)
    captured.capture()
    query = Query(captured)
    query.batches()
    (tmp_path / "other").symlink_to(captured.root)
    other = tmp_path / "other.yaml"
    other.write_text(Path(captured.path).read_text().replace(str(captured.root), f"{tmp_path}/other"))
    for changed, text in (
        ({"config": str(other)}, f"one of url file://{captured.root}, not of file://{tmp_path}/other: "),
        ({"keys": "a"}, "one of keys none, not of a: "),
    ):
        with pytest.raises(SourceError, match=text):
            Query(captured, query.end, **changed).plan()
    for given, text in (
        ({"url": "file:///a"}, "^config: name the capture's configuration, which says how its messages are decoded$"),
        ({"config": "a", "strat": "a"}, r"strat: unknown option; did you mean start\?"),
        (
            {"config": "a", "startingOffsets": "first"},
            "startingOffsets: expected earliest, latest or a sequence from 1",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            CombinedSource(given)


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
    expected = captured.read(spark).orderBy(layout.SEQ)
    assert spark.sql(query).collect() == expected.select(layout.SEQ, "key", "n", "tags", "hour").collect()
    for _ in range(2):
        frame = spark.readStream.format("jetcapture").options(**options, maxOffsetsPerTrigger=15).load()
        writer = frame.select(layout.SEQ, "n").writeStream.format("parquet")
        writer = writer.option("checkpointLocation", f"{tmp_path}/checkpoint").trigger(availableNow=True)
        streaming = writer.start(f"{tmp_path}/files")
        assert streaming.awaitTermination(120)
        captured.live.send([message(number) for number in range(40, 45)])
    rows = spark.read.parquet(f"{tmp_path}/files").orderBy(layout.SEQ).collect()
    assert [(row[0], row[1]) for row in rows] == [(seq, seq - 1) for seq in range(1, 46)]


def test_a_task_whose_objects_vanish_after_its_first_rows_fails_and_its_next_attempt_plans_again(
    captured: Captured,
) -> None:
    captured.sections = {"block": {"max_messages": 10}}
    captured.live.fill(400)
    captured.capture()
    query = Query(captured, minPartitions="1")
    assert query.plan()
    (part,) = query.reader.partitions(query.start, query.next_end)
    batches = query.reader.read(part)
    next(batches)
    merge(captured.root, sorted(objects(captured.root), key=lambda name: name.first_seq)[-2:])
    with pytest.raises(JetcaptureError, match="is gone, removed by maintenance: read it again"):
        list(batches)
    assert query.run() == list(range(1, 401))
