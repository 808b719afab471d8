"""What is published for each kind of row, byte for byte: ids deduplicate against earlier replays and writes.

`message_ids.json` was written by version 0.1.0. It has the subject, the header block and the payload of each message.
Headers that instruct a server are not repeated with an archived message, neither by a replay nor by the sink.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nats
import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from spark_jobs.archive import read_archive
from spark_jobs.replay import main, replay
from spark_jobs.replaying.origin import origin_of
from tests.integration.spark.conftest import HOUR, Archive
from tests.support.nats_server import NatsServer
from tests.support.replays import add_stream, ask, stored

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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


EVERYTHING = {
    "allow_rollup_hdrs": True,
    "allow_msg_ttl": True,
    "allow_msg_schedules": True,
    "allow_atomic": True,
    "allow_batched": True,
    "subject_delete_marker_ttl": 1_000_000_000,
}
LATER = {"Nats-Schedule": "@at 2090-01-01T00:00:00Z", "Nats-Schedule-Target": "all.target"}
INSTRUCTIONS: tuple[dict[str, str], ...] = (
    {"Nats-Rollup": "all"},
    {"Nats-Rollup": "sub"},
    {"nats-rollup": "all"},
    {"Nats-TTL": "876000h"},
    {"Nats-Msg-Id": "other-7"},
    {"Nats-Expected-Stream": "ELSEWHERE"},
    {"Nats-Expected-Last-Sequence": "5"},
    {"Nats-Expected-Last-Subject-Sequence": "5", "Nats-Expected-Last-Subject-Sequence-Subject": "all.1"},
    {"Nats-Expected-Last-Msg-Id": "none"},
    {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1"},
    {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"},
    {**LATER, "Nats-Schedule-TTL": "1s", "Nats-Schedule-Rollup": "sub", "Nats-Schedule-Time-Zone": "UTC"},
    {**LATER, "Nats-Schedule-Source": "all.source"},
    {"Nats-Schedule-Next": "purge", "Nats-Scheduler": "all.schedule"},
    {"Nats-Incr": "+1", "Nats-Counter-Sources": '{"S": {"all.1": "5"}}'},
    {"Nats-Marker-Reason": "MaxAge"},
    {"Nats-Stream-Source": "S 5 > > all.1"},
    {"Nats-Trace-Dest": "trace", "Nats-Trace-Only": "true", "Nats-Trace-Hop": "1"},
    {"Nats-Required-Api-Level": "99", "Nats-Request-Info": '{"acc": "OTHER"}'},
)


def hold_others(server: NatsServer) -> None:
    """Store 300 messages, and a schedule, under the subjects that the archive's messages will have."""

    async def publish() -> None:
        nc = await nats.connect(server.url)
        await nc.jetstream().publish("all.schedule", b"later", headers=LATER)
        for number in range(300):
            await nc.jetstream().publish(f"all.{number % 50}", b"other", headers={"Nats-Msg-Id": f"other-{number}"})
        await nc.close()

    asyncio.run(publish())


def test_no_instruction_of_an_archive_reaches_a_stream_that_would_obey(
    spark: SparkSession, archive: Archive, nats_server: Callable[..., NatsServer], capsys: pytest.CaptureFixture[str]
) -> None:
    server = nats_server()
    ask(server.url, "STREAM.CREATE.ALL", {"name": "ALL", "subjects": ["all.>"], "storage": "file", **EVERYTHING})
    hold_others(server)
    others, seqs = stored(server.url, "ALL"), range(1, 401)
    given = [{**INSTRUCTIONS[seq % len(INSTRUCTIONS)], "Kept": str(seq)} for seq in seqs]
    archive.write(
        seqs,
        headers=[[(name, [value]) for name, value in headers.items()] for headers in given],
        columns={"_nats_subject": [f"all.{seq % 50}" for seq in seqs]},
    )
    raw = b"NATS/1.0\r\nno colon\r\nNats-Rollup: all\r\nKept: 401\r\n\r\n"
    archive.write([401], quarantine=True, subject="all.1", raw_headers=[raw], stage=["headers"])
    arguments = [archive.url, "ORDERS", "--servers", server.url, "--replay-id", "r"]
    assert main([*arguments, "--dry-run"]) == 0
    assert "\nwithout headers that are instructions to a server, in 400 messages\n" in capsys.readouterr().out
    assert main([*arguments, "--tasks", "1"]) == 0
    assert main([*arguments, "--tasks", "1", "--quarantine"]) == 0
    frame = read_archive(spark, archive.url, "ORDERS").select("_nats_subject", "_nats_payload", "_nats_headers")
    frame.coalesce(1).write.format("nats").option("servers", server.url).mode("append").save()
    messages = stored(server.url, "ALL")
    assert messages[: len(others)] == others
    again = messages[len(others) :]
    assert [message.header("Kept") for message in again] == [str(seq) for seq in (*seqs, 401, *seqs)]
    names = {line.partition(b":")[0].decode() for message in again for line in message.lines}
    provenance = {f"Jetcapture-{name}" for name in ("Stream", "Sequence", "Timestamp", "Replay")}
    assert names == {"Kept", "no colon", "Nats-Msg-Id", *provenance}
