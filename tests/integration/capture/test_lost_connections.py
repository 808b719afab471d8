"""Connections that break while much is on its way: it comes back after `ack_wait`, and nothing is held twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from jetcapture_py.archive import layout
from tests.chaos.proxy import Proxy
from tests.support.nats_server import NatsServer
from tests.support.running import (
    Message,
    config,
    consumer,
    objects,
    publish,
    rows,
    running,
    until,
)

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # nats-py's, of connections that break

Start = Callable[..., NatsServer]
IMPATIENT = "write_deadline: '2s'"
"""The server drops who does not read for two seconds."""
COUNT = 12_000


def messages() -> Iterable[Message]:
    """More than the buffers between a server and its client hold."""
    return ((f"orders.k{n % 3}", b"%06d" % n * 1000, None) for n in range(COUNT))


async def freeze(proxy: Proxy, server: NatsServer) -> None:
    """Let nothing through until the server has given the client up, then everything that it had written."""
    before = server.log.count("Slow Consumer")
    proxy.freeze("down")
    await until(lambda: server.log.count("Slow Consumer") > before, "the server drops its client", 60)
    proxy.heal()


def test_what_a_broken_connection_took_with_it_is_delivered_again(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server(IMPATIENT)
        await publish(server.url, messages())
        async with Proxy(lambda: server.port) as proxy:
            wanted = config(f"nats://127.0.0.1:{proxy.port}", tmp_path / "archive", source={"ack_wait": "10s"})
            async with running(wanted) as capture:
                await until(lambda: capture.source.fetched > 0, "messages come")
                await freeze(proxy, server)
                await until(lambda: capture.stats.received == COUNT, "all come after ack_wait", 120)
                assert capture.stats.redelivered > 0
            assert (await consumer(server.url)).num_ack_pending == 0
        assert [row[layout.SEQ] for row in rows(tmp_path / "archive")] == list(range(1, COUNT + 1))
        assert sum(name.rows for name in objects(tmp_path / "archive")) == COUNT, "nothing was held twice"

    asyncio.run(scenario())
