"""The jobs over Spark Connect: against a server of its own, and one that PySpark starts for SPARK_REMOTE=local."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from tests.spark.conftest import HOUR, Archive
from tests.support import s3

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.spark

SUMS = "SELECT key, sum(amount) AS total FROM archive GROUP BY key ORDER BY key"
STARTS = 120.0

NOTEBOOK = """
import sys
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf
from spark_jobs.archive import archive_view, read_archive

spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
for engine in ("spark", "arrow"):
    for dedupe in ("auto", "full"):
        frame = read_archive(spark, sys.argv[2], "ORDERS", engine=engine, dedupe=dedupe)
        print(engine, dedupe, frame.count(), frame.agg(sf.sum("amount")).first()[0], sorted(frame.dtypes)[0])
archive_view(spark, sys.argv[2], "ORDERS", keys=["us"], columns=["amount"])
print(spark.sql("SELECT * FROM ORDERS ORDER BY amount").collect())
"""


@pytest.fixture
def orders(archive: Archive) -> Archive:
    """Copies that are settled by sequences, copies that Spark compares, and a column that drifted."""
    archive.write([1, 2, 3], "eu", amount=[1.0, 2.0, 3.0])
    archive.write([3, 4], "eu", amount=[3.0, 4.0])
    archive.write([5], "us", bucket=HOUR + 3600, amount=[5], timestamps=[1])
    archive.write([5], "us", bucket=HOUR + 3600, amount=[6], timestamps=[2])
    archive.write([7], quarantine=True, stage=["decode"], error=["truncated"])
    return archive


def environment(remote: str) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    return {**found, "SPARK_REMOTE": remote, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}


def run(remote: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**environment(remote), **more},
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Connect server as the script in PySpark's package starts it."""
    home = tmp_path_factory.mktemp("connect")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(home),
    }
    words = [f"{pyspark.__path__[0]}/sbin/start-connect-server.sh", "--master", "local[2]"]
    for name, value in settings.items():
        words += ["--conf", f"{name}={value}"]
    variables = environment("") | {"SPARK_NO_DAEMONIZE": "1", "SPARK_LOG_DIR": str(home), "SPARK_PID_DIR": str(home)}
    del variables["SPARK_REMOTE"]
    log = home / "server.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(words, stdout=output, stderr=output, env=variables, start_new_session=True) as process,
    ):
        deadline = time.monotonic() + STARTS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield f"sc://127.0.0.1:{port}"
        os.killpg(process.pid, signal.SIGTERM)


def test_an_archive_is_read_over_connect_by_either_engine(server: str, orders: Archive) -> None:
    done = run("", "-c", NOTEBOOK, server, orders.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *(
            f"{engine} {dedupe} 6 21.0 ('_nats_delivered', 'int')"
            for engine in ("spark", "arrow")
            for dedupe in ("auto", "full")
        ),
        "[Row(amount=5), Row(amount=6)]",
    ]


def test_the_notebook_of_the_examples_runs(server: str, orders: Archive) -> None:
    now = int(time.time())
    orders.write([9], "recent", bucket=now - now % 3600)
    notebook = Path(__file__).parents[2] / "examples" / "notebook.py"
    done = run("", str(notebook), server, orders.url, "ORDERS")
    assert done.returncode == 0, done.stderr
    assert "recent" in done.stdout
    assert "truncated" in done.stdout


def test_query_runs_on_the_server_that_spark_remote_names(server: str, orders: Archive) -> None:
    bad = "(SELECT count(*) FROM quarantine) AS bad"
    sql = f"SELECT key, sum(amount) AS total, {bad} FROM archive GROUP BY key ORDER BY key"
    done = run(server, "-m", "spark_jobs.query", orders.url, "ORDERS", sql)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split() for line in done.stdout.splitlines()[2:]] == [["eu", "10.0", "1"], ["us", "11.0", "1"]]
    done = run(server, "-m", "spark_jobs.query", orders.url, "ORDERS", "SELECT nothing FROM archive")
    assert done.returncode == 1
    assert done.stderr.startswith("query: ")
    assert done.stderr.count("\n") == 1


def test_a_server_without_the_file_system_is_told_the_package(server: str, orders: Archive) -> None:
    with s3.serve() as endpoint:
        where = [s3.upload(endpoint, orders.root), "ORDERS", *s3.arguments(endpoint)]
        done = run(server, "-m", "spark_jobs.query", *where, SUMS)
        assert done.returncode == 1
        assert done.stderr.startswith("query: Spark cannot read s3a:// URLs")
        assert "org.apache.hadoop:hadoop-aws:" in done.stderr
        done = run(server, "-m", "spark_jobs.query", *where, SUMS, "--engine", "arrow", "--format", "csv")
        assert (done.returncode, done.stdout) == (0, "key,total\neu,10.0\nus,11.0\n"), done.stderr


def test_a_local_connect_session_is_started_and_ended(orders: Archive) -> None:
    done = run("local[2]", "-m", "spark_jobs.query", orders.url, "ORDERS", SUMS, "--format", "csv", SPARK_TESTING="1")
    assert (done.returncode, done.stdout) == (0, "key,total\neu,10.0\nus,11.0\n"), done.stderr
    assert "UserWarning" not in done.stderr
