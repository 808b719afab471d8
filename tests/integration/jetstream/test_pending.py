"""A server that miscounts a consumer's pending messages, as several versions did, holds nobody up at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.jetstream import range_reader
from jetcapture_py.jetstream.acks import AckPosition, position
from jetcapture_py.jetstream.connection import Api
from jetcapture_py.jetstream.range_reader import RangeReader, StreamRange
from jetcapture_py.jetstream.read_session import ReadSession
from tests.support.nats_server import NatsServer
from tests.support.running import STREAM, capture_all, config, connection, publish, rows

Start = Callable[..., NatsServer]
MESSAGES = 50


@pytest.fixture(params=[3, (1 << 64) - 1])
def miscounted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server says this number in place of 0."""
    ask = Api.request

    async def answered(api: Api, subject: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer = await ask(api, subject, body)
        return {**answer, "num_pending": request.param} if answer.get("num_pending") == 0 else answer

    def parsed(reply: bytes, stream: str, consumer: str) -> AckPosition | None:
        ack = position(reply, stream, consumer)
        return ack._replace(pending=request.param) if ack is not None and not ack.pending else ack

    monkeypatch.setattr(Api, "request", answered)
    monkeypatch.setattr(range_reader, "position", parsed)


@pytest.mark.usefixtures("miscounted")
def test_a_run_until_caught_up_and_a_range_end_where_the_stream_ends(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()

    async def scenario() -> int:
        await publish(server.url, [("orders.a", b"x", None)] * MESSAGES)
        await asyncio.wait_for(capture_all(config(server.url, tmp_path / "archive")), 120)
        async with connection(server.url) as client:
            await client.jetstream().delete_msg(STREAM, MESSAGES)  # the range has its last sequence
        async with ReadSession(NatsConfig(servers=(server.url,)), "test", timeout=60) as session:
            reader = RangeReader(session, StreamRange(stream=STREAM, first=1, end=MESSAGES + 1))
            return sum([len(received) async for _, received in reader.messages()])

    assert asyncio.run(scenario()) == MESSAGES - 1
    assert len(rows(tmp_path / "archive")) == MESSAGES
