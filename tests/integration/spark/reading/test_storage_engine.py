from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pyspark
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.errors import JetcaptureError
from spark_jobs.archive import read_archive
from spark_jobs.query import main
from spark_jobs.reading.location import spark_settings
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


def test_a_query_does_not_need_what_it_does_not_name_and_a_damaged_object_that_it_needs_is_named(
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
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("query: cannot read ")
    assert path.name in error
