"""Headers that instruct a server are not repeated with an archived message, neither by a replay nor by the sink."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import nats
import pytest

from spark_jobs.archive import read_archive
from spark_jobs.replay import main
from tests.integration.spark.conftest import Archive
from tests.support.nats_server import NatsServer
from tests.support.replays import ask, stored
from tests.support.restores import main as restore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

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
    others, seqs = stored(server.url, "ALL"), range(1, 2001)
    given = [{**INSTRUCTIONS[seq % len(INSTRUCTIONS)], "Kept": str(seq)} for seq in seqs]
    archive.write(
        seqs,
        headers=[[(name, [value]) for name, value in headers.items()] for headers in given],
        columns={"_nats_subject": [f"all.{seq % 50}" for seq in seqs]},
    )
    raw = b"NATS/1.0\r\nno colon\r\nNats-Rollup: all\r\nKept: 2001\r\n\r\n"
    archive.write([2001], quarantine=True, subject="all.1", raw_headers=[raw], stage=["headers"])
    _is_restored_exactly(archive, server, given, raw)
    arguments = [archive.url, "ORDERS", "--servers", server.url, "--replay-id", "r"]
    assert main([*arguments, "--dry-run"]) == 0
    assert "\nwithout headers that are instructions to a server, in 2,000 messages\n" in capsys.readouterr().out
    assert main([*arguments, "--quarantine", "--dry-run"]) == 0
    assert "\nwithout headers that are instructions to a server, in 1 message\n" in capsys.readouterr().out
    assert main([*arguments, "--tasks", "1"]) == 0
    assert main([*arguments, "--tasks", "1", "--quarantine"]) == 0
    frame = read_archive(spark, archive.url, "ORDERS").select("_nats_subject", "_nats_payload", "_nats_headers")
    frame.coalesce(1).write.format("nats").option("servers", server.url).mode("append").save()
    messages = stored(server.url, "ALL")
    assert messages[: len(others)] == others
    again = messages[len(others) :]
    assert [message.header("Kept") for message in again] == [str(seq) for seq in (*seqs, 2001, *seqs)]
    names = {line.partition(b":")[0].decode() for message in again for line in message.lines}
    provenance = {f"Jetcapture-{name}" for name in ("Stream", "Sequence", "Timestamp", "Replay")}
    assert names == {"Kept", "no colon", "Nats-Msg-Id", *provenance}


def _is_restored_exactly(archive: Archive, server: NatsServer, given: list[dict[str, str]], raw: bytes) -> None:
    """A restore is no publish: it keeps the instructions, and nothing obeys them in a stream without schedules."""
    config = archive.root.parent / "copy.yaml"
    stream = {"name": "COPY", "subjects": ["copy.>"], **EVERYTHING}
    config.write_text(
        json.dumps({"stream": {name: stream[name] for name in stream if "ttl" not in name and "sched" not in name}})
    )
    arguments = [archive.url, "ORDERS", "--servers", server.url, "--stream-config", str(config)]
    assert restore([*arguments, "--as", "COPY", "--subject-prefix", "copy"]) == 0
    *messages, last = stored(server.url, "COPY")
    lines = [[f"{name}: {value}".encode() for name, value in headers.items()] for headers in given]
    assert [message.lines for message in messages] == lines
    assert last.headers == raw
    ask(server.url, "STREAM.DELETE.COPY")
