"""The jobs over Spark Connect: against a server of its own, and one that PySpark starts for SPARK_REMOTE=local."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.spark.conftest import HOUR, Archive
from tests.support import s3
from tests.support.connect import connect_server, environment

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.spark

SUMS = "SELECT key, sum(amount) AS total FROM archive GROUP BY key ORDER BY key"


HELD = """
import shutil
import sys
from pathlib import Path
from pyspark.sql import SparkSession
from spark_jobs.archive import archive_view

spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
root = Path(sys.argv[2])
frame = archive_view(spark, str(root), "ORDERS", "held")


def show(event):
    for held in (frame, spark.table("held")):
        try:
            found = held.count()
        except Exception as error:
            found = "read it again" in str(error) or "PATH_NOT_FOUND" in str(error) or str(error)
        print(event, found)


def forget():
    for number in range(40):  # the server keeps 16 plans of a session
        spark.range(number).count()


show("planned")
shutil.copytree(sys.argv[3], root, dirs_exist_ok=True)
forget()
show("more is stored")
spark.sql("REFRESH TABLE held").collect()
show("refreshed")
next(root.glob("ORDERS/key=eu/*/*/*.parquet")).unlink()
show("one is gone")
forget()
show("forgotten")
spark.sql("REFRESH TABLE held").collect()
show("refreshed")
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


def run(remote: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**environment(remote), **more},
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with connect_server(tmp_path_factory.mktemp("connect")) as url:
        yield url


@pytest.mark.exhaustive
def test_a_held_frame_reads_the_objects_of_its_plan_or_says_read_it_again(
    server: str, orders: Archive, tmp_path: Path
) -> None:
    later = Archive(tmp_path / "later")
    later.write([8, 9], "eu", amount=[8.0, 9.0])
    later.write([8], "us", bucket=HOUR + 3600, amount=[7])
    later.write([10], "new", amount=[1])
    done = run("", "-c", HELD, server, str(orders.root), str(later.root))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{event} {found}"
        for event, found in (
            ("planned", 6),
            ("more is stored", 6),
            ("refreshed", 6),
            ("one is gone", True),
            ("forgotten", True),
            ("refreshed", True),
        )
        for _ in range(2)
    ]


@pytest.mark.exhaustive
def test_held_reads_beside_a_capture_and_compactions_are_right_or_fail(server: str) -> None:
    done = run("", "-m", "tests.held_reads", "--count", "8", "--connect", server)
    assert done.returncode == 0, done.stdout


@pytest.mark.exhaustive
def test_the_notebook_of_the_examples_runs(server: str, orders: Archive) -> None:
    now = int(time.time())
    orders.write([9], "recent", bucket=now - now % 3600)
    notebook = Path(__file__).parents[3] / "examples" / "notebook.py"
    done = run("", str(notebook), server, orders.url, "ORDERS")
    assert done.returncode == 0, done.stderr
    assert "recent" in done.stdout
    assert "truncated" in done.stdout


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
def test_a_server_without_the_file_system_is_told_the_package(server: str, orders: Archive) -> None:
    with s3.serve() as endpoint:
        where = [s3.upload(endpoint, orders.root), "ORDERS", *s3.arguments(endpoint)]
        done = run(server, "-m", "spark_jobs.query", *where, SUMS)
        assert done.returncode == 1
        assert done.stderr.startswith("query: Spark cannot read s3a:// URLs")
        assert "org.apache.hadoop:hadoop-aws:" in done.stderr
        done = run(server, "-m", "spark_jobs.query", *where, SUMS, "--engine", "arrow", "--format", "csv")
        assert (done.returncode, done.stdout) == (0, "key,total\neu,10.0\nus,11.0\n"), done.stderr
