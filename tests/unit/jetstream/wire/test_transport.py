from __future__ import annotations

import asyncio
import socket
from urllib.parse import urlparse

import pytest

from jetcapture_py.jetstream.wire import transport
from jetcapture_py.jetstream.wire.transport import SEGMENT, ReceiveBuffer, _Reader


def test_what_is_not_parsed_moves_to_the_next_piece_of_memory_and_the_rest_stays() -> None:
    memory = ReceiveBuffer()
    memory.append(b"x" * (SEGMENT - 10))
    first = memory.segment
    memory.start = SEGMENT - 15
    memory.append(b"y" * (len(first) - memory.stop + 1))
    assert memory.segment is not first
    assert bytes(memory.segment[memory.start : memory.start + 6]) == b"xxxxxy"
    assert bytes(first[: SEGMENT - 10]) == b"x" * (SEGMENT - 10)


def test_memory_grows_to_what_a_large_message_needs_and_is_not_kept() -> None:
    memory = ReceiveBuffer()
    memory.append(b"x" * 100)
    memory.needed = 3 * SEGMENT
    assert len(memory) + len(memory.room(len(memory.segment))) >= 3 * SEGMENT
    memory = ReceiveBuffer()
    memory.needed = 3 * SEGMENT
    memory.append(b"x")
    memory.needed = 0
    memory.append(b"x" * (len(memory.segment) - memory.stop))
    memory.start = memory.stop
    memory.append(b"y")
    assert len(memory.segment) < 2 * SEGMENT


async def fed(*pieces: bytes, eof: bool = True) -> _Reader:
    reader = _Reader()
    for piece in pieces:
        reader.feed_data(piece)
    if eof:
        reader.feed_eof()
    return reader


def test_lines_are_taken_out_and_the_rest_is_read_before_the_end() -> None:
    async def scenario() -> None:
        reader = await fed(b"INFO {}\r", b"\nPING\r\nMSG")
        assert await reader.readline() == b"INFO {}\r\n"
        assert await reader.readline() == b"PING\r\n"
        assert not reader.at_eof()
        memory = await reader.read()
        assert bytes(memory.segment[memory.start : memory.stop]) == b"MSG"
        assert reader.at_eof()
        cut = await fed(b"INF")
        assert [await cut.readline(), await cut.readline(), cut.at_eof()] == [b"INF", b"", True]

    asyncio.run(scenario())


def test_a_reader_waits_for_more_and_tells_of_an_error() -> None:
    async def scenario() -> None:
        reader = await fed(eof=False)
        reading = asyncio.create_task(reader.read())
        await asyncio.sleep(0)
        assert not reading.done()
        reader.feed_data(b"x")
        assert len(await reading) == 1
        reader.set_exception(ConnectionResetError())
        with pytest.raises(ConnectionResetError):
            await reader.read()

    asyncio.run(scenario())


def test_a_connection_closes_although_the_server_has_stopped_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CLOSING", 0.05)

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            connection = transport.Transport()
            await connection.connect(urlparse("nats://{}:{}".format(*server.getsockname())), 0, 60)
            stopped, _ = server.accept()
            with stopped:
                connection.write(bytes(64 << 20))  # more than the system holds
                for _ in range(2):  # nats-py does it before it reconnects, and the client before the next attempt
                    connection.close()
                    await asyncio.wait_for(connection.wait_closed(), 60)

    asyncio.run(scenario())
