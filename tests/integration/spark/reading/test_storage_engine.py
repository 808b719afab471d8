from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from spark_jobs.query import main
from spark_jobs.sql import columns_in
from tests.integration.spark.conftest import HOUR, Archive
from tests.support import s3

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


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
