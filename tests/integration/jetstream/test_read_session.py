from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from nats.errors import FlushTimeoutError

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.jetstream.read_session import ReadSession
from tests.support.nats_server import NatsServer


async def test_a_connection_still_reads_after_a_flush_that_got_no_answer_in_time(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with ReadSession(NatsConfig(servers=(server.url,)), "test", timeout=30.0) as session:
        server.pause()
        with pytest.raises(FlushTimeoutError):
            await session.connection.flush(1)
        server.resume()
        await session.connection.flush()
        assert (await session.api.request("INFO"))["streams"] == 0
    assert caplog.text == ""


def test_a_command_does_not_print_what_nats_py_logs() -> None:
    logs = "logging.getLogger('nats.aio.client').error('nats: encountered error')"
    program = f"import logging, jetcapture_py.jetstream.connection; {logs}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
