"""NDJSON and CSV: read alike by every engine with the documented options, and proven by `verify`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from jetcapture_py import read_archive
from jetcapture_py.archive import layout
from jetcapture_py.archive.block_writer import csv_header, csv_lines, json_lines
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.maintain.compact import Compaction, CompactionSettings, compact_in_threads
from jetcapture_py.store.archive import open_archive
from jetcapture_py.verify.proof import verify
from tests.support.nats_server import NatsServer
from tests.support.running import STREAM, capture_all, config, objects, publish

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Start = Callable[..., NatsServer]
TEXTS = (
    *("", " ", '"', '""', '"quoted"', "a,b", "a\nb", "x\r\ny", "\r", "\\", '\\"', "\\n", " padded ", "é", "日本", "🚀"),
    *("null", "NULL", "None", "NaN", "N/A", "#comment", "'single'", "tab\there", "a;b|c", "1", "007", "true", "-"),
    *("\u2028", "\u0085", '{"a": 1}', "[1]", "2026-05-01", "plain text", None),
)
COUNT = 3000
TYPES: dict[str, tuple[pa.DataType, str, str]] = {
    "id": (pa.int64(), "BIGINT", "long"),
    "text": (pa.string(), "VARCHAR", "string"),
    "amount": (pa.decimal128(12, 2), "DECIMAL(12,2)", "decimal(12,2)"),
    "ratio": (pa.float64(), "DOUBLE", "double"),
    "at": (pa.timestamp("us", "UTC"), "TIMESTAMPTZ", "timestamp"),
    "flag": (pa.bool_(), "BOOLEAN", "boolean"),
}
"""The columns, and their types in Arrow, DuckDB and Spark."""
BASE = datetime(2026, 5, 1, 12, tzinfo=UTC)


def table() -> pa.Table:
    source = random.Random(3)
    columns = {
        "id": [2**62, *range(1, COUNT)],
        "text": [source.choice(TEXTS) for _ in range(COUNT)],
        "amount": [source.choice([None, Decimal(source.randrange(-(10**9), 10**9)) / 100]) for _ in range(COUNT)],
        "ratio": [source.choice([None, 0.1, 1e-7, 1e22, -2.5, source.random()]) for _ in range(COUNT)],
        "at": [source.choice([None, BASE + timedelta(microseconds=number * 1001)]) for number in range(COUNT)],
        "flag": [source.choice([True, False, None]) for _ in range(COUNT)],
    }
    return pa.table({name: pa.array(columns[name], type_) for name, (type_, _, _) in TYPES.items()})


def normal(rows: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows as every engine gives them, each value in one type for all."""

    def value(name: str, found: Any) -> Any:
        if found is None or found is pd.NaT or (isinstance(found, float) and found != found):
            return None
        if name == "amount":
            return Decimal(f"{found:.2f}" if isinstance(found, float) else found)
        if name == "at":
            at = datetime.fromisoformat(found) if isinstance(found, str) else found
            return at.replace(tzinfo=at.tzinfo or UTC) - BASE  # Spark's are in the session's time zone, UTC
        return bool(found) if name == "flag" else found

    return sorted((tuple(map(value, TYPES, row)) for row in rows), key=lambda row: int(row[0]))


@pytest.mark.spark
def test_csv_and_json_are_read_alike_by_every_engine_with_the_documented_options(
    tmp_path: Path, spark: SparkSession
) -> None:
    (batch,) = table().to_batches()
    expected = normal(row.values() for row in batch.to_pylist())
    path, lines = str(tmp_path / "rows.csv"), str(tmp_path / "rows.ndjson")
    Path(path).write_bytes(csv_header(batch.schema.names) + bytes(csv_lines(batch)))
    Path(lines).write_bytes(bytes(json_lines(batch)))
    in_duckdb = {name: duck for name, (_, duck, _) in TYPES.items()}
    csv = f"read_csv('{path}', nullstr='\\N', allow_quoted_nulls=false, types={in_duckdb})"
    for query in (csv, f"read_json('{lines}', format='newline_delimited', columns={in_duckdb})"):
        assert normal(duckdb.sql(f"FROM {query}").fetchall()) == expected
    overrides = {"amount": pl.Decimal(12, 2), "at": pl.Datetime("us", "UTC"), "ratio": pl.Float64, "text": pl.String}
    assert normal(pl.read_csv(path, null_values="\\N", schema_overrides=overrides).rows()) == expected
    options: dict[str, Any] = {"keep_default_na": False, "na_values": ["\\N"], "float_precision": "round_trip"}
    of_json: dict[str, Any] = {"dtype": False, "convert_dates": False, "precise_float": True}
    in_spark = ", ".join(f"{name} {type_}" for name, (_, _, type_) in TYPES.items())
    reader = spark.read.schema(in_spark).option("mode", "FAILFAST")
    for frame in (
        pd.read_csv(path, dtype={"text": str}, **options),
        pd.read_json(lines, lines=True, **of_json),
        reader.json(lines).toPandas(),  # before the options of CSV, which stay in the reader
        reader.options(header=True, multiLine=True, escape='"', nullValue="\\N", lineSep="\n").csv(path).toPandas(),
    ):
        assert normal(frame[list(TYPES)].astype(object).itertuples(index=False)) == expected


def test_an_archive_of_several_formats_is_proven_and_its_parquet_read(nats_server: Start, tmp_path: Path) -> None:
    server, root = nats_server(), tmp_path / "archive"
    for index, kind in enumerate(("csv", "parquet", "ndjson", "parquet")):
        asyncio.run(publish(server.url, [("orders.new", b"%d" % number, None) for number in range(100)]))
        decode, block = {"format": "raw", "keep_payload": True}, {"format": kind, "compression": "gzip"}
        found = config(server.url, root, key="", decode=decode, block=block)
        asyncio.run(capture_all(found))
        if index == 0:
            with pytest.raises(JetcaptureError, match=r"1 object .* in csv\.gz, and only Parquet can be read$"):
                read_archive(root, STREAM)
        proof = asyncio.run(verify(found))
        assert (proof.complete, proof.stored) == (True, (index + 1) * 100)
    with pytest.raises(JetcaptureError, match=r"2 objects .* in csv\.gz, ndjson\.gz, .*parquet_only=True"):
        read_archive(root, STREAM)
    seqs = read_archive(root, STREAM, parquet_only=True, columns=[layout.SEQ]).read_all()[layout.SEQ].to_pylist()
    assert sorted(seqs) == [*range(101, 201), *range(301, 401)]
    told: list[str] = []
    archive, before = open_archive(str(root), {}), {name for name in objects(root) if not name.parquet}
    compaction = CompactionSettings(after=0, grace=0, incomplete=True)
    compact_in_threads(archive, Compaction(archive, STREAM, compaction, tell=told.append), 1 << 28)
    assert told[0] == "left alone, because only Parquet is compacted: 2 other objects"
    assert before <= set(objects(root))
    assert asyncio.run(verify(found)).complete
