from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import nats
import pytest
from nats.errors import FlushTimeoutError

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.errors import UnavailableError
from jetcapture_py.jetstream.connection import Api
from jetcapture_py.jetstream.read_session import ReadSession
from tests.support.nats_server import NatsServer

Start = Callable[..., NatsServer]


class LosesFirstAnswer(Api):
    """The server acts on every request, but the first answer about a consumer never arrives."""

    def __init__(self, api: Api) -> None:
        self._api, self.subjects, self.answers = api, api.subjects, 0

    async def request(self, subject: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer = await self._api.request(subject, body)
        self.answers += subject.startswith("CONSUMER.")
        if self.answers == 1 and subject.startswith("CONSUMER."):
            raise UnavailableError("no answer")
        return answer


def test_a_lost_answer_leaves_no_consumer_behind_when_a_time_is_looked_up(nats_server: Start) -> None:
    server = nats_server()

    async def main() -> None:
        nc = await nats.connect(server.url)
        js = nc.jetstream()
        await js.add_stream(name="S", subjects=["s"])
        for _ in range(3):
            await js.publish("s", b"")
        third = await js.get_msg("S", 3)
        async with ReadSession(NatsConfig(servers=(server.url,)), "test", timeout=30.0) as session:
            session.api = api = LosesFirstAnswer(session.api)
            assert await session.first_at("S", datetime(2020, 1, 1, tzinfo=UTC)) == 1
            assert await session.first_at("S", third.time or datetime.now(UTC)) == 3
            assert api.answers == 5
        assert (await js.stream_info("S")).state.consumer_count == 0
        await nc.close()

    asyncio.run(main())


def test_a_connection_still_reads_after_a_flush_that_got_no_answer_in_time(
    nats_server: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = nats_server()

    async def main() -> None:
        async with ReadSession(NatsConfig(servers=(server.url,)), "test", timeout=30.0) as session:
            server.pause()
            with pytest.raises(FlushTimeoutError):
                await session.connection.flush(1)
            server.resume()
            await session.connection.flush()
            assert (await session.api.request("INFO"))["streams"] == 0

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert caplog.text == ""


def test_a_command_does_not_print_what_nats_py_logs() -> None:
    logs = "logging.getLogger('nats.aio.client').error('nats: encountered error')"
    program = f"import logging, jetcapture_py.jetstream.connection; {logs}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
