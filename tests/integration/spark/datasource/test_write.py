"""`df.write.format("nats")` and `df.writeStream.format("nats")`: rows become messages, each of them once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.spark.live import Live, message
from tests.support.streams import Stored, read_stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


def write(frame: DataFrame, live: Live, mode: str = "append", **options: Any) -> None:
    """Write the rows."""
    frame.write.format("nats").option("servers", live.server.url).options(**options).mode(mode).save()


def stored(live: Live) -> list[Stored]:
    """The stream's messages, without the ids that the writer gave them."""
    messages = asyncio.run(read_stream(live.server.url, "ORDERS"))
    ours = "Nats-Msg-Id: "
    return [
        each._replace(headers=tuple(line for line in each.headers if not line.startswith(ours))) for each in messages
    ]


def parts(live: Live) -> list[tuple[str, bytes]]:
    """Subjects and payloads, sorted."""
    return sorted((each.subject, each.payload) for each in stored(live))


def failure(frame: DataFrame, live: Live, **options: Any) -> str:
    """What is said when the rows cannot be written."""
    with pytest.raises(Exception) as raised:  # noqa: PT011  Spark has several kinds
        write(frame, live, **options)
    return message(raised.value)


def test_each_row_has_its_own_subject(spark: SparkSession, live: Live) -> None:
    write(spark.sql("SELECT * FROM VALUES ('orders.a', 'x'), ('orders.b', 'y') AS t(subject, payload)"), live)
    write(spark.sql("SELECT 'eu' AS region, 7 AS n, 'z' AS value"), live, subject="orders.{region}.{n}")
    write(spark.sql("SELECT 'orders.c' AS _nats_subject, X'00FF' AS _nats_payload"), live)
    last = "SELECT 'my.own' AS subject, CAST(NULL AS string) AS payload, map('To', 'us') AS headers"
    write(spark.sql(last), live, subject="orders.{subject[1]}.{header.To}")
    assert parts(live) == [
        ("orders.a", b"x"),
        ("orders.b", b"y"),
        ("orders.c", b"\x00\xff"),
        ("orders.eu.7", b"z"),
        ("orders.own.us", b""),
    ]


def test_a_row_without_payload_is_published_as_json(spark: SparkSession, live: Live) -> None:
    frame = spark.sql(
        "SELECT 'orders.a' AS subject, 1 AS id, 2.50 AS price, TIMESTAMP '2026-01-31 12:00:00' AS at, X'00FF' AS raw, "
        "map('k', array(1)) AS tags, named_struct('x', 'é') AS s, CAST(NULL AS int) AS nothing, "
        "DATE '2026-01-31' AS day"
    )
    write(frame, live)
    ((_, payload),) = parts(live)
    assert b'"price":2.50' in payload
    assert json.loads(payload) == {
        "id": 1,
        "price": 2.5,
        "at": "2026-01-31T12:00:00.000000Z",
        "raw": "AP8=",
        "tags": {"k": [1]},
        "s": {"x": "é"},
        "nothing": None,
        "day": "2026-01-31",
    }
    columns = "id int, price decimal(10,2), at timestamp, raw binary, tags map<string, array<int>>"
    reader = spark.read.format("nats").options(**live.options, format="json", columns=columns, mode="FAILFAST")
    back = reader.load().select("id", "price", "at", "raw", "tags")
    assert back.collect() == frame.select(*back.columns).collect()


def test_headers_go_both_ways(spark: SparkSession, live: Live) -> None:
    write(spark.sql("SELECT 'orders.a' AS subject, 'x' AS payload, map('A', '1', 'B', NULL) AS headers"), live)
    write(spark.sql("SELECT 'orders.b' AS subject, 'x' AS payload, map('A', array('1', '2')) AS headers"), live)
    assert [each.headers for each in stored(live)] == [("A: 1",), ("A: 1", "A: 2")]
    read = spark.read.format("nats").options(**live.options, includeHeaders=True)
    columns = "_nats_payload", "map_filter(_nats_headers, (name, _) -> name = 'A') AS _nats_headers"
    copied = read.load().selectExpr(*columns)
    write(copied, live, subject="orders.copy")
    assert [each.headers for each in stored(live)][2:] == [("A: 1",), ("A: 1", "A: 2")]


