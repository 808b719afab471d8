"""Spark's reader returns of random archives exactly the rows that a model without our code expects."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from jetcapture_py.archive import layout
from spark_jobs.archive import read_archive
from tests.support.random_archives import STREAM, archives, comparable
from tests.unit.reading.test_engines import identities, selected, selections

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def check(spark: SparkSession, drawn: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        archive = drawn.draw(archives(Path(directory)))
        for bad in sorted({message.bad for message in archive.messages}):
            expected = comparable(archive.rows(bad=bad))
            schemas = []
            for engine in ("spark", "arrow"):
                frame = read_archive(spark, archive.url, STREAM, quarantine=bad, engine=engine)
                schemas.append(frame.schema)
                table = frame.toArrow()
                assert comparable(table.to_pylist()) == expected, (engine, archive.log)
            assert schemas[0] == schemas[1]
            names = [name for name in table.schema.names if name != layout.DELIVERED]  # which copies differ in
            columns = drawn.draw(some.lists(some.sampled_from(names), min_size=1, unique=True))
            narrow = read_archive(spark, archive.url, STREAM, quarantine=bad, columns=columns).toArrow()
            assert sorted(map(str, narrow.to_pylist())) == sorted(map(str, table.select(columns).to_pylist()))
        if all(message.bad for message in archive.messages):
            return
        selection = drawn.draw(selections(archive))
        rows = [row for message, row in archive.pairs() if selected(message, selection)]
        frame = read_archive(spark, archive.url, STREAM, **selection.arguments())
        assert identities(frame.toArrow().to_pylist()) == identities(rows), (selection, archive.log)
        compared = read_archive(spark, archive.url, STREAM, dedupe="full")
        assert identities(compared.toArrow().to_pylist()) == identities(archive.rows()), archive.log


@settings(max_examples=6)
@given(some.data())
def test_every_message_is_read_once_with_its_values(spark: SparkSession, drawn: Any) -> None:
    check(spark, drawn)


@pytest.mark.exhaustive
@settings(max_examples=50, derandomize=False)
@given(some.data())
def test_every_message_of_many_archives_is_read_once_with_its_values(spark: SparkSession, drawn: Any) -> None:
    check(spark, drawn)
