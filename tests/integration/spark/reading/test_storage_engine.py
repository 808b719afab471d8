from __future__ import annotations

import uuid
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.errors import JetcaptureError
from spark_jobs.archive import read_archive
from spark_jobs.query import main
from spark_jobs.sql import columns_in
from tests.integration.spark.conftest import HOUR, Archive
from tests.support import azurite, s3

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


def both(spark: SparkSession, archive: Archive, **read: Any) -> tuple[DataFrame, DataFrame]:
    """The archive as Spark's own reader sees it, and as the other engine does."""
    native = read_archive(spark, archive.url, "ORDERS", **read)
    return native, read_archive(spark, archive.url, "ORDERS", engine="arrow", **read)


def rows(frame: DataFrame) -> list[dict[str, Any]]:
    return sorted((row.asDict(recursive=True) for row in frame.collect()), key=lambda row: str(sorted(row.items())))


def same(native: DataFrame, own: DataFrame) -> list[dict[str, Any]]:
    """The rows of both, which must be the same, of the same types."""
    assert own.schema == native.schema
    found = rows(own)
    assert found == rows(native)
    return found


STRUCTS = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])
FIELDS: dict[str, pa.Array] = {
    "flag": pa.array([True]),
    "small": pa.array([1], pa.int8()),
    "large": pa.array([2**64 - 1], pa.uint64()),
    "ratio": pa.array([0.5], pa.float32()),
    "price": pa.array([Decimal("1.25")], pa.decimal128(12, 2)),
    "day": pa.array([20_000], pa.date32()),
    "at": pa.array([1_777_636_800_123], pa.timestamp("ms", "UTC")),
    "local": pa.array([1_777_636_800_123_456], pa.timestamp("us")),
    "blob": pa.array([b"\x00\xff"]),
    "text": pa.array(["é\n"]).dictionary_encode(),
    "inner": pa.array([{"a": 1, "b": ["x", None]}], STRUCTS),
    "items": pa.array([[{"a": 1, "b": []}, None]], pa.list_(STRUCTS)),
    "tags": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
    "void": pa.nulls(1),
}


def test_every_type_comes_back_as_spark_reads_it(spark: SparkSession, archive: Archive) -> None:
    archive.write([1], "a", headers=[[("H", ["1", "2"])]], payloads=[b"\x00"], columns=FIELDS)
    archive.write([2], None)  # has none of the fields
    found = same(*both(spark, archive))
    assert [(row["key"], row["date"], row["hour"], row["large"]) for row in found] == [
        (None, "2026-05-01", "12", None),
        ("a", "2026-05-01", "12", 2**64 - 1),
    ]


def test_an_archive_in_s3_is_queried_without_a_file_system_of_sparks(
    spark: SparkSession, archive: Archive, capsys: pytest.CaptureFixture[str]
) -> None:
    archive.write([1, 2, 3], "eu", amount=[1.0, 2.0, 3.0])
    archive.write([3, 4], "eu", amount=[3.0, 4.0])
    archive.write([5], "a b/ü%", amount=[11.0])
    archive.write([6], None, bucket=HOUR + 3600, amount=[20.0])
    archive.write([7], quarantine=True, stage=["decode"], error=["truncated"])
    with s3.serve() as endpoint:
        where = [s3.upload(endpoint, archive.root), "ORDERS", *s3.arguments(endpoint), "--engine", "arrow"]
        sums = "SELECT key, sum(amount) AS total FROM archive GROUP BY key ORDER BY total"
        assert main([*where, sums, "--format", "csv"]) == 0
        assert capsys.readouterr().out == "key,total\neu,10.0\na b/ü%,11.0\n,20.0\n"
        count = "SELECT count(*) AS n FROM archive"
        assert main([*where, count, "--format", "csv", "--to", "2026-05-01T13:00Z"]) == 0
        assert capsys.readouterr().out == "n\n5\n"
        assert main([*where, "SELECT stage, _nats_seq FROM quarantine", "--format", "csv"]) == 0
        assert capsys.readouterr().out == "stage,_nats_seq\ndecode,7\n"


