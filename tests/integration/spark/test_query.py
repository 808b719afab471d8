"""The jobs as they are started from a shell: what a query prints, writes and publishes, and how jobs end."""

from __future__ import annotations

import asyncio
import base64
import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from jetcapture_py.archive import watermark
from jetcapture_py.cli import app
from spark_jobs import compact, query
from spark_jobs.query import main
from spark_jobs.replay import replay
from tests.integration.spark.conftest import HOUR, Archive
from tests.integration.spark.live import Live
from tests.support.commands import process
from tests.support.nats_server import NatsServer
from tests.support.replays import add_stream, stored
from tests.support.running import settings
from tests.support.streams import read_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

SUMS = "SELECT key, sum(amount) AS total FROM archive GROUP BY key ORDER BY key"


@pytest.fixture
def orders(archive: Archive) -> Archive:
    archive.write([1, 2], "eu", amount=[1.5, 2.5])
    archive.write([3], "us", amount=[10.0])
    archive.write([4], None, bucket=HOUR + 3600, amount=[100.0])
    return archive


BYTES = base64.b64encode(b"x" * 100).decode()  # Spark's own has line breaks
ROWS = "SELECT 'a,\"b' AS text, NULL AS nothing, array(1, 2) AS list, CAST(repeat('x', 100) AS binary) AS bytes"
PAIR = "FROM archive AS a, archive AS b WHERE a.amount = 1.5 AND b.amount = 10"
SAME_NAMES = f"SELECT a.key, b.key, a.amount AS `x.y` {PAIR}"
PRINTED: tuple[tuple[str, str, str], ...] = (
    ("table", SUMS, "key   total\n----  -----\nNULL  100.0\neu    4.0\nus    10.0\n"),
    ("csv", ROWS, f'text,nothing,list,bytes\n"a,""b",,"[1,2]",{BYTES}\n'),
    ("json", ROWS, f'{{"text":"a,\\"b","nothing":null,"list":[1,2],"bytes":"{BYTES}"}}\n'),
    ("csv", "SELECT (SELECT count(*) FROM quarantine) AS bad, count(*) AS good FROM archive", "bad,good\n0,4\n"),
    ("csv", SAME_NAMES, "key,key,x.y\neu,us,1.5\n"),
    ("json", "SELECT 1 AS x, 2 AS X", '{"x":1,"X":2}\n'),
)
JSON, NATS = ["--format", "json"], ["--to-nats", "a.b", "--servers", "nats://127.0.0.1:1"]
UNIQUE = "names in JSON must be unique; rename one with AS\n"
NO_JSON = r".*, which JSON lacks: cast them to text with transform_keys\n"
REFUSED: tuple[tuple[str, list[str], str], ...] = (
    ("SELECT amuont FROM archive", [], ".*amuont.*\n"),
    ("SELEC 1", [], ".*SELEC.*\n"),
    ("TABLE nowhere", [], ".*nowhere.*\n"),
    (SAME_NAMES, JSON, f"two columns are called key: {UNIQUE}"),
    (SAME_NAMES, NATS, f"two columns are called key: {UNIQUE}"),
    (f"SELECT struct(a.key, b.key) AS s {PAIR}", JSON, f"two fields of s are called key: {UNIQUE}"),
    ("SELECT array(map(current_timestamp(), 1)) AS m", JSON, f"m has maps with keys of type timestamp{NO_JSON}"),
    ("SELECT map(X'00FF', 1) AS m", JSON, f"m has maps with keys of type binary{NO_JSON}"),
    ("SELECT map(named_struct('a', 1), 1) AS m", JSON, f"m has maps with keys of type struct<{NO_JSON}"),
)


