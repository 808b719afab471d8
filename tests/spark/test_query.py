from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_jobs.query import main, table
from tests.spark.conftest import HOUR, Archive

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

SUMS = "SELECT key, sum(amount) AS total FROM archive GROUP BY key ORDER BY key"


@pytest.fixture
def orders(archive: Archive) -> Archive:
    archive.write([1, 2], "eu", amount=[1.5, 2.5])
    archive.write([3], "us", amount=[10.0])
    archive.write([4], None, bucket=HOUR + 3600, amount=[100.0])
    return archive


def test_a_table_is_the_default(orders: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([orders.url, "ORDERS", SUMS]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "key   total",
        "----  -----",
        "NULL  100.0",
        "eu    4.0",
        "us    10.0",
    ]


def test_csv_quotes_what_must_be_quoted(orders: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "SELECT 'a,\"b\n' AS text, NULL AS nothing, array(1, 2) AS list, X'00ff' AS bytes"
    assert main([orders.url, "ORDERS", sql, "--format", "csv"]) == 0
    assert list(csv.reader(io.StringIO(capsys.readouterr().out))) == [
        ["text", "nothing", "list", "bytes"],
        ['a,"b\n', "", "[1,2]", "AP8="],
    ]


def test_json_is_one_object_a_line_with_nulls(orders: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([orders.url, "ORDERS", SUMS, "--format", "json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"key": None, "total": 100.0},
        {"key": "eu", "total": 4.0},
        {"key": "us", "total": 10.0},
    ]


def test_parquet_goes_to_a_directory_and_never_over_another(
    orders: Archive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [orders.url, "ORDERS", SUMS, "--format", "parquet", "--output", str(tmp_path / "sums")]
    assert main(arguments) == 0
    assert pq.read_table(tmp_path / "sums").column("total").to_pylist() == [100.0, 4.0, 10.0]
    assert main(arguments) == 1
    assert "already exists" in capsys.readouterr().err


def test_parquet_without_an_output_is_a_usage_error(orders: Archive) -> None:
    with pytest.raises(SystemExit) as raised:
        main([orders.url, "ORDERS", SUMS, "--format", "parquet"])
    assert raised.value.code == 2


def test_a_file_appears_only_when_the_query_succeeded(orders: Archive, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    assert main([orders.url, "ORDERS", SUMS, "--format", "csv", "--output", str(good)]) == 0
    assert good.read_text() == "key,total\n,100.0\neu,4.0\nus,10.0\n"
    failing = "SELECT raise_error('no') FROM archive"
    assert main([orders.url, "ORDERS", failing, "--format", "csv", "--output", str(bad)]) == 1
    assert [path.name for path in tmp_path.glob("*bad*")] == []


def test_range_and_keys_narrow_the_archive(orders: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    count = "SELECT count(*) AS n FROM archive"
    for arguments, expected in (
        (["--from", "2026-05-01T13:00"], "1"),
        (["--to", "2026-05-01T15:00+02:00"], "3"),
        (["--key", "us"], "1"),
        (["--key", "us", "--key", ""], "2"),
    ):
        assert main([orders.url, "ORDERS", count, *arguments]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == expected


def test_the_quarantine_is_a_view_even_when_it_is_empty(orders: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "SELECT (SELECT count(*) FROM quarantine) AS bad, (SELECT count(*) FROM archive) AS good"
    assert main([orders.url, "ORDERS", sql, "--format", "csv"]) == 0
    assert capsys.readouterr().out == "bad,good\n0,4\n"
    orders.write([5], quarantine=True, stage=["decode"], error=["truncated"])
    assert main([orders.url, "ORDERS", "SELECT stage, error FROM quarantine", "--format", "csv"]) == 0
    assert capsys.readouterr().out == "stage,error\ndecode,truncated\n"


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT amuont FROM archive", "amuont"),
        ("SELEC 1", "SELEC"),
        ("SELECT * FROM nowhere", "nowhere"),
    ],
)
def test_a_wrong_query_is_one_line_and_exit_code_1(
    orders: Archive, capsys: pytest.CaptureFixture[str], sql: str, message: str
) -> None:
    assert main([orders.url, "ORDERS", sql]) == 1
    error = capsys.readouterr().err
    assert error.startswith("query: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_missing_archive_is_one_line_and_exit_code_1(archive: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([archive.url, "ORDERS", "SELECT * FROM archive"]) == 1
    assert capsys.readouterr().err.startswith("query: no archive of stream ORDERS under file:///")


def test_a_table_shows_line_breaks_and_nulls() -> None:
    assert list(table(["a", "b"], [("x\ny", None)])) == ["a     b", "----  ----", "x\\ny  NULL"]


def test_drifted_columns_can_be_queried(archive: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    archive.write([1], amount=pa.array([1]))
    archive.write([2], amount=pa.array([0.5]))
    assert main([archive.url, "ORDERS", "SELECT sum(amount) AS s FROM archive", "--format", "csv"]) == 0
    assert capsys.readouterr().out == "s\n1.5\n"
