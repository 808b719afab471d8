"""An archive in S3 or Azure, read and written by Spark's own file systems, and by the store's driver in its workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
import pytest

from jetcapture_py.errors import JetcaptureError
from spark_jobs.archive import read_archive
from spark_jobs.query import main
from spark_jobs.reading.location import spark_settings
from tests.integration.spark.conftest import HOUR, Archive
from tests.support import azurite, s3
from tests.support.commands import process

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SUMS = "SELECT key, sum(amount) AS total FROM archive GROUP BY key ORDER BY total"
TOTALS = "key,total\neu,10.0\na b/ü%,11.0\n,20.0\n"


@pytest.fixture
def orders(archive: Archive) -> Archive:
    archive.write([1, 2, 3], "eu", amount=[1.0, 2.0, 3.0])
    archive.write([3, 4], "eu", amount=[3.0, 4.0])
    archive.write([5], "a b/ü%", amount=[11.0])
    archive.write([6], None, bucket=HOUR + 3600, amount=[20.0])
    archive.write([7], quarantine=True, stage=["decode"], error=["truncated"])
    return archive


def test_an_archive_in_s3_is_queried_without_a_file_system_of_sparks(
    spark: SparkSession, orders: Archive, capsys: pytest.CaptureFixture[str]
) -> None:
    with s3.serve() as endpoint:
        where = [s3.upload(endpoint, orders.root), "ORDERS", *s3.arguments(endpoint), "--engine", "arrow"]
        assert main([*where, SUMS, "--format", "csv"]) == 0
        assert capsys.readouterr().out == TOTALS


def test_a_new_session_gets_the_packages_of_the_hadoop_that_it_has(spark: SparkSession) -> None:
    jvm: Any = spark._jvm
    hadoop = jvm.org.apache.hadoop.util.VersionInfo.getVersion()
    settings = spark_settings("s3://bucket/nats", None, "/local", "az://box/nats", "s3a://other")
    packages = {f"org.apache.hadoop:hadoop-{name}:{hadoop}" for name in ("aws", "azure")}
    assert set(settings["spark.jars.packages"].split(",")) == packages
    assert (Path(pyspark.__file__).parent / "jars" / f"hadoop-client-api-{hadoop}.jar").exists()
    unreachable = {"endpoint_url": "http://127.0.0.1:1", "key": "AKIA", "secret": "hidden"}
    with pytest.raises(JetcaptureError) as raised:  # before anything is listed
        read_archive(spark, "s3://bucket/nats", "ORDERS", options=unreachable)
    assert f"--packages org.apache.hadoop:hadoop-aws:{hadoop}" in str(raised.value)
    assert "--engine arrow" in str(raised.value)
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------------- Spark's own file systems, which it downloads

JOBS = f"""
import sys
from spark_jobs.query import main

url, other, copy, *options = sys.argv[1:]
sums = "{SUMS}"
assert main([url, "ORDERS", sums, "--format", "csv", *options]) == 0
assert main([url, "ORDERS", "SELECT count(*) AS n FROM archive", "--format", "csv", "--key", "eu", *options]) == 0
assert main([url, "ORDERS", "SELECT stage FROM quarantine", "--format", "csv", *options]) == 0
assert main([url, "ORDERS", sums, "--format", "parquet", "--output", copy, *options]) == 0
endpoint = options[-2:]  # and the credentials from the environment
assert main([other, "ORDERS", "SELECT max(amount) AS most FROM archive", "--format", "csv", *endpoint]) == 0
wrong = [*endpoint, "--option", "key=dummy", "--option", "secret=hidden-too"]
assert main([other + "-missing", "ORDERS", "SELECT * FROM archive", *wrong]) == 1
"""
EMULATOR = {
    "fs.azure.always.use.https": "false",
    "fs.azure.account.hns.enabled": "false",
    "fs.azure.fns.account.service.type": "BLOB",
    "fs.azure.networking.library": "JDK_HTTP_URL_CONNECTION",
}
"""What Spark needs for Azurite, beside its endpoint."""


def run(directory: Path, defaults: dict[str, str], *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose Spark has these settings."""
    settings = "".join(f"{name} {value}\n" for name, value in defaults.items())
    (directory / "spark-defaults.conf").write_text(settings)
    environment = {**os.environ, **variables, "SPARK_CONF_DIR": str(directory)}
    done = process(sys.executable, *words, timeout=580, env=environment)
    if "unresolved dependenc" in done.stderr.lower():
        pytest.skip("Spark cannot download its packages")
    return done


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_spark_reads_and_writes_s3_with_the_captures_options_and_shows_no_secret(
    orders: Archive, tmp_path: Path
) -> None:
    events = tmp_path / "events"
    events.mkdir()
    log = {"enabled": "true", "compress": "false", "dir": events.as_uri()}
    defaults = {f"spark.eventLog.{name}": value for name, value in log.items()}
    credentials = {"AWS_ACCESS_KEY_ID": "dummy", "AWS_SECRET_ACCESS_KEY": "hidden-too"}
    with s3.serve() as endpoint:
        url, other = (s3.upload(endpoint, orders.root) for _ in range(2))
        words = ["-c", JOBS, url, other, f"{url}-sums", *s3.arguments(endpoint)]
        done = run(tmp_path, defaults, *words, **credentials)
        assert done.returncode == 0, done.stderr
        written = s3.names(endpoint, f"{url}-sums")
    assert done.stdout == f"{TOTALS}n\n4\nstage\ndecode\nmost\n20.0\n"
    assert any(name.endswith(".parquet") for name in written)
    logs = [path.read_text() for path in events.rglob("*") if path.is_file()]
    assert any("SparkListenerSQLExecutionStart" in text for text in logs)
    for secret in (s3.CREDENTIALS["secret"], "hidden-too"):
        assert all(secret not in text for text in (done.stdout, done.stderr, *logs))


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_spark_reads_azure_with_the_captures_options(orders: Archive, tmp_path: Path) -> None:
    with azurite.serve(tmp_path) as connection:
        azurite.upload(connection, orders.root)
        endpoint = re.search(r"BlobEndpoint=http://([^/;]+)", connection)
        assert endpoint is not None
        settings = {**EMULATOR, "fs.azure.abfs.endpoint": endpoint[1]}
        defaults = {f"spark.hadoop.{name}": value for name, value in settings.items()}
        options = ["--format", "csv", "--option", "connection_string=${AZURE}"]
        words = ["-m", "spark_jobs.query", azurite.URL, "ORDERS", SUMS, *options]
        done = run(tmp_path, defaults, *words, AZURE=connection)
    assert (done.returncode, done.stdout) == (0, TOTALS), done.stderr
