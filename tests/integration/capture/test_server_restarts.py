"""A server that is restarted under a running capture: every supported release."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from jetcapture_py.archive import layout
from tests.support.nats_server import NatsServer, binary, older_servers
from tests.support.publishing import Publisher
from tests.support.running import STREAM, config, connection, consumer, rows, running, until

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # nats-py's, of connections that break

OLDER = [pytest.param(command, id=version, marks=pytest.mark.exhaustive) for version, command in older_servers()]


async def publish_steadily(url: str, subject: str, stop: asyncio.Event) -> int:
    """Publish small messages until `stop` is set, through restarts; how many the server has acknowledged."""
    sent = 0
    async with connection(url) as client:
        while not stop.is_set():
            publisher = Publisher(client, ack_timeout=0.5, patience=1)
            try:
                async with publisher:
                    for _ in range(200):
                        await publisher.publish(subject, b"%d" % sent)
                    await publisher.flush()
                    sent += 200
            except Exception:  # the server is away: what was not acknowledged may be there all the same
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.005)
    return sent


@pytest.mark.parametrize("command", [pytest.param(binary(), id="installed"), *OLDER])
@pytest.mark.parametrize("crash", [False, True], ids=["stopped", "killed"])
def test_a_server_restarted_under_load_is_captured_from_as_before(
    nats_server: Callable[..., NatsServer], tmp_path: Path, command: str, crash: bool
) -> None:
    async def scenario() -> None:
        server = nats_server(command=command)
        async with connection(server.url) as client:
            await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"])
        stop = asyncio.Event()
        publishing = asyncio.create_task(publish_steadily(server.url, "orders.eu", stop))
        block, source = {"max_age": "0.2s"}, {"ack_wait": "5s"}
        configuration = config(server.url, tmp_path / "archive", block=block, source=source)
        async with running(configuration) as capture:
            await until(lambda: capture.stats.acked > 0, "messages are captured")
            await asyncio.to_thread(server.kill if crash else server.stop)
            await until(lambda: not capture.source.connected, "the connection is lost")
            await asyncio.to_thread(server.start)
            await until(lambda: capture.source.connected, "the connection is back")
            before = capture.stats.acked
            await until(lambda: capture.stats.acked > before, "messages are captured after the restart", 60)
            stop.set()
            await publishing
            async with connection(server.url) as client:
                stored = (await client.jetstream().stream_info(STREAM)).state.messages
            await until(lambda: capture.source.state.pending == 0 == capture.source.unacked, "all are captured", 60)

            async def all_acknowledged() -> bool:  # what a server forgets when it stops is delivered again
                state = await consumer(server.url)
                return state.num_pending == 0 == state.num_ack_pending

            await until(all_acknowledged, "all are acknowledged")
        assert len({row[layout.SEQ] for row in rows(tmp_path / "archive")}) >= stored

    asyncio.run(scenario())
