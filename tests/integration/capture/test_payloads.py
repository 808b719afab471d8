"""Consumers that deliver no payload: refused, noticed when it begins under a capture, and nothing acknowledged."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from nats.aio.client import Client

from jetcapture_py.archive import layout
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.errors import SourceError
from tests.integration.manage.api import ask_with
from tests.support.nats_server import NatsServer
from tests.support.publishing import Publisher
from tests.support.running import CONSUMER, STREAM, capture_all, config, connection, publish, rows, running, until

COUNT = 30_000
WITHOUT = f"consumer {CONSUMER} of stream {STREAM} has headers_only set"


async def change(client: Client, **settings: Any) -> None:
    """Change the consumer as an operator would."""
    info = await ask_with(client, f"CONSUMER.INFO.{STREAM}.{CONSUMER}")
    body = {"stream_name": STREAM, "config": {**info["config"], **settings}, "action": "update"}
    await ask_with(client, f"CONSUMER.CREATE.{STREAM}.{CONSUMER}", body)


async def publish_steadily(client: Client) -> None:
    async with Publisher(client) as publisher:
        for start in range(0, COUNT, 500):
            for number in range(start, start + 500):
                await publisher.publish(f"orders.{number}", b"payload %d" % number)
            await publisher.flush()
            await asyncio.sleep(0.01)


async def test_a_consumer_switched_to_headers_only_under_load_ends_the_capture_and_costs_no_payload(
    server: NatsServer, archive: Path
) -> None:
    wanted = config(server.url, archive, key="", block={"max_age": "0.2s"}, source={"ack_wait": "5s"})
    async with connection(server.url) as client:
        await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"], retention="workqueue")
        publishing = asyncio.create_task(publish_steadily(client))
        capture = Capture(wanted)
        task = asyncio.create_task(capture.run(asyncio.Event()))
        await until(lambda: capture.stats.acked > 1000, "it captures")
        await change(client, headers_only=True)
        with pytest.raises(SourceError, match=WITHOUT):
            await asyncio.wait_for(task, 60)
        await publishing
        assert b"" not in {row[layout.PAYLOAD] for row in rows(archive)}
        with pytest.raises(SourceError, match=WITHOUT):
            await capture_all(wanted)
        await change(client, headers_only=False)
    await capture_all(wanted)
    found = {row[layout.SUBJECT]: row[layout.PAYLOAD] for row in rows(archive)}
    assert found == {f"orders.{n}": b"payload %d" % n for n in range(COUNT)}


async def test_other_changes_of_the_consumer_are_reported_and_followed(
    server: NatsServer, archive: Path, logged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(server.url, [("orders.a", b"%d" % n, None) for n in range(100)])
    async with running(config(server.url, archive, source={"ack_wait": "10m"})) as capture:
        await until(lambda: capture.archiver.blocks.rows == 100, "all are in a block")
        async with connection(server.url) as client:
            await change(client, ack_wait=3 * 10**9)
        await until(lambda: bool(logged("consumer.changed")), "it is reported")
        kept_alive: list[int] = []
        keep_alive = capture.acks.keep_alive

        async def counted(replies: pa.BinaryArray) -> None:
            kept_alive.append(len(replies))
            await keep_alive(replies)

        monkeypatch.setattr(capture.acks, "keep_alive", counted)
        await until(lambda: kept_alive[:2] == [100, 100], "messages are kept alive as the change asks for")
