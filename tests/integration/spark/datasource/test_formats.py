"""Every format that the capture decodes, read and written live, and read from an archive."""

from __future__ import annotations

import asyncio
import gzip
import json
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from jetcapture_py.archive import layout
from spark_jobs.archive import read_archive
from tests.integration.spark.live import Live, message
from tests.support.formats import COLUMNS, descriptor_set, formats, message_class, rows
from tests.support.running import STREAM, capture_all, config
from tests.unit.transform.decode.test_avro import container, datum

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

DDL = (
    "id bigint, name string, amount double, price decimal(12,2), at timestamp, day date, flag boolean, small int, "
    "tags array<string>"
)


def read(spark: SparkSession, live: Live, **options: Any) -> DataFrame:
    return spark.read.format("nats").options(**live.options, **options).load()


@pytest.mark.parametrize("name", ["msgpack", "csv", "avro", "protobuf"])
def test_a_read_decodes_what_the_capture_decodes(spark: SparkSession, live: Live, tmp_path: Path, name: str) -> None:
    of = formats(tmp_path)[name]
    sent = rows(50)
    payloads = [of.encode(row) for row in sent]
    payloads[7] = gzip.compress(payloads[7])
    payloads[9] = b"\xff\xff"
    live.send([("orders.a", payload) for payload in payloads])
    ddl = (
        DDL.replace("price decimal(12,2)", "price string").replace("day date", "day int") if name == "protobuf" else DDL
    )
    options = {key: value for key, value in of.settings.items() if key != "columns"}
    frame = read(spark, live, format=name, columns=ddl, compression="auto", **options)
    found = {row[layout.SEQ]: row for row in frame.withColumn("at", frame["at"].cast("double")).collect()}
    for seq, row in enumerate(sent, 1):
        expected = of.stored(row)
        if seq == 10:
            assert all(found[seq][column] is None for column in COLUMNS)
            continue
        assert found[seq]["id"] == expected["id"]
        assert (found[seq]["name"] or None) == (expected["name"] or None)
        assert found[seq]["price"] == expected["price"]
        assert found[seq]["day"] == expected["day"]
        assert found[seq]["tags"] == expected["tags"]
        assert found[seq]["at"] == pytest.approx(expected["at"].timestamp(), abs=1e-5)


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


def test_without_columns_a_read_has_all_fields_of_the_schema(spark: SparkSession, live: Live, tmp_path: Path) -> None:
    (tmp_path / "r.avsc").write_text(json.dumps(AVRO))
    live.send([("orders.a", datum(AVRO, SENT))])
    (row,) = read(spark, live, format="avro", schema=str(tmp_path / "r.avsc")).drop(*layout.ENVELOPE).collect()
    assert row.asDict() == ROW
    (row,) = (
        spark.read.format("nats")
        .options(**live.options, format="avro", schema=str(tmp_path / "r.avsc"))
        .schema("clock time(6), id bigint")
        .load()
        .collect()
    )
    assert (row["clock"], row["id"]) == (time(1, 2, 3, 4), 1)


PROTO = """
syntax = "proto3";
package t;
import "google/protobuf/duration.proto";
message R { uint64 big = 1; google.protobuf.Duration took = 2; map<int32, string> names = 3; uint32 small = 4; }
"""


def test_the_archive_of_a_schemas_types_is_read_as_the_stream_is(
    spark: SparkSession, live: Live, tmp_path: Path
) -> None:
    path = descriptor_set(tmp_path, PROTO)
    sent = message_class(path, "t.R")(big=2**64 - 1, names={5: "five"}, small=2**32 - 1)
    sent.took.FromTimedelta(timedelta(seconds=-1.5))
    live.send([("orders.a", sent.SerializeToString())])
    options = {"schema": str(path), "message": "t.R"}
    (row,) = read(spark, live, format="protobuf", **options).drop(*layout.ENVELOPE).collect()
    expected = {"big": Decimal(2**64 - 1), "took": timedelta(seconds=-1.5), "names": {5: "five"}, "small": 2**32 - 1}
    assert row.asDict() == expected
    sections = {"decode": {"format": "protobuf", **options}}
    asyncio.run(capture_all(config(live.options["servers"], tmp_path / "archive", **sections)))
    frame = read_archive(spark, str(tmp_path / "archive"), STREAM)
    (stored,) = frame.select("big", "took", "names", "small").collect()
    assert stored.asDict() == expected | {"took": -1_500_000}


def test_the_archive_of_avros_logical_types_is_read(
    spark: SparkSession, live: Live, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: spark.conf.unset("spark.sql.timeType.enabled"))
    spark.conf.set("spark.sql.timeType.enabled", "true")
    (tmp_path / "r.avsc").write_text(json.dumps(AVRO))
    live.send([("orders.a", container(AVRO, [SENT, {**SENT, "id": 2}]))])
    decode = {"format": "avro", "schema": str(tmp_path / "r.avsc"), "rows": "container"}
    asyncio.run(capture_all(config(live.options["servers"], tmp_path / "archive", decode=decode)))
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


def test_rows_are_written_as_messagepack(spark: SparkSession, live: Live) -> None:
    live.fill(0)
    text = "SELECT 'orders.a' AS subject, 5 AS id, 1.5D AS amount, X'ff' AS data, array('x', null) AS tags"
    spark.sql(text).write.format("nats").mode("append").options(
        servers=live.options["servers"], format="msgpack"
    ).save()
    columns = "id int, amount double, data binary, tags array<string>"
    (row,) = read(spark, live, format="msgpack", columns=columns).collect()
    assert msgpack.unpackb(bytes(row[layout.PAYLOAD])) == {"id": 5, "amount": 1.5, "data": b"\xff", "tags": ["x", None]}
    assert (row["id"], row["amount"], bytes(row["data"]), row["tags"]) == (5, 1.5, b"\xff", ["x", None])
