"""Reading archives with many keys in bundles, and archives whose layout was changed: every message once."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.archive.footer import SchemaReader
from spark_jobs.archive import Engine, archive_view, read_archive
from tests.support.archives import lay_out, tangle

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

BUCKET = 1_700_000_100
KEYS = [None, "", "eu", "us", "größe", "a/b", "007", "k'", *map(str, range(12))]
MESSAGES = {(seq, BUCKET * 1_000_000 + seq): KEYS[seq % len(KEYS)] or None for seq in range(1, 101)}


def some(first: int, last: int) -> dict[tuple[int, int], str | None]:
    return {each: key for each, key in MESSAGES.items() if first <= each[0] <= last}


def rows(frame: DataFrame) -> list[tuple[int, str | None]]:
    return sorted((row[layout.SEQ], row["key"]) for row in frame.select(layout.SEQ, "key").collect())


EXPECTED = sorted((seq, key) for (seq, _), key in MESSAGES.items())


@pytest.mark.parametrize("engine", ["spark", "arrow"])
def test_bundles_are_read_like_keys_with_the_same_columns(spark: SparkSession, tmp_path: Path, engine: Engine) -> None:
    for root, bundles in ((tmp_path / "keys", 0), (tmp_path / "bundles", 16)):
        lay_out(root, some(1, 60), bundles)
        lay_out(root, some(50, 100), bundles)
        lay_out(root, some(1, 10), bundles, bucket=BUCKET + 900)
    frames = [read_archive(spark, str(tmp_path / name), "ORDERS", engine=engine) for name in ("keys", "bundles")]
    assert frames[0].columns == frames[1].columns
    found = [sorted(map(tuple, frame.drop(layout.HEADERS).collect()), key=str) for frame in frames]
    assert found[0] == found[1]
    assert len(found[0]) == 110
    assert rows(frames[1].where("hour = '22'"))  # the partition columns are strings
    assert {row["key"] for row in frames[1].where("key IN ('007', '7')").collect()} == {"007", "7"}


@pytest.mark.parametrize("engine", ["spark", "arrow"])
def test_links_are_followed_unless_they_lead_nowhere_or_in_a_circle(
    spark: SparkSession, tmp_path: Path, engine: Engine
) -> None:
    lay_out(tmp_path / "archive", MESSAGES, 0)
    tangle(tmp_path / "archive", "eu")
    assert rows(read_archive(spark, str(tmp_path / "archive"), "ORDERS", engine=engine)) == EXPECTED
    only = read_archive(spark, str(tmp_path / "archive"), "ORDERS", keys=["eu"], engine=engine)
    assert rows(only) == [pair for pair in EXPECTED if pair[1] == "eu"]


@pytest.mark.parametrize(
    ("engine", "dedupe"),
    [
        ("spark", "auto"),
        pytest.param("arrow", "full", marks=pytest.mark.exhaustive),
        pytest.param("spark", "full", marks=pytest.mark.exhaustive),
        pytest.param("arrow", "auto", marks=pytest.mark.exhaustive),
    ],
)
def test_a_bucket_whose_layout_was_changed_three_times_is_read_once(
    spark: SparkSession, tmp_path: Path, engine: Engine, dedupe: Any
) -> None:
    """Keys, then 4 bundles, then 8, of which the names cannot tell, then 16; each time with copies of those before."""
    for bundles, (first, last) in ((0, (1, 40)), (4, (30, 60)), (8, (50, 80)), (16, (1, 100))):
        lay_out(tmp_path, some(first, last), bundles)
    frame = read_archive(spark, str(tmp_path), "ORDERS", engine=engine, dedupe=dedupe)
    assert rows(frame) == EXPECTED
    for keys in (["eu"], [None], ["a/b", None, "007", "nobody"], [str(n) for n in range(12)], []):
        part = read_archive(spark, str(tmp_path), "ORDERS", engine=engine, dedupe=dedupe, keys=keys)
        assert rows(part) == [(seq, key) for seq, key in EXPECTED if key in keys]
    without_key = [(seq, key) for seq, key in EXPECTED if key is None]
    empty = read_archive(spark, str(tmp_path), "ORDERS", engine=engine, dedupe=dedupe, keys=[""])
    assert rows(empty) == without_key  # an empty key is no key, as where messages are captured


@pytest.mark.parametrize("numbers", list(combinations((0, 4, 8, 16), 2)))
def test_copies_in_two_layouts_of_a_bucket_are_dropped(
    spark: SparkSession, tmp_path: Path, numbers: tuple[int, int]
) -> None:
    for bundles, (first, last) in zip(numbers, ((1, 60), (40, 100)), strict=True):
        lay_out(tmp_path, some(first, last), bundles)
    assert rows(read_archive(spark, str(tmp_path), "ORDERS")) == EXPECTED


def test_a_key_is_read_from_its_bundle_and_no_footer_is_read_twice(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [*lay_out(tmp_path, some(1, 100), 16), *lay_out(tmp_path, some(1, 9), 4, bucket=BUCKET + 900)]
    footers: list[bytes] = []
    number = SchemaReader.number

    def counted(reader: SchemaReader, footer: bytes) -> int:
        footers.append(footer)
        return number(reader, footer)

    monkeypatch.setattr(SchemaReader, "number", counted)
    frame = read_archive(spark, str(tmp_path), "ORDERS", keys=["eu"])
    assert len(footers) == len(set(footers)) <= len(names)
    paths = {path.rpartition("/")[2] for path in frame.inputFiles()}
    own = {bundle_of("eu", 16), bundle_of("eu", 4)}
    assert paths == {name.path.rpartition("/")[2] for name in names if name.bundle in own}
    assert "EqualTo(key,eu)" in frame._jdf.queryExecution().executedPlan().toString()  # skips row groups and pages
    assert rows(frame) == sorted([each for each in EXPECTED if each[1] == "eu"] + [(2, "eu")])


def test_plain_sql_finds_a_key_in_an_archive_with_bundles(spark: SparkSession, tmp_path: Path) -> None:
    lay_out(tmp_path, MESSAGES, 16)
    archive_view(spark, str(tmp_path), "ORDERS", "bundled")
    found = spark.sql("SELECT count(*), count(DISTINCT key) FROM bundled WHERE key IN ('eu', '007')").collect()
    assert tuple(found[0]) == (10, 2)


@pytest.mark.parametrize("engine", ["spark", "arrow"])
def test_a_column_called_bundle_of_older_objects_under_keys_is_null_for_objects_in_bundles(
    spark: SparkSession, tmp_path: Path, engine: Engine
) -> None:
    (name,) = lay_out(tmp_path, {(1, BUCKET * 1_000_000): "eu"}, 0)
    table = pq.ParquetFile(tmp_path / name.path).read()
    pq.write_table(table.append_column("Bundle", pa.array([7], pa.int64())), tmp_path / name.path)
    lay_out(tmp_path, {(2, BUCKET * 1_000_000 + 900_000_000): "us"}, 16, bucket=BUCKET + 900)
    frame = read_archive(spark, str(tmp_path), "ORDERS", engine=engine)
    found = frame.select(layout.SEQ, "key", "Bundle").collect()
    assert sorted(map(tuple, found)) == [(1, "eu", 7), (2, "us", None)]
