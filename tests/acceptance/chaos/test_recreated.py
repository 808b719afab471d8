"""A stream that is deleted and created again starts its sequences again: an acknowledgement of an old message must not
reach the new one of the same sequence, or that counts as stored when nobody has stored it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.capture import side_tasks
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.errors import SourceError
from jetcapture_py.store import LocalStore
from tests.chaos.proxy import Proxy
from tests.support.nats_server import NatsServer
from tests.support.running import CONSUMER, STREAM, config, connection, consumer, publish, rows, until

COUNT = 50


class WaitingStore(LocalStore):
    """Stores when it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.go = threading.Event()

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        self.go.wait(60)
        return super().put(name, data)


@pytest.mark.parametrize("cut_off", [False, True], ids=["connected", "cut off"])
def test_what_is_held_of_a_stream_that_is_gone_is_stored_and_not_acknowledged_to_the_one_in_its_place(
    nats_server: Callable[..., NatsServer], tmp_path: Path, cut_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_tasks, "POLL", 600)  # the server says it first where nobody asks
    server, root = nats_server(), tmp_path / "archive"
    root.mkdir()

    async def scenario() -> None:
        await publish(server.url, ((f"orders.{number}", b"old", None) for number in range(COUNT)))
        async with Proxy(lambda: server.port) as proxy, connection(server.url) as client:
            store = WaitingStore(root)
            url = f"nats://127.0.0.1:{proxy.port}"
            capture = Capture(config(url, root, key="", block={"max_age": "300ms"}), store=store)
            running = asyncio.create_task(capture.run(asyncio.Event()))
            await until(lambda: capture.opened and capture.archiver.blocks.sealed == 1, "everything is held")
            if cut_off:
                proxy.refusing = True
                proxy.cut()
            stream = client.jetstream()

            async def waits() -> bool:
                return bool((await stream.consumer_info(STREAM, CONSUMER)).num_waiting)

            same = (await stream.consumer_info(STREAM, CONSUMER)).config
            if not cut_off:
                await until(waits, "the server has a pull to answer")
            await stream.delete_stream(STREAM)
            await publish(server.url, ((f"orders.{number}", b"new", None) for number in range(COUNT)))
            await stream.add_consumer(STREAM, same)
            other = await stream.pull_subscribe_bind(CONSUMER, STREAM)
            assert len(await other.fetch(COUNT)) == COUNT
            if cut_off:
                proxy.heal()
                await until(lambda: capture.source.reconnects > 0, "the capture is connected again")
            else:
                await until(lambda: capture.source.failure is not None, "the deletion is noticed")
            store.go.set()
            with pytest.raises(SourceError, match="created again" if cut_off else "Consumer Deleted"):
                await asyncio.wait_for(running, 60)
        assert (await consumer(server.url)).num_ack_pending == COUNT
        assert {row["_nats_payload"] for row in rows(root)} == {b"old"}

    asyncio.run(scenario())
