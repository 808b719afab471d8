"""What Spark makes of a plan: which objects it reads, with which reader, and what it says of those that it cannot read.

That each message is read once, with its values, whatever the objects are, is in `test_random_archives.py`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyspark.sql import Row

from jetcapture_py.archive import layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.archive.footer import SchemaReader
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store.archive import IF_DAMAGED
from spark_jobs.archive import Engine, archive_view, read_archive, read_latest
from spark_jobs.job import spark_error
from tests.integration.spark.conftest import HOUR, Archive
from tests.support.archives import encoded, lay_out, put
from tests.support.latest import described, fill, newest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

KEYS = [
    "a/b", "x=y", "100%", "{a}", "{a,b}", "é", "日本", "a b", " a ", "__HIVE_DEFAULT_PARTITION__", None, "007", "1.0",
    "[x]*?", "a,b", "a\\b", "a+b", "a%20b", "_under", ".dot", "..", "~", "a&b;c", "'q'", '"', "2026-01-01", "null", "#",
]  # fmt: skip
Conf = Callable[[str, str], None]
INFERENCE = "spark.sql.sources.partitionColumnTypeInference.enabled"


def seqs(frame: DataFrame) -> list[int]:
    return sorted(row[0] for row in frame.select(layout.SEQ).collect())


def plan(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


# ---------------------------------------------------------------------- keys and columns


def test_keys_and_directories_are_the_strings_that_they_were_whatever_the_session_infers(
    spark: SparkSession, archive: Archive
) -> None:
    odd = Archive(archive.root / "a{b,c}[d]* %20é")
    for number, key in enumerate(KEYS):
        odd.write([number], key, name=[key])
    assert spark.conf.get(INFERENCE) == "true"
    for url in (odd.url, str(odd.root)):
        frame = read_archive(spark, url, "ORDERS")
        rows = frame.select(layout.SEQ, "key", "name", "date", "hour").collect()
        assert sorted(rows) == [(number, key, key, "2026-05-01", "12") for number, key in enumerate(KEYS)]
    assert frame.columns == [*layout.ENVELOPE, "name", *layout.PARTITIONS]


def test_readers_of_paths_and_readers_of_columns_find_the_same_keys(
    spark: SparkSession, archive: Archive, conf: Conf
) -> None:
    keys = ["007", "eu", "a/b", "", None]
    for seq, key in enumerate(keys, 1):
        put(archive.root, encoded([(seq, HOUR * 1_000_000)], key=key, bucket=HOUR))
    directory = archive.root / "ORDERS"
    found: dict[str, list[str | None]] = {}
    for inferred in ("true", "false"):
        conf(INFERENCE, inferred)
        rows = spark.read.parquet(str(directory)).orderBy(layout.SEQ).select("key").collect()
        found[f"Spark, types inferred: {inferred}"] = [row[0] for row in rows]
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
    expected = [key or None for key in keys]
    assert found == dict.fromkeys(found, expected)


def test_names_with_dots_and_backticks_are_read_and_of_those_that_differ_in_case_the_session_sees_one(
    spark: SparkSession, archive: Archive, conf: Conf
) -> None:
    archive.write([1], columns={"a.b": [1], "c`d": [2], "amount": [1], "s": [{"id": 1, "t": [{"X": 1}]}]})
    archive.write([2], columns={"a.b": ["x"], "c`d": [2], "Amount": [2], "s": [{"ID": 2, "t": [{"x": 2}]}]})
    for sensitive in ("false", "true"):
        conf("spark.sql.caseSensitive", sensitive)
        frame = read_archive(spark, archive.url, "ORDERS", columns=["a.b", "c`d", "AMOUNT", "s"])
        assert dict(frame.dtypes)["s"] == "struct<id:bigint,t:array<struct<X:bigint>>>"
        rows = frame.select("`a.b`", "`c``d`", "AMOUNT", "s.id", "s.t.X").collect()
        assert sorted(map(tuple, rows)) == [("1", 2, 1, 1, [1]), ("x", 2, 2, 2, [2])]
    archive.write([3], stream="BAD", list=[[{"id": 1, "ID": 2}]], other=[3])
    error = "^column list has fields id and ID, which differ in case only: name the columns you need, without these$"
    with pytest.raises(JetcaptureError, match=error):
        read_archive(spark, archive.url, "BAD")
    assert read_archive(spark, archive.url, "BAD", columns=["other"]).collect() == [Row(other=3)]


def test_a_type_that_the_session_cannot_read_is_named_or_is_left_out(
    spark: SparkSession, archive: Archive, conf: Conf
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
    conf("spark.sql.timeType.enabled", "true")
    (row,) = read_archive(spark, archive.url, "ORDERS").collect()
    assert str(row["clock"]) == "00:00:00.000001"


# ---------------------------------------------------------------------- plans


def test_overlaps_cost_a_shuffle_only_where_names_and_sequences_do_not_settle_them(
    spark: SparkSession, archive: Archive
) -> None:
    expected = []
    for first, key in enumerate("abcdefghijkl"):  # so many ranges that a plan which lists them would be long
        archive.write([1000 * first + number for number in range(300) if number % 20 < 10], key)
        archive.write([1000 * first + number for number in range(290) if number % 20 > 4], key)
        expected += range(1000 * first, 1000 * first + 290)
    frame = read_archive(spark, archive.url, "ORDERS")
    assert "Exchange hash" not in plan(frame)
    assert plan(frame).count(layout.SEQ) < 50
    assert seqs(frame) == sorted(expected)
    for key, others in (("x", [*range(1, 9)]), ("y", [*range(9, 15)])):  # parts of objects whose names are the same
        archive.write(others, key)
        archive.write([7, 8, 9, 10], key)
    assert seqs(read_archive(spark, archive.url, "ORDERS", keys=["x", "y"])) == sorted([*range(1, 11), *range(7, 15)])
    frame = frame.where("key = 'a'")
    assert seqs(frame) == [*range(290)]
    assert re.search(r"PartitionFilters: \[[^]]*isnotnull\(key", plan(frame))  # through the deduplication
    archive.write([2], timestamps=[HOUR * 1_000_000 + 500])
    frame = read_archive(spark, archive.url, "ORDERS", keys="a")
    assert "Exchange hash" in plan(frame)
    assert seqs(frame) == [0, 1, 2, 2, *range(3, 290)]


def test_a_key_is_read_from_its_bundle_and_no_footer_is_read_twice(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, bucket = [None, "", "eu", "us", "größe", "a/b", "007", "k'", *map(str, range(12))], 1_700_000_100
    messages = {(seq, bucket * 1_000_000 + seq): keys[seq % len(keys)] or None for seq in range(1, 101)}
    some = {each: key for each, key in messages.items() if each[0] < 10}
    names = [*lay_out(tmp_path, messages, 16), *lay_out(tmp_path, some, 1, bucket=bucket + 900)]
    footers: list[bytes] = []
    number = SchemaReader.number

    def counted(reader: SchemaReader, footer: bytes) -> int:
        footers.append(footer)
        return number(reader, footer)

    monkeypatch.setattr(SchemaReader, "number", counted)
    frame = read_archive(spark, str(tmp_path), "ORDERS", keys=["eu"])
    assert len(footers) == len(set(footers)) <= len(names)
    paths = {path.rpartition("/")[2] for path in frame.inputFiles()}
    own = {bundle_of("eu", 16), bundle_of("eu", 1)}
    assert paths == {name.path.rpartition("/")[2] for name in names if name.bundle in own}
    assert "EqualTo(key,eu)" in plan(frame)  # skips row groups and pages
    for chosen in (["eu"], [None], ["eu", None]):
        expected = [seq for part in (messages, some) for (seq, _), key in part.items() if key in chosen]
        assert seqs(read_archive(spark, str(tmp_path), "ORDERS", keys=chosen)) == sorted(expected)


def test_only_objects_that_store_another_type_are_read_in_workers(spark: SparkSession, archive: Archive) -> None:
    narrow, single = pa.array([1, 2], pa.int32()), pa.array([0.5, 1.5], pa.float32())
    archive.write([1, 2], "a", n=narrow, x=single, s=["x", "y"])
    archive.write([3], "a", n=[3], x=[0.1])
    archive.write([4], "a", n=[4], s=[{"z": 1}])
    frame = read_archive(spark, archive.url, "ORDERS").where("key = 'a' AND n > 1").select("s", "x")
    assert (plan(frame).count("FileScan parquet"), plan(frame).count("MapInArrow")) == (1, 1)
    assert "PushedFilters: [IsNotNull(n), GreaterThan(n,1)]" in plan(frame)
    assert "ReadSchema: struct<n:bigint,x:double,s:string>" in plan(frame)
    assert sorted(map(tuple, frame.collect()), key=str) == [("y", 1.5), ('{"z":1}', None), (None, 0.1)]
    archive.write([5, 6], "a", n=["42", "n/a"])
    frame = read_archive(spark, archive.url, "ORDERS", types={"n": "bigint"}, columns=["_nats_seq", "n"])
    assert (plan(frame).count("FileScan parquet"), plan(frame).count("MapInArrow")) == (1, 1)
    assert sorted(map(tuple, frame.collect())) == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 42), (6, None)]
    archive_view(spark, archive.url, "ORDERS", "typed", types={"n": "bigint"})
    assert spark.sql("SELECT sum(n), count(*) FROM typed").collect() == [(52, 6)]
    spark.catalog.dropTempView("typed")


# ---------------------------------------------------------------------- the newest row of each key


@pytest.mark.parametrize(
    ("seed", "engine"),
    [(1, "spark"), (2, "arrow"), *(pytest.param(seed, "spark", marks=pytest.mark.exhaustive) for seed in range(3, 12))],
)
def test_the_newest_row_of_each_key_is_that_of_a_model(
    spark: SparkSession, archive: Archive, seed: int, engine: Engine
) -> None:
    rows = fill(archive, random.Random(seed))
    for by, order, deleted in (
        ("id", "_nats_seq", None),
        (["op", "id"], "version", None),
        (["id"], "version", "d"),
    ):
        condition = None if deleted is None else f"op = '{deleted}'"
        how: dict[str, Any] = {"by": by, "order": order, "deleted": condition, "engine": engine}
        for dedupe in ("auto", "full"):
            read = read_latest(spark, archive.url, "ORDERS", **how, dedupe=dedupe).toArrow()
            assert described(read) == newest(rows, [by] if isinstance(by, str) else by, order, deleted)


def test_the_newest_rows_have_the_columns_of_a_read_and_the_key_reaches_the_objects(
    spark: SparkSession, archive: Archive
) -> None:
    archive.write([1, 2], id=[1, 1], after=[{"id": 7}, None], before=[None, {"id": 7}], size=[1, 2], op=["c", "d"])
    archive.write(
        [3], id=[2], after=[{"id": 8}], before=pa.nulls(1), size=[3], op=["c"], clock=pa.array([1], pa.time64("us"))
    )
    how: dict[str, Any] = {"by": "coalesce(after.id, before.id)", "columns": ["SIZE"]}
    frame = read_latest(spark, archive.url, "ORDERS", **how)
    assert (frame.columns, sorted(frame.collect())) == (["SIZE"], [(2,), (3,)])
    assert read_latest(spark, archive.url, "ORDERS", **how, deleted="op = 'd'").collect() == [(3,)]
    end = "2026-05-01T12:00:00.000002Z"
    assert read_latest(spark, archive.url, "ORDERS", **how, end=end).collect() == [(1,)]
    frame = read_latest(spark, archive.url, "ORDERS", by="id", columns=["id", "size"]).where("id = 1")
    assert "PushedFilters: [IsNotNull(id), EqualTo(id,1)]" in plan(frame)
    assert frame.collect() == [(1, 2)]


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"by": []}, "by: expected at least one column or expression"),
    ({"by": ["id", "ids"]}, r"by: ids: \[UNRESOLVED_COLUMN.WITH_SUGGESTION\] .*"),
    ({"by": "max(id)"}, r"by: max\(id\): \[INVALID_WHERE_CONDITION\] .*"),
    ({"by": "explode(array(id))"}, r"by: explode\(array\(id\)\): \[UNSUPPORTED_GENERATOR.OUTSIDE_SELECT\] .*"),
    ({"by": "map(id, 1)"}, r"by: map\(id, 1\): \[DATATYPE_MISMATCH.INVALID_ORDERING_TYPE\] .*"),
    ({"by": "id", "order": "id DESC"}, r"order: id DESC: \[PARSE_SYNTAX_ERROR\] .*"),
    ({"by": "id", "deleted": "id"}, r"deleted: id: \[DATATYPE_MISMATCH.FILTER_NOT_BOOLEAN\] .*"),
    ({"by": "id", "columns": ["sizes"]}, "the archive has no column sizes; it has .*, size, .*"),
)


def test_a_wrong_expression_is_named_in_one_line(
    spark: SparkSession, archive: Archive, capfd: pytest.CaptureFixture[str]
) -> None:
    archive.write([1], id=[1], size=[1])
    for wrong, text in WRONG:
        with pytest.raises(JetcaptureError) as raised:
            read_latest(spark, archive.url, "ORDERS", **wrong)
        assert re.fullmatch(text, str(raised.value))
    assert capfd.readouterr().err == ""


# ---------------------------------------------------------------------- arguments and errors

DAY = 86_400
A_TIME = "a time such as 2026-05-01T12:00:00Z, a date, today, yesterday or -1h"
A_KEY = "text, or None for messages without a key"
HINT = "could not be decoded: select FROM quarantine, or read it with quarantine=True"
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("ORDERS", {"start": "bogus"}, f'start: expected {A_TIME}, got "bogus"'),
    ("ORDERS", {"end": 5}, f"end: expected {A_TIME}, got 5"),
    ("ORDERS", {"start": datetime(2026, 5, 1)}, "start: 2026-05-01T00:00:00 has no time zone"),
    ("ORDERS", {"keys": [5]}, f"keys: expected {A_KEY}, got 5"),
    ("ORDERS", {"keys": b"eu"}, f"keys: expected {A_KEY}, got b'eu'"),
    ("ORDERS", {"dedupe": "maybe"}, "dedupe='maybe': expected auto, full or none"),
    ("ORDERS", {"engine": "duck"}, "engine='duck': expected spark or arrow"),
    ("EMPTY", {}, "the archive of stream EMPTY under {url} has no objects"),
    ("BAD", {}, f"the archive of stream BAD under {{url}} has only a quarantine, of messages that {HINT}"),
    ("NONE", {}, "no archive of stream NONE under {url}; there are: BAD, EMPTY, ORDERS"),
)


def test_arguments_choose_messages_and_those_that_cannot_be_meant_are_refused_by_name(
    spark: SparkSession, archive: Archive
) -> None:
    for number, key in enumerate(("eu", "us", None)):
        archive.write([number + 1], key, bucket=HOUR + number * DAY)
    (archive.root / "EMPTY").mkdir()
    archive.write([1], stream="BAD", quarantine=True)
    for asked, expected in (
        ({"start": date(2026, 5, 2), "keys": ("us", None)}, [2, 3]),
        ({"end": "2026-05-02T17:46+05:45", "keys": "eu", "columns": "_nats_seq"}, [1]),
        ({"keys": ["unheard of"], "columns": ["_nats_seq", "key"]}, []),
    ):
        assert seqs(read_archive(spark, archive.url, "ORDERS", **asked)) == expected
    for stream, asked, text in REFUSED:
        with pytest.raises(JetcaptureError) as raised:
            read_archive(spark, archive.url, stream, **asked)
        assert str(raised.value) == text.replace("{url}", archive.url)
    for url, text in (("memory://archive", "Spark cannot read memory:// URLs"), ("no://archive", "cannot open no://")):
        with pytest.raises(JetcaptureError, match=text):
            read_archive(spark, url, "ORDERS")


def test_views_have_names_that_plain_sql_finds_or_any_others(spark: SparkSession, archive: Archive) -> None:
    streams = {"ü": "_", "1e5": "_1e5", "orders-eu": "orders_eu", "select": "select"}
    for stream in ("ORDERS", *streams):
        archive.write([1, 2], stream=stream)
    for stream, given, name in (
        *((stream, None, name) for stream, name in streams.items()),
        *(("ORDERS", name, f"`{name.replace('`', '``')}`") for name in ("1", "a`b", "a.b")),
    ):
        archive_view(spark, archive.url, stream, given)
        try:
            assert spark.sql(f"SELECT count(*) FROM {name}").collect() == [(2,)]
        finally:
            spark.catalog.dropTempView(name)


def test_an_object_with_a_damaged_page_is_named_with_a_way_out(spark: SparkSession, archive: Archive) -> None:
    name = archive.write([1, 2, 3])
    path = archive.root / name.path
    path.write_bytes(path.read_bytes()[:4] + bytes(196) + path.read_bytes()[200:])
    with pytest.raises(Exception, match="FAILED_READ_FILE") as caught:
        read_archive(spark, archive.url, "ORDERS").collect()
    text = spark_error(caught.value)
    assert name.path.rpartition("/")[2] in text
    assert text.endswith(IF_DAMAGED)
    path.write_bytes(b"half an object")
    with pytest.raises(JetcaptureError, match=name.digest):
        read_archive(spark, archive.url, "ORDERS")


ROWS = 3000
START = datetime(2026, 1, 1, tzinfo=UTC)
NUMBERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())


def column(value: Callable[[int], Any], type_: pa.DataType) -> pa.Array:
    """Values of the rows, with nulls between."""
    return pa.array([None if row % 7 == 3 else value(row) for row in range(ROWS)], type_)


COLUMNS = {
    **{f"{type_}": column(lambda row: row * 37 % 100, type_) for type_ in NUMBERS[::4]},
    **{f"{type_}": column(lambda row: row * 37 % 30_000, type_) for type_ in NUMBERS if type_.bit_width > 8},
    "millis": column(lambda row: START + timedelta(milliseconds=row * row), pa.timestamp("ms", "UTC")),
    "micros": column(lambda row: START + timedelta(microseconds=row * row), pa.timestamp("us", "UTC")),
    "day": column(lambda row: START.date() + timedelta(days=row), pa.date32()),
    "single": column(lambda row: row / 3, pa.float32()),
    "double": column(lambda row: row / 3, pa.float64()),
    "text": column(lambda row: f"text {row}", pa.string()),
    "again": column(lambda row: f"text {row % 5}", pa.string()),
    "bytes": column(lambda row: b"%d" % row, pa.binary()),
}
"""Columns that never repeat themselves, and some that do."""


def test_every_engine_reads_what_is_written(spark: SparkSession, tmp_path: Path, conf: Conf) -> None:
    payloads = [b"%d" % row for row in range(ROWS)]
    name = Archive(tmp_path).write(range(1, ROWS + 1), payloads=payloads, columns=COLUMNS)
    expected = pa.table({layout.SEQ: range(1, ROWS + 1), layout.PAYLOAD: payloads, **COLUMNS})
    path = str(tmp_path / name.path)

    def same(table: pa.Table) -> bool:
        return bool(table.select(expected.column_names).cast(expected.schema).equals(expected))

    assert same(pq.read_table(path))
    assert same(pl.read_parquet(path).to_arrow())
    assert same(duckdb.connect().sql(f"FROM read_parquet('{path}') ORDER BY {layout.SEQ}").to_arrow_table())
    for vectorised in ("true", "false"):
        conf("spark.sql.parquet.enableVectorizedReader", vectorised)
        assert same(spark.read.parquet(path).orderBy(layout.SEQ).toArrow())