def test_an_archive_in_azure_is_queried_without_a_file_system_of_sparks(
    spark: SparkSession,
    archive: Archive,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    archive.write([1, 2], "a b/ü%", amount=[1.0, 2.0])
    with azurite.serve(tmp_path) as connection:
        azurite.upload(connection, archive.root)
        monkeypatch.setenv("AZURE", connection)
        sql = "SELECT key, sum(amount) AS total FROM archive GROUP BY key"
        where = [azurite.URL, "ORDERS", "--option", "connection_string=${AZURE}", "--engine", "arrow"]
        assert main([*where, sql, "--format", "csv"]) == 0
    assert capsys.readouterr().out == "key,total\na b/ü%,3.0\n"


@pytest.mark.parametrize(
    ("sql", "columns"),
    [
        ("SELECT key, sum(Amount) FROM archive GROUP BY key", ["amount"]),
        ("SELECT count(*), count( * ) FROM archive WHERE `odd ``name` = 1", ["odd `name"]),
        ("WITH a AS (SELECT amount FROM archive) SELECT max(amount) FROM a", ["amount"]),
        ("SELECT 1 FROM archive JOIN other USING (_nats_subject)", ["_nats_subject"]),
        ("SELECT * FROM archive", None),
        ("SELECT count(*), archive.* FROM archive", None),
        ("SELECT amount * 2 FROM archive", None),
        ("FROM archive |> SELECT amount", None),
        ("SELECT amount FROM ((FROM archive) UNION (FROM archive))", None),
        ("SELECT amount FROM archive NATURAL JOIN other", None),
        ("SELECT amount IN (TABLE amounts) FROM archive", None),
        ("SELECT identifier('am' || 'ount') FROM archive", None),
        ("DESCRIBE archive", None),
    ],
)
def test_a_query_fetches_the_columns_that_it_names_and_all_where_it_may_mean_others(
    sql: str, columns: list[str] | None
) -> None:
    wanted = columns_in(sql)
    known = ["amount", "_nats_subject", "_nats_payload", "odd `name"]
    assert columns == (None if wanted is None else [name for name in known if wanted(name)])


def test_a_query_does_not_need_what_it_does_not_name(
    spark: SparkSession, archive: Archive, capsys: pytest.CaptureFixture[str]
) -> None:
    payloads = [uuid.uuid4().bytes for _ in range(1000)]
    path = archive.root / archive.write(list(range(1000)), payloads=payloads, amount=list(range(1000))).path
    pages = pq.read_metadata(path).row_group(0)
    chunks = (pages.column(index) for index in range(pages.num_columns))
    payload = next(chunk for chunk in chunks if chunk.path_in_schema == layout.PAYLOAD)
    start = payload.dictionary_page_offset or payload.data_page_offset
    data = path.read_bytes()
    path.write_bytes(
        data[:start] + bytes(payload.total_compressed_size) + data[start + payload.total_compressed_size :]
    )
    arguments = [archive.url, "ORDERS", "--engine", "arrow", "--format", "csv"]
    assert main([*arguments, "SELECT sum(amount) AS total FROM archive"]) == 0
    assert capsys.readouterr().out == "total\n499500\n"
    assert main([*arguments, "SELECT sum(length(_nats_payload)) FROM archive"]) == 1


def test_a_damaged_object_is_one_line_that_names_it(
    spark: SparkSession, archive: Archive, capsys: pytest.CaptureFixture[str]
) -> None:
    name = archive.write(list(range(1000)), payloads=[uuid.uuid4().bytes for _ in range(1000)])
    path = archive.root / name.path
    data = path.read_bytes()
    path.write_bytes(data[:4] + bytes(len(data) // 2) + data[4 + len(data) // 2 :])  # the footer is whole
    assert main([archive.url, "ORDERS", "--engine", "arrow", "SELECT sum(length(_nats_payload)) FROM archive"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("query: cannot read ")
    assert name.path in error


def test_an_unknown_engine_is_an_error(spark: SparkSession, archive: Archive) -> None:
    with pytest.raises(JetcaptureError, match="engine='duck': expected spark or arrow"):
        read_archive(spark, archive.url, "ORDERS", engine="duck")  # type: ignore[arg-type]
