from __future__ import annotations

import json
import re
import socket
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from jetcapture_py.archive import layout, watermark
from jetcapture_py.compaction.summary import Summary
from jetcapture_py.compaction.unit import CHANGED
from jetcapture_py.config.units import format_time
from jetcapture_py.maintain.compact import CompactionSettings
from jetcapture_py.reading.selection import Selection
from spark_jobs.archive import read_archive
from spark_jobs.compact import compact, main
from spark_jobs.job import spark_error
from tests.integration.spark.conftest import HOUR, Archive
from tests.support import s3

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def names(archive: Archive) -> list[layout.ObjectName]:
    paths = (str(path.relative_to(archive.root)) for path in archive.root.rglob("*.parquet"))
    return sorted(filter(None, map(layout.parse_path, paths)), key=lambda name: name.path)


def at_once(spark: SparkSession, archive: Archive, said: list[str] | None = None, **more: Any) -> Summary:
    settings = CompactionSettings(after=0, grace=0, **more)
    return compact(spark, archive.url, "ORDERS", settings, tell=(said if said is not None else []).append)


class TestChoice:
    @pytest.fixture
    def hours(self, archive: Archive) -> Archive:
        """Two objects to merge for each of two keys in each of three hours."""
        for key in ("a", None):
            for hour in range(3):
                for seq in (1, 2):
                    archive.write([seq], key, bucket=HOUR + 3600 * hour)
        return archive

    def test_buckets_that_are_not_complete_by_the_watermark_are_left_alone(
        self, spark: SparkSession, hours: Archive
    ) -> None:
        known = watermark.ConsumerWatermark(
            stream="ORDERS", consumer="c", created="", seq=2, time=datetime.fromtimestamp(HOUR + 2 * 3600, UTC)
        )
        path = hours.root / watermark.path("ORDERS", "c")
        path.parent.mkdir(parents=True)
        path.write_bytes(known.encode())
        said: list[str] = []
        # a bucket's interval in these objects is a day: none of the three has ended
        summary = at_once(spark, hours, said)
        assert summary.changes == ()
        until = format_time(known.time)
        assert said == [f"skipping time slices that end after the watermark, {until}: they are incomplete"]
        path.write_bytes(replace(known, time=datetime.fromtimestamp(HOUR + 3600 + 86_400, UTC)).encode())
        assert [
            change.bucket[11:13] for change in at_once(spark, hours, selection=Selection.of(keys=[None])).changes
        ] == ["12", "13"]
        assert [change.bucket[11:13] for change in at_once(spark, hours, incomplete=True).changes] == [
            "14",
            "12",
            "13",
            "14",
        ]

    @pytest.mark.exhaustive
    def test_workers_with_another_working_directory_or_disk_than_the_driver(
        self, spark: SparkSession, hours: Archive, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(hours.root.parent)
        unseen = "file:///proc/self/cwd/archive"  # another directory for each process
        summary = compact(spark, unseen, "ORDERS", CompactionSettings(after=0, grace=0))
        assert (summary.left, summary.changes, len(names(hours))) == ({CHANGED: 6}, (), 12)
        needs = "every worker of Spark needs the archive at this path"
        host = socket.gethostname()
        for engine, text in (("arrow", f"{unseen}/ORDERS does not exist on {host}"), ("spark", "on a worker of Spark")):
            with pytest.raises((PySparkException, Py4JError)) as raised:
                read_archive(spark, unseen, "ORDERS", engine=engine).count()
            assert text in spark_error(raised.value)
            assert spark_error(raised.value).endswith(needs)
        assert len(names(hours)) == 12
        summary = compact(spark, "archive", "ORDERS", CompactionSettings(after=0, grace=0))
        assert (summary.errors, len(names(hours))) == ((), 6)
        assert read_archive(spark, "archive", "ORDERS", engine="arrow").count() == 12


class TestCommand:
    @pytest.fixture
    def orders(self, archive: Archive) -> Archive:
        for number in range(4):
            archive.write([number * 2, number * 2 + 1, number * 2 + 2])
        archive.write([50], None)
        return archive

    def test_a_dry_run_shows_the_plan_and_changes_nothing(
        self, spark: SparkSession, orders: Archive, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = names(orders)
        assert main([orders.url, "ORDERS", "--dry-run"]) == 0
        plan, total = capsys.readouterr().out.splitlines()
        assert re.fullmatch(r'key "a", 2026-05-01T12:00:00Z: 4 objects, [\d.]+ KiB', plan)
        assert re.fullmatch(r"ORDERS: 5 objects, [\d.]+ KiB: would read 4 objects, [\d.]+ KiB, in 1 unit", total)
        assert names(orders) == before

    def test_the_summary_is_for_people_or_for_machines(
        self, spark: SparkSession, orders: Archive, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([orders.url, "ORDERS", "--grace", "0s", "--json"]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert (summary["objects_before"], summary["objects_after"], summary["duplicates"]) == (5, 2, 3)
        assert summary["bytes_before"] > summary["bytes_after"] > 0
        (change,) = summary["changes"]
        assert (change["key"], change["objects_before"], change["objects_after"]) == ("a", 4, 1)
        assert main([orders.url, "ORDERS"]) == 0
        assert capsys.readouterr().out.startswith("ORDERS: 2 objects, ")

    def test_a_failure_is_one_line_after_the_summary_and_exit_code_1(
        self, spark: SparkSession, orders: Archive, capsys: pytest.CaptureFixture[str]
    ) -> None:
        name = next(name for name in names(orders) if name.key == "a")
        (orders.root / name.path).write_bytes(b"half an object")
        assert main([orders.url, "ORDERS", "--grace", "0s"]) == 1
        found = capsys.readouterr()
        assert found.out.startswith("ORDERS: 5 objects")
        assert found.err.startswith("compact: cannot read file:///")
        assert name.digest in found.err
        assert found.err.count("\n") == 1

    def test_what_cannot_be_done_is_one_line(self, spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
        for words, message in (
            (["file:///nowhere/at/all", "ORDERS"], "no objects of stream ORDERS under file:///nowhere/at/all"),
            (["file:///tmp/{key}/x", "ORDERS"], "replace {key} with one key"),
            (["file:///tmp", "ORDERS", "--target-size", "0"], "the target size must be above 0"),
            (["file:///tmp", "ORDERS", "--quarantine", "--key", "a"], "not divided by key"),
        ):
            assert main(words) == 1
            error = capsys.readouterr().err
            assert error.startswith("compact: ")
            assert message in error
            assert error.count("\n") == 1


def test_an_archive_in_object_storage_is_compacted_there(
    spark: SparkSession, archive: Archive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(30):
        archive.write([number * 2, number * 2 + 1, number * 2 + 2])
    with s3.serve() as endpoint:
        url = s3.upload(endpoint, archive.root)
        words = [url, "ORDERS", "--grace", "0s", "--json", *s3.arguments(endpoint)]
        assert main(words) == 0
        summary = json.loads(capsys.readouterr().out)
        assert (summary["objects_before"], summary["objects_after"], summary["duplicates"]) == (30, 1, 29)
        assert main(words) == 0
        assert json.loads(capsys.readouterr().out)["changes"] == []
