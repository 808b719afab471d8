"""Copies of messages under two keys and in two buckets, as a changed configuration leaves them, are read once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jetcapture_py.archive import layout
from spark_jobs.archive import read_archive
from tests.integration.spark.conftest import HOUR, Archive

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


pytestmark = pytest.mark.spark


def seqs(frame: DataFrame) -> list[int]:
    return sorted(row[0] for row in frame.select(layout.SEQ).collect())


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
