"""What the encoder chooses for a column can be read by all that the archive promises to be read by."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import BlockId
from jetcapture_py.archive.schema import ENVELOPE, REPLY
from jetcapture_py.archive.writer import Encoder
from tests.support.archives import put

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

NUMBERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
TIMES = (pa.timestamp("ms", "UTC"), pa.timestamp("us", "UTC"))


def columns(rows: int) -> dict[str, pa.Array]:
    """Columns that never repeat themselves, and some that do, with nulls between."""
    kept = [index % 7 != 3 for index in range(rows)]
    found = {}
    for kind in NUMBERS:
        most = 100 if kind in (pa.int8(), pa.uint8()) else 30_000
        found[f"{kind}"] = pa.array([index * 37 % most if keep else None for index, keep in enumerate(kept)], kind)
    for kind in TIMES:
        start = datetime(2026, 1, 1, tzinfo=UTC)
        times = [start + timedelta(milliseconds=index * index) if keep else None for index, keep in enumerate(kept)]
        found[f"{kind}"] = pa.array(times, kind)
    found["day"] = pa.array([date(2026, 1, 1) + timedelta(days=index) for index in range(rows)])
    found["single"] = pa.array([index / 3 if keep else None for index, keep in enumerate(kept)], pa.float32())
    found["double"] = pa.array([index / 3 if keep else None for index, keep in enumerate(kept)])
    found["text"] = pa.array([f"text {index}" if keep else None for index, keep in enumerate(kept)])
    found["bytes"] = pa.array([b"%d" % index if keep else None for index, keep in enumerate(kept)])
    found["again"] = pa.array([f"text {index % 5}" for index in range(rows)])
    return found


def test_every_engine_reads_what_is_written(spark: SparkSession, tmp_path: Path) -> None:
    rows = 3000
    envelope = {
        layout.SUBJECT: pa.array(["orders.new"] * rows),
        layout.SEQ: pa.array(range(1, rows + 1)),
        layout.TIMESTAMP: pa.array(range(rows), pa.timestamp("us", "UTC")),
        layout.DELIVERED: pa.array([1] * rows, pa.int32()),
        layout.HEADERS: pa.nulls(rows, ENVELOPE.field(layout.HEADERS).type),
        layout.PAYLOAD: pa.array([b"%d" % index for index in range(rows)]),
        REPLY: pa.nulls(rows, pa.binary()),
    }
    given = pa.RecordBatch.from_pydict(envelope | columns(rows))
    encoder = Encoder(stream="ORDERS", interval=900, compression="zstd")
    cut = rows // 3
    batches = [given.slice(cut), given.slice(0, cut)]
    path = str(put(tmp_path, encoder.encode(BlockId(key="a", bucket=0), "age", batches)))
    names = [layout.SEQ, layout.TIMESTAMP, layout.PAYLOAD, *columns(1)]
    expected = [tuple(_plain(row[name]) for name in names) for row in given.to_pylist()]

    def same(found: list[dict[str, Any]]) -> bool:
        return [tuple(_plain(row[name]) for name in names) for row in found] == expected

    assert same(pq.read_table(path).to_pylist())
    assert same(pl.read_parquet(path).to_dicts())
    assert same(duckdb.connect().sql(f"from read_parquet('{path}')").to_arrow_table().to_pylist())
    for vectorised in ("true", "false"):
        spark.conf.set("spark.sql.parquet.enableVectorizedReader", vectorised)
        try:
            assert same([row.asDict() for row in spark.read.parquet(path).orderBy(layout.SEQ).collect()])
        finally:
            spark.conf.unset("spark.sql.parquet.enableVectorizedReader")


def _plain(value: Any) -> Any:
    """A value as it is without what an engine's own types add."""
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.astimezone(UTC)).astimezone(UTC)
    return int(value) if hasattr(value, "to_integral_value") else value
