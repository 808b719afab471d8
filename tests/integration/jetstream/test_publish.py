# ruff: noqa: PT012 - leaving the `async with` is part of what raises
from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

from jetcapture_py.errors import SourceError
from tests.support.nats_server import NatsServer
from tests.support.publishing import Publisher, connect

Start = Callable[..., NatsServer]
Body = Callable[[Client, JetStreamContext], Awaitable[None]]


def with_stream(server: NatsServer, body: Body) -> None:
    """Run `body` on a connection to `server`, which gets a stream S over `s.>`."""

    async def main() -> None:
        nc = await connect(server.url, reconnect_time_wait=0.05, max_reconnect_attempts=-1)
        try:
            js = nc.jetstream()
            await js.add_stream(name="S", subjects=["s.>"])
            await body(nc, js)
        finally:
            with contextlib.suppress(OSError):  # nats-py's close passes on what a killed server did to the socket
                await nc.close()

    asyncio.run(main())


def test_a_refusal_by_the_stream_ends_the_publishing(nats_server: Start) -> None:
    async def body(nc: Client, js: JetStreamContext) -> None:
        await js.add_stream(name="SMALL", subjects=["small.>"], max_msg_size=10)
        async with Publisher(nc) as publisher:
            await publisher.publish("small.a", b"x" * 100)
            with pytest.raises(SourceError, match=r"small\.a was refused: message size exceeds maximum allowed"):
                await publisher.flush()
            with pytest.raises(SourceError, match="refused"):
                await publisher.publish("s.a", b"x")
            with pytest.raises(SourceError, match="refused"):
                await publisher.flush()

    with pytest.raises(SourceError, match="refused"):
        with_stream(nats_server(), body)


def test_a_lost_acknowledgement_without_a_message_id_is_an_error(nats_server: Start) -> None:
    async def body(nc: Client, js: JetStreamContext) -> None:
        await js.add_stream(name="SILENT", subjects=["silent.>"], no_ack=True)
        with pytest.raises(SourceError, match=r"2 messages not acknowledged within 0\.2 s, 1 without Nats-Msg-Id"):
            async with Publisher(nc, ack_timeout=0.2) as publisher:
                await publisher.publish("silent.a", b"1")
                await publisher.publish("silent.a", b"2", [("Nats-Msg-Id", "2")])

    with_stream(nats_server(), body)


def test_a_stream_that_never_acknowledges_is_given_up(nats_server: Start) -> None:
    async def body(nc: Client, js: JetStreamContext) -> None:
        await js.add_stream(name="SILENT", subjects=["silent.>"], no_ack=True)
        with pytest.raises(SourceError, match=r"1 message not acknowledged within [01] s"):
            async with Publisher(nc, ack_timeout=0.1, patience=0.5) as publisher:
                await publisher.publish("silent.a", b"1", [("Nats-Msg-Id", "1")])
        assert (await js.stream_info("SILENT")).state.messages == 1

    with_stream(nats_server(), body)


def test_a_crash_of_the_server_is_an_error_for_messages_without_ids(nats_server: Start) -> None:
    server = nats_server()

    async def body(nc: Client, js: JetStreamContext) -> None:
        await js.add_stream(name="SILENT", subjects=["silent.>"], no_ack=True)
        with pytest.raises(SourceError, match="1 message not acknowledged before the connection broke, 1 without"):
            async with Publisher(nc) as publisher:
                await publisher.publish("silent.a", b"1")
                await publisher._publish_rows()
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)

    with_stream(server, body)


def test_a_closed_connection_is_an_error(nats_server: Start) -> None:
    async def body(nc: Client, js: JetStreamContext) -> None:
        with pytest.raises(SourceError, match="connection to NATS is closed"):
            async with Publisher(nc) as publisher:
                await publisher.publish("s.a", b"1")
                await nc.close()

    with_stream(nats_server(), body)


def test_an_exception_of_the_caller_passes_without_waiting_for_acknowledgements(nats_server: Start) -> None:
    async def body(nc: Client, js: JetStreamContext) -> None:
        with pytest.raises(ZeroDivisionError):
            async with Publisher(nc) as publisher:
                await publisher.publish("nobody.listens", b"1")
                raise ZeroDivisionError

    with_stream(nats_server(), body)
