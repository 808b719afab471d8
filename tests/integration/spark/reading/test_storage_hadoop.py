"""Spark's own reader on S3 and Azure, with the packages that a new session adds, which it downloads: 700 MB."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.spark.conftest import HOUR, Archive
from tests.support import azurite, s3

pytestmark = [
    pytest.mark.spark,
    pytest.mark.exhaustive,
    pytest.mark.timeout(600),
]

EMULATOR = {
    "fs.azure.always.use.https": "false",
    "fs.azure.account.hns.enabled": "false",
    "fs.azure.fns.account.service.type": "BLOB",
    "fs.azure.networking.library": "JDK_HTTP_URL_CONNECTION",
}
"""What Spark needs for Azurite, beside its endpoint."""

JOBS = """
import sys
from spark_jobs.query import main

url, other, copy, *options = sys.argv[1:]
sums = "SELECT key, sum(amount) AS total FROM archive GROUP BY key ORDER BY total"
assert main([url, "ORDERS", sums, "--format", "csv", *options]) == 0
assert main([url, "ORDERS", "SELECT count(*) AS n FROM archive", "--format", "csv", "--key", "eu", *options]) == 0
assert main([url, "ORDERS", "SELECT stage FROM quarantine", "--format", "csv", *options]) == 0
assert main([url, "ORDERS", sums, "--format", "parquet", "--output", copy, *options]) == 0
endpoint = options[-2:]  # and the credentials from the environment
assert main([other, "ORDERS", "SELECT max(amount) AS most FROM archive", "--format", "csv", *endpoint]) == 0
wrong = [*endpoint, "--option", "key=dummy", "--option", "secret=hidden-too"]
assert main([other + "-missing", "ORDERS", "SELECT * FROM archive", *wrong]) == 1
"""


@pytest.fixture
def orders(archive: Archive) -> Archive:
    archive.write([1, 2, 3], "eu", amount=[1.0, 2.0, 3.0])
    archive.write([3, 4], "eu", amount=[3.0, 4.0])
    archive.write([5], "a b/ü%", amount=[11.0])
    archive.write([6], None, bucket=HOUR + 3600, amount=[20.0])
    archive.write([7], quarantine=True, stage=["decode"], error=["truncated"])
    return archive


def run(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
        env={**os.environ, **environment},
    )
    if "unresolved dependenc" in done.stderr.lower():
        pytest.skip("Spark cannot download its packages")
    return done


def test_spark_reads_and_writes_s3_with_the_captures_options_and_shows_no_secret(
    orders: Archive, tmp_path: Path
) -> None:
    events = tmp_path / "events"
    events.mkdir()
    (tmp_path / "spark-defaults.conf").write_text(
        f"spark.eventLog.enabled true\nspark.eventLog.compress false\nspark.eventLog.dir {events.as_uri()}\n"
    )
    environment = {
        "SPARK_CONF_DIR": str(tmp_path),
        "AWS_ACCESS_KEY_ID": "dummy",
        "AWS_SECRET_ACCESS_KEY": "hidden-too",
    }
    with s3.serve() as endpoint:
        url, other = (s3.upload(endpoint, orders.root) for _ in range(2))
        done = run(["-c", JOBS, url, other, f"{url}-sums", *s3.arguments(endpoint)], **environment)
        assert done.returncode == 0, done.stderr
        written = s3.names(endpoint, f"{url}-sums")
    expected = ["key,total", "eu,10.0", "a b/ü%,11.0", ",20.0", "n", "4", "stage", "decode", "most", "20.0"]
    assert done.stdout.splitlines() == expected
    assert any(name.endswith(".parquet") for name in written)
    logs = [path.read_text() for path in events.rglob("*") if path.is_file()]
    assert any("SparkListenerSQLExecutionStart" in text for text in logs)
    for secret in (s3.CREDENTIALS["secret"], "hidden-too"):
        assert all(secret not in text for text in (done.stdout, done.stderr, *logs))


def test_spark_reads_azure_with_the_captures_options(orders: Archive, tmp_path: Path) -> None:
    with azurite.serve(tmp_path) as connection:
        azurite.upload(connection, orders.root)
        endpoint = re.search(r"BlobEndpoint=http://([^/;]+)", connection)
        assert endpoint is not None
        settings = {**EMULATOR, "fs.azure.abfs.endpoint": endpoint[1]}
        lines = (f"spark.hadoop.{name} {value}\n" for name, value in settings.items())
        (tmp_path / "spark-defaults.conf").write_text("".join(lines))
        sums = "SELECT key, sum(amount) AS total FROM archive GROUP BY key ORDER BY total"
        options = ["--format", "csv", "--option", "connection_string=${AZURE}"]
        words = ["-m", "spark_jobs.query", azurite.URL, "ORDERS", sums, *options]
        done = run(words, AZURE=connection, SPARK_CONF_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "key,total\neu,10.0\na b/ü%,11.0\n,20.0\n"), done.stderr
