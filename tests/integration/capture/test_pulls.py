"""Pulls against messages of every size: nothing too large to ask for, nothing asked for that is too much to keep."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.archive import layout
from jetcapture_py.jetstream.pulls import SLOTS, TIMING, PullTiming
from jetcapture_py.monitoring.health import health
from tests.support.nats_server import NatsServer
from tests.support.running import CONSUMER, STREAM, capture_all, config, connection, publish, rows, running, until

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # nats-py's, of connections that break

Start = Callable[..., NatsServer]
KEPT = {"block": {"max_age": "0.2s"}, "source": {"ack_wait": "10m"}}
"""What is delivered and lost does not come back within a test."""


@pytest.fixture(autouse=True)
def longer_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few of the pulls that are counted are made because others have expired."""
    monkeypatch.setattr("jetcapture_py.jetstream.pulls.TIMING", PullTiming(expires=0.5))


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def restart(server: NatsServer, extra_config: str) -> None:
    server.stop()
    server.extra_config = extra_config
    server.start()


def pulls(capture: Any) -> int:
    return sum(lane.pull for lane in capture.source.pulls.slots)


async def create_consumer(url: str, **settings: Any) -> None:
    """Create it with settings that nats-py does not know."""
    wanted = {"durable_name": CONSUMER, "ack_policy": "explicit", "ack_wait": 600 * 10**9, **settings}
    body = {"stream_name": STREAM, "action": "create", "config": wanted}
    async with connection(url) as client:
        await client.request(f"$JS.API.CONSUMER.CREATE.{STREAM}.{CONSUMER}", json.dumps(body).encode())


def test_a_message_larger_than_the_server_now_allows_is_captured(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server("max_payload: 8MB")
        large = [noise(7_000_000, seed) for seed in range(2)]
        await publish(server.url, [("orders.a", b"small", None), ("orders.b", large[0], None)])
        await publish(server.url, [("orders.c", b"small", None), ("orders.d", large[1], None)])
        await asyncio.to_thread(restart, server, "")
        async with running(config(server.url, tmp_path / "archive", **KEPT)) as capture:
            await until(lambda: capture.stats.acked == 4, "all are captured")
            assert pulls(capture) < 100, "the same pull is not made again and again"
            assert health(capture).ready
        assert [row[layout.PAYLOAD] for row in rows(tmp_path / "archive")] == [b"small", large[0], b"small", large[1]]

    asyncio.run(scenario())


@pytest.mark.parametrize(("max_payload", "size", "count"), [(8, 100_000, 800), (64, 30_000_000, 4)])
def test_no_size_of_messages_has_the_server_drop_the_connection(
    nats_server: Start, tmp_path: Path, max_payload: int, size: int, count: int
) -> None:
    async def scenario() -> None:
        server = nats_server(f"max_payload: {max_payload}MB")
        payload = noise(size)
        await publish(server.url, [("orders.a", payload, None)] * count)
        async with running(config(server.url, tmp_path / "archive", **KEPT)) as capture:
            await until(lambda: capture.stats.acked == count, "all are captured", 120)
            assert (capture.source.reconnects, capture.stats.redelivered) == (0, 0)
        assert "Slow Consumer" not in server.log

    asyncio.run(scenario())


def test_pulls_of_a_run_that_catches_up_are_brief_where_little_is_left_and_longer_the_longer_it_has_to_wait(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drain need not wait long for them, and they are not many while another replica keeps it waiting."""
    monkeypatch.setattr("jetcapture_py.jetstream.pulls.TIMING", PullTiming(expires=1.0))
    expiries: list[float] = []

    async def note(pull: Any) -> None:
        expiries.append(json.loads(pull.data)["expires"] / 1e9)

    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.a", b"%d" % n, None) for n in range(110)])
        await create_consumer(server.url)
        async with connection(server.url) as client:
            other = await client.jetstream().pull_subscribe_bind(CONSUMER, STREAM)
            (held,) = await other.fetch(1)
            await client.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{CONSUMER}", cb=note)
            await client.flush()
            run = asyncio.create_task(capture_all(config(server.url, tmp_path / "archive", source={"batch": 10})))
            await until(lambda: TIMING.brief in expiries, "a pull asks for more than is left")
            await until(lambda: expiries[-1] == 1.0, "nothing has come for long")
            await held.ack()
            assert (await run).stats.acked == 109
        assert expiries[0] == 1.0, "a pull that will be filled"

    asyncio.run(scenario())


def test_a_quiet_capture_keeps_one_pull_open_until_a_message_comes(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jetcapture_py.jetstream.pulls.TIMING", PullTiming(expires=0.1, idle=0.5))

    async def scenario() -> None:
        url = nats_server().url
        await publish(url, [])
        async with running(config(url, tmp_path / "archive")) as capture:
            slots = capture.source.pulls
            await until(lambda: slots.active == 1, "the other pulls have expired")
            most = 0

            def busy() -> bool:
                nonlocal most
                most = max(most, slots.active)
                return most == SLOTS

            await publish(url, [("orders.a", b"1", None)])
            await until(busy, "all pulls are open")
            await until(lambda: slots.active == 1, "it is quiet again")
            assert capture.stats.received == 1

    asyncio.run(scenario())
