"""Connections that break while much is on its way: it comes back soon, and nothing comes twice."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from nats.js.errors import NotFoundError

from jetcapture_py.archive import layout
from jetcapture_py.jetstream.pulls import SLOTS
from tests.chaos.proxy import Proxy
from tests.support.nats_server import NatsServer
from tests.support.running import (
    CONSUMER,
    STREAM,
    Command,
    Message,
    config,
    connection,
    consumer,
    objects,
    publish,
    rows,
    running,
    settings,
    until,
)

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # nats-py's, of connections that break

Start = Callable[..., NatsServer]
IMPATIENT = "write_deadline: '2s'"
"""The server drops who does not read for two seconds."""
LONG = {"ack_wait": "10m"}
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


def reported(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found = [record for record in caplog.records if record.msg == "messages.lost_in_flight"]
    return [record.jetcapture_fields for record in found]  # type: ignore[attr-defined]


@pytest.mark.parametrize("features", ["", "jetstream { domain: hub }\nfeature_flags { js_ack_fc_v2: true }"])
def test_what_a_broken_connection_took_with_it_is_delivered_again_at_once(
    nats_server: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, features: str
) -> None:
    async def scenario() -> None:
        server = nats_server(f"{IMPATIENT}\n{features}")
        await publish(server.url, messages())
        async with Proxy(lambda: server.port) as proxy:
            wanted = config(f"nats://127.0.0.1:{proxy.port}", tmp_path / "archive", source=LONG)
            async with running(wanted) as capture:
                await until(lambda: capture.source.fetched > 0, "messages come")
                await freeze(proxy, server)
                await until(lambda: capture.stats.received == COUNT, "all come within a tenth of ack_wait", 60)
                assert 0 < capture.stats.redelivered <= capture.source.lost
                assert capture.source.pulls.limits.limit < 24 << 20
            assert (await consumer(server.url)).num_ack_pending == 0
        found = rows(tmp_path / "archive")
        assert [row[layout.SEQ] for row in found] == list(range(1, COUNT + 1))
        assert sum(name.rows for name in objects(tmp_path / "archive")) == COUNT, "nothing was held twice"
        first, *_ = reported(caplog)  # on a slow machine the server may drop it again
        assert first["messages"] == first["given_back"]
        assert "slow consumer" in first["reason"]

    with caplog.at_level(logging.WARNING, "jetcapture"):
        asyncio.run(scenario())


@pytest.mark.exhaustive
def test_what_was_lost_twice_is_delivered_again_too(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server(IMPATIENT)
        await publish(server.url, messages())
        async with Proxy(lambda: server.port) as proxy:
            wanted = config(f"nats://127.0.0.1:{proxy.port}", tmp_path / "archive", source=LONG)
            async with running(wanted) as capture:
                await until(lambda: capture.source.fetched > 0, "messages come")
                await freeze(proxy, server)
                lost = capture.source.lost
                await until(lambda: capture.source.lost > lost, "the connection is back")
                proxy.cut()  # while what was lost is on its way again
                await until(lambda: capture.stats.received >= COUNT, "all come within a tenth of ack_wait", 60)
        assert [row[layout.SEQ] for row in rows(tmp_path / "archive")] == list(range(1, COUNT + 1))
        assert sum(name.rows for name in objects(tmp_path / "archive")) == COUNT

    asyncio.run(scenario())


def test_what_another_replica_holds_is_not_taken_from_it(
    nats_server: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        server = nats_server(IMPATIENT)
        await publish(server.url, messages())
        given_back: list[bytes] = []
        async with connection(server.url) as client, Proxy(lambda: server.port) as proxy:

            async def note(message: Any) -> None:
                if message.data == b"-NAK":
                    given_back.append(message.subject)

            await client.subscribe(f"$JS.ACK.{STREAM}.{CONSUMER}.>", cb=note)
            near = config(server.url, tmp_path / "archive", source=LONG)
            far = config(f"nats://127.0.0.1:{proxy.port}", tmp_path / "archive", source=LONG)
            async with running(near) as one, running(far) as other:
                await until(lambda: min(one.source.fetched, other.source.fetched) > 0, "both are delivered to")
                await freeze(proxy, server)
                await until(lambda: other.source.lost > 0, "the loss is noticed")
                lost = other.source.lost
                await until(lambda: one.stats.received + other.stats.received >= COUNT - lost, "the rest comes", 60)
                assert given_back == []
            assert {fields["given_back"] for fields in reported(caplog)} == {0}

    with caplog.at_level(logging.WARNING, "jetcapture"):
        asyncio.run(scenario())


@pytest.mark.exhaustive
def test_a_process_that_stood_still_gets_what_it_missed_long_before_ack_wait(
    nats_server: Start, tmp_path: Path
) -> None:
    server = nats_server(IMPATIENT)
    asyncio.run(publish(server.url, []))
    with Command(
        tmp_path, settings(server.url, tmp_path / "archive", source=LONG, block={"max_age": "0.2s"})
    ) as command:
        command.start()

        async def stand_still() -> None:
            async with connection(server.url) as client:
                stream = client.jetstream()

                async def pulls() -> bool:
                    with contextlib.suppress(NotFoundError):
                        return (await stream.consumer_info(STREAM, CONSUMER)).num_waiting == SLOTS
                    return False

                async def done() -> bool:
                    state = await stream.consumer_info(STREAM, CONSUMER)
                    return (state.num_pending, state.num_ack_pending) == (0, 0)

                await until(pulls, "it pulls")
                command.process.send_signal(signal.SIGSTOP)
                await publish(server.url, messages())
                await until(lambda: "Slow Consumer" in server.log, "the server drops it", 60)
                command.process.send_signal(signal.SIGCONT)
                await until(done, "everything is acknowledged", 60)

        asyncio.run(stand_still())
        command.process.terminate()
        assert command.wait() == 0
    lost, *_ = command.events("messages.lost_in_flight")
    assert lost["given_back"] == lost["messages"] > 0
    found = objects(tmp_path / "archive")
    assert sum(name.rows for name in found) == len(rows(tmp_path / "archive")) == COUNT
