"""The stream's configuration in the archive: there from the start, and true after a change."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from nats.js.api import StreamSource

from jetcapture_py.archive import stream_config
from jetcapture_py.archive.stream_config import StreamConfig
from jetcapture_py.capture import marks
from jetcapture_py.config.model import NatsConfig
from jetcapture_py.restoring import backup
from jetcapture_py.restoring.send import send
from tests.integration.manage.api import ask_with
from tests.support.nats_server import NatsServer
from tests.support.running import STREAM, capture_all, config, connection, publish, running, until

ONE = [("orders.eu", b"x", None)]


def kept(root: Path) -> list[StreamConfig]:
    files = sorted((root / "_streams" / STREAM).glob("*.json"))
    found = [stream_config.StreamConfig.decode(file.read_bytes(), STREAM, str(file)) for file in files]
    assert [str(file.relative_to(root)) for file in files] == [stream_config.path(STREAM, it.created) for it in found]
    return found


async def test_every_incarnation_of_the_stream_has_its_present_configuration_in_the_archive(
    server: NatsServer, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "MARK", 0.05)
    await publish(server.url, ONE)
    settings = config(server.url, archive)
    async with connection(server.url) as client:
        async with running(settings), running(settings):
            await until(lambda: bool(kept(archive)), "it is written")
            changes = {"description": "changed", "max_msgs": 12}
            await client.jetstream().update_stream(name=STREAM, subjects=["orders.>"], **changes)
            info = await ask_with(client, f"STREAM.INFO.{STREAM}")
            await until(lambda: [each.config for each in kept(archive)] == [info["config"]], "the change is written")
        await client.jetstream().delete_stream(STREAM)
        await publish(server.url, ONE)
        await capture_all(settings)
        created = [info["created"], (await ask_with(client, f"STREAM.INFO.{STREAM}"))["created"]]
    assert [each.created for each in kept(archive)] == created


async def restore_old(url: str) -> None:
    """Restore a stream with one message that is older than the stream."""
    old = np.array([1_700_000_000 * 10**9])
    subject, payload = pa.array([b"orders.eu"], pa.binary()), pa.array([b"x"], pa.binary())
    part: Future[tuple[int, list[bytes]]] = Future()
    part.set_result((1, backup.framed(backup.messages(subject, old, np.array([1]), None, payload))))
    config = {"name": STREAM, "subjects": ["orders.>"], "storage": "file"}
    await send(NatsConfig(servers=[url]), config, (1, 1), [], iter([part]), lambda _: None)


async def test_a_stream_with_messages_from_before_its_creation_continues_an_earlier_one_and_so_does_a_mirror(
    server: NatsServer, archive: Path
) -> None:
    settings = config(server.url, archive)
    await restore_old(server.url)
    await capture_all(settings)
    assert [each.continues for each in kept(archive)] == [True]
    async with connection(server.url) as client:
        stream = client.jetstream()
        for remove, found in ((stream.purge_stream, [True]), (stream.delete_stream, [True, False])):
            await remove(STREAM)
            for messages in ([], ONE):
                await publish(server.url, messages)
                await capture_all(settings)
            assert [each.continues for each in kept(archive)] == found
        await stream.delete_stream(STREAM)
        await stream.add_stream(name="ORIGIN", subjects=["origin.>"])
        await stream.add_stream(name=STREAM, mirror=StreamSource(name="ORIGIN"))
        await capture_all(settings)
    assert [each.continues for each in kept(archive)] == [True, False, True]
