"""`spark.readStream.format("nats")`: streaming queries, stopped, killed and cut off."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.spark.live import Live

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = pytest.mark.spark


def start(spark: SparkSession, live: Live, directory: Path, *, once: bool = False, **options: Any) -> StreamingQuery:
    """A query that writes the stream's sequences to files; `once` ends it when it has read what is there."""
    frame = spark.readStream.format("nats").options(**live.options, **options).load()
    writer = frame.selectExpr("_nats_seq", "_nats_payload").writeStream
    writer = writer.option("checkpointLocation", f"{directory}/checkpoint").format("parquet")
    return (writer.trigger(availableNow=True) if once else writer).start(f"{directory}/files")


@contextlib.contextmanager
def running(query: StreamingQuery) -> Iterator[StreamingQuery]:
    """Stop it in the end."""
    try:
        yield query
    finally:
        query.stop()


def written(spark: SparkSession, directory: Path) -> list[int]:
    """What the query's files hold: each once, as the file sink guarantees for a source that repeats its batches."""
    return sorted(row[0] for row in spark.read.parquet(f"{directory}/files").select("_nats_seq").collect())


def wait(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline, f"it never was so that {what}"
        time.sleep(0.05)


def test_a_query_reads_what_comes_and_goes_on_from_its_checkpoint(
    spark: SparkSession, live: Live, tmp_path: Path
) -> None:
    live.fill(100)
    with running(start(spark, live, tmp_path)) as query:
        query.processAllAvailable()
        live.fill(50)
        query.processAllAvailable()
    assert written(spark, tmp_path) == list(range(1, 151))
    live.fill(30)
    with running(start(spark, live, tmp_path)) as query:
        query.processAllAvailable()
    assert written(spark, tmp_path) == list(range(1, 181))
    assert live.consumers() == []


def test_available_now_reads_what_is_there_in_limited_batches_and_ends(
    spark: SparkSession, live: Live, tmp_path: Path
) -> None:
    live.fill(100)
    with running(start(spark, live, tmp_path, once=True, maxOffsetsPerTrigger=40, minPartitions=2)) as query:
        assert query.awaitTermination(60)
        assert [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]] == [
            40,
            40,
            20,
        ]
    assert written(spark, tmp_path) == list(range(1, 101))


@pytest.mark.exhaustive
def test_a_server_that_restarts_in_the_middle_of_a_query_loses_and_repeats_nothing(
    spark: SparkSession, live: Live, tmp_path: Path
) -> None:
    live.fill(4000)
    with running(start(spark, live, tmp_path, maxOffsetsPerTrigger=1000)) as query:
        wait(lambda: query.lastProgress is not None, "the first batch is done")
        live.server.kill()
        live.server.start()
        live.fill(100)
        query.processAllAvailable()
    assert written(spark, tmp_path) == list(range(1, 4101))


@pytest.mark.exhaustive
def test_a_killed_driver_loses_and_repeats_nothing(spark: SparkSession, live: Live, tmp_path: Path) -> None:
    live.fill(5000)
    command = [
        sys.executable,
        "-m",
        "tests.integration.spark.stream_to_files",
        live.server.url,
        "ORDERS",
        str(tmp_path),
    ]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        wait(lambda: (tmp_path / "checkpoint/commits/1").exists(), "two batches are done")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "checkpoint/commits/9").exists(), "it was done before it was killed"
    live.fill(100)
    with running(start(spark, live, tmp_path, once=True)) as query:
        assert query.awaitTermination(60)
    assert written(spark, tmp_path) == list(range(1, 5101))
