from __future__ import annotations

import asyncio

import pytest

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
