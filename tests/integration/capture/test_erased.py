"""Erased messages that are delivered again are acknowledged and not stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from jetcapture_py.archive import layout
from jetcapture_py.capture import marks
from jetcapture_py.store import NoteStore
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
    publish_and_capture,
    rows,
    running,
    until,
)

Start = Callable[..., NatsServer]


def orders(count: int) -> list[Message]:
    return [(f"orders.{'abc'[index % 3]}", b"%d" % index, None) for index in range(count)]


def test_a_recreated_consumer_does_not_bring_erased_messages_back(nats_server: Start, tmp_path: Path) -> None:
    """Those of one key are a block of which nothing is left; of another key, half of the block is."""
    server, root = nats_server(), tmp_path / "archive"
    settings = publish_and_capture(server.url, root, orders(60), key="{subject[1]}")
    stored = rows(root)
    gone = [row for row in stored if row["key"] == "b" or (row["key"] == "c" and row[layout.SEQ] <= 30)]
    bury(root, gone)

    report = asyncio.run(verify(settings))
    (finding,) = report.of(Kind.ERASED)
    assert (finding.severity, finding.count, report.exit_code()) == (Severity.FAILURE, len(gone), 1)
    assert "can still be read from 2 objects" in finding.summary

    for name in objects(root):
        if name.key in ("b", "c"):
            (root / name.path).unlink()

    async def again() -> int:
        async with connection(server.url) as client:
            await client.jetstream().delete_consumer(STREAM, CONSUMER)
        return (await capture_all(settings)).archiver.encoding.left_out

    assert asyncio.run(again()) == len(gone)
    kept = {row[layout.SEQ] for row in stored} - {row[layout.SEQ] for row in gone}
    assert {row[layout.SEQ] for row in rows(root)} == kept
    found = asyncio.run(consumer(server.url))
    assert (found.ack_floor.stream_seq, found.num_ack_pending, found.num_pending) == (60, 0, 0)

    for path in root.rglob("*.parquet"):
        if "key=c" in path.parts[-4]:
            path.unlink()  # a hole among erased messages: only what was not erased is stored again
    report, repair = asyncio.run(verify_and_repair(settings))
    assert repair.messages == 10
    assert {row[layout.SEQ] for row in rows(root)} == kept
    assert (report.verdict, report.exit_code(strict=True)) == (Verdict.COMPLETE, 0), report.as_text()
    assert report.as_text().splitlines()[0].endswith(f"is stored; {len(gone)} were erased")


def test_a_tombstone_that_is_written_meanwhile_counts_for_open_blocks(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "MARK", 0.1)
    server, root = nats_server(), tmp_path / "archive"
    settings = config(server.url, root, key="", block={"max_age": "1h"})

    async def captured() -> int:
        await publish(server.url, orders(30))
        async with running(settings) as state:
            await until(lambda: state.archiver.blocks.messages == 30, "messages are in blocks")
            (block,) = state.archiver.blocks
            held = [row for batch in block.batches() for row in batch.to_pylist()]
            bury(root, held[:10])
            (root / "_erased" / STREAM / ".x.json.tmp").write_text("{")  # of a kill: nobody reads it
            await until(lambda: bool(state.archiver.encoding.erased), "the tombstone is read")
        return state.archiver.encoding.left_out

    assert asyncio.run(captured()) == 10
    assert {row[layout.SEQ] for row in rows(root)} == {*range(11, 31)}
    assert asyncio.run(consumer(server.url)).ack_floor.stream_seq == 30


def test_a_user_store_needs_no_tombstones(nats_server: Start, tmp_path: Path) -> None:
    """It may keep its objects anywhere."""
    server = nats_server()

    class Own:
        def __init__(self) -> None:
            self.names: list[layout.ObjectName] = []

        def put(self, name: layout.ObjectName, data: object) -> str:
            self.names.append(name)
            return name.path

        def probe(self) -> None:
            """Takes anything."""

    async def captured() -> Own:
        await publish(server.url, orders(3))
        store = Own()
        await capture_all(config(server.url, tmp_path / "nowhere"), store=store)
        return store

    store = asyncio.run(captured())
    assert not isinstance(store, NoteStore)
    assert sum(name.rows for name in store.names) == 3
    assert not (tmp_path / "nowhere").exists()
