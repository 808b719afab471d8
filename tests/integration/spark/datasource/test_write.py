"""`df.write`, streaming queries and pipelines of the format `nats`, stopped, killed and cut off: each message once.

Which rows become which messages is in `unit/spark_jobs/publishing/test_prepare.py` and `test_message_ids.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
import yaml

from tests.integration.spark.live import Captured, Live, message
from tests.support import java
from tests.support.commands import process
from tests.support.documents import REPOSITORY, SERVER
from tests.support.spark_cluster import wait
from tests.support.streams import Stored, read_stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery


pytestmark = pytest.mark.spark


def write(frame: DataFrame, live: Live, mode: str = "append", **options: Any) -> None:
    """Write the rows."""
    frame.write.format("nats").option("servers", live.server.url).options(**options).mode(mode).save()


def stored(live: Live, stream: str = "ORDERS") -> list[Stored]:
    return asyncio.run(read_stream(live.server.url, stream))


def parts(live: Live) -> list[tuple[str, bytes]]:
    """Subjects and payloads, sorted."""
    return sorted((each.subject, each.payload) for each in stored(live))


def test_each_row_has_its_own_subject_payload_and_headers(spark: SparkSession, live: Live) -> None:
    write(spark.sql("SELECT * FROM VALUES ('orders.a', 'x'), ('orders.b', 'y') AS t(subject, payload)"), live)
    headers = "map('To', 'us', 'None', NULL) AS headers"
    last = f"SELECT 'my.own' AS subject, CAST(NULL AS string) AS payload, {headers}"
    write(spark.sql(last), live, subject="orders.{subject[1]}.{header.To}")
    assert parts(live) == [("orders.a", b"x"), ("orders.b", b"y"), ("orders.own.us", b"")]
    assert stored(live)[-1].headers[0] == "To: us"
    text = "SELECT 'orders.c' AS subject, 5 AS id, 1.5D AS amount, X'ff' AS data, array('x', null) AS tags"
    write(spark.sql(text), live, format="msgpack")
    expected = {"id": 5, "amount": 1.5, "data": b"\xff", "tags": ["x", None]}
    assert msgpack.unpackb(stored(live)[-1].payload) == expected


def test_a_streaming_query_copies_a_stream_and_a_repeated_batch_publishes_nothing_twice(
    spark: SparkSession, live: Live, tmp_path: Path
) -> None:
    live.do(lambda stream: stream.add_stream(name="COPY", subjects=["copy.>"]))
    live.fill(500)

    def copy() -> None:
        rows = spark.readStream.format("nats").options(**live.options, maxOffsetsPerTrigger=200).load()
        rows = rows.selectExpr("'copy.' || _nats_subject AS subject", "_nats_payload AS payload")
        writer = rows.writeStream.format("nats").option("servers", live.server.url).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        assert query.awaitTermination(60)

    copy()
    (tmp_path / "checkpoint/commits/2").unlink()  # as if it had been killed before it could note down the third batch
    (tmp_path / "checkpoint/commits/.2.crc").unlink()
    live.fill(50)
    copy()
    expected = [*range(500), *range(50)]
    assert sorted((each.subject, each.payload) for each in stored(live, "COPY")) == sorted(
        (f"copy.orders.{number}", b"%d" % number) for number in expected
    )


def test_sql_inserts_through_a_view_and_never_into_a_table_whose_options_spark_drops(
    spark: SparkSession, live: Live
) -> None:
    options, columns = f"USING nats OPTIONS (servers '{live.server.url}')", "(subject string, payload string)"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW outbox {columns} {options}")
    spark.sql("INSERT INTO outbox SELECT 'orders.' || id, 'n' || id FROM range(3)")
    assert parts(live) == [("orders.0", b"n0"), ("orders.1", b"n1"), ("orders.2", b"n2")]
    with pytest.raises(Exception, match="CREATE TABLE") as raised:
        spark.sql(f"CREATE TABLE lost {options}")
    assert message(raised.value) == (
        "CREATE TABLE: Spark does not store table options for a Python data source; "
        "use CREATE TEMPORARY VIEW name USING nats OPTIONS (…)"
    )
    spark.sql(f"CREATE TABLE lost {columns} {options}")
    try:
        for sql in ("INSERT INTO lost VALUES ('orders.a', 'x')", "SELECT * FROM lost"):
            with pytest.raises(Exception, match="no options") as raised:
                spark.sql(sql).collect()
            assert message(raised.value).startswith("no options are set, not even servers; ")
    finally:
        spark.sql("DROP TABLE lost")


def test_what_cannot_be_written_is_one_clear_error(spark: SparkSession, live: Live) -> None:
    other = "SELECT 'x' AS payload, map('Nats-Expected-Stream', 'B') AS headers"
    for sql, options, expected in (
        (
            "SELECT 'orders.*' AS subject, 'x' AS payload",
            {},
            "invalid subject 'orders.*': a message cannot be published",
        ),
        ("SELECT 'x' AS payload", {"subject": "a", "mode": "overwrite"}, "a stream only accepts mode append"),
        (other, {"subject": "orders.a"}, "expected stream does not match"),
    ):
        with pytest.raises(Exception) as raised:  # noqa: PT011  Spark has several kinds
            write(spark.sql(sql), live, **options)
        assert expected in message(raised.value)
    assert stored(live) == []


# ---------------------------------------------------------------------- streaming queries

PROGRAM = """
import sys
from spark_jobs.job import session

