"""`read_stream`: an archive and its stream as one table, each message once, up to one sequence."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from nats.js.api import RetentionPolicy, StreamConfig

from jetcapture_py.archive import layout
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import moment_of
from jetcapture_py.errors import JetcaptureError
from spark_jobs.archive import read_archive, read_stream
from tests.integration.spark.live import Live
from tests.support.restores import main as restore
from tests.support.running import STREAM, capture_all, config, settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

DECODED = {
    "decode": {
        "format": "json",
        "columns": {"n": "int64", "at": "timestamp", "tags": "list<string>", "region": "string"},
    },
    "key": "{region}",
    "block": {"interval": "1h"},
}


@dataclass
class Captured:
    """A stream with a capture that runs when a test says so."""

    live: Live
    root: Path
    sections: dict[str, Any]

    @property
    def config(self) -> Config:
        return config(self.live.server.url, self.root, **self.sections)

    @property
    def path(self) -> str:
        """The configuration as a file."""
        path = self.root.parent / "capture.yaml"
        path.write_text(yaml.safe_dump(settings(self.live.server.url, self.root, **self.sections)))
        return str(path)

    def capture(self) -> None:
        asyncio.run(capture_all(self.config))

    def restore(self, last: int | None = None) -> None:
        """Delete the stream, and restore it from its archive, up to the sequence `last`."""
        self.live.do(lambda stream: stream.delete_stream(STREAM))
        words = [f"file://{self.root}", STREAM, "--as", STREAM, "--servers", self.live.server.url]
        assert restore(words if last is None else [*words, "--to-seq", str(last)]) == 0

    def read(self, spark: SparkSession, **read: Any) -> DataFrame:
        return read_stream(spark, self.config, **read)

    def seqs(self, spark: SparkSession, **read: Any) -> list[int]:
        return sequences(self.read(spark, **read))


@pytest.fixture
def captured(live: Live, tmp_path: Path, request: pytest.FixtureRequest) -> Captured:
    return Captured(live, tmp_path / "archive", getattr(request, "param", {}))


def sequences(frame: DataFrame) -> list[int]:
    return sorted(row[0] for row in frame.select(layout.SEQ).collect())


def message(number: int, **fields: Any) -> tuple[str, bytes]:
    fields = {
        "n": number,
        "at": f"2026-05-01T12:00:{number % 60:02}Z",
        "region": "eu" if number % 2 else None,
        **fields,
    }
    return f"orders.{number}", json.dumps({**fields, "tags": ["a", str(number)]}).encode()


def test_archive_and_stream_are_one_table_up_to_the_sequence_that_was_there(
    spark: SparkSession, captured: Captured
) -> None:
    captured.live.fill(10)
    captured.capture()
    captured.live.fill(5)
    frame = captured.read(spark)
    captured.live.fill(3)
    assert sequences(frame) == list(range(1, 16))
    captured.capture()  # while the frame is kept
    assert sequences(frame) == list(range(1, 16))
    assert captured.seqs(spark) == list(range(1, 19))
    assert captured.live.consumers() == ["archive"]
    captured.live.purge()
    assert captured.seqs(spark) == list(range(1, 19))
    captured.live.fill(2)
    assert captured.seqs(spark) == list(range(1, 21))


@pytest.mark.parametrize("captured", [DECODED, {}], indirect=True, ids=["declared", "raw"])
def test_before_the_first_object_it_is_empty_or_what_the_stream_has(spark: SparkSession, captured: Captured) -> None:
    before = read_stream(spark, captured.config)
    assert before.count() == 0
    captured.live.send([message(1), message(2)])
    live = read_stream(spark, captured.config)
    rows = live.orderBy(layout.SEQ).collect()
    captured.capture()
    after = read_stream(spark, captured.config)
    assert after.orderBy(layout.SEQ).collect() == rows
    assert after.schema == live.schema == before.schema
    assert len(rows) == 2


@pytest.mark.parametrize(
    "captured",
    [
        {**DECODED, "decode": {"format": "json"}, "block": {"interval": "1h", "bundles": 3}},
        {**DECODED, "block": {"interval": "1h", "time": "at", "time_fallback": "timestamp"}},
    ],
    indirect=True,
    ids=["inferred in bundles", "keys and event time"],
)
def test_a_message_has_the_same_row_before_and_after_it_is_archived(spark: SparkSession, captured: Captured) -> None:
    captured.live.send([message(number) for number in range(20)])
    captured.capture()
    captured.live.send(
        [
            *(message(number) for number in range(20, 40)),
            ("orders.bad", b"{"),
            ("orders.a", message(41)[1], [("Trace", ["1", "2"])]),
            ("orders.b", b'{"n": null}'),
        ]
    )
    before = read_stream(spark, captured.path)
    rows = sorted(map(repr, before.collect()))
    assert len(rows) == 42
    read = {"keys": ["eu", None], "columns": [layout.SEQ, "key", "n"], "start": "2026-01-01"}
    some = sorted(map(repr, read_stream(spark, captured.config, **read).where("n > 10").collect()))
    captured.capture()
    after = read_archive(spark, f"file://{captured.root}", STREAM)
    assert (before.schema, rows) == (after.schema, sorted(map(repr, after.collect())))
    chosen = read_archive(spark, f"file://{captured.root}", STREAM, **read).where("n > 10")
    assert some == sorted(map(repr, chosen.collect()))


def test_keys_and_times_choose_on_both_sides(spark: SparkSession, captured: Captured) -> None:
    captured.sections = DECODED
    captured.live.send([message(number) for number in range(10)])
    captured.capture()
    captured.live.send([message(number) for number in range(10, 20)])
    assert captured.seqs(spark, keys="eu") == list(range(2, 21, 2))
    assert captured.seqs(spark, keys=[None]) == list(range(1, 20, 2))
    times = {
        row[0]: row[1]
        for row in captured.read(spark).selectExpr(layout.SEQ, f"unix_micros({layout.TIMESTAMP})").collect()
    }
    start, end = moment_of(times[5]), moment_of(times[15])
    assert captured.seqs(spark, start=start, end=end) == list(range(5, 15))


def test_what_is_in_neither_is_an_error_that_names_it(spark: SparkSession, captured: Captured) -> None:
    captured.live.fill(10)
    captured.capture()
    captured.live.fill(10)
    captured.live.purge(seq=16)
    with pytest.raises(JetcaptureError, match="messages 11 to 15 of stream ORDERS are gone: it starts at 16; "):
        captured.read(spark)
    assert captured.seqs(spark, fail_on_data_loss=False) == [*range(1, 11), *range(16, 21)]


def test_a_stream_that_was_restored_and_went_on_otherwise_has_no_message_of_its_former_end(
    spark: SparkSession, captured: Captured
) -> None:
    captured.live.fill(20, "orders.old.{}")
    captured.capture()
    captured.restore(12)
    captured.live.fill(4, "orders.new.{}")
    for _ in range(2):
        frame = captured.read(spark)
        rows = sorted((row[0], row[1].split(".")[1]) for row in frame.select(layout.SEQ, layout.SUBJECT).collect())
        assert rows == [*((seq, "old") for seq in range(1, 13)), *((seq, "new") for seq in range(13, 17))]
        captured.capture()


def test_a_stream_that_loses_acknowledged_messages_is_refused(spark: SparkSession, captured: Captured) -> None:
    captured.live.fill(3)
    captured.capture()
    for retention in (RetentionPolicy.WORK_QUEUE, RetentionPolicy.INTEREST):
        config = StreamConfig(name=STREAM, subjects=["orders.>"], retention=retention)
        captured.live.do(lambda stream: stream.delete_stream(STREAM))
        captured.live.do(lambda stream: stream.add_stream(config))  # noqa: B023
        error = f"^stream ORDERS has retention {retention.value}: .* read_archive has what is"
        with pytest.raises(JetcaptureError, match=error):
            captured.read(spark)
