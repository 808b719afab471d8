# ruff: noqa: PT012 - leaving the `async with` is part of what raises
from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pyarrow as pa
import pytest

from jetcapture_py.archive.schema import HEADERS_TYPE
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.publish import publisher as publisher_module
from jetcapture_py.jetstream.publish.frames import header_blocks
from jetcapture_py.jetstream.publish.publisher import Publisher
from jetcapture_py.jetstream.wire.client import Connection
from tests.support.nats_server import NatsServer

Start = Callable[..., NatsServer]
Message = tuple[str, bytes, bytes]  # subject, header block, payload


async def quiet(_: Exception) -> None:
    """Restarts are the tests' own doing."""


async def connect(url: str) -> Connection:
    client = Connection()
    await client.connect(url, reconnect_time_wait=0.05, max_reconnect_attempts=-1, error_cb=quiet)
    return client


def publish(server: NatsServer, body: Callable[[Publisher], Awaitable[None]], **how: Any) -> Any:
    """Run `body` with a publisher to a stream S over `s.>`; the publisher, and what the stream then holds."""

    async def main() -> tuple[Publisher, list[Message]]:
        nc = await connect(server.url)
        try:
            await nc.jetstream().add_stream(name="S", subjects=["s.>"])
            async with Publisher(nc, **how) as publisher:
                await body(publisher)
            return publisher, await stored(nc)
        finally:
            with contextlib.suppress(OSError):
                await nc.close()

    return asyncio.run(main())


async def stored(nc: Any) -> list[Message]:
    last = (await nc.jetstream().stream_info("S")).state.last_seq
    found = []
    for seq in range(1, last + 1):
        answer = await nc.request("$JS.API.STREAM.MSG.GET.S", json.dumps({"seq": seq}).encode())
        message = json.loads(answer.data)["message"]
        found.append((message["subject"], *(base64.b64decode(message.get(part, "")) for part in ("hdrs", "data"))))
    return found


def maps(*rows: list[tuple[str, list[str | None] | None]] | None) -> pa.MapArray:
    return pa.array(rows, HEADERS_TYPE)


def with_ids(*ids: str) -> pa.BinaryArray:
    return header_blocks(None, {"Nats-Msg-Id": pa.array(ids)}, len(ids))


def test_rows_arrive_in_order_byte_for_byte(nats_server: Start) -> None:
    payloads = [b"", b"\r\n", bytes(range(256)), None, os.urandom(100_000), b"PUB s.x 0\r\n\r\n"]
    headers = maps(None, [], [("A", ["1", "2"]), ("B", [""])], [("C", [None, "é"]), ("D", None)], None, [("A", [" "])])
    ids = pa.array(["1", None, None, "4", None, "6"])
    subjects = ["s.a", "s.é", "s.a.b", "s.$x", "s.-_", "s.a"]

    async def body(publisher: Publisher) -> None:
        blocks = header_blocks(headers, {"Nats-Msg-Id": ids}, len(subjects))
        await publisher.publish_batch(pa.array(subjects), pa.array(payloads), blocks)

    publisher, found = publish(nats_server(), body)
    blocks = [
        b"NATS/1.0\r\nNats-Msg-Id: 1\r\n\r\n",
        b"NATS/1.0\r\n\r\n",
        b"NATS/1.0\r\nA: 1\r\nA: 2\r\nB: \r\n\r\n",
        "NATS/1.0\r\nC: é\r\nNats-Msg-Id: 4\r\n\r\n".encode(),
        b"",
        b"NATS/1.0\r\nA:  \r\nNats-Msg-Id: 6\r\n\r\n",
    ]
    assert found == list(zip(subjects, blocks, [payload or b"" for payload in payloads], strict=True))
    assert (publisher.published, publisher.duplicates) == (6, 0)


def test_an_id_or_an_extra_header_takes_the_place_of_one_of_its_name(nats_server: Start) -> None:
    headers = maps([("Nats-Msg-Id", ["old"]), ("A", ["1"]), ("X", ["2", "3"])], [("X", ["kept out"])], None)

    async def body(publisher: Publisher) -> None:
        extra = {"X": pa.array(["new", None, None]), "Nats-Msg-Id": pa.array(["id", None, None])}
        blocks = header_blocks(headers, extra, 3)
        await publisher.publish_batch(pa.array(["s.a"] * 3), pa.nulls(3, pa.string()), blocks)

    _, found = publish(nats_server(), body)
    assert [block for _, block, _ in found] == [
        b"NATS/1.0\r\nA: 1\r\nX: new\r\nNats-Msg-Id: id\r\n\r\n",
        b"NATS/1.0\r\n\r\n",
        b"",
    ]


def test_known_ids_count_as_duplicates(nats_server: Start) -> None:
    async def body(publisher: Publisher) -> None:
        for _ in range(3):
            await publisher.publish_batch(pa.array(["s.a"] * 2), pa.array([b"x"] * 2), with_ids("1", "2"))

    publisher, found = publish(nats_server(), body)
    assert (publisher.published, publisher.duplicates, len(found)) == (6, 4, 2)


