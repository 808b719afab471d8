"""`spark.read.format("nats")`: bounded reads of every format, as a user writes them; what is archived reads alike.

What a range of a stream has, whatever happens, is in `test_ranges.py` and `test_loss.py`.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from datetime import UTC, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy

from jetcapture_py.archive import layout
from spark_jobs.archive import read_archive
from tests.integration.spark.live import Live, message
from tests.support.formats import COLUMNS, formats, rows
from tests.support.running import STREAM, capture_all, config
from tests.unit.transform.decode.test_avro import container, datum

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


def read(spark: SparkSession, live: Live, ddl: str = "", **options: Any) -> DataFrame:
    """The stream, as it is now."""
    reader = spark.read.format("nats").options(**{**live.options, **options})
    return (reader.schema(ddl) if ddl else reader).load()


def failure(frame: DataFrame) -> str:
    """What the error of reading `frame` says of ours, in one line."""
    with pytest.raises(Exception) as raised:  # noqa: PT011  Spark has several kinds
        frame.collect()
    return message(raised.value)


def test_every_message_is_read_once_with_its_envelope_and_other_consumers_are_not_touched(
    spark: SparkSession, live: Live
) -> None:
    began = datetime.now(UTC)
    live.fill(3000)
    archive = ConsumerConfig(durable_name="archive", ack_policy=AckPolicy.EXPLICIT)
    live.do(lambda stream: stream.add_consumer("ORDERS", archive))
    frame = read(spark, live, minPartitions=4)
    assert frame.columns == [name for name in layout.ENVELOPE if name != layout.HEADERS]
    assert frame.rdd.getNumPartitions() == 4
    times = f"unix_micros({layout.TIMESTAMP})"
    rows = sorted(frame.selectExpr(layout.SEQ, layout.STREAM, layout.SUBJECT, "_nats_payload", times).collect())
    assert [row[0] for row in rows] == list(range(1, 3001))
    for number, row in enumerate(rows):
        assert (row[1], row[2], bytes(row[3])) == ("ORDERS", f"orders.{number}", b"%d" % number)
    assert began.timestamp() - 1 < rows[0][4] / 1e6 <= rows[-1][4] / 1e6 < datetime.now(UTC).timestamp() + 1
    info = live.do(lambda stream: stream.consumer_info("ORDERS", "archive"))
    assert (info.num_pending, info.num_ack_pending, live.consumers()) == (3000, 0, ["archive"])


def test_live_and_archived_messages_make_one_table(spark: SparkSession, live: Live, tmp_path: Path) -> None:
    headers = [("A", "1"), ("A", "2"), ("B", "")]
    live.send([("orders.a", bytes(range(256)), headers), ("orders.b", b"")])
    asyncio.run(capture_all(config(live.server.url, tmp_path / "archive")))
    archived = read_archive(spark, f"file://{tmp_path}/archive", "ORDERS")
    table = read(spark, live, includeHeaders=True).unionByName(archived, allowMissingColumns=True)
    both = table.select(*layout.ENVELOPE).collect()
    assert len(both) == 4
    assert sorted(both[:2]) == sorted(both[2:])
    assert {row[layout.SEQ]: row[layout.HEADERS] for row in both} == {1: {"A": ["1", "2"], "B": [""]}, 2: None}


@pytest.fixture
def orders(live: Live) -> Live:
    """A stream of two messages that fit, and two that do not."""
    first = (
        b'{"id": 1, "price": 12.5, "at": "2026-01-31T12:00:00Z", "date": "x", "items": [{"sku": "a"}], "t": {"k": 2}}'
    )
    live.send([("orders.new", payload) for payload in (first, b'{"id": "two"}', b'{"id": 3}', b"nonsense")])
    return live


def test_json_is_decoded_into_the_columns_that_a_user_asks_for(spark: SparkSession, orders: Live) -> None:
    columns = "id bigint, price decimal(10,2), at timestamp, date_ string, items array<struct<sku: string, n: int>>"
    frame = read(spark, orders, format="json", columns=columns).orderBy(layout.SEQ)
    assert frame.columns[:2] == [layout.STREAM, layout.SUBJECT]
    first, *rest = frame.withColumn("at", frame["at"].cast("string")).collect()
    assert (first["id"], first["price"], first["at"]) == (1, Decimal("12.50"), "2026-01-31 12:00:00")
    assert (first["date_"], first["items"]) == ("x", [("a", None)])
    assert [row["id"] for row in rest] == [None, 3, None]
    assert bytes(rest[-1][layout.PAYLOAD]) == b"nonsense"  # what did not fit can still be seen
    frame = read(spark, orders, "id bigint, _NATS_SEQ bigint, date string", format="json")
    assert frame.columns == ["id", "_NATS_SEQ", "date"]
    assert sorted(map(tuple, frame.collect()), key=str) == [(1, 1, "x"), (3, 3, None), (None, 2, None), (None, 4, None)]
    assert read(spark, orders, f"{layout.SUBJECT} string").collect() == [("orders.new",)] * 4
    dropped = read(spark, orders, format="json", columns="id bigint", mode="dropMalformed")
    assert sorted(row["id"] for row in dropped.collect()) == [1, 3]


def test_a_read_that_fails_says_so_in_one_line_of_ours(spark: SparkSession, orders: Live) -> None:
    orders.do(lambda stream: stream.add_stream(name="JOBS", subjects=["jobs"], retention=RetentionPolicy.WORK_QUEUE))
    orders.do(lambda stream: stream.publish("jobs", b""))
    raw = "format raw has no column id; format json decodes it from the payload"
    jobs = "NATS refused: consumer in pull mode requires explicit ack policy on workqueue stream"
    for frame, text in (
        (read(spark, orders, "id bigint"), raw),
        (read(spark, orders, maxOffsetsPerTrigger=1), "maxOffsetsPerTrigger: only in a streaming query"),
        (read(spark, orders, stream="JOBS"), jobs),
        (read(spark, orders, format="json", columns="id int", mode="FAILFAST"), "message 2 of stream ORDERS: "),
    ):
        assert failure(frame).startswith(text)
    orders.purge(seq=4)
    assert failure(read(spark, orders, startingOffsets=2)).startswith("messages 2 to 3 of stream ORDERS are gone")
    with pytest.raises(Exception, match="unknown option") as raised:
        read(spark, orders, startingOffset=1)
    assert message(raised.value) == "startingoffset: unknown option; did you mean startingOffsets?"


def test_plain_sql_reads_a_stream_through_a_view(spark: SparkSession, orders: Live) -> None:
    view = (
        "CREATE OR REPLACE TEMPORARY VIEW live_orders USING nats OPTIONS "
        f"(servers '{orders.server.url}', stream 'ORDERS', format 'json', columns 'id bigint')"
    )
    query = f"SELECT {layout.SUBJECT}, count(*), sum(id) FROM live_orders GROUP BY {layout.SUBJECT}"
    spark.sql(view)
    assert spark.sql(query).collect() == [("orders.new", 4, 4)]
    orders.send([("orders.new", b'{"id": 10}')])
    assert spark.sql(query).collect() == [("orders.new", 4, 4)]  # queries over one view see the same messages
    spark.sql(view)
    assert spark.sql(query).collect() == [("orders.new", 5, 14)]


# ---------------------------------------------------------------------- formats

DDL = (
    "id bigint, name string, amount double, price decimal(12,2), at timestamp, day date, flag boolean, small int, "
    "tags array<string>"
)


@pytest.mark.parametrize("name", ["csv", "avro"])
def test_a_read_decodes_what_the_capture_decodes(spark: SparkSession, live: Live, tmp_path: Path, name: str) -> None:
    of = formats(tmp_path)[name]
    sent = rows(50)
    payloads = [of.encode(row) for row in sent]
    payloads[7] = gzip.compress(payloads[7])
    payloads[9] = b"\xff\xff"
    live.send([("orders.a", payload) for payload in payloads])
    options = {key: value for key, value in of.settings.items() if key != "columns"}
    frame = read(spark, live, format=name, columns=DDL, compression="auto", **options)
    found = {row[layout.SEQ]: row for row in frame.withColumn("at", frame["at"].cast("double")).collect()}
    bad = found.pop(10)
    assert all(bad[column] is None for column in COLUMNS)
    for seq, row in found.items():
        expected = of.stored(sent[seq - 1])
        assert (row["name"] or None) == (expected["name"] or None)
        names = ("id", "price", "day", "tags")
        assert [row[column] for column in names] == [expected[column] for column in names]
        assert row["at"] == pytest.approx(expected["at"].timestamp(), abs=1e-5)


AVRO: dict[str, Any] = {
    "type": "record",
    "name": "R",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "clock", "type": {"type": "long", "logicalType": "time-micros"}},
        {"name": "local", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}},
        {"name": "counts", "type": {"type": "map", "values": "int"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}


SENT = {
    "id": 1,
    "clock": time(1, 2, 3, 4),
    "local": datetime(2026, 1, 31, 12),
    "price": Decimal("1.25"),
    "counts": {"a": 1},
    "at": datetime(2026, 1, 31, 12, tzinfo=UTC),
}


ROW = SENT | {"at": SENT["at"].astimezone().replace(tzinfo=None)}
"""As PySpark returns it, with timestamps in the process's time zone."""


