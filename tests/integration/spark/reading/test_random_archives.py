"""Spark's reader returns of random archives exactly the rows that a model without our code expects."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from jetcapture_py.reading.selection import Selection
from spark_jobs.archive import read_archive
from tests.support.engines import EVERYTHING, check_reads
from tests.support.random_archives import STREAM, RandomArchive, archives

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from jetcapture_py.reading.plan import Dedupe

pytestmark = pytest.mark.spark


class InSpark:
    """`read_archive` for Spark, with one of its readers."""

    def __init__(self, spark: SparkSession, engine: str) -> None:
        self._spark, self._engine = spark, engine

    def read(
        self,
        archive: RandomArchive,
        *,
        selection: Selection = EVERYTHING,
        quarantine: bool = False,
        columns: Sequence[str] | None = None,
        dedupe: Dedupe = "auto",
    ) -> pa.Table:
        arguments: dict[str, Any] = {"engine": self._engine, "dedupe": dedupe, **selection.arguments()}
        frame = read_archive(self._spark, archive.url, STREAM, quarantine=quarantine, columns=columns, **arguments)
        return frame.toArrow()


def check(spark: SparkSession, drawn: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        archive = drawn.draw(archives(Path(directory)))
        check_reads(drawn, archive, [InSpark(spark, "spark"), InSpark(spark, "arrow")])


@settings(max_examples=6)
@given(some.data())
def test_every_message_is_read_once_with_its_values(spark: SparkSession, drawn: Any) -> None:
    check(spark, drawn)


@pytest.mark.exhaustive
@settings(max_examples=50, derandomize=False)
@given(some.data())
def test_every_message_of_many_archives_is_read_once_with_its_values(spark: SparkSession, drawn: Any) -> None:
    check(spark, drawn)