def test_headers_that_instructed_a_server_are_not_sent_again(spark: SparkSession, live: Live) -> None:
    headers = "map('Nats-Expected-Stream', array('OTHER'), 'Nats-Msg-Id', array('old'), 'Kept', array('1'))"
    write(spark.sql(f"SELECT 'orders.a' AS _nats_subject, X'00' AS _nats_payload, {headers} AS _nats_headers"), live)
    assert [each.headers for each in stored(live)] == [("Kept: 1",)]
    assert "wrong stream" not in live.server.log
    error = failure(
        spark.sql("SELECT 'orders.a' AS subject, 'x' AS payload, map('Nats-Expected-Stream', 'OTHER') AS headers"),
        live,
    )
    assert "expected stream does not match" in error  # what a user says on purpose is said


def test_rows_under_one_message_id_are_stored_once(spark: SparkSession, live: Live) -> None:
    frame = spark.sql(
        "SELECT 'orders.a' AS subject, value AS payload, msg_id FROM "
        "VALUES ('x', 'one'), ('y', 'one'), ('z', NULL), ('z', NULL) AS t(value, msg_id)"
    ).coalesce(1)
    write(frame, live)
    write(frame, live)
    assert [payload for _, payload in parts(live)] == [b"x", b"z", b"z", b"z", b"z"]  # without an id, all are wanted


def test_a_row_has_one_message_id(spark: SparkSession, live: Live) -> None:
    row = spark.sql("SELECT 'orders.a' AS subject, 'x' AS payload, map('Nats-Msg-Id', 'a') AS headers, 'b' AS msg_id")
    assert failure(row, live) == "a row has two message ids: msg_id is 'b', and Nats-Msg-Id in its headers is 'a'"
    write(row.selectExpr("subject", "payload", "headers"), live)
    write(row.selectExpr("subject", "'y' AS payload", "'a' AS msg_id"), live)
    assert parts(live) == [("orders.a", b"x")]


@pytest.mark.exhaustive
def test_a_task_that_runs_again_publishes_nothing_twice(live: Live) -> None:
    command = [sys.executable, "-m", "tests.integration.spark.write_with_a_failing_task", live.server.url, "2000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "the first attempt fails" in done.stderr
    assert sorted(json.loads(each.payload)["id"] for each in stored(live)) == list(range(2000))


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
    copied = asyncio.run(read_stream(live.server.url, "COPY"))
    expected = [*range(500), *range(50)]
    assert sorted((each.subject, each.payload) for each in copied) == sorted(
        (f"copy.orders.{number}", b"%d" % number) for number in expected
    )


def test_a_table_whose_options_spark_drops_is_never_written_to(spark: SparkSession, live: Live) -> None:
    with pytest.raises(Exception, match="CREATE TABLE") as raised:
        spark.sql(f"CREATE TABLE lost USING nats OPTIONS (servers '{live.server.url}', stream 'ORDERS')")
    assert message(raised.value) == (
        "CREATE TABLE: Spark does not store table options for a Python data source; "
        "use CREATE TEMPORARY VIEW name USING nats OPTIONS (…)"
    )
    spark.sql(f"CREATE TABLE lost (subject string, payload string) USING nats OPTIONS (servers '{live.server.url}')")
    try:
        for sql in ("INSERT INTO lost VALUES ('orders.a', 'x')", "SELECT * FROM lost"):
            with pytest.raises(Exception, match="no options") as raised:
                spark.sql(sql).collect()
            assert message(raised.value).startswith("no options are set, not even servers; ")
    finally:
        spark.sql("DROP TABLE lost")


def test_sql_inserts_through_a_view(spark: SparkSession, live: Live) -> None:
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW outbox (subject string, payload string) USING nats "
        f"OPTIONS (servers '{live.server.url}')"
    )
    spark.sql("INSERT INTO outbox SELECT 'orders.' || id, 'n' || id FROM range(3)")
    assert parts(live) == [("orders.0", b"n0"), ("orders.1", b"n1"), ("orders.2", b"n2")]


def test_what_cannot_be_written_is_one_clear_error(spark: SparkSession, live: Live) -> None:
    null = "SELECT CAST(NULL AS string) AS a, 'y' AS value"
    for sql, options, expected in (
        (
            "SELECT 'orders.*' AS subject, 'x' AS payload",
            {},
            "invalid subject 'orders.*': a message cannot be published",
        ),
        (null, {"subject": "orders.{a}"}, 'a row has no subject: a is null in {"a":null,"value":"y"}'),
        ("SELECT 'x' AS payload", {"subject": "a", "mode": "overwrite"}, "a stream only accepts mode append"),
    ):
        assert failure(spark.sql(sql), live, **options).startswith(expected)
    assert stored(live) == []
