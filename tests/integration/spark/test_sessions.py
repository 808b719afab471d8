"""Sessions that change what a row is or where it is computed: other settings, Spark Connect, a cluster."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.spark import core
from tests.integration.spark.conftest import HOUR, Archive
from tests.support import java, s3
from tests.support.commands import process
from tests.support.connect import connect_server, environment
from tests.support.nats_server import NatsServer
from tests.support.replays import add_stream

pytestmark = [pytest.mark.spark, pytest.mark.exhaustive]

SUMS = "SELECT key, sum(amount) AS total FROM archive GROUP BY key ORDER BY key"
SETTINGS = {
    "spark.sql.session.timeZone": "Asia/Kathmandu",
    "spark.sql.ansi.enabled": "false",
    "spark.sql.caseSensitive": "true",
    "spark.sql.adaptive.enabled": "false",
}
"""None of them has its default here."""


def run(variables: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return process(sys.executable, *words, env=variables, cwd=Path(__file__).parents[3])


@pytest.mark.parametrize("master", ["remote", "local-cluster[2,1,1024]"])
@pytest.mark.timeout(700)  # it starts up to four JVMs
def test_the_core_cases_hold_on_connect_and_on_a_cluster(
    nats_server: Callable[..., NatsServer], tmp_path: Path, master: str
) -> None:
    archive, server = Archive(tmp_path / "core"), nats_server()
    core.fill(archive)
    add_stream(server.url, "CORE", "core.>")
    given = [f"{key}={value}" for key, value in (SETTINGS | java.COMPILED).items()]
    done = run(java.only(), "-m", core.__name__, archive.url, server.url, "CORE", master, *given)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-3000:]


# ---------------------------------------------------------------------- a server of Spark Connect


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with connect_server(tmp_path_factory.mktemp("connect")) as url:
        yield url


@pytest.fixture
def orders(archive: Archive) -> Archive:
    """Copies that are settled by sequences, copies that Spark compares, and a column that drifted."""
    archive.write([1, 2, 3], "eu", amount=[1.0, 2.0, 3.0])
    archive.write([3, 4], "eu", amount=[3.0, 4.0])
    archive.write([5], "us", bucket=HOUR + 3600, amount=[5], timestamps=[1])
    archive.write([5], "us", bucket=HOUR + 3600, amount=[6], timestamps=[2])
    archive.write([7], quarantine=True, stage=["decode"], error=["truncated"])
    return archive


def test_held_reads_beside_a_capture_and_compactions_are_right_or_fail(remote: str) -> None:
    done = run(environment(""), "-m", "tests.held_reads", "--count", "8", "--connect", remote)
    assert done.returncode == 0, done.stdout


def test_the_notebook_of_the_examples_runs(remote: str, orders: Archive) -> None:
    now = int(time.time())
    orders.write([9], "recent", bucket=now - now % 3600)
    done = run(environment(""), "examples/notebook.py", remote, orders.url, "ORDERS")
    assert done.returncode == 0, done.stderr
    assert "recent" in done.stdout
    assert "truncated" in done.stdout


def test_query_runs_on_the_server_that_spark_remote_names(remote: str, orders: Archive) -> None:
    def query(url: str, *words: str) -> subprocess.CompletedProcess[str]:
        return run(environment(remote), "-m", "spark_jobs.query", url, "ORDERS", *words)

    done = query(orders.url, SUMS.replace("total", "total, (SELECT count(*) FROM quarantine) AS bad"))
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split() for line in done.stdout.splitlines()[2:]] == [["eu", "10.0", "1"], ["us", "11.0", "1"]]
    done = query(orders.url, "SELECT nothing FROM archive")
    assert (done.returncode, done.stderr[:7], done.stderr.count("\n")) == (1, "query: ", 1)
    with s3.serve() as endpoint:  # which the server has no file system for
        url, options = s3.upload(endpoint, orders.root), s3.arguments(endpoint)
        done = query(url, SUMS, *options)
        assert done.returncode == 1
        assert done.stderr.startswith("query: Spark cannot read s3a:// URLs")
        assert "org.apache.hadoop:hadoop-aws:" in done.stderr
        done = query(url, SUMS, *options, "--engine", "arrow", "--format", "csv")
        assert (done.returncode, done.stdout) == (0, "key,total\neu,10.0\nus,11.0\n"), done.stderr
