# ruff: noqa: PT012 - leaving the `async with` is part of what raises
"""Publishing in batches: byte for byte, in order, and each message once or an error."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable

import pyarrow as pa
import pytest

from jetcapture_py.archive.schema import HEADERS_TYPE
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.publish import publisher as publisher_module
from jetcapture_py.jetstream.publish.frames import header_blocks
from jetcapture_py.jetstream.publish.publisher import Publisher
from jetcapture_py.jetstream.wire.client import Connection
from tests.support.nats_server import NatsServer
from tests.support.replays import Kept, messages

INVALID = r"invalid (header name|value of header A)"


@contextlib.asynccontextmanager
async def connected(server: NatsServer) -> AsyncIterator[Connection]:
    """A connection to a server with a stream S over `s.>`, and one that never acknowledges over `silent.>`."""

    async def quiet(_: Exception) -> None:
        """Restarts are the tests' own doing."""

    client = Connection()
    await client.connect(server.url, reconnect_time_wait=0.05, max_reconnect_attempts=-1, error_cb=quiet)
    try:
        await client.jetstream().add_stream(name="S", subjects=["s.>"])
        await client.jetstream().add_stream(name="SILENT", subjects=["silent.>"], no_ack=True)
        yield client
    finally:
        with contextlib.suppress(OSError):  # nats-py's close passes on what a killed server did to the socket
            await client.close()


async def stored(server: NatsServer) -> list[Kept]:
    return [kept for _, kept in await messages(server.url, "S")]


async def send(publisher: Publisher, subject: str, *payloads: bytes, ids: bool = True) -> None:
    blocks = with_ids(*(payload.decode() for payload in payloads)) if ids else None
    await publisher.publish_batch(pa.array([subject] * len(payloads)), pa.array(payloads, pa.binary()), blocks)


def maps(*rows: list[tuple[str, list[str | None] | None]] | None) -> pa.MapArray:
    return pa.array(rows, HEADERS_TYPE)


def with_ids(*ids: str) -> pa.BinaryArray:
    return header_blocks(None, {"Nats-Msg-Id": pa.array(ids)}, len(ids))


async def test_rows_arrive_in_order_byte_for_byte(server: NatsServer) -> None:
    payloads = [b"", b"\r\n", bytes(range(256)), None, os.urandom(100_000), b"PUB s.x 0\r\n\r\n"]
    headers = maps(None, [], [("A", ["1", "2"]), ("B", [""])], [("C", [None, "é"]), ("D", None)], None, [("A", [" "])])
    ids = pa.array(["1", None, None, "4", None, "6"])
    subjects = ["s.a", "s.é", "s.a.b", "s.$x", "s.-_", "s.a"]
    blocks = [
        b"NATS/1.0\r\nNats-Msg-Id: 1\r\n\r\n",
        b"NATS/1.0\r\n\r\n",
        b"NATS/1.0\r\nA: 1\r\nA: 2\r\nB: \r\n\r\n",
        "NATS/1.0\r\nC: é\r\nNats-Msg-Id: 4\r\n\r\n".encode(),
        b"",
        b"NATS/1.0\r\nA:  \r\nNats-Msg-Id: 6\r\n\r\n",
    ]
    replaced = maps([("Nats-Msg-Id", ["old"]), ("A", ["1"]), ("X", ["2", "3"])], [("X", ["kept out"])])
    extra = {"X": pa.array(["new", None]), "Nats-Msg-Id": pa.array(["id", None])}
    odd = header_blocks(maps([("a b\n é\t", ["1\r2\n3\0", "\r"])]), {}, 1, stored=True)
    async with connected(server) as nc:
        async with Publisher(nc) as publisher:
            given = header_blocks(headers, {"Nats-Msg-Id": ids}, len(subjects))
            await publisher.publish_batch(pa.array(subjects), pa.array(payloads), given)
            await publisher.publish_batch(
                pa.array(["s.a"] * 2), pa.nulls(2, pa.string()), header_blocks(replaced, extra, 2)
            )
            await publisher.publish_batch(pa.array(["s.a"]), pa.array([b""]), odd)
        found = await stored(server)
    assert found[:6] == list(zip(subjects, blocks, [payload or b"" for payload in payloads], strict=True))
    assert [block for _, block, _ in found[6:]] == [
        b"NATS/1.0\r\nA: 1\r\nX: new\r\nNats-Msg-Id: id\r\n\r\n",  # in place of those of the same name
        b"NATS/1.0\r\n\r\n",
        "NATS/1.0\r\na b\n é\t: 1\r2\n3\0\r\na b\n é\t: \r\r\n\r\n".encode(),  # what a stream has may be odd
    ]
    assert (publisher.published, publisher.duplicates) == (9, 0)


def test_a_header_that_could_forge_another_is_refused() -> None:
    names = [("", "x"), ("A B", "x"), ("A:", "x"), ("A\r\nB", "x"), ("é", "")]
    for name, value in [*names, ("A", "x\r\nB: y"), ("A", "x\n"), ("A", "\0")]:
        headers = maps([("Good", ["x"])], [("Good", ["y"]), (name, [value])])
        for given, extra in ((headers, {}), (None, {name: pa.array([None, value])})):
            with pytest.raises(SourceError, match=INVALID):
                header_blocks(given, extra, 2)
    for name, value in (("A\r\nB", "x"), ("A", "x\r\nB: y"), ("A:B", "x"), ("", "x")):
        with pytest.raises(SourceError, match=INVALID):
            header_blocks(maps([(name, [value])]), {}, 1, stored=True)


async def test_known_ids_count_as_duplicates(server: NatsServer) -> None:
    async with connected(server) as nc:
        async with Publisher(nc) as publisher:
            for _ in range(3):
                await send(publisher, "s.a", b"1", b"2")
        assert (publisher.published, publisher.duplicates, len(await stored(server))) == (6, 4, 2)


