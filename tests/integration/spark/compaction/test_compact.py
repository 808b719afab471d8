"""The job that compacts: its plan, its summary, its errors. What it does to each unit is in `unit/compaction`."""

from __future__ import annotations

import json
import re
import socket
from datetime import UTC, datetime
from itertools import product
from typing import TYPE_CHECKING

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from jetcapture_py.archive import watermark
from jetcapture_py.compaction.unit import CHANGED
from jetcapture_py.config.units import format_time
from jetcapture_py.maintain.compact import Compaction, CompactionSettings, compact_in_threads
from jetcapture_py.reading.selection import Selection
from jetcapture_py.store.archive import ArchiveFiles
from spark_jobs.archive import read_archive
from spark_jobs.compact import compact, main
from spark_jobs.job import spark_error
from tests.integration.spark.conftest import HOUR, Archive
from tests.support import s3
from tests.support.running import objects

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
DAY, HOURS = 86_400, [HOUR, HOUR + 3600, HOUR + 7200]


@pytest.fixture
def hours(archive: Archive) -> Archive:
    """Two objects to merge for each of two keys in each of three hours."""
    for key in ("a", None):
        for hour in HOURS:
            for seq in (1, 2):
                archive.write([seq], key, bucket=hour)
    return archive


def test_buckets_that_are_not_complete_by_the_watermark_are_left_alone(hours: Archive) -> None:
    said: list[str] = []

    def chosen(hour: int, **more: object) -> set[tuple[str | None, int]]:
        """Keys and hours to merge of an archive that is complete up to a time; a slice of these objects lasts a day."""
        time = datetime.fromtimestamp(hour, UTC)
        known = watermark.ConsumerWatermark(stream="ORDERS", consumer="c", created="", seq=2, time=time)
        path = hours.root / watermark.path("ORDERS", "c")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(known.encode())
        settings = CompactionSettings(after=0, grace=0, dry_run=True, **more)  # type: ignore[arg-type]
        files = ArchiveFiles(hours.url, {})
        compaction = Compaction(files, "ORDERS", settings, tell=said.append)
        compact_in_threads(files, compaction, 64 << 20)
        return {(merged.key, merged.bucket) for merged in compaction.merged}

    assert chosen(HOURS[2]) == set()
    until = format_time(datetime.fromtimestamp(HOURS[2], UTC))
    assert said == [f"skipping time slices that end after the watermark, {until}: they are incomplete"]
    assert chosen(HOURS[1] + DAY, selection=Selection.of(keys=[None])) == {(None, HOURS[0]), (None, HOURS[1])}
    assert chosen(HOURS[1], incomplete=True) == {*product((None, "a"), HOURS)}


@pytest.mark.exhaustive
def test_workers_with_another_working_directory_or_disk_than_the_driver(
    spark: SparkSession, hours: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hours.root.parent)
    unseen = "file:///proc/self/cwd/archive"  # another directory for each process
    summary = compact(spark, unseen, "ORDERS", CompactionSettings(after=0, grace=0))
    assert (summary.left, summary.changes, len(objects(hours.root))) == ({CHANGED: 6}, (), 12)
    needs = "every worker of Spark needs the archive at this path"
    host = socket.gethostname()
    for engine, text in (("arrow", f"{unseen}/ORDERS does not exist on {host}"), ("spark", "on a worker of Spark")):
        with pytest.raises((PySparkException, Py4JError)) as raised:
            read_archive(spark, unseen, "ORDERS", engine=engine).count()
        assert text in spark_error(raised.value)
        assert spark_error(raised.value).endswith(needs)
    assert len(objects(hours.root)) == 12
    summary = compact(spark, "archive", "ORDERS", CompactionSettings(after=0, grace=0))
    assert (summary.errors, len(objects(hours.root))) == ((), 6)
    assert read_archive(spark, "archive", "ORDERS", engine="arrow").count() == 12


def test_the_command_shows_its_plan_a_summary_and_a_failure(
    spark: SparkSession, archive: Archive, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        archive.write([number * 2, number * 2 + 1, number * 2 + 2])
    archive.write([50], None)
    before = objects(archive.root)
    assert main([archive.url, "ORDERS", "--dry-run"]) == 0
    plan, total = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r'key "a", 2026-05-01T12:00:00Z: 4 objects, [\d.]+ KiB', plan)
    assert re.fullmatch(r"ORDERS: 5 objects, [\d.]+ KiB: would read 4 objects, [\d.]+ KiB, in 1 unit", total)
    assert objects(archive.root) == before
    assert main([archive.url, "ORDERS", "--grace", "0s"]) == 0
    assert capsys.readouterr().out.startswith("ORDERS: 5 objects, ")
    name = archive.write([4, 5])
    (archive.root / name.path).write_bytes(b"half an object")
    assert main([archive.url, "ORDERS", "--grace", "0s"]) == 1
    found = capsys.readouterr()
    assert found.out.startswith("ORDERS: 3 objects")
    assert found.err.startswith("compact: cannot read file:///")
    assert name.digest in found.err
    assert found.err.count("\n") == 1


def test_what_cannot_be_done_is_one_line(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
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
    spark: SparkSession, archive: Archive, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(30):
        archive.write([number * 2, number * 2 + 1, number * 2 + 2])
    with s3.serve() as endpoint:
        words = [s3.upload(endpoint, archive.root), "ORDERS", "--grace", "0s", "--json", *s3.arguments(endpoint)]
        assert main(words) == 0
        summary = json.loads(capsys.readouterr().out)
        assert (summary["objects_before"], summary["objects_after"], summary["duplicates"]) == (30, 1, 29)
        assert summary["bytes_before"] > summary["bytes_after"] > 0
        (change,) = summary["changes"]
        assert (change["key"], change["objects_before"], change["objects_after"]) == ("a", 30, 1)
        assert main(words) == 0
        assert json.loads(capsys.readouterr().out)["changes"] == []
