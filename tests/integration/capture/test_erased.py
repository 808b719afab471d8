"""Erased messages that are delivered again are acknowledged and not stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetcapture_py.archive import layout
from jetcapture_py.capture import marks
from jetcapture_py.verify.findings import Kind, Severity, Verdict
from jetcapture_py.verify.proof import verify
from jetcapture_py.verify.repair import verify_and_repair
from tests.support.erasing import bury
from tests.support.nats_server import NatsServer
from tests.support.running import (
    CONSUMER,
    STREAM,
    Message,
    capture_all,
    config,
    connection,
    consumer,
    objects,
    publish,
    rows,
    running,
    seqs,
    until,
)


def orders(count: int) -> list[Message]:
    return [(f"orders.{'abc'[index % 3]}", b"%d" % index, None) for index in range(count)]


async def test_a_recreated_consumer_does_not_bring_erased_messages_back(server: NatsServer, archive: Path) -> None:
    """Those of one key are a block of which nothing is left; of another key, half of the block is."""
    settings = config(server.url, archive, key="{subject[1]}")
    await publish(server.url, orders(60))
    await capture_all(settings)
    stored = rows(archive)
    gone = [row for row in stored if row["key"] == "b" or (row["key"] == "c" and row[layout.SEQ] <= 30)]
    bury(archive, gone)

    report = await verify(settings)
    (finding,) = report.of(Kind.ERASED)
    assert (finding.severity, finding.count, report.exit_code()) == (Severity.FAILURE, len(gone), 1)
    assert "can still be read from 2 objects" in finding.summary

    for name in objects(archive):
        if name.key in ("b", "c"):
            (archive / name.path).unlink()

    async with connection(server.url) as client:
        await client.jetstream().delete_consumer(STREAM, CONSUMER)
    assert (await capture_all(settings)).archiver.encoding.left_out == len(gone)
    kept = {row[layout.SEQ] for row in stored} - {row[layout.SEQ] for row in gone}
    assert set(seqs(archive)) == kept
    found = await consumer(server.url)
    assert (found.ack_floor.stream_seq, found.num_ack_pending, found.num_pending) == (60, 0, 0)

    for path in archive.rglob("*.parquet"):
        if "key=c" in path.parts[-4]:
            path.unlink()  # a hole among erased messages: only what was not erased is stored again
    report, repair = await verify_and_repair(settings)
    assert repair.messages == 10
    assert set(seqs(archive)) == kept
    assert (report.verdict, report.exit_code(strict=True)) == (Verdict.COMPLETE, 0), report.as_text()
    assert report.as_text().splitlines()[0].endswith(f"is stored; {len(gone)} were erased")


async def test_a_tombstone_that_is_written_meanwhile_counts_for_open_blocks(
    server: NatsServer, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "MARK", 0.1)
    settings = config(server.url, archive, key="", block={"max_age": "1h"})

    await publish(server.url, orders(30))
    async with running(settings) as state:
        await until(lambda: state.archiver.blocks.messages == 30, "messages are in blocks")
        (block,) = state.archiver.blocks
        held = [row for batch in block.batches() for row in batch.to_pylist()]
        bury(archive, held[:10])
        (archive / "_erased" / STREAM / ".x.json.tmp").write_text("{")  # of a kill: nobody reads it
        await until(lambda: bool(state.archiver.encoding.erased), "the tombstone is read")
    assert state.archiver.encoding.left_out == 10
    assert seqs(archive) == [*range(11, 31)]
    assert (await consumer(server.url)).ack_floor.stream_seq == 30
