from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
import yaml

from jetcapture_py.archive import watermark
from spark_jobs.query import main
from tests.integration.spark.conftest import HOUR, Archive
from tests.support.nats_server import NatsServer
from tests.support.replays import add_stream, stored
from tests.support.running import settings

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


def test_rows_are_a_table_csv_or_json(orders: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    values = "'a,\"b' AS text, NULL AS nothing, array(1, 2) AS list, CAST(repeat('x', 100) AS binary) AS bytes"
    encoded = base64.b64encode(b"x" * 100).decode()  # Spark's own has line breaks
    for form, sql, expected in (
        ("table", SUMS, "key   total\n----  -----\nNULL  100.0\neu    4.0\nus    10.0\n"),
        ("csv", f"SELECT {values}", f'text,nothing,list,bytes\n"a,""b",,"[1,2]",{encoded}\n'),
        ("json", f"SELECT {values}", f'{{"text":"a,\\"b","nothing":null,"list":[1,2],"bytes":"{encoded}"}}\n'),
    ):
        assert main([orders.url, "ORDERS", sql, "--format", form]) == 0
        assert capsys.readouterr().out == expected


def test_parquet_goes_to_a_directory_and_never_over_another(
    orders: Archive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [orders.url, "ORDERS", SUMS, "--format", "parquet", "--output", str(tmp_path / "sums")]
    assert main(arguments) == 0
    assert pq.read_table(tmp_path / "sums").column("total").to_pylist() == [100.0, 4.0, 10.0]
    assert main(arguments) == 1
    assert "already exists" in capsys.readouterr().err


def mark(archive: Archive, seconds: float) -> None:
    """Write a watermark `seconds` after HOUR."""
    known = watermark.ConsumerWatermark(
        stream="ORDERS", consumer="archive", created="", seq=2, time=datetime.fromtimestamp(HOUR + seconds, UTC)
    )
    path = archive.root / watermark.path("ORDERS", "archive")
    path.parent.mkdir(parents=True)
    path.write_bytes(known.encode())


def test_complete_only_ends_with_the_watermark(orders: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    orders.write([5], quarantine=True, stage=["decode"], error=["truncated"])
    mark(orders, 2e-6)  # the time of message 2
    cut = "complete only up to 2026-05-01T12:00:00.000002Z: later messages are left out\n"
    for sql, arguments, expected, said in (
        ("SELECT max(_nats_seq) AS n FROM archive", [], "2", ""),
        ("SELECT max(_nats_seq) AS n FROM archive", ["--to", "2026-05-01T12:00:00.000002"], "1", ""),
        ("SELECT max(_nats_seq) AS n FROM archive", ["--to", "2026-05-02"], "2", cut),
        ("SELECT count(*) AS n FROM quarantine", [], "0", ""),
    ):
        assert main([orders.url, "ORDERS", sql, "--complete-only", *arguments]) == 0
        output = capsys.readouterr()
        assert (output.out.splitlines()[-1], output.err) == (expected, said)


def test_the_captures_configuration_says_where_the_archive_is(
    orders: Archive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings("nats://127.0.0.1:1", orders.url)))
    assert main(["--config", str(path), SUMS, "--format", "csv", "--key", "us"]) == 0
    assert capsys.readouterr().out == "key,total\nus,10.0\n"
    assert main([SUMS, "--format", "csv", "--key", "us", f"--config={path}"]) == 0
    assert capsys.readouterr().out == "key,total\nus,10.0\n"


def test_rows_go_straight_to_nats(
    orders: Archive,
    nats_server: Callable[..., NatsServer],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = nats_server('authorization { user: "u", password: "p" }')
    url = server.url.replace("//", "//u:p@")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings(server.url, orders.url, nats={"user": "u", "password": "p"})))
    monkeypatch.setenv("NATS_USER", "u")
    monkeypatch.setenv("NATS_PASSWORD", "p")
    sql = "SELECT key, sum(amount) AS total FROM archive WHERE key IS NOT NULL GROUP BY key ORDER BY key"
    for stream, where in (("A", ["--config", str(path)]), ("B", [orders.url, "ORDERS", "--servers", server.url])):
        add_stream(url, stream, f"{stream}.>")
        assert main([*where, sql, "--to-nats", f"{stream}.{{key}}"]) == 0
        assert capsys.readouterr().out.startswith("published 2 messages")
        assert sorted((message.subject, json.loads(message.payload)) for message in stored(url, stream)) == [
            (f"{stream}.eu", {"key": "eu", "total": 4.0}),
            (f"{stream}.us", {"key": "us", "total": 10.0}),
        ]


def test_the_quarantine_is_a_view_even_when_it_is_empty(orders: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "SELECT (SELECT count(*) FROM quarantine) AS bad, (SELECT count(*) FROM archive) AS good"
    assert main([orders.url, "ORDERS", sql, "--format", "csv"]) == 0
    assert capsys.readouterr().out == "bad,good\n0,4\n"
    orders.write([5], quarantine=True, stage=["decode"], error=["truncated"])
    assert main([orders.url, "ORDERS", "SELECT stage, error FROM quarantine", "--format", "csv"]) == 0
    assert capsys.readouterr().out == "stage,error\ndecode,truncated\n"


def test_a_wrong_query_is_one_line_and_exit_code_1(orders: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    for sql, named in (("SELECT amuont FROM archive", "amuont"), ("SELEC 1", "SELEC"), ("TABLE nowhere", "nowhere")):
        assert main([orders.url, "ORDERS", sql]) == 1
        error = capsys.readouterr().err
        assert error.startswith("query: ")
        assert named in error
        assert error.count("\n") == 1


def test_columns_of_one_name_are_all_shown_and_refused_as_json(
    orders: Archive, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pair = "FROM archive AS a, archive AS b WHERE a.amount = 1.5 AND b.amount = 10"
    sql = f"SELECT a.key, b.key, a.amount AS `x.y` {pair}"
    assert main([orders.url, "ORDERS", sql, "--format", "csv"]) == 0
    assert capsys.readouterr().out == "key,key,x.y\neu,us,1.5\n"
    assert main([orders.url, "ORDERS", sql]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["key", "key", "x.y"],
        ["---", "---", "---"],
        ["eu", "us", "1.5"],
    ]
    said = "names in JSON must be unique; rename one with AS\n"
    for query, what in (
        (sql, "columns are called key"),
        (f"SELECT struct(a.key, b.key) AS s {pair}", "fields of s are called key"),
    ):
        output = tmp_path / "out.json"
        assert main([orders.url, "ORDERS", query, "--format", "json", "--output", str(output)]) == 1
        assert capsys.readouterr().err == f"query: two {what}: {said}"
        assert list(tmp_path.glob("*out.json*")) == []
    assert main([orders.url, "ORDERS", "SELECT 1 AS x, 2 AS X", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"x": 1, "X": 2}
    where = ["--to-nats", "a.b", "--servers", "nats://127.0.0.1:1"]
    assert main([orders.url, "ORDERS", sql, *where]) == 1
    assert capsys.readouterr().err == f"query: two columns are called key: {said}"
