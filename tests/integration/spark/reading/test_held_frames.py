"""A frame of `read_archive` that is kept while the archive changes: the objects of its plan, or "read it again"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from jetcapture_py.archive import layout
from jetcapture_py.store.archive import AGAIN
from spark_jobs.archive import archive_view, read_archive
from spark_jobs.job import guarded
from tests.held_reads import held_reads, wrong
from tests.integration.spark.conftest import HOUR, Archive
from tests.support.archives import merge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from jetcapture_py.archive.layout import ObjectName

    Conf = Callable[[str, str], None]

pytestmark = pytest.mark.spark

CREATED = "2024-01-01T00:00:00Z"


@pytest.fixture
def view(spark: SparkSession) -> Iterator[str]:
    yield "held"
    spark.catalog.dropTempView("held")


def seqs(frame: DataFrame) -> list[int]:
    return sorted(row[0] for row in frame.select(layout.SEQ).collect())


def orders(archive: Archive, blocks: Sequence[Sequence[int]], key: str = "a", **more: Any) -> list[ObjectName]:
    return [archive.write(block, key, created=CREATED, **more) for block in blocks]


def test_a_cached_frame_and_a_refreshed_view_do_not_gain_what_was_stored_since(
    spark: SparkSession, archive: Archive, view: str
) -> None:
    sources = orders(archive, [[1, 2], [3, 4], [5, 6]])
    frame = archive_view(spark, archive.url, "ORDERS", view)
    cached = read_archive(spark, archive.url, "ORDERS").cache()
    assert cached.count() == 6
    archive.write([7, 8])  # the capture goes on, here and in an hour that is new
    archive.write([9], bucket=HOUR + 3600)
    merge(archive.root, sources, keep=True)  # a compaction in its grace period
    assert seqs(read_archive(spark, archive.url, "ORDERS")) == list(range(1, 10))
    assert seqs(cached) == [1, 2, 3, 4, 5, 6]
    cached.unpersist()
    spark.sql(f"REFRESH TABLE {view}")
    spark.catalog.refreshByPath(f"{archive.url}/ORDERS")
    assert seqs(frame) == seqs(spark.table(view)) == [1, 2, 3, 4, 5, 6]


def test_a_frame_whose_objects_were_replaced_fails_and_a_job_says_read_it_again(
    spark: SparkSession, archive: Archive, view: str, conf: Conf, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = orders(archive, [[1, 2], [3, 4]])
    orders(archive, [[5, 6], [6, 7]], "b")  # overlapping
    orders(archive, [[10]], "c", timestamps=[5])
    orders(archive, [[10]], "c", timestamps=[6])  # compared by Spark
    frame = archive_view(spark, archive.url, "ORDERS", view)
    assert seqs(frame) == [1, 2, 3, 4, 5, 6, 7, 10, 10]
    merge(archive.root, sources)
    conf("spark.sql.files.ignoreMissingFiles", "true")  # which would lose them without an error
    spark.sql(f"REFRESH TABLE {view}")
    for held in (spark.table(view), frame.where("key = 'a'"), frame.where(f"{layout.SEQ} = 3")):
        with pytest.raises((PySparkException, Py4JError), match="FILE_NOT_EXIST"):
            held.collect()
    assert guarded("query", lambda: frame.agg({layout.SEQ: "sum"}).collect()) == 1
    assert capsys.readouterr().err.endswith(f" is gone, removed by maintenance: {AGAIN}\n")
    assert seqs(read_archive(spark, archive.url, "ORDERS")) == [1, 2, 3, 4, 5, 6, 7, 10, 10]


@pytest.mark.parametrize(
    ("stream", "name", "value"),
    [
        ("A=B", "fileStreamSink.ignoreMetadata", "false"),
        ("ORDERS", "fileStreamSink.ignoreMetadata", "true"),
        ("ORDERS", "fileSink.log.compactInterval", "1"),
    ],
)
def test_a_frame_is_exact_where_spark_cannot_be_given_a_list_of_files(
    spark: SparkSession, archive: Archive, view: str, conf: Conf, stream: str, name: str, value: str
) -> None:
    sources = orders(archive, [[1, 2], [3, 4]], stream=stream)
    conf(f"spark.sql.streaming.{name}", value)
    frame = archive_view(spark, archive.url, stream, view)
    orders(archive, [[5]], stream=stream)
    orders(archive, [[1, 2]], "b", stream=stream)  # an object of a planned name
    spark.sql(f"REFRESH TABLE {view}")
    assert seqs(frame) == seqs(spark.table(view)) == [1, 2, 3, 4]
    assert frame.columns[-3:] == ["key", "date", "hour"]
    (archive.root / sources[0].path).unlink()
    spark.sql(f"REFRESH TABLE {view}")  # which leaves it out
    with pytest.raises((PySparkException, Py4JError), match=r"of 2 objects, Spark finds 1; .*: read it again"):
        frame.count()


@pytest.mark.exhaustive
def test_held_reads_beside_a_capture_and_compactions_are_right_or_fail(spark: SparkSession, tmp_path: Path) -> None:
    outcomes = held_reads(spark, tmp_path / "archive", 15, 1)
    assert not wrong(outcomes), outcomes
