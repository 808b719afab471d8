"""Only the objects, row groups and pages of the chosen keys are read of bundles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jetcapture_py.archive import layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.archive.footer import SchemaReader
from spark_jobs.archive import read_archive
from tests.support.archives import lay_out

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from pyspark.sql import DataFrame, SparkSession

BUCKET = 1_700_000_100
KEYS = [None, "", "eu", "us", "größe", "a/b", "007", "k'", *map(str, range(12))]
MESSAGES = {(seq, BUCKET * 1_000_000 + seq): KEYS[seq % len(KEYS)] or None for seq in range(1, 101)}


def some(first: int, last: int) -> dict[tuple[int, int], str | None]:
    return {each: key for each, key in MESSAGES.items() if first <= each[0] <= last}


def rows(frame: DataFrame) -> list[tuple[int, str | None]]:
    return sorted((row[layout.SEQ], row["key"]) for row in frame.select(layout.SEQ, "key").collect())


EXPECTED = sorted((seq, key) for (seq, _), key in MESSAGES.items())


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
