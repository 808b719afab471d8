"""NDJSON and CSV: read alike by every engine, proven by `verify`, and never half there."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pandas as pd
import polars as pl
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.config.model import Config
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.verify.proof import verify
from tests.support.nats_server import NatsServer
from tests.support.running import (
    STREAM,
    Message,
    capture_all,
    config,
    objects,
    publish,
    publish_and_capture,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Start = Callable[..., NatsServer]

TEXTS = (
    *("", " ", '"', '""', '"quoted"', "a,b", "a\nb", "x\r\ny", "\r", "\\", '\\"', "\\n", " padded ", "é", "日本", "🚀"),
    *("null", "NULL", "None", "NaN", "N/A", "#comment", "'single'", "tab\there", "a;b|c", "1", "007", "true", "-"),
    *("\u2028", "\u0085", '{"a": 1}', "[1]", "2026-05-01", "plain text", None),
)
COUNT = 10_000
COLUMNS = {
    "id": "int64",
    "text": "string",
    "amount": "decimal(12,2)",
    "ratio": "float64",
    "at": "timestamp",
    "flag": "bool",
    "tags": "list<string>",
}
Row = tuple[int, str | None, Decimal | None, float | None, datetime | None, bool | None, str | None]
EPOCH = datetime.fromtimestamp(0, UTC)
BASE = datetime(2026, 5, 1, 12, tzinfo=UTC)


def values(count: int) -> Iterator[dict[str, Any]]:
    source = random.Random(3)
    for number in range(count):
        yield {
            "id": number if number else 2**62,
            "text": source.choice(TEXTS),
            "amount": None if number % 11 == 0 else f"{source.randrange(-(10**9), 10**9) / 100:.2f}",
            "ratio": None if number % 13 == 0 else source.choice([0.1, 1e-7, 1e22, -2.5, source.random()]),
            "at": (BASE + timedelta(microseconds=number * 1001)).isoformat() if number % 17 else None,
            "flag": source.choice([True, False, None]),
            "tags": source.choice([None, [], ["a", 'b"', "c,\n"], ["é", None]]),
        }


def messages(count: int) -> list[Message]:
    return [("orders.new", json.dumps(each).encode(), None) for each in values(count)]


def expected() -> list[Row]:
    return sorted(
        (
            each["id"],
            each["text"],
            None if each["amount"] is None else Decimal(each["amount"]),
            each["ratio"],
            None if each["at"] is None else datetime.fromisoformat(each["at"]),
            each["flag"],
            None if each["tags"] is None else json.dumps(each["tags"], separators=(",", ":"), ensure_ascii=False),
        )
        for each in values(COUNT)
    )


def missing(value: Any) -> bool:
    return value is None or value is pd.NaT or (isinstance(value, float) and value != value)


def row(found: Any) -> Row:
    """A row as every engine gives it, with its own types for the same values."""
    number, text, amount, ratio, at, flag, tags = (None if missing(each) else each for each in found)
    if isinstance(amount, float):
        amount = Decimal(f"{amount:.2f}")
    elif amount is not None:
        amount = Decimal(amount)
    if isinstance(at, str):
        at = datetime.fromisoformat(at)
    if tags is not None and not isinstance(tags, str):
        tags = json.dumps(list(tags), separators=(",", ":"), ensure_ascii=False)
    if at is not None:
        at = EPOCH + (at.replace(tzinfo=at.tzinfo or UTC) - EPOCH)  # Spark's are in the session's time zone, UTC
    return (
        int(number),
        text,
        amount,
        None if ratio is None else float(ratio),
        at,
        None if flag is None else bool(flag),
        tags,
    )


def captured(nats_server: Start, root: Path, kind: str, compression: str) -> Config:
    server = nats_server()
    sections: dict[str, Any] = {
        "decode": {"format": "json", "columns": COLUMNS},
        "block": {"format": kind, "compression": compression, "max_messages": COUNT * 3 // 10},
    }
    return publish_and_capture(server.url, root, messages(COUNT), key="", **sections)


NAMES = list(COLUMNS)
QUOTED = ", ".join(f'"{name}"' for name in NAMES)
IN_DUCKDB = {
    "id": "BIGINT",
    "text": "VARCHAR",
    "amount": "DECIMAL(12,2)",
    "ratio": "DOUBLE",
    "at": "TIMESTAMPTZ",
    "flag": "BOOLEAN",
}


def files(root: Path, suffix: str) -> list[str]:
    paths = [str(root / name.path) for name in objects(root)]
    assert all(path.endswith(suffix) for path in paths)
    return paths


def test_rows_of_csv_are_read_alike_by_duckdb_polars_and_pandas(nats_server: Start, tmp_path: Path) -> None:
    settings = captured(nats_server, tmp_path / "archive", "csv", "none")
    paths = files(tmp_path / "archive", ".csv")
    types = {name: kind for name, kind in IN_DUCKDB.items() if name != "id"}
    duck = duckdb.connect().execute(
        f"SELECT {QUOTED} FROM read_csv({paths}, nullstr='\\N', allow_quoted_nulls=false, "
        f"hive_partitioning=false, types={types})"
    )
    assert sorted(map(row, duck.fetchall())) == expected()
    overrides = {"amount": pl.Decimal(12, 2), "at": pl.Datetime("us", "UTC"), "ratio": pl.Float64, "text": pl.String}
    polars = pl.concat(pl.read_csv(path, null_values="\\N", schema_overrides=overrides) for path in paths)
    assert sorted(map(row, polars.select(NAMES).rows())) == expected()
    options: dict[str, Any] = {"keep_default_na": False, "na_values": ["\\N"], "float_precision": "round_trip"}
    pandas = pd.concat(pd.read_csv(path, dtype={"id": "int64", "text": str, "tags": str}, **options) for path in paths)
    assert sorted(map(row, pandas[NAMES].astype(object).itertuples(index=False))) == expected()
    assert asyncio.run(verify(settings)).complete


def test_lines_of_json_are_read_alike_by_duckdb_polars_and_pandas(nats_server: Start, tmp_path: Path) -> None:
    settings = captured(nats_server, tmp_path / "archive", "ndjson", "gzip")
    paths = files(tmp_path / "archive", ".ndjson.gz")
    columns = IN_DUCKDB | {"tags": "VARCHAR[]"}
    query = f"read_json({paths}, format='newline_delimited', columns={columns}, hive_partitioning=false)"
    duck = duckdb.connect().execute(f"SELECT {QUOTED} FROM {query}")
    assert sorted(map(row, duck.fetchall())) == expected()
    schema = {
        **dict.fromkeys(("text", "at"), pl.String),
        **dict.fromkeys(("amount", "ratio"), pl.Float64),
        "id": pl.Int64,
        "flag": pl.Boolean,
        "tags": pl.List(pl.String),
    }
    polars = pl.concat(pl.read_ndjson(gzip.decompress(Path(path).read_bytes()), schema=schema) for path in paths)
    assert sorted(map(row, polars.select(NAMES).rows())) == expected()
    options: dict[str, Any] = {"dtype": False, "convert_dates": False, "precise_float": True}
    pandas = pd.concat(pd.read_json(path, lines=True, **options) for path in paths)
    assert sorted(map(row, pandas[NAMES].astype(object).itertuples(index=False))) == expected()
    assert asyncio.run(verify(settings)).complete


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["csv", "ndjson"])
def test_rows_of_text_are_read_alike_by_spark(
    nats_server: Start, tmp_path: Path, spark: SparkSession, kind: str
) -> None:
    captured(nats_server, tmp_path / "archive", kind, "gzip")
    url = f"file://{tmp_path}/archive/{STREAM}"
    tags = "array<string>" if kind == "ndjson" else "string"
    # the columns of a CSV file are found by their place, so the envelope's are named as well
    envelope = (
        f"{layout.STREAM} string, {layout.SUBJECT} string, {layout.SEQ} long, {layout.TIMESTAMP} timestamp, "
        f"{layout.NANOS} smallint, {layout.DELIVERED} int, {layout.HEADERS} string"
    )
    schema = (
        f"{envelope}, id long, text string, amount decimal(12,2), ratio double, at timestamp, flag boolean, tags {tags}"
    )
    reader = spark.read.schema(schema).option("mode", "FAILFAST")
    if kind == "csv":
        frame = reader.options(header=True, multiLine=True, escape='"', nullValue="\\N", lineSep="\n").csv(url)
    else:
        frame = reader.json(url)
    found = frame.select(*NAMES).toPandas().astype(object)
    assert sorted(map(row, found.itertuples(index=False))) == expected()


@pytest.mark.spark
def test_an_archive_whose_format_was_changed_is_proven_and_its_parquet_can_still_be_read(
    nats_server: Start, tmp_path: Path, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    from jetcapture_py.maintain.compact import CompactionSettings
    from spark_jobs.archive import read_archive
    from spark_jobs.compact import compact
    from spark_jobs.replaying.origin import origin_of

    server, root = nats_server(), tmp_path / "archive"
    url = f"file://{root}"
    decode = {"format": "json", "columns": COLUMNS}
    all_of_them = messages(400)
    formats = [("csv", "gzip"), ("parquet", "zstd"), ("ndjson", "none"), ("parquet", "none")]
    for index, (kind, compression) in enumerate(formats):
        asyncio.run(publish(server.url, all_of_them[index * 100 : (index + 1) * 100]))
        found = config(server.url, root, decode=decode, key="", block={"format": kind, "compression": compression})
        asyncio.run(capture_all(found))
        if index == 0:
            with pytest.raises(
                JetcaptureError, match=r"1 object of stream ORDERS in csv\.gz, and only Parquet can be read$"
            ):
                read_archive(spark, url, STREAM)
            with pytest.raises(JetcaptureError, match="no Parquet objects of stream ORDERS"):
                compact(spark, url, STREAM)
        proof = asyncio.run(verify(found))
        assert proof.complete
        assert proof.stored == (index + 1) * 100
    with pytest.raises(JetcaptureError, match=r"2 objects of stream ORDERS in csv\.gz, ndjson, .*parquet_only=True"):
        read_archive(spark, url, STREAM)
    seqs = [each[0] for each in read_archive(spark, url, STREAM, parquet_only=True).select(layout.SEQ).collect()]
    assert sorted(seqs) == [*range(101, 201), *range(301, 401)]
    told: list[str] = []
    before = {name for name in objects(root) if not name.parquet}
    compact(spark, url, STREAM, CompactionSettings(after=0, grace=0, incomplete=True), tell=told.append)
    assert told[0] == "left alone, because only Parquet is compacted: 2 other objects"
    assert before <= set(objects(root))
    assert origin_of(url, STREAM, {}).stream == STREAM
    assert asyncio.run(verify(found)).complete