def test_an_invalid_subject_keeps_the_whole_batch_back(nats_server: Start) -> None:
    async def body(publisher: Publisher) -> None:
        for subject, message in (
            ("s.*", "wildcard"),
            ("s. x", "invalid subject"),
            ("s.a\n", "invalid"),
            ("$JS.API.X", "reserved"),
            ("s." + "x" * 5000, "limit"),
            (None, "has no subject"),
        ):
            with pytest.raises(SourceError, match=message):
                await publisher.publish_batch(pa.array(["s.a", subject]), pa.array([b"", b""]))

    assert publish(nats_server(), body)[1] == []


def test_a_header_that_could_forge_another_is_refused() -> None:
    names = [("", "x"), ("A B", "x"), ("A:", "x"), ("A\r\nB", "x"), ("é", "")]
    for name, value in [*names, ("A", "x\r\nB: y"), ("A", "x\n"), ("A", "\0")]:
        headers = maps([("Good", ["x"])], [("Good", ["y"]), (name, [value])])
        for given, extra in ((headers, {}), (None, {name: pa.array([None, value])})):
            with pytest.raises(SourceError, match=r"invalid (header name|value of header A)"):
                header_blocks(given, extra, 2)


def test_stored_headers_may_hold_what_nats_has_taken_but_no_line_end(nats_server: Start) -> None:
    async def body(publisher: Publisher) -> None:
        blocks = header_blocks(maps([("a b\n é\t", ["1\r2\n3\0", "\r"])]), {}, 1, stored=True)
        await publisher.publish_batch(pa.array(["s.a"]), pa.array([b""]), blocks)
        for name, value in (("A\r\nB", "x"), ("A", "x\r\nB: y"), ("A:B", "x"), ("", "x")):
            with pytest.raises(SourceError, match=r"invalid (header name|value of header A)"):
                header_blocks(maps([(name, [value])]), {}, 1, stored=True)

    _, found = publish(nats_server(), body)
    assert [block for _, block, _ in found] == ["NATS/1.0\r\na b\n é\t: 1\r2\n3\0\r\na b\n é\t: \r\r\n\r\n".encode()]


def test_a_message_larger_than_the_server_allows_is_named(nats_server: Start) -> None:
    async def body(publisher: Publisher) -> None:
        with pytest.raises(SourceError, match=r"a message for s\.b has 1048577 bytes, the server allows 1048576"):
            await publisher.publish_batch(pa.array(["s.a", "s.b"]), pa.array([b"x", b"x" * 1_048_577]))

    assert publish(nats_server(), body)[1] == []


def test_bytes_under_way_are_bounded(nats_server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "WINDOW_BYTES", 1_000_000)
    most = 0

    async def body(publisher: Publisher) -> None:
        add = publisher._pending.add

        def watched(replies: list[bytes], messages: list[bytes]) -> None:
            nonlocal most
            add(replies, messages)
            most = max(most, publisher._pending.size)

        publisher._pending.add = watched  # type: ignore[method-assign]
        await publisher.publish_batch(pa.array(["s.a"] * 40), pa.array([b"x" * 300_000] * 40))

    publisher, found = publish(nats_server(), body)
    assert (publisher.published, len(found)) == (40, 40)
    assert 900_000 < most <= 1_000_000


def test_a_refusal_by_the_stream_ends_the_publishing(nats_server: Start) -> None:
    async def body(publisher: Publisher) -> None:
        with pytest.raises(SourceError, match=r"other\.b was refused: no stream listens on it"):
            await publisher.publish_batch(pa.array(["s.a", "other.b"]), pa.array([b"", b""]))
            await publisher.flush()
        with pytest.raises(SourceError, match="refused"):
            await publisher.publish_batch(pa.array(["s.a"]), pa.array([b""]))

    with pytest.raises(SourceError, match="refused"):
        publish(nats_server(), body)


def test_messages_that_found_no_stream_are_not_overtaken_by_later_ones(nats_server: Start) -> None:
    def late(start: int) -> tuple[pa.Array, pa.Array]:
        return pa.array(["late.a"] * 20), pa.array([str(number) for number in range(start, start + 20)])

    async def body(publisher: Publisher) -> None:
        await publisher.publish_batch(*late(0))
        while not publisher._pending.held:
            await asyncio.sleep(0.001)
        await publisher._nc.jetstream().update_stream(name="S", subjects=["s.>", "late.>"])
        await publisher.publish_batch(*late(20))

    publisher, found = publish(nats_server(), body)
    assert publisher.published == 40
    assert [int(payload) for _, _, payload in found] == list(range(40))


def test_order_and_ids_hold_when_the_server_crashes_again_and_again(nats_server: Start) -> None:
    server = nats_server("jetstream: {sync_interval: always}")

    async def body(publisher: Publisher) -> None:
        async def crash() -> None:
            for at in (500, 1500, 2500):
                while publisher.published < at:
                    await asyncio.sleep(0.001)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)

        crashing = asyncio.create_task(crash())
        for start in range(0, 4000, 10):  # in small parts, so that there is always something new to write
            numbers = pa.array([str(number) for number in range(start, start + 10)])
            await publisher.publish_batch(pa.array(["s.a"] * 10), numbers, with_ids(*numbers.to_pylist()))
            await asyncio.sleep(0.001)
        await publisher.flush()
        await crashing

    publisher, found = publish(server, body)
    assert publisher.published == 4000
    assert [int(payload) for _, _, payload in found] == list(range(4000))