async def test_an_invalid_subject_or_a_message_that_is_too_large_keeps_the_whole_batch_back(server: NatsServer) -> None:
    too_large = r"a message for s\.b has 1048577 bytes, the server allows 1048576"
    async with connected(server) as nc:
        async with Publisher(nc) as publisher:
            for subject, size, message in (
                ("s.*", 0, "wildcard"),
                ("s. x", 0, "invalid subject"),
                ("s.a\n", 0, "invalid"),
                ("$JS.API.X", 0, "reserved"),
                ("s." + "x" * 5000, 0, "limit"),
                (None, 0, "has no subject"),
                ("s.b", 1_048_577, too_large),
            ):
                with pytest.raises(SourceError, match=message):
                    await publisher.publish_batch(pa.array(["s.a", subject]), pa.array([b"", b"x" * size]))
        assert await stored(server) == []


async def test_bytes_under_way_are_bounded(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "WINDOW_BYTES", 1_000_000)
    most = 0
    async with connected(server) as nc:
        async with Publisher(nc) as publisher:
            add = publisher._pending.add

            def watched(replies: list[bytes], messages: list[bytes]) -> None:
                nonlocal most
                add(replies, messages)
                most = max(most, publisher._pending.size)

            publisher._pending.add = watched  # type: ignore[method-assign]
            await send(publisher, "s.a", *[b"x" * 300_000] * 40, ids=False)
        assert (publisher.published, len(await stored(server))) == (40, 40)
    assert 900_000 < most <= 1_000_000


@pytest.mark.parametrize(
    ("subject", "reason"), [("small.a", "message size exceeds maximum allowed"), ("other.b", "no stream listens on it")]
)
async def test_a_refusal_ends_the_publishing(server: NatsServer, subject: str, reason: str) -> None:
    async with connected(server) as nc:
        await nc.jetstream().add_stream(name="SMALL", subjects=["small.>"], max_msg_size=10)
        with pytest.raises(SourceError, match="refused"):
            async with Publisher(nc) as publisher:
                await send(publisher, subject, b"x" * 100)
                with pytest.raises(SourceError, match=rf"{subject} was refused: {reason}"):
                    await publisher.flush()
                with pytest.raises(SourceError, match="refused"):
                    await send(publisher, "s.a", b"x")


@pytest.mark.parametrize(
    ("ids", "how", "reason"),
    [
        ((True, False), {"ack_timeout": 0.2}, r"2 messages not acknowledged within 0\.2 s, 1 without Nats-Msg-Id"),
        ((True,), {"ack_timeout": 0.1, "patience": 0.5}, r"1 message not acknowledged within [01] s"),
    ],
    ids=["without an id", "never"],
)
async def test_messages_that_are_not_acknowledged_are_an_error(
    server: NatsServer, ids: tuple[bool, ...], how: dict[str, float], reason: str
) -> None:
    async with connected(server) as nc:
        with pytest.raises(SourceError, match=reason):
            async with Publisher(nc, **how) as publisher:
                for number, each in enumerate(ids):
                    await send(publisher, "silent.a", b"%d" % number, ids=each)
        assert (await nc.jetstream().stream_info("SILENT")).state.messages == len(ids)


@pytest.mark.parametrize("crash", [True, False])
async def test_a_crash_of_the_server_and_a_closed_connection_are_errors(server: NatsServer, crash: bool) -> None:
    reason = "1 message not acknowledged before the connection broke, 1 without" if crash else "connection to NATS is"
    async with connected(server) as nc:
        with pytest.raises(SourceError, match=reason):
            async with Publisher(nc) as publisher:
                await send(publisher, "silent.a", b"1", ids=False)
                if crash:
                    await asyncio.to_thread(server.kill)
                    await asyncio.to_thread(server.start)
                else:
                    await nc.close()


async def test_an_exception_of_the_caller_passes_without_waiting_for_acknowledgements(server: NatsServer) -> None:
    async with connected(server) as nc:
        with pytest.raises(ZeroDivisionError):
            async with Publisher(nc) as publisher:
                await send(publisher, "nobody.listens", b"1")
                raise ZeroDivisionError


async def test_messages_that_found_no_stream_are_not_overtaken_by_later_ones(server: NatsServer) -> None:
    numbers = [b"%d" % number for number in range(40)]
    async with connected(server) as nc:
        async with Publisher(nc) as publisher:
            await send(publisher, "late.a", *numbers[:20], ids=False)
            while not publisher._pending.held:
                await asyncio.sleep(0.001)
            await nc.jetstream().update_stream(name="S", subjects=["s.>", "late.>"])
            await send(publisher, "late.a", *numbers[20:], ids=False)
        assert publisher.published == 40
        assert [payload for _, _, payload in await stored(server)] == numbers


async def test_order_and_ids_hold_when_the_server_crashes_again_and_again(
    nats_server: Callable[..., NatsServer],
) -> None:
    server = nats_server("jetstream: {sync_interval: always}")

    async def crash(publisher: Publisher) -> None:
        for at in (500, 1500, 2500):
            while publisher.published < at:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)

    async with connected(server) as nc:
        async with Publisher(nc) as publisher:
            crashing = asyncio.create_task(crash(publisher))
            for start in range(0, 4000, 10):  # in small parts, so that there is always something new to write
                await send(publisher, "s.a", *(b"%d" % number for number in range(start, start + 10)))
                await asyncio.sleep(0.001)
            await publisher.flush()
            await crashing
        assert publisher.published == 4000
        assert [int(payload) for _, _, payload in await stored(server)] == list(range(4000))
