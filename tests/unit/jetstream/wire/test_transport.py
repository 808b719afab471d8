from __future__ import annotations

import asyncio
import importlib.util
import socket
import sys
from collections import deque
from typing import Any
from urllib.parse import urlparse

import numpy as np
import pyarrow as pa
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
    assert first.count(b"x") == SEGMENT - 10


def test_memory_grows_to_what_the_first_frame_needs() -> None:
    memory = ReceiveBuffer()
    memory.append(b"x" * 100)
    memory.needed = 3 * SEGMENT
    room = memory.room(len(memory.segment))
    assert len(memory) + len(room) >= 3 * SEGMENT


def next_segment(memory: Any) -> int:
    """Fill the segment, and start another one; return what identifies that."""
    memory.append(b"x" * (len(memory.segment) - memory.stop))
    memory.start = memory.stop
    memory.append(b"y")
    memory.start = memory.stop
    return id(memory.segment)


def used_again(memory: Any) -> bool:
    """Start another segment; return whether it has content of an earlier one. New memory may have its address."""
    next_segment(memory)
    return b"x" in memory.segment[memory.stop :]


def test_memory_is_used_again_only_when_nobody_refers_to_it() -> None:
    memory = ReceiveBuffer()
    memory.append(b"x")
    used: list[object] = []
    contents: list[bytes] = []
    seen: set[int] = set()
    for refer in (lambda segment: segment, memoryview, pa.py_buffer, lambda segment: np.frombuffer(segment, np.uint8)):
        used.append(refer(memory.segment))
        contents.append(bytes(memory.segment[: memory.stop]))
        seen.add(id(memory.segment))
        for _ in range(3):
            assert next_segment(memory) not in seen
    assert all(bytes(each).startswith(before) for each, before in zip(used, contents, strict=True))
    used.clear()
    assert any(used_again(memory) for _ in range(4))


def imported_anew() -> Any:
    """Another copy of the module, as if imported under this Python."""
    spec = importlib.util.spec_from_file_location("another_transport", transport.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("unused", [1, 2, 3])
def test_memory_in_use_is_recognized_whatever_python_counts(monkeypatch: pytest.MonkeyPatch, unused: int) -> None:
    count, surplus = sys.getrefcount, 0

    def counted(found: object) -> int:
        return count(found) - surplus

    held = deque((bytearray(),))
    surplus = counted(held[0]) - unused
    monkeypatch.setattr(sys, "getrefcount", counted)
    memory = imported_anew().ReceiveBuffer()
    memory.append(b"x")
    used = memory.segment
    assert id(used) not in {next_segment(memory) for _ in range(4)}
    assert any(used_again(memory) for _ in range(4))


def test_no_memory_is_used_again_if_python_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "getrefcount", lambda _: 2)
    memory = imported_anew().ReceiveBuffer()
    memory.append(b"x")
    assert not any(used_again(memory) for _ in range(4))


def test_memory_of_a_large_message_is_not_kept() -> None:
    memory = ReceiveBuffer()
    memory.needed = 3 * SEGMENT
    memory.append(b"x")
    memory.needed = 0
    for _ in range(4):
        next_segment(memory)
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

    asyncio.run(scenario())


def test_a_line_that_the_end_cuts_is_what_has_come_of_it() -> None:
    async def scenario() -> None:
        reader = await fed(b"INF")
        assert await reader.readline() == b"INF"
        assert await reader.readline() == b""
        assert reader.at_eof()

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