def test_rows_are_printed_as_a_table_csv_or_json_and_what_cannot_be_is_one_line(
    orders: Archive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for form, sql, expected in PRINTED:
        assert main([orders.url, "ORDERS", sql, "--format", form]) == 0
        assert capsys.readouterr().out == expected
    for sql, options, expected in REFUSED:
        output = ["--output", str(tmp_path / "out.json")] if options is JSON else []
        assert main([orders.url, "ORDERS", sql, *options, *output]) == 1
        assert re.fullmatch(f"query: {expected}", capsys.readouterr().err), sql
        assert list(tmp_path.glob("*out.json*")) == []
    orders.write([5], quarantine=True, stage=["decode"], error=["truncated"])
    assert main([orders.url, "ORDERS", "SELECT stage, error FROM quarantine", "--format", "csv"]) == 0
    assert capsys.readouterr().out == "stage,error\ndecode,truncated\n"


def test_latest_is_a_view_of_the_newest_row_of_each_key(orders: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "SELECT amount FROM latest ORDER BY amount"
    for options, expected in (
        (["--by", "key"], "2.5,10.0,100.0"),
        (["--by", "1 = 1", "--order", "-amount"], "1.5"),
        (["--by", "key", "--by", "date", "--deleted", "key IS NULL", "--engine", "arrow"], "2.5,10.0"),
    ):
        assert main([orders.url, "ORDERS", sql, "--format", "csv", *options]) == 0
        assert capsys.readouterr().out.split() == ["amount", *expected.split(",")]
    assert main([orders.url, "ORDERS", sql, "--by", "place"]) == 1
    assert re.fullmatch(r"query: by: place: \[UNRESOLVED_COLUMN.*\n", capsys.readouterr().err)


def test_parquet_goes_to_a_directory_and_never_over_another(
    orders: Archive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [orders.url, "ORDERS", SUMS, "--format", "parquet", "--output", str(tmp_path / "sums")]
    assert main(arguments) == 0
    assert pq.read_table(tmp_path / "sums").column("total").to_pylist() == [100.0, 4.0, 10.0]
    assert main(arguments) == 1
    assert "already exists" in capsys.readouterr().err


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
    sql = SUMS.replace("GROUP", "WHERE key IS NOT NULL GROUP")
    for stream, where in (("A", ["--config", str(path)]), ("B", [orders.url, "ORDERS", "--servers", server.url])):
        add_stream(url, stream, f"{stream}.>")
        assert main([*where, sql, "--to-nats", f"{stream}.{{key}}"]) == 0
        assert capsys.readouterr().out.startswith("published 2 messages")
        assert sorted((message.subject, json.loads(message.payload)) for message in stored(url, stream)) == [
            (f"{stream}.eu", {"key": "eu", "total": 4.0}),
            (f"{stream}.us", {"key": "us", "total": 10.0}),
        ]


def test_complete_only_ends_with_the_watermark(orders: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    time = datetime.fromtimestamp(HOUR, UTC).replace(microsecond=2)  # of message 2
    mark = watermark.ConsumerWatermark(stream="ORDERS", consumer="archive", created="", seq=2, time=time)
    path = orders.root / watermark.path("ORDERS", "archive")
    path.parent.mkdir(parents=True)
    path.write_bytes(mark.encode())
    cut = "complete only up to 2026-05-01T12:00:00.000002Z: later messages are left out\n"
    for arguments, expected, said in (
        ([], "2", ""),
        (["--to", "2026-05-01T12:00:00.000002"], "1", ""),
        (["--to", "2026-05-02"], "2", cut),
    ):
        assert main([orders.url, "ORDERS", "SELECT max(_nats_seq) FROM archive", "--complete-only", *arguments]) == 0
        output = capsys.readouterr()
        assert (output.out.splitlines()[-1], output.err) == (expected, said)


# ---------------------------------------------------------------------- rows as JSON

AT, TIME = "timestamp_micros(1777636800123456)", "2026-05-01T12:00:00.123456Z"
STRUCT = f"named_struct('at', {AT}, 'x', double('NaN'), 'none', CAST(NULL AS int))"
VALUES: dict[str, tuple[str, Any]] = {
    "at": (AT, TIME),
    "local": ("TIMESTAMP_NTZ '2026-05-01 12:00:00.5'", "2026-05-01T12:00:00.500000"),
    "day": ("DATE '2026-05-01'", "2026-05-01"),
    "clock": ("TIME '12:34:56.5'", "12:34:56.5"),
    "took": ("INTERVAL '-1 02:03:04.5' DAY TO SECOND", "INTERVAL '-1 02:03:04.5' DAY TO SECOND"),
    "pause": ("INTERVAL '90' MINUTE", "INTERVAL '90' MINUTE"),
    "s": (STRUCT, {"at": TIME, "x": "NaN", "none": None}),
    "floats": ("array(float('-Infinity'), float(0.1))", ["-Infinity", 0.1]),
    "doubles": ("array(double('Infinity'), 1e300D, 0.1D, NULL)", ["Infinity", 1e300, 0.1, None]),
    "by_number": (f"map(7, array({AT}))", {"7": [TIME]}),
    "bytes": ("X'00FF'", "AP8="),
    "small": ("CAST('0.0000000015' AS decimal(20, 10))", 1.5e-09),
    "large": ("CAST('12345678901234567890123456789.5' AS decimal(38, 1))", 12345678901234567890123456789.5),
    "whole": ("9007199254740993", 9007199254740993),
    "v": ("""parse_json('{"b": [1, 2.5, "x"], "a": null}')""", {"a": None, "b": [1, 2.5, "x"]}),
    "vs": ("array(parse_json('1'))", [1]),
    "text": ("'é\"\\n'", 'é"\n'),
    "nothing": ("CAST(NULL AS string)", None),
}
"""Values in SQL, and in JSON."""
ROW = f"SELECT {', '.join(f'{sql} AS {name}' for name, (sql, _) in VALUES.items())}"
EXPECTED = {name: value for name, (_, value) in VALUES.items()}
NESTED = ("s", "floats", "doubles", "by_number", "v", "vs")


def test_query_prints_rows_as_json_whatever_the_session_is_set_to(
    orders: Archive, conf: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    conf("spark.sql.session.timeZone", "Asia/Kathmandu")
    conf("spark.sql.ansi.enabled", "false")
    assert main([orders.url, "ORDERS", ROW, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == EXPECTED
    query = [orders.url, "ORDERS", f"SELECT {', '.join(NESTED)} FROM ({ROW})", "--format", "csv"]
    assert main(query) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert {name: json.loads(value) for name, value in row.items()} == {name: EXPECTED[name] for name in NESTED}


def test_rows_are_published_as_the_same_json(spark: SparkSession, live: Live) -> None:
    replay(spark.sql(ROW), live.server.url, "orders.a")
    for column in ("s", "v"):
        replay(spark.sql(ROW), live.server.url, "orders.a", payload=column)
    frame = spark.sql(f"SELECT 'orders.a' AS subject, * FROM ({ROW})")
    frame.write.format("nats").option("servers", live.server.url).mode("append").save()
    messages = [each.payload for each in asyncio.run(read_stream(live.server.url, "ORDERS"))]
    assert b'"large":12345678901234567890123456789.5,' in messages[0]
    replayed, *columns, written = map(json.loads, messages)
    assert columns == [EXPECTED["s"], EXPECTED["v"]]
    assert replayed == written == {**EXPECTED, "took": "-P1DT7384.5S", "pause": "PT5400S"}


# ---------------------------------------------------------------------- processes

REPOSITORY = Path(__file__).parents[3]
STARTING = ("WARNING: Using incubator", "Using Spark's default", "Setting ", "To adjust logging", "2")
"""How the lines start that Spark prints while it starts."""
SUBMITTED = """
from spark_jobs.job import session

def look(batches):
    import jetcapture_py, of_the_user, pyarrow as pa
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"name": [of_the_user.NAME], "file": [jetcapture_py.__file__]})

spark = session("test")
row = spark.range(1).mapInArrow(look, "name string, file string").first()
print(spark.conf.get("spark.sql.session.timeZone"), *row)
"""
SHIPPED = """
from pyspark.sql import SparkSession
from spark_jobs.job import session, spark_error

def columns(spark):
    return spark.read.format("nats").options(servers="nats://127.0.0.1:1", stream="S").load().columns

try:
    columns(SparkSession.builder.getOrCreate())
except Exception as error:
    print(spark_error(error))
spark = session("test")
print(*columns(spark)[:2])
"""


def submit(directory: Path, *words: str, **more: str) -> str:
    """What a program prints that is submitted from there."""
    command = [str(Path(sys.executable).with_name("spark-submit")), "--master", "local[1]", *words]
    variables = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", **more}
    done = process(*command, cwd=directory, env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_spark_submit_runs_a_job_from_its_file_in_utc_unless_it_is_told_otherwise(
    orders: Archive, tmp_path: Path
) -> None:
    job = str(REPOSITORY / "spark_jobs" / "query.py")
    sql = SUMS.replace("AS total", "AS total, current_timezone() AS zone")
    printed = submit(tmp_path, job, orders.url, "ORDERS", sql, "--format", "csv", "--key", "eu", TZ="America/New_York")
    assert printed == "key,total,zone\neu,4.0,UTC\n"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "of_the_user.py").write_text("NAME = 'theirs'\n")
    program = tmp_path / "program.py"
    program.write_text(SUBMITTED)
    zone, path = "spark.sql.session.timeZone=Asia/Kathmandu", f"spark.executorEnv.PYTHONPATH={tmp_path}/theirs"
    printed = submit(tmp_path, "--conf", zone, "--conf", path, str(program), PYTHONPATH=str(REPOSITORY))
    assert printed == f"Asia/Kathmandu theirs {REPOSITORY}/jetcapture_py/__init__.py\n"


@pytest.mark.exhaustive
def test_a_session_knows_the_nats_format_when_the_package_comes_with_py_files(tmp_path: Path) -> None:
    program, package, python = tmp_path / "program.py", tmp_path / "jetcapture.zip", tmp_path / "python"
    program.write_text(SHIPPED)
    with zipfile.ZipFile(package, "w") as file:
        for path in (each for name in ("jetcapture_py", "spark_jobs") for each in (REPOSITORY / name).rglob("*.py")):
            file.write(path, path.relative_to(REPOSITORY))
    # what is installed here, but neither this package nor the module by which Spark finds its format
    installed = tmp_path / "installed"
    installed.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name != "pyspark_nats.py":
            (installed / entry.name).symlink_to(entry)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    words = ["--py-files", str(package), str(program)]
    without, columns = submit(tmp_path, *words, PYSPARK_PYTHON=str(python), PYTHONPATH=str(installed)).splitlines()
    assert without.startswith("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: nats.")
    assert without.endswith("and call spark.dataSource.register(NatsDataSource), from spark_jobs.datasource")
    assert columns == "_nats_stream _nats_subject"


@pytest.mark.parametrize(
    "connect", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["classic", "connect"]
)
def test_an_interrupted_query_ends_quietly_with_130(orders: Archive, tmp_path: Path, connect: bool) -> None:
    output, log = tmp_path / "never.csv", tmp_path / "log"
    sql = "SELECT count(*) FROM range(0, 1000000000000, 1, 1) AS r WHERE sha2(CAST(id AS string), 512) < '00'"
    words = ["-m", "jetcapture_py", "spark", "query", orders.url, "ORDERS", sql, "--format", "csv", "--output", output]
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable}
    if connect:
        environment |= {"SPARK_REMOTE": "local[1]", "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_TESTING": "1"}
    with log.open("w") as file:
        command = [sys.executable, *words]
        job = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 600
        while not output.with_name(".never.csv.partial").exists():  # it is about to ask Spark for the first row
            assert job.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does it
        assert job.wait(300) == 130
    finally:  # it would go on for days
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    said = [line for line in log.read_text().splitlines() if not line.startswith(STARTING)]
    assert said == ["query: interrupted"]
    assert list(tmp_path.glob("*never*")) == []


TO_NATS = ("--to-nats", "a", "--servers", "nats://a")
USAGE: tuple[tuple[Any, tuple[str, ...], str], ...] = (
    (query, ("S", "--from", "bogus"), "--from: expected a time such as 2026-05-01T12:00:00Z, a date, today"),
    (query, ("S", "--formt", "csv"), "unexpected argument --formt: expected URL STREAM SQL"),
    (query, (), "SQL is missing: expected URL STREAM SQL"),
    (query, ("S", "--servers", "nats://a"), "--servers needs --to-nats"),
    (query, ("S", "--context", ""), "--context needs --to-nats"),
    (query, ("S", "--format", "parquet"), "--format parquet needs --output"),
    (query, ("S", "--order", "amount"), "--order needs --by"),
    (query, ("S", *TO_NATS, "--format", "csv"), "--to-nats cannot be combined with --format or --output"),
    (query, ("S", *TO_NATS, "--output", "a.txt"), "--to-nats cannot be combined with --format or --output"),
    (compact, ("--target-size", "1G"), "expected a size in GiB"),
    (compact, ("--older-than=-1h",), "at least 0"),
)


def test_an_argument_that_cannot_be_read_is_refused_with_what_was_expected(capsys: pytest.CaptureFixture[str]) -> None:
    for module, arguments, expected in USAGE:
        assert module.main(["file:///archive", "ORDERS", *arguments]) == 2
        assert expected in capsys.readouterr().err


@pytest.mark.usefixtures("spark")
def test_jetcapture_runs_a_job_with_its_arguments_and_ends_with_its_exit_code(orders: Archive, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("source: {stream: ORDERS, consumer: archive}\nstore: {urll: /tmp/x}\n")
    for words, code, output, error in (
        ([orders.url, "--format", "csv", "ORDERS", SUMS, "--key", "eu"], 0, "key,total\neu,4.0\n", ""),
        ([orders.url, "ORDERS", "SELECT nothing FROM archive"], 1, "", "query: "),
        (["--config", str(config), SUMS], 2, "", "query: store.url: "),
    ):
        done = CliRunner().invoke(app, ["spark", "query", *words])
        assert (done.exit_code, done.stdout) == (code, output), done.output
        assert done.stderr.startswith(error)


def test_without_pyspark_a_job_says_what_to_install() -> None:
    program = "import sys; sys.modules['pyspark'] = None; from jetcapture_py.cli import main; main()"
    done = process(sys.executable, "-c", program, "spark", "query", "file:///x", "ORDERS", SUMS)
    assert done.returncode == 1
    assert done.stderr == "jetcapture: pyspark is missing: pip install 'jetcapture[spark]'\n"