def test_a_read_and_an_archive_have_all_fields_of_a_schema(
    spark: SparkSession, live: Live, tmp_path: Path, conf: Callable[[str, str], None]
) -> None:
    path = tmp_path / "r.avsc"
    path.write_text(json.dumps(AVRO))
    live.send([("orders.a", datum(AVRO, SENT))])
    (row,) = read(spark, live, format="avro", schema=str(path)).drop(*layout.ENVELOPE).collect()
    assert row.asDict() == ROW
    options = {**live.options, "format": "avro", "schema": str(path)}
    (row,) = spark.read.format("nats").options(**options).schema("clock time(6), id bigint").load().collect()
    assert (row["clock"], row["id"]) == (time(1, 2, 3, 4), 1)
    live.purge()
    live.send([("orders.a", container(AVRO, [SENT, {**SENT, "id": 2}]))])
    decode = {"format": "avro", "schema": str(path), "rows": "container"}
    asyncio.run(capture_all(config(live.options["servers"], tmp_path / "archive", decode=decode)))
    conf("spark.sql.timeType.enabled", "true")
    frame = read_archive(spark, str(tmp_path / "archive"), STREAM)
    found = frame.select(layout.ROW, *SENT).orderBy(layout.ROW).collect()
    assert [row.asDict() for row in found] == [{layout.ROW: 0, **ROW}, {layout.ROW: 1, **ROW, "id": 2}]


def test_several_rows_of_a_message_are_numbered(spark: SparkSession, live: Live) -> None:
    live.send([("orders.a", b'{"a": 1}\n{"a": 2}'), ("orders.a", b'{"a": "x"}\n{"a": 3}'), ("orders.a", b'{"a": 4}')])
    options = {"format": "json", "rows": "lines", "columns": "a int"}
    frame = read(spark, live, **options)
    payload = frame[layout.PAYLOAD].isNotNull()
    found = frame.select(layout.SEQ, layout.ROW, "a", payload).collect()
    assert sorted(map(tuple, found)) == [(1, 0, 1, True), (1, 1, 2, False), (2, 0, None, True), (3, 0, 4, True)]
    dropped = read(spark, live, mode="DROPMALFORMED", **options).select(layout.SEQ, "a").collect()
    assert sorted(map(tuple, dropped)) == [(1, 1), (1, 2), (3, 4)]
    with pytest.raises(Exception) as raised:  # noqa: PT011  Spark has several kinds
        read(spark, live, mode="FAILFAST", **options).collect()
    assert "message 2 of stream ORDERS: row 0: " in message(raised.value)
