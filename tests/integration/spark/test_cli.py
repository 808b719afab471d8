"""The jobs as they are started from a shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jetcapture_py.cli import app
from spark_jobs import compact, query
from tests.integration.spark.conftest import Archive

pytestmark = pytest.mark.spark

REPOSITORY = Path(__file__).parents[3]
STARTING = ("WARNING: Using incubator", "Using Spark's default", "Setting ", "To adjust logging", "2")
"""How the lines start that Spark prints while it starts."""
SUBMITTED = """
import os, sys
from spark_jobs.job import session

def look(batches):
    import pyarrow as pa
    try:
        from of_the_user import NAME
    except ImportError:
        NAME = None
    import jetcapture_py
    root = os.path.dirname(os.path.dirname(jetcapture_py.__file__))
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"name": [str(NAME)], "root": [root]})

spark = session("test")
row = spark.range(1).mapInArrow(look, "name string, root string").first()
print(spark.conf.get("spark.sql.session.timeZone"), *row)
print(spark.sparkContext.getConf().get("spark.executorEnv.PYTHONPATH"))
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
SUMS = "SELECT key, sum(amount) AS total FROM archive GROUP BY key ORDER BY key"
JETCAPTURE = [sys.executable, "-m", "jetcapture_py"]


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env={**os.environ, **environment}
    )


@pytest.fixture
def orders(archive: Archive) -> Archive:
    archive.write([1, 2], "eu", amount=[1.5, 2.5])
    archive.write([2, 3], "eu", amount=[2.5, 4.0])
    return archive


@pytest.mark.usefixtures("spark")
def test_jetcapture_runs_a_job_with_its_arguments(orders: Archive) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["spark", "query", orders.url, "--format", "csv", "ORDERS", SUMS, "--key", "eu"])
    assert (done.exit_code, done.stdout) == (0, "key,total\neu,8.0\n"), done.output
    done = runner.invoke(app, ["spark", "query", orders.url, "ORDERS", "SELECT nothing FROM archive"])
    assert (done.exit_code, done.stdout) == (1, "")


def submit(place: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("spark-submit")), "--master", "local[1]", *words],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=place,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", **more},
    )


@pytest.mark.exhaustive
def test_spark_submit_runs_a_job_from_its_file_in_utc(orders: Archive, tmp_path: Path) -> None:
    job = str(REPOSITORY / "spark_jobs" / "query.py")
    sql = SUMS.replace("AS total", "AS total, current_timezone() AS zone")
    done = submit(tmp_path, job, orders.url, "ORDERS", sql, "--format", "csv", TZ="America/New_York")
    assert (done.returncode, done.stdout) == (0, "key,total,zone\neu,8.0,UTC\n"), done.stderr


@pytest.mark.exhaustive
def test_settings_given_to_spark_submit_are_kept(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "of_the_user.py").write_text("NAME = 'theirs'\n")
    program = tmp_path / "program.py"
    program.write_text(SUBMITTED)
    given = {"spark.sql.session.timeZone": "Asia/Kathmandu", "spark.executorEnv.PYTHONPATH": str(theirs)}
    words = [word for name, value in given.items() for word in ("--conf", f"{name}={value}")]
    done = submit(tmp_path, *words, str(program), PYTHONPATH=str(REPOSITORY))
    path = f"{theirs}{os.pathsep}{REPOSITORY}"
    assert (done.returncode, done.stdout.split()) == (0, ["Asia/Kathmandu", "theirs", str(REPOSITORY), path]), (
        done.stderr
    )


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
    done = submit(tmp_path, *words, PYSPARK_PYTHON=str(python), PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    without, columns = done.stdout.splitlines()
    assert without.startswith("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: nats.")
    assert without.endswith("and call spark.dataSource.register(NatsDataSource), from spark_jobs.datasource")
    assert columns == "_nats_stream _nats_subject"


@pytest.mark.parametrize(
    "connect", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["classic", "connect"]
)
def test_an_interrupted_query_ends_quietly_with_130(orders: Archive, tmp_path: Path, connect: bool) -> None:
    output = tmp_path / "never.csv"
    sql = "SELECT count(*) FROM range(0, 1000000000000, 1, 1) AS r WHERE sha2(CAST(id AS string), 512) < '00'"
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable}
    if connect:
        environment |= {"SPARK_REMOTE": "local[1]", "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_TESTING": "1"}
    with (tmp_path / "log").open("w+") as log:
        job = subprocess.Popen(
            [*JETCAPTURE, "spark", "query", orders.url, "ORDERS", sql, "--format", "csv", "--output", str(output)],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        try:
            partial = output.with_name(".never.csv.partial")
            deadline = time.monotonic() + 600
            while not partial.exists():  # it is about to ask Spark for the first row
                assert job.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            os.killpg(job.pid, signal.SIGINT)  # as a terminal does it
            assert job.wait(300) == 130
        finally:  # it would go on for days
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        log.seek(0)
        said = [line for line in log.read().splitlines() if not line.startswith(STARTING)]
    assert said == ["query: interrupted"]
    assert list(tmp_path.glob("*never*")) == []


def test_an_argument_that_cannot_be_read_is_refused_with_what_was_expected(capsys: pytest.CaptureFixture[str]) -> None:
    for module, arguments, expected in (
        (query, ["SELECT 1", "--from", "bogus"], "--from: expected a time such as 2026-05-01T12:00:00Z, a date, today"),
        (query, ["SELECT 1", "--formt", "csv"], "unexpected argument --formt: expected URL STREAM SQL"),
        (query, [], "SQL is missing: expected URL STREAM SQL"),
        (query, ["SELECT 1", "--servers", "nats://a"], "--servers needs --to-nats"),
        (query, ["SELECT 1", "--context", ""], "--context needs --to-nats"),
        (compact, ["--target-size", "1G"], "expected a size in GiB"),
        (compact, ["--older-than=-1h"], "at least 0"),
        (query, ["SELECT 1", "--format", "parquet"], "--format parquet"),
        (query, ["SELECT 1", "--to-nats", "a", "--servers", "nats://a", "--format", "csv"], "--format"),
        (query, ["SELECT 1", "--to-nats", "a", "--servers", "nats://a", "--output", "a.txt"], "--output"),
    ):
        assert module.main(["file:///archive", "ORDERS", *arguments]) == 2
        assert expected in capsys.readouterr().err


def test_a_wrong_job_argument_or_configuration_is_exit_code_2(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("source: {stream: ORDERS, consumer: archive}\nstore: {urll: /tmp/x}\n")
    done = run([*JETCAPTURE, "spark", "query", "--config", str(config), SUMS])
    assert done.returncode == 2
    assert [line.split(": ")[:2] for line in done.stderr.splitlines()] == [
        ["query", "store.url"],
        ["query", "store.urll"],
    ]
    assert run([*JETCAPTURE, "spark", "query", "--from", "lately", "file:///x", "ORDERS", SUMS]).returncode == 2


def test_a_failed_job_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    done = run([*JETCAPTURE, "spark", "query", str(tmp_path), "ORDERS", SUMS], JAVA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("query: Spark needs Java: install Java 17 (")
    assert done.stderr.count("\n") == 1


def test_without_pyspark_a_job_says_what_to_install() -> None:
    program = "import sys; sys.modules['pyspark'] = None; from jetcapture_py.cli import main; main()"
    done = run([sys.executable, "-c", program, "spark", "query", "file:///x", "ORDERS", SUMS])
    assert done.returncode == 1
    assert done.stderr == "jetcapture: pyspark is missing: pip install 'jetcapture[spark]'\n"
