"""`spark.read.format("nats")`: bounded reads, as a user writes them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy

from jetcapture_py.archive import layout
from spark_jobs.archive import read_archive
from tests.integration.spark.live import Live, message
from tests.support.running import capture_all, config

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


def read(spark: SparkSession, live: Live, **options: Any) -> DataFrame:
    """The stream, as it is now."""
    return spark.read.format("nats").options(**live.options, **options).load()


def sequences(frame: DataFrame) -> list[int]:
    """The sequences in `frame`."""
    return sorted(row[0] for row in frame.select(layout.SEQ).collect())


def failure(frame: DataFrame) -> str:
    """What the error of reading `frame` says of ours, in one line."""
    with pytest.raises(Exception) as raised:  # noqa: PT011  Spark has several kinds
        frame.collect()
    return message(raised.value)


def test_every_message_is_read_once_with_its_envelope(spark: SparkSession, live: Live) -> None:
    began = datetime.now(UTC)
    live.fill(3000)
    frame = read(spark, live, minPartitions=4)
    assert frame.columns == [name for name in layout.ENVELOPE if name != layout.HEADERS]
    rows = sorted(frame.collect(), key=lambda row: row[layout.SEQ])
    assert frame.rdd.getNumPartitions() == 4
    assert [row[layout.SEQ] for row in rows] == list(range(1, 3001))
    for number, row in enumerate(rows):
        assert row[layout.STREAM] == "ORDERS"
        assert row[layout.SUBJECT] == f"orders.{number}"
        assert bytes(row[layout.PAYLOAD]) == b"%d" % number
        assert row[layout.DELIVERED] == 1
    times = [row[0] for row in frame.selectExpr(f"unix_micros({layout.TIMESTAMP})").collect()]
    assert began.timestamp() - 1 < min(times) / 1e6 <= max(times) / 1e6 < datetime.now(UTC).timestamp() + 1


def test_a_bounded_read_begins_and_ends_as_told(spark: SparkSession, live: Live) -> None:
    live.send([(f"orders.{name}", b"") for name in "aabcca"])
    moment = datetime.now(UTC).isoformat()
    live.send([("orders.d", b""), ("orders.b", b"")])

    def of(**options: Any) -> list[int]:
        return sequences(read(spark, live, **options))

    assert of(startingOffsets="earliest") == of(endingOffsets="latest") == list(range(1, 9))
    assert of(startingOffsets=3, endingOffsets=6) == [3, 4, 5]  # the end is exclusive, as Kafka's is
    assert of(startingOffsets=3, endingOffsets=3) == []
    assert of(startingOffsets=9) == []
    assert of(startingOffsets="last") == [8]
    assert of(startingOffsets="last", subjects="orders.a, orders.c") == [6]
    assert of(startingOffsets="last_per_subject") == [5, 6, 7, 8]
    assert of(startingOffsets="last_per_subject", subjects="orders.a,orders.b") == [6, 8]
    assert of(startingTimestamp=moment) == [7, 8]
    assert of(endingTimestamp=moment) == [1, 2, 3, 4, 5, 6]


def test_subjects_choose_messages_by_wildcards(spark: SparkSession, live: Live) -> None:
    live.send([(subject, b"") for subject in ("orders.eu.new", "orders.us.new", "orders.eu.paid", "orders.x")] * 2)
    assert sequences(read(spark, live, subjects="orders.eu.*")) == [1, 3, 5, 7]
    assert sequences(read(spark, live, subjects="orders.*.paid, orders.x", minPartitions=3)) == [3, 4, 7, 8]
    assert sequences(read(spark, live, subjects="orders.none")) == []


def test_the_streams_consumers_are_not_touched(spark: SparkSession, live: Live) -> None:
    live.fill(10)
    config = ConsumerConfig(durable_name="archive", ack_policy=AckPolicy.EXPLICIT)
    live.do(lambda stream: stream.add_consumer("ORDERS", config))
    assert len(sequences(read(spark, live, minPartitions=3))) == 10
    info = live.do(lambda stream: stream.consumer_info("ORDERS", "archive"))
    assert (info.num_pending, info.num_ack_pending) == (10, 0)
    assert live.consumers() == ["archive"]


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
    live.send([("orders.c", b"new")])
    ahead = read(spark, live, startingOffsets=3).unionByName(archived, allowMissingColumns=True)
    assert sequences(ahead) == [1, 2, 3]


ORDERS = [
    b'{"id": 1, "price": 12.50, "at": "2026-01-31T12:00:00Z", "date": "x", "items": [{"sku": "a"}], "tags": {"k": 2}}',
    b'{"id": "two"}',
    b'{"id": 3}',
    b"nonsense",
]


def orders(live: Live) -> None:
    """Two messages that fit, two that do not."""
    live.send([("orders.new", payload) for payload in ORDERS])


def test_json_is_decoded_into_the_columns_asked_for(spark: SparkSession, live: Live) -> None:
    orders(live)
    columns = (
        "id bigint, price decimal(10,2), at timestamp, date_ string, "
        "items array<struct<sku: string, n: int>>, tags map<string, double>"
    )
    frame = read(spark, live, format="json", columns=columns).orderBy(layout.SEQ)
    assert frame.columns[:2] == [layout.STREAM, layout.SUBJECT]
    fields = frame.withColumn("at", frame["at"].cast("string")).select("id", "price", "at", "date_", "items", "tags")
    first, *rest = fields.collect()
    assert (first["id"], first["price"], first["at"]) == (1, Decimal("12.50"), "2026-01-31 12:00:00")
    assert (first["date_"], first["items"], first["tags"]) == ("x", [("a", None)], {"k": 2.0})
    assert [row["id"] for row in rest] == [None, 3, None]
    assert bytes(frame.collect()[3][layout.PAYLOAD]) == b"nonsense"  # what did not fit can still be seen


def test_a_schema_of_the_users_own_is_exactly_what_is_read(spark: SparkSession, live: Live) -> None:
    orders(live)
    reader = spark.read.format("nats").options(**live.options).option("format", "json")
    frame = reader.schema(f"id bigint, {layout.SEQ} bigint, date string").load()
    assert sorted(frame.collect(), key=lambda row: row[1]) == [
        (1, 1, "x"),
        (None, 2, None),
        (3, 3, None),
        (None, 4, None),
    ]
    bare = spark.read.format("nats").options(**live.options).schema(f"{layout.SUBJECT} string").load()
    assert bare.collect() == [("orders.new",)] * 4
    assert failure(spark.read.format("nats").options(**live.options).schema("id bigint").load()) == (
        "format raw has no column id; format json decodes it from the payload"
    )


def test_columns_of_the_envelope_are_found_in_any_case(spark: SparkSession, live: Live) -> None:
    live.send([("orders.a", b'{"id": 7}')])
    frame = spark.read.format("nats").options(**live.options, format="json")
    rows = frame.schema("_NATS_SEQ bigint, id bigint, _Nats_Subject string").load().collect()
    assert [row.asDict() for row in rows] == [{"_NATS_SEQ": 1, "id": 7, "_Nats_Subject": "orders.a"}]


def test_the_mode_says_what_becomes_of_messages_that_do_not_fit(spark: SparkSession, live: Live) -> None:
    orders(live)
    for mode, expected in (("PERMISSIVE", [1, None, 3, None]), ("dropMalformed", [1, 3])):
        frame = read(spark, live, format="json", columns="id bigint", mode=mode).orderBy(layout.SEQ)
        assert [row["id"] for row in frame.collect()] == expected
    error = failure(read(spark, live, format="json", columns="id bigint", mode="FAILFAST"))
    assert error.startswith("message 2 of stream ORDERS: ")


def test_a_read_that_fails_says_so_in_one_line_of_ours(spark: SparkSession, live: Live) -> None:
    live.fill(10)
    live.purge(seq=5)
    assert sequences(read(spark, live, startingOffsets=2, failOnDataLoss=False)) == [5, 6, 7, 8, 9, 10]
    assert failure(read(spark, live, startingOffsets=2)).startswith("messages 2 to 4 of stream ORDERS are gone")
    assert failure(read(spark, live, maxOffsetsPerTrigger=1)) == "maxOffsetsPerTrigger: only in a streaming query"
    live.do(lambda stream: stream.add_stream(name="JOBS", subjects=["jobs"], retention=RetentionPolicy.WORK_QUEUE))
    live.do(lambda stream: stream.publish("jobs", b""))
    jobs = spark.read.format("nats").options(**live.options | {"stream": "JOBS"}).load()
    assert failure(jobs) == "NATS refused: consumer in pull mode requires explicit ack policy on workqueue stream"
    with pytest.raises(Exception, match="unknown option") as raised:
        read(spark, live, startingOffset=1)
    assert message(raised.value) == "startingoffset: unknown option; did you mean startingOffsets?"


def test_plain_sql_reads_a_stream_through_a_view(spark: SparkSession, live: Live) -> None:
    orders(live)
    view = (
        "CREATE OR REPLACE TEMPORARY VIEW live_orders USING nats OPTIONS "
        f"(servers '{live.server.url}', stream 'ORDERS', format 'json', columns 'id bigint')"
    )
    query = f"SELECT {layout.SUBJECT}, count(*), sum(id) FROM live_orders GROUP BY {layout.SUBJECT}"
    spark.sql(view)
    assert spark.sql(query).collect() == [("orders.new", 4, 4)]
    live.send([("orders.new", b'{"id": 10}')])
    assert spark.sql(query).collect() == [("orders.new", 4, 4)]  # queries over one view see the same messages
    spark.sql(view)
    assert spark.sql(query).collect() == [("orders.new", 5, 14)]
