"""The stream's configuration in the archive: there from the start, and true after a change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from nats.js.api import StreamSource

from jetcapture_py.archive import stream_config
from jetcapture_py.archive.stream_config import StreamConfig
from jetcapture_py.capture import marks
from jetcapture_py.config.model import NatsConfig
from jetcapture_py.errors import StoreError
from jetcapture_py.restoring import backup
from jetcapture_py.restoring.send import send
from jetcapture_py.store import LocalStore
from tests.support.nats_server import NatsServer
from tests.support.running import STREAM, capture_all, config, connection, publish, rows, running, until

Start = Callable[..., NatsServer]


def kept(root: Path) -> list[StreamConfig]:
    files = sorted((root / "_streams" / STREAM).glob("*.json"))
    found = [stream_config.StreamConfig.decode(file.read_bytes(), STREAM, str(file)) for file in files]
    assert [str(file.relative_to(root)) for file in files] == [stream_config.path(STREAM, it.created) for it in found]
    return found


async def info(url: str) -> dict[str, Any]:
    async with connection(url) as client:
        return dict(await client.jetstream()._api_request(f"$JS.API.STREAM.INFO.{STREAM}"))


async def update(url: str, **changes: Any) -> None:
    async with connection(url) as client:
        await client.jetstream().update_stream(name=STREAM, subjects=["orders.>"], **changes)


def test_every_incarnation_of_the_stream_has_its_configuration_in_the_archive(
    nats_server: Start, tmp_path: Path
) -> None:
    async def scenario() -> None:
        server, root = nats_server(), tmp_path / "a"
        await publish(server.url, [("orders.eu", b"x", None)] * 10)
        await capture_all(config(server.url, root))
        first = await info(server.url)
        assert [(each.created, each.config) for each in kept(root)] == [(first["created"], first["config"])]
        async with connection(server.url) as client:
            await client.jetstream().delete_stream(STREAM)
        await publish(server.url, [("orders.eu", b"x", None)] * 10)
        await capture_all(config(server.url, root))
        assert [each.created for each in kept(root)] == [first["created"], (await info(server.url))["created"]]

    asyncio.run(scenario())


def test_a_change_of_the_stream_is_kept_while_replicas_run(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(marks, "MARK", 0.05)
        server, root = nats_server(), tmp_path / "a"
        await publish(server.url, [("orders.eu", b"x", None)])
        settings = config(server.url, root)
        async with running(settings), running(settings):
            await until(lambda: bool(kept(root)), "it is written")
            await update(server.url, description="changed", max_msgs=12)
            expected = (await info(server.url))["config"]
            await until(lambda: [each.config for each in kept(root)] == [expected], "the change is written")

    asyncio.run(scenario())


async def restore_old(url: str) -> None:
    """Restore a stream with one message that is older than the stream."""
    old = np.array([1_700_000_000 * 10**9])
    subject, payload = pa.array([b"orders.eu"], pa.binary()), pa.array([b"x"], pa.binary())
    part: Future[tuple[int, list[bytes]]] = Future()
    part.set_result((1, backup.framed(backup.messages(subject, old, np.array([1]), None, payload))))
    config = {"name": STREAM, "subjects": ["orders.>"], "storage": "file"}
    await send(NatsConfig(servers=[url]), config, (1, 1), [], iter([part]), lambda _: None)


def test_a_stream_with_messages_from_before_its_creation_is_recorded_as_continuing_an_earlier_one(
    nats_server: Start, tmp_path: Path
) -> None:
    async def scenario() -> None:
        server, root = nats_server(), tmp_path / "a"
        await restore_old(server.url)
        await capture_all(config(server.url, root))
        assert [each.continues for each in kept(root)] == [True]
        async with connection(server.url) as client:
            await client.jetstream().purge_stream(STREAM)
        await capture_all(config(server.url, root))
        await publish(server.url, [("orders.eu", b"x", None)])
        await capture_all(config(server.url, root))
        assert [each.continues for each in kept(root)] == [True], "also without those messages"
        async with connection(server.url) as client:
            await client.jetstream().delete_stream(STREAM)
        await publish(server.url, [])
        await capture_all(config(server.url, root))
        await publish(server.url, [("orders.eu", b"x", None)])
        await capture_all(config(server.url, root))
        assert [each.continues for each in kept(root)] == [True, False]

    asyncio.run(scenario())


def test_a_mirror_is_recorded_as_continuing_an_earlier_stream(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server, root = nats_server(), tmp_path / "a"
        async with connection(server.url) as client:
            await client.jetstream().add_stream(name="ORIGIN", subjects=["origin.>"])
            await client.jetstream().add_stream(name=STREAM, mirror=StreamSource(name="ORIGIN"))
        await capture_all(config(server.url, root))
        assert [each.continues for each in kept(root)] == [True]

    asyncio.run(scenario())


class NoStreams(LocalStore):
    def write_note(self, path: str, data: bytes) -> None:
        if path.startswith("_streams"):
            raise StoreError("no configurations today")
        super().write_note(path, data)


def test_a_configuration_that_cannot_be_written_keeps_nothing_else_from_being_stored(
    nats_server: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.eu", b"x", None)] * 10)
        with caplog.at_level(logging.WARNING, "jetcapture"):
            await capture_all(config(server.url, tmp_path / "a"), store=NoStreams(str(tmp_path / "a")))
        assert len(rows(tmp_path / "a")) == 10
        assert (tmp_path / "a" / "_watermark").exists()
        assert "stream_config.failed" in caplog.text

    asyncio.run(scenario())
