# ruff: noqa: PT012 - leaving the `async with` is part of what raises
from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.publish.frames import check_subject, header_block
from jetcapture_py.jetstream.publish.publisher import Publisher
from tests.support.nats_server import NatsServer

Start = Callable[..., NatsServer]
Body = Callable[[Client, JetStreamContext], Awaitable[None]]


def with_stream(server: NatsServer, body: Body, **connect: Any) -> None:
    """Run `body` on a connection to `server`, which gets a stream S over `s.>`."""

    async def main() -> None:
        nc = await nats.connect(server.url, reconnect_time_wait=0.05, max_reconnect_attempts=-1, **connect)
        try:
            js = nc.jetstream()
            await js.add_stream(name="S", subjects=["s.>"])
            await body(nc, js)
        finally:
            with contextlib.suppress(OSError):  # nats-py's close passes on what a killed server did to the socket
                await nc.close()

    asyncio.run(main())


async def stored(js: JetStreamContext) -> int:
    return (await js.stream_info("S")).state.messages


def test_every_message_is_acknowledged_and_in_order(nats_server: Start) -> None:
    async def body(nc: Client, js: JetStreamContext) -> None:
        async with Publisher(nc, window=100) as publisher:
            for number in range(5000):
                await publisher.publish(f"s.{number % 7}", b"%d" % number)
        assert (publisher.published, publisher.duplicates) == (5000, 0)
        assert await stored(js) == 5000
        for number in (0, 1, 2500, 4999):
            message = await js.get_msg("S", number + 1)
            assert (message.subject, message.data) == (f"s.{number % 7}", b"%d" % number)

    with_stream(nats_server(), body)


@pytest.mark.parametrize("payload", [b"", b"\r\n", bytes(range(256)), os.urandom(900_000)], ids=len)
def test_payloads_arrive_byte_for_byte(nats_server: Start, payload: bytes) -> None:
    async def body(nc: Client, js: JetStreamContext) -> None:
        async with Publisher(nc) as publisher:
            await publisher.publish("s.plain", payload)
            await publisher.publish("s.headers", payload, [("A", "b")])
        assert [(await js.get_msg("S", seq)).data or b"" for seq in (1, 2)] == [payload] * 2

    with_stream(nats_server(), body)


def test_repeated_headers_keep_their_order_and_values(nats_server: Start) -> None:
    headers = [("B", "2"), ("A", "1"), ("B", ""), ("Content-Type", "text/plain; x=é"), ("B", "3")]

    async def body(nc: Client, js: JetStreamContext) -> None:
        async with Publisher(nc) as publisher:
            await publisher.publish("s.a", b"x", headers)
        answer = await nc.request("$JS.API.STREAM.MSG.GET.S", b'{"seq":1}')
        block = base64.b64decode(json.loads(answer.data)["message"]["hdrs"])
        assert block == header_block(headers)

    with_stream(nats_server(), body)


def test_a_message_id_that_the_stream_knows_counts_as_duplicate(nats_server: Start) -> None:
    async def body(nc: Client, js: JetStreamContext) -> None:
        async with Publisher(nc) as publisher:
            for _ in range(3):
                await publisher.publish("s.a", b"x", [("Nats-Msg-Id", "same")])
        assert (publisher.published, publisher.duplicates) == (3, 2)
        assert await stored(js) == 1

    with_stream(nats_server(), body)


def test_a_subject_without_a_stream_is_an_error_that_names_it(nats_server: Start) -> None:
    async def body(nc: Client, js: JetStreamContext) -> None:
        with pytest.raises(SourceError, match=r"message for other\.a was refused: no stream listens on it"):
            async with Publisher(nc) as publisher:
                await publisher.publish("s.a", b"x")
                await publisher.publish("other.a", b"x")
        assert await stored(js) == 1

    with_stream(nats_server(), body)


def test_a_stream_that_appears_in_time_takes_the_messages_that_found_none(nats_server: Start) -> None:
    async def body(nc: Client, js: JetStreamContext) -> None:
        async with Publisher(nc) as publisher:
            await publisher.publish("late.a", b"x")
            flushed = asyncio.ensure_future(publisher.flush())
            await asyncio.sleep(0.05)
            await js.add_stream(name="LATE", subjects=["late.>"])
            await flushed
        assert (await js.stream_info("LATE")).state.messages == 1

    with_stream(nats_server(), body)


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


def test_a_message_larger_than_the_server_allows_is_refused_before_it_ends_the_connection(nats_server: Start) -> None:
    async def body(nc: Client, js: JetStreamContext) -> None:
        async with Publisher(nc) as publisher:
            with pytest.raises(SourceError, match="has 1048577 bytes, the server allows 1048576"):
                await publisher.publish("s.a", b"x" * 1_048_577)
            await publisher.publish("s.a", b"x" * 1_048_576)
        assert await stored(js) == 1

    with_stream(nats_server(), body)


def test_messages_with_ids_survive_a_crash_of_the_server_once_each(nats_server: Start) -> None:
    server = nats_server("jetstream: {sync_interval: always}")

    async def body(nc: Client, js: JetStreamContext) -> None:
        async with Publisher(nc, window=50, ack_timeout=0.5) as publisher:
            for number in range(3000):
                if number == 1500:
                    await asyncio.to_thread(server.kill)
                    await asyncio.to_thread(server.start)
                await publisher.publish("s.a", b"%d" % number, [("Nats-Msg-Id", str(number))])
        assert publisher.published == 3000
        assert await stored(js) == 3000

    with_stream(server, body)


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
                await publisher._write()
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


def test_bytes_under_way_are_bounded(nats_server: Start) -> None:
    async def body(nc: Client, js: JetStreamContext) -> None:
        async with Publisher(nc, window_bytes=1_000_000) as publisher:
            for _ in range(40):
                await publisher.publish("s.a", b"x" * 300_000)
                assert publisher._pending.size < 1_000_000
        assert await stored(js) == 40

    with_stream(nats_server(), body)


@pytest.mark.parametrize("subject", ["", ".", "a.", ".a", "a..b", "a b", "a\tb", "a\r\nPUB x 0", "a\x00", "a.\u2028b"])
def test_a_malformed_subject_is_refused(subject: str) -> None:
    with pytest.raises(SourceError, match="invalid subject"):
        check_subject(subject)


@pytest.mark.parametrize("subject", ["*", ">", "a.*", "a.>", "a.*.b"])
def test_a_wildcard_is_refused(subject: str) -> None:
    with pytest.raises(SourceError, match="wildcard"):
        check_subject(subject)


@pytest.mark.parametrize("subject", ["$JS.API.STREAM.DELETE.S", "$SYS.REQ.SERVER.PING"])
def test_the_servers_own_subjects_are_refused(subject: str) -> None:
    with pytest.raises(SourceError, match="reserved for the server"):
        check_subject(subject)


@pytest.mark.parametrize("subject", ["a", "a.b-c_d", "é.日本", "$KV.bucket.key", "a.b*", "{x}", "a>b"])
def test_an_ordinary_subject_is_accepted(subject: str) -> None:
    check_subject(subject)


@pytest.mark.parametrize(
    ("name", "value"),
    [("", "x"), ("A B", "x"), ("A:", "x"), ("A\r\nB", "x"), ("A", "x\r\nB: y"), ("A", "x\n"), ("é", "")],
)
def test_a_header_that_could_forge_another_is_refused(name: str, value: str) -> None:
    with pytest.raises(SourceError, match=r"invalid (header name|value of header)"):
        header_block([(name, value)])
