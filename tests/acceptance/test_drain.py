"""The real command gets SIGTERM under a backlog; `python -m tests.drains` does that as often as is wanted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.test_run import awaited, three
from tests.drains import drains, full_stream
from tests.support.nats_server import NatsServer
from tests.support.running import Command, publish, rows, settings

Start = Callable[..., NatsServer]


@pytest.mark.parametrize(("servers", "count"), [("single", 1), pytest.param("far", 3, marks=pytest.mark.exhaustive)])
def test_a_drain_under_a_backlog_leaves_nothing_unacknowledged(tmp_path: Path, servers: str, count: int) -> None:
    async def scenario() -> None:
        async with full_stream(tmp_path, servers, 120_000) as url:
            async for drain in drains(url, tmp_path, count):
                assert drain.clean, drain

    asyncio.run(scenario())


def test_a_drain_without_a_connection_says_that_messages_may_come_back_and_exits_1(
    nats_server: Start, tmp_path: Path
) -> None:
    server = nats_server()
    asyncio.run(publish(server.url, three()))
    with Command(tmp_path, settings(server.url, tmp_path / "archive", block={"max_age": "0.2s"})) as replica:
        replica.start()
        awaited(lambda: list(replica.events("blocks.stored")), "all is stored")
        server.kill()
        awaited(lambda: list(replica.events("nats.disconnected")), "the connection is lost")
        replica.process.send_signal(signal.SIGTERM)
        assert replica.wait() == 1
        (failure,) = replica.events("capture.failed")
        assert failure["error"].startswith("drain: the connection to NATS was lost")
    assert len(rows(tmp_path / "archive")) == 1000
