"""Copies of messages under two keys and in two buckets, as a changed configuration leaves them, are read once."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from jetcapture_py.archive import layout
from spark_jobs.archive import archive_view, read_archive
from spark_jobs.query import main
from tests.integration.spark.conftest import HOUR, Archive
from tests.support.running import capture_all, config, objects, publish, publish_and_capture
from tests.support.stores import ThenStore, crash

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.spark


def seqs(frame: DataFrame) -> list[int]:
    return sorted(row[0] for row in frame.select(layout.SEQ).collect())


def test_messages_that_were_captured_twice_by_two_rules_are_read_once_in_the_full_mode(
    spark: SparkSession, nats_server: Callable[..., NatsServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, server = tmp_path / "archive", nats_server()
    asyncio.run(publish(server.url, [("orders.eu", b'{"id":%d,"n":1.5}' % number, None) for number in range(10)]))
    before = config(
        server.url, root, decode={"format": "json"}, key="{id}", block={"interval": "1m"}, store={"retry_for": "0s"}
    )
    with pytest.raises(BaseExceptionGroup):
        asyncio.run(capture_all(before, store=ThenStore(before, crash)))
    publish_and_capture(
        server.url, root, [("orders.eu", b'{"id":"x","n":"text"}', None)], decode={"format": "json"}, key="{subject}"
    )
    assert {name.key for name in objects(root)} > {"orders.eu"}
    url = f"file://{root}"
    copies = read_archive(spark, url, "ORDERS", dedupe="auto").count()
    assert copies > 11
    for engine in ("spark", "arrow"):
        assert seqs(read_archive(spark, url, "ORDERS", dedupe="full", engine=engine)) == list(range(1, 12))
    archive_view(spark, url, "ORDERS", "everything", dedupe="full")
    assert spark.sql("SELECT count(*), count(DISTINCT _nats_seq) FROM everything").first() == (11, 11)
    sql = "SELECT count(*) AS n FROM archive"
    for arguments, count in (([], copies), (["--dedupe", "full"], 11)):
        assert main([url, "ORDERS", sql, "--format", "json", *arguments]) == 0
        assert json.loads(capsys.readouterr().out) == {"n": count}


def test_copies_in_buckets_of_two_lengths_and_with_drifted_columns_are_read_once_within_any_range_of_time(
    spark: SparkSession, archive: Archive
) -> None:
    times = [(HOUR + second) * 1_000_000 for second in (0, 1000, 2000, 3599)]
    for number, key in enumerate(("a", "b")):
        for seq, time in enumerate(times, 1):
            archive.write([seq], key, bucket=HOUR + (seq - 1) * 900, timestamps=[time], amount=[1.5 if number else 1])
    archive.write([1, 2, 3, 4], "a", timestamps=times, amount=["x"] * 4)
    archive.write([1, 2, 3, 4], None, timestamps=times)
    frame = read_archive(spark, archive.url, "ORDERS", dedupe="full")
    assert seqs(frame) == [1, 2, 3, 4]
    assert seqs(frame.where("_nats_seq > 2")) == [3, 4]
    assert frame.where("key = 'a'").count() + frame.where("key <> 'a' OR key IS NULL").count() == 4
    assert sum(row["count"] for row in frame.groupBy("key").count().collect()) == 4
    assert seqs(read_archive(spark, archive.url, "ORDERS", dedupe="full", keys=["b"])) == [1, 2, 3, 4]
    assert read_archive(spark, archive.url, "ORDERS", dedupe="full", columns=["amount"]).count() == 4
