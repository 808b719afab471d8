"""What is published for each kind of row, byte for byte: ids deduplicate against earlier replays and writes.

`message_ids.json` was written by version 0.1.0. It has the subject, the header block and the payload of each message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from spark_jobs.archive import read_archive
from spark_jobs.replay import replay
from spark_jobs.replaying.origin import origin_of
from tests.integration.spark.conftest import HOUR
from tests.support.archives import Archive
from tests.support.replays import add_stream, stored

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.spark

GOLDEN = Path(__file__).with_name("message_ids.json")
SAVE = "00000000-0000-4000-8000-000000000001"
"""The id of a streaming query, or what replaces the random id of a `save()`."""
START = HOUR * 1_000_000
HEADERS = [("A", ["1", "2"]), ("Nats-Msg-Id", ["old"]), ("Nats-TTL", ["1s"]), ("Jetcapture-Row", ["7"]), ("E", [""])]
ROWS = """SELECT * FROM VALUES
    ('a', 'one', map('To', array('eu'))), ('a', 'one', map('To', array('eu'))), ('b', CAST(NULL AS string), NULL),
    ('c', 'ü', map('To', array('us', 'x'), 'None', CAST(NULL AS array<string>))),
    ('d', 'own', map('Nats-Msg-Id', array('mine'))) AS t(region, payload, headers)"""


def frames(spark: SparkSession, root: Path) -> Iterator[tuple[str, DataFrame, dict[str, Any]]]:
    """The name of a case, its rows, and arguments of `replay`."""

    def read(name: str, **how: Any) -> DataFrame:
        return read_archive(spark, Archive(root / name).url, "ORDERS", **how)

    Archive(root / "plain").write(
        [1, 2, 3], "eu", headers=[HEADERS, None, []], payloads=[b"\xff\0", b"", b"3"], n=[7, 8, 9]
    )
    yield "plain", read("plain"), {"subject": "{stream}.{key}.{subject[1]}"}
    yield "a column as the payload", read("plain"), {"subject": "{stream}.a", "payload": "n"}
    yield "a query without headers", read("plain").drop(layout.HEADERS), {"subject": "{stream}.{n}"}
    yield "a query without time", read("plain").drop(layout.TIMESTAMP).coalesce(1), {"subject": "{stream}.{n}"}
    query = "SELECT _nats_stream, CAST(_nats_seq AS string) AS _nats_seq, n FROM {f} ORDER BY n"
    yield "sequences as text", spark.sql(query, f=read("plain")).coalesce(1), {"subject": "{stream}.a"}
    aggregate = "SELECT key, sum(n) AS total, max(_nats_timestamp) AS at FROM {f} GROUP BY key"
    yield "an aggregate", spark.sql(aggregate, f=read("plain")), {"subject": "{stream}.{key}"}
    several = Archive(root / "several")
    several.write([1, 1, 2], payloads=[b"1", None, b"2"], _nats_row=[0, 1, 0], line=["a", "b", "c"])
    several.write([3], payloads=[b"3"], _nats_row=pa.array([None], pa.int32()), line=["d"])
    yield "several rows", read("several"), {"subject": "{stream}.a"}
    yield "several rows apart", read("several"), {"subject": "{stream}.a", "payload": "line"}
    yield "several rows by a field", read("several").where("_nats_payload IS NOT NULL"), {"subject": "{stream}.{line}"}
    created = ("2026-05-01T11:59:59.123456789Z", "2026-05-01T12:30:00.5Z")
    for life, name in enumerate(created):
        at = [START + life * 3_000_000_000 + seq for seq in (1, 2)]
        Archive(root / "again").write([1, 2], timestamps=at, payloads=[b"%d" % life] * 2, created=name)
    origin = origin_of(Archive(root / "again").url, "ORDERS", {})
    yield "created again", read("again"), {"subject": "{stream}.a", "origin": origin}
    yield "created again, by its rows", read("again"), {"subject": "{stream}.a"}
    Archive(root / "bad").write(
        [1, 2, 3],
        quarantine=True,
        payloads=[b"1", b"2", b"3"],
        headers=[[("A", ["1"])], None, None],
        stage=["decode", "headers", "subject"],
        error=["truncated", "no colon", "the subject is not valid UTF-8"],
        raw_headers=[None, b"NATS/1.0\r\nno colon\r\nNats-TTL: 1s\r\nB: \xff\r\nJetcapture-Replay: old\r\n\r\n", None],
        columns={layout.SUBJECT: ["orders.new", "orders.new", r"orders.\x5cxff.\xff"]},
    )
    yield "quarantine", read("bad", quarantine=True), {"subject": "{stream}.{subject}"}


def test_replayed_messages_are_as_they_were(
    spark: SparkSession, tmp_path: Path, nats_server: Callable[..., NatsServer]
) -> None:
    server = nats_server()
    golden = json.loads(GOLDEN.read_text())["replay"]
    for number, (name, frame, how) in enumerate(frames(spark, tmp_path)):
        stream = f"S{number}"
        add_stream(server.url, stream, f"{stream}.>")
        replay(frame, server.url, how.pop("subject").replace("{stream}", stream), replay_id="r1", **how)
        assert published(server, stream) == golden[name], name
    add_stream(server.url, "INTO", "orders.>")
    replay(read_archive(spark, Archive(tmp_path / "plain").url, "ORDERS"), server.url, replay_id="missing", into="INTO")
    assert published(server, "INTO") == golden["missing"]


def test_messages_of_a_write_are_as_they_were(
    spark: SparkSession, tmp_path: Path, nats_server: Callable[..., NatsServer]
) -> None:
    server = nats_server()
    golden = json.loads(GOLDEN.read_text())["write"]
    rows = spark.sql(ROWS).coalesce(1)
    for number, (name, frame, subject) in enumerate(
        (
            ("payloads", rows, "{stream}.{region}"),
            ("rows", rows.drop("payload", "headers"), "{stream}.{region}"),
            ("ids", rows.selectExpr("*", "nullif(region, 'b') || '1' AS msg_id").where("region <> 'd'"), "{stream}.a"),
        )
    ):
        add_stream(server.url, f"S{number}", f"S{number}.>")
        options = {"servers": server.url, "subject": subject.replace("{stream}", f"S{number}")}
        frame.write.format("nats").options(**options).mode("append").save()
        assert published(server, f"S{number}") == golden[name], name
    rows.write.parquet(str(tmp_path / "rows"))
    add_stream(server.url, "STREAM", "STREAM.>")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "metadata").write_text(json.dumps({"id": SAVE}))
    stream = spark.readStream.schema(rows.schema).parquet(str(tmp_path / "rows")).writeStream.format("nats")
    stream = stream.options(servers=server.url, subject="STREAM.{region}", checkpointLocation=str(checkpoint))
    assert stream.trigger(availableNow=True).start().awaitTermination(120)
    assert published(server, "STREAM") == golden["stream"]


def published(server: NatsServer, stream: str) -> list[list[str]]:
    """The messages of a stream, sorted, as Latin-1; the id of a `save()` is replaced."""
    messages = stored(server.url, stream)
    shown = [[message.subject, *(data.decode("latin-1") for data in message[1:])] for message in messages]
    save = re.compile(r"(?<=Nats-Msg-Id: )[0-9a-f]{32}(?=:\d+:\d+:)")
    return sorted([subject, save.sub(SAVE, headers), payload] for subject, headers, payload in shown)
