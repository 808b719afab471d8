"""Reading archives with many keys in bundles, and archives whose layout was changed: every message once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.archive.footer import SchemaReader
from spark_jobs.archive import Engine, read_archive
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
