from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store.archive import IF_DAMAGED, ArchiveFiles, File
from spark_jobs.archive import read_archive
from spark_jobs.job import spark_error
from tests.integration.spark.conftest import HOUR, Archive
from tests.support.archives import encoded, put

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession


pytestmark = pytest.mark.spark

KEYS = [
    "a/b", "x=y", "100%", "{a}", "{a,b}", "é", "日本", "a b", " a ", "__HIVE_DEFAULT_PARTITION__", None, "007", "1.0",
    "[x]*?", "a,b", "a\\b", "a+b", "a%20b", "_under", ".dot", "..", "~", "a&b;c", "'q'", '"', "2026-01-01", "null", "#",
]  # fmt: skip


def seqs(frame: DataFrame) -> list[int]:
    return sorted(row[0] for row in frame.select(layout.SEQ).collect())


def columns_of(frame: DataFrame) -> dict[str, str]:
    return dict(frame.dtypes)


def plan(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


class TestKeys:
    def test_every_key_comes_back_as_the_string_it_was(self, spark: SparkSession, archive: Archive) -> None:
        for number, key in enumerate(KEYS):
            archive.write([number], key, name=[key])
        rows = read_archive(spark, archive.url, "ORDERS").select(layout.SEQ, "key", "name").collect()
        assert {row[0]: row[1] for row in rows} == dict(enumerate(KEYS))
        assert all(row["key"] == row["name"] for row in rows)

    def test_an_archive_may_lie_under_a_directory_that_looks_like_a_pattern(
        self, spark: SparkSession, archive: Archive
    ) -> None:
        odd = Archive(archive.root / "a{b,c}[d]* %20é")
        odd.write([1, 2], "x")
        assert seqs(read_archive(spark, str(odd.root), "ORDERS")) == [1, 2]
        assert seqs(read_archive(spark, odd.url, "ORDERS")) == [1, 2]

    def test_partition_columns_are_strings_whatever_the_session_infers(
        self, spark: SparkSession, archive: Archive
    ) -> None:
        archive.write([1], "007")
        setting = "spark.sql.sources.partitionColumnTypeInference.enabled"
        before = spark.conf.get(setting)
        frame = read_archive(spark, archive.url, "ORDERS")
        row = frame.select("key", "date", "hour").first()
        assert row is not None
        assert tuple(row) == ("007", "2026-05-01", "12")
        assert [columns_of(frame)[name] for name in layout.PARTITIONS] == ["string"] * 3
        assert spark.conf.get(setting) == before == "true"


class TestDuplicates:
    def test_overlaps_cost_a_shuffle_only_where_names_and_sequences_do_not_settle_them(
        self, spark: SparkSession, archive: Archive
    ) -> None:
        archive.write([1, 2])
        archive.write([4, 5])
        archive.write([1, 2], "b")
        assert "Exchange hash" not in plan(read_archive(spark, archive.url, "ORDERS"))
        archive.write([2, 3, 4])
        assert "Exchange hash" not in plan(read_archive(spark, archive.url, "ORDERS"))
        archive.write([2], timestamps=[HOUR * 1_000_000 + 500])
        frame = read_archive(spark, archive.url, "ORDERS")
        assert "Exchange hash" in plan(frame)
        assert seqs(frame) == [1, 1, 2, 2, 2, 3, 4, 5]

    def test_overlaps_of_many_ranges_make_no_larger_a_plan_than_those_of_one(
        self, spark: SparkSession, archive: Archive
    ) -> None:
        expected = []
        for first, key in enumerate("abcdefghijkl"):
            archive.write([1000 * first + number for number in range(300) if number % 20 < 10], key)
            archive.write([1000 * first + number for number in range(290) if number % 20 > 4], key)
            expected += range(1000 * first, 1000 * first + 290)
        frame = read_archive(spark, archive.url, "ORDERS")
        assert "Exchange hash" not in plan(frame)
        assert plan(frame).count(layout.SEQ) < 50
        assert seqs(frame) == sorted(expected)

    def test_a_filter_on_the_key_reaches_the_objects_through_the_deduplication(
        self, spark: SparkSession, archive: Archive
    ) -> None:
        for key in "ab":
            archive.write([1, 2], key)
            archive.write([2, 3], key)
        frame = read_archive(spark, archive.url, "ORDERS").where("key = 'a'")
        assert seqs(frame) == [1, 2, 3]
        assert re.search(r"PartitionFilters: \[[^]]*isnotnull\(key", plan(frame))


class TestDrift:
    def test_names_with_dots_and_backticks_are_read(self, spark: SparkSession, archive: Archive) -> None:
        archive.write([1], columns={"a.b": [1], "c`d": [2]})
        archive.write([2], columns={"a.b": ["x"], "c`d": [2]})
        frame = read_archive(spark, archive.url, "ORDERS", columns=["a.b", "c`d"])
        assert sorted(tuple(row) for row in frame.collect()) == [("1", 2), ("x", 2)]

    def test_the_envelope_comes_first_and_the_partitions_last(self, spark: SparkSession, archive: Archive) -> None:
        archive.write([1], z=[1])
        archive.write([2], z=[1], a=[1], _nats_row=pa.array([0], pa.int32()))
        expected = [*layout.ENVELOPE, layout.ROW, "z", "a", *layout.PARTITIONS]
        assert read_archive(spark, archive.url, "ORDERS").columns == expected

    def test_a_type_that_the_session_cannot_read_is_named_or_is_left_out(
        self, spark: SparkSession, archive: Archive, request: pytest.FixtureRequest
    ) -> None:
        archive.write([1], clock=pa.array([1], pa.time64("us")))
        archive.write([1], stream="NANOS", clock=pa.array([1], pa.time64("ns")))
        for stream, error in (
            ("ORDERS", "column clock is a time of day: set"),
            ("NANOS", "column clock is time64"),
        ):
            with pytest.raises(JetcaptureError, match=error):
                read_archive(spark, archive.url, stream)
            assert read_archive(spark, archive.url, stream, columns=[layout.SEQ]).count() == 1
        request.addfinalizer(lambda: spark.conf.unset("spark.sql.timeType.enabled"))
        spark.conf.set("spark.sql.timeType.enabled", "true")
        (row,) = read_archive(spark, archive.url, "ORDERS").collect()
        assert str(row["clock"]) == "00:00:00.000001"


class TestArchive:
    def test_readers_of_paths_and_readers_of_columns_find_the_same_keys(
        self, spark: SparkSession, archive: Archive
    ) -> None:
        keys = ["007", "eu", "a/b", "", None]
        for seq, key in enumerate(keys, 1):
            put(archive.root, encoded([(seq, HOUR * 1_000_000)], key=key, bucket=HOUR))
        directory = archive.root / "ORDERS"
        expected = [key or None for key in keys]
        found: dict[str, list[str | None]] = {}
        for inferred in ("true", "false"):
            spark.conf.set("spark.sql.sources.partitionColumnTypeInference.enabled", inferred)
            try:
                rows = spark.read.parquet(str(directory)).orderBy(layout.SEQ).select("key").collect()
            finally:
                spark.conf.unset("spark.sql.sources.partitionColumnTypeInference.enabled")
            found[f"Spark, types inferred: {inferred}"] = [row[0] for row in rows]
        for engine in ("spark", "arrow"):
            rows = read_archive(spark, archive.url, "ORDERS", engine=engine).orderBy(layout.SEQ).collect()
            found[engine] = [row["key"] for row in rows]
            assert rows[0].asDict().keys() == {*layout.ENVELOPE, *layout.PARTITIONS}
        for hive in (True, False):
            query = f"FROM read_parquet('{directory}/**/*.parquet', hive_partitioning={hive}) ORDER BY {layout.SEQ}"
            found[f"DuckDB, {hive}"] = [row[0] for row in duckdb.connect().execute(f"SELECT key {query}").fetchall()]
            frame = pl.scan_parquet(f"{directory}/**/*.parquet", hive_partitioning=hive).sort(layout.SEQ)
            found[f"Polars, {hive}"] = frame.collect()["key"].to_list()
        typed = ds.partitioning(pa.schema([(name, pa.string()) for name in layout.PARTITIONS]), flavor="hive")
        for partitioning in (typed, None):
            table = ds.dataset(directory, partitioning=partitioning).to_table().sort_by(layout.SEQ)
            found[f"pyarrow, {partitioning}"] = table["key"].to_pylist()
            frame = pd.read_parquet(directory, partitioning=partitioning).sort_values(layout.SEQ)
            found[f"pandas, {partitioning}"] = [None if pd.isna(key) else key for key in frame["key"]]
        assert found == dict.fromkeys(found, expected)

    def test_a_store_that_spark_has_no_file_system_for_is_a_clear_error(self, spark: SparkSession) -> None:
        with pytest.raises(JetcaptureError, match="Spark cannot read memory:// URLs"):
            read_archive(spark, "memory://archive", "ORDERS")
        with pytest.raises(JetcaptureError, match="cannot open nonsense://"):
            read_archive(spark, "nonsense://archive", "ORDERS")

    def test_an_object_with_a_damaged_page_is_named_with_a_way_out(self, spark: SparkSession, archive: Archive) -> None:
        name = archive.write([1, 2, 3])
        data = bytearray((archive.root / name.path).read_bytes())
        data[4:200] = bytes(196)
        (archive.root / name.path).write_bytes(data)
        with pytest.raises(Exception, match="FAILED_READ_FILE") as caught:
            read_archive(spark, archive.url, "ORDERS").collect()
        text = spark_error(caught.value)
        assert name.path.rpartition("/")[2] in text
        assert text.endswith(IF_DAMAGED)
        (archive.root / name.path).write_bytes(b"half an object")
        with pytest.raises(JetcaptureError, match=name.digest):
            read_archive(spark, archive.url, "ORDERS")

    def test_an_object_that_appears_while_it_is_planned_is_not_read_by_half(
        self, spark: SparkSession, archive: Archive, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        archive.write([1, 2])
        infos = ArchiveFiles.infos

        def late(files: ArchiveFiles, objects: Sequence[File], **more: Any) -> Any:
            archive.write([2, 3])
            return infos(files, objects, **more)

        monkeypatch.setattr(ArchiveFiles, "infos", late)
        assert seqs(read_archive(spark, archive.url, "ORDERS")) == [1, 2]
        monkeypatch.undo()
        assert seqs(read_archive(spark, archive.url, "ORDERS")) == [1, 2, 3]
