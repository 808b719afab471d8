"""Consumers that deliver no payload: refused, noticed when it begins under a capture, and nothing acknowledged."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from nats.aio.client import Client

from jetcapture_py.archive import layout
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.errors import SourceError
from tests.support.nats_server import NatsServer
from tests.support.publishing import Publisher
from tests.support.running import (
    CONSUMER,
    STREAM,
    capture_all,
    config,
    connection,
    consumer,
    publish,
    rows,
    running,
    until,
)

Start = Callable[..., NatsServer]
COUNT = 30_000
WITHOUT = f"consumer {CONSUMER} of stream {STREAM} has headers_only set"


async def work_queue(client: Client) -> None:
    """Whatever is acknowledged is gone from it."""
    await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"], retention="workqueue")


async def switch(client: Client, headers_only: bool) -> None:
    """Change the consumer as an operator would."""
    info = json.loads((await client.request(f"$JS.API.CONSUMER.INFO.{STREAM}.{CONSUMER}")).data)
    body = {"stream_name": STREAM, "config": {**info["config"], "headers_only": headers_only}, "action": "update"}
    answer = await client.request(f"$JS.API.CONSUMER.CREATE.{STREAM}.{CONSUMER}", json.dumps(body).encode())
    assert "error" not in json.loads(answer.data)


async def publish_steadily(client: Client) -> None:
    async with Publisher(client) as publisher:
        for start in range(0, COUNT, 500):
            for number in range(start, start + 500):
                await publisher.publish(f"orders.{number}", b"payload %d" % number)
            await publisher.flush()
            await asyncio.sleep(0.01)


def captured(archive: Path) -> dict[str, bytes]:
    return {row[layout.SUBJECT]: row[layout.PAYLOAD] for row in rows(archive)}


def settings(url: str, archive: Path) -> Any:
    return config(url, archive, key="", block={"max_age": "0.2s"}, source={"ack_wait": "5s"})


async def capture_until_it_ends(wanted: Any) -> str:
    """Capture; the error that it ends with, or "" once it has caught up."""
    try:
        await capture_all(wanted)
    except SourceError as error:
        return str(error)
    return ""


def test_a_consumer_switched_to_headers_only_under_load_ends_the_capture_and_costs_no_payload(
    nats_server: Start, tmp_path: Path
) -> None:
    async def scenario() -> None:
        server = nats_server()
        wanted = settings(server.url, tmp_path / "archive")
        async with connection(server.url) as client:
            await work_queue(client)
            publishing = asyncio.create_task(publish_steadily(client))
            capture = Capture(wanted)
            task = asyncio.create_task(capture.run(asyncio.Event()))
            await until(lambda: capture.stats.acked > 1000, "it captures")
            await switch(client, headers_only=True)
            with pytest.raises(SourceError, match=WITHOUT):
                await asyncio.wait_for(task, 60)
            await publishing
            before = captured(tmp_path / "archive")
            assert all(payload == f"payload {subject.split('.')[1]}".encode() for subject, payload in before.items())
            assert WITHOUT in await capture_until_it_ends(wanted), "it is refused at the start"
            await switch(client, headers_only=False)
        await capture_all(wanted)
        found = captured(tmp_path / "archive")
        assert found == {f"orders.{n}": b"payload %d" % n for n in range(COUNT)}

    asyncio.run(scenario())


def test_empty_messages_that_were_published_with_the_header_of_a_stripped_one_are_captured(
    nats_server: Start, tmp_path: Path
) -> None:
    async def scenario() -> None:
        server = nats_server()
        header = [("Nats-Msg-Size", "5"), ("Other", "x")]
        await publish(server.url, [("orders.a", b"" if n % 2 else b"full", header) for n in range(100)])
        await publish(server.url, [("orders.b", b"", [("Nats-Msg-Size", "0")]), ("orders.b", b"", None)])
        capture = await capture_all(config(server.url, tmp_path / "archive"))
        assert capture.stats.redelivered == 0
        found = rows(tmp_path / "archive")
        assert [row[layout.PAYLOAD] for row in found] == [b"full", b""] * 50 + [b"", b""]
        assert dict(found[1][layout.HEADERS]) == {"Nats-Msg-Size": ["5"], "Other": ["x"]}
        assert (await consumer(server.url)).num_ack_pending == 0

    asyncio.run(scenario())


def test_other_changes_of_the_consumer_are_reported_and_followed(
    nats_server: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.a", b"%d" % n, None) for n in range(100)])
        async with running(config(server.url, tmp_path / "archive", source={"ack_wait": "10m"})) as capture:
            await until(lambda: capture.archiver.blocks.rows == 100, "all are in a block")
            async with connection(server.url) as client:
                await client.jetstream().add_consumer(
                    STREAM, durable_name=CONSUMER, ack_policy="explicit", ack_wait=3, max_ack_pending=50_000
                )
            await until(lambda: "consumer.changed" in [record.msg for record in caplog.records], "it is reported")
            kept_alive: list[int] = []
            keep_alive = capture.acks.keep_alive

            async def counted(replies: pa.BinaryArray) -> None:
                kept_alive.append(len(replies))
                await keep_alive(replies)

            monkeypatch.setattr(capture.acks, "keep_alive", counted)
            await until(lambda: kept_alive[:2] == [100, 100], "messages are kept alive as the change asks for")

    with caplog.at_level(logging.WARNING, "jetcapture"):
        asyncio.run(scenario())