url, directory = sys.argv[1:]
options = {"servers": url, "stream": "ORDERS", "maxOffsetsPerTrigger": "500"}
rows = session("test").readStream.format("nats").options(**options).load().selectExpr("_nats_seq", "_nats_payload")
rows.writeStream.option("checkpointLocation", f"{directory}/checkpoint").start(f"{directory}/files").awaitTermination()
"""


@contextlib.contextmanager
def running(
    spark: SparkSession, live: Live, directory: Path, *, once: bool = False, **options: Any
) -> Iterator[StreamingQuery]:
    """A query that writes the stream's sequences to files; `once` ends it when it has read what is there."""
    frame = spark.readStream.format("nats").options(**live.options, **options).load()
    writer = frame.selectExpr("_nats_seq", "_nats_payload").writeStream
    writer = writer.option("checkpointLocation", f"{directory}/checkpoint").format("parquet")
    query = (writer.trigger(availableNow=True) if once else writer).start(f"{directory}/files")
    try:
        yield query
    finally:
        query.stop()


def written(spark: SparkSession, directory: Path) -> list[int]:
    """What the query's files hold: each once, as the file sink guarantees for a source that repeats its batches."""
    return sorted(row[0] for row in spark.read.parquet(f"{directory}/files").select("_nats_seq").collect())


def test_a_query_reads_what_comes_and_goes_on_from_its_checkpoint_in_limited_batches_until_the_end(
    spark: SparkSession, live: Live, tmp_path: Path
) -> None:
    live.fill(100)
    with running(spark, live, tmp_path) as query:
        query.processAllAvailable()
        live.fill(50)
        query.processAllAvailable()
    assert written(spark, tmp_path) == list(range(1, 151))
    live.fill(100)
    with running(spark, live, tmp_path, once=True, maxOffsetsPerTrigger=40, minPartitions=2) as query:
        assert query.awaitTermination(60)
        counts = [progress["numInputRows"] for progress in query.recentProgress]
    assert list(filter(None, counts)) == [40, 40, 20]
    assert written(spark, tmp_path) == list(range(1, 251))
    assert live.consumers() == []


@pytest.mark.exhaustive
def test_a_killed_driver_and_a_killed_server_lose_and_repeat_nothing(
    spark: SparkSession, live: Live, tmp_path: Path
) -> None:
    live.fill(5000)
    command = [sys.executable, "-c", PROGRAM, live.server.url, str(tmp_path)]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        wait(lambda: (tmp_path / "checkpoint/commits/1").exists(), "two batches are done")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "checkpoint/commits/9").exists(), "it was done before it was killed"
    with running(spark, live, tmp_path, maxOffsetsPerTrigger=1000) as query:
        wait(lambda: query.lastProgress is not None, "the first batch is done")
        live.server.kill()
        live.server.start()
        live.fill(100)
        query.processAllAvailable()
    assert written(spark, tmp_path) == list(range(1, 5101))


DECODE = {"format": "json", "columns": {"region": "string", "amount": "int64"}}


def order(number: int) -> tuple[str, bytes]:
    region = "eu" if number % 2 else "us"
    return f"orders.{region}", json.dumps({"region": region, "amount": 100 * number}).encode()


@pytest.mark.exhaustive
def test_a_pipeline_publishes_what_is_new_since_its_last_run(live: Live, tmp_path: Path) -> None:
    captured, url = Captured(live, tmp_path / "archive", {"decode": DECODE}), live.server.url
    live.do(lambda stream: stream.add_stream(name="LARGE", subjects=["large.>"]))
    text = (REPOSITORY / "examples" / "pipeline.py").read_text().replace(SERVER, url)
    (tmp_path / "orders.py").write_text(text.replace("/etc/jetcapture/config.yaml", captured.path))
    spec = {"name": "orders", "storage": f"file://{tmp_path}/storage"}
    spec_file = tmp_path / "spark-pipeline.yml"
    spec_file.write_text(yaml.safe_dump({**spec, "libraries": [{"glob": {"include": "orders.py"}}]}))
    live.send(order(number) for number in range(20))
    captured.capture()
    command = Path(sys.executable).with_name("spark-pipelines")
    variables = {**java.only(), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    variables |= {"PYTHONPATH": str(REPOSITORY), "SPARK_TESTING": "1"}  # any free port
    for count in (20, 30):
        done = process(command, "run", "--spec", spec_file, cwd=tmp_path, env=variables)
        assert done.returncode == 0, done.stdout + done.stderr
        found = [json.loads(message.payload) for message in asyncio.run(read_stream(url, "LARGE"))]
        assert sorted(each["amount"] for each in found) == [100 * number for number in range(11, count)]
        live.send(order(number) for number in range(20, 30))
