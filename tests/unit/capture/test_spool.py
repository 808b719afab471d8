"""The spool: files for rows and objects, within their bound, of which nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
import gc
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.schema import REPLY
from jetcapture_py.archive.writer import ObjectWriter
from jetcapture_py.capture import spool as spool_module
from jetcapture_py.capture.blocks import Block, Blocks
from jetcapture_py.capture.sealing import Amount
from jetcapture_py.capture.spool import Spool, SpoolFile, Spooling
from tests.unit.archive.test_writer import BLOCK, ENCODER, batch, plain, read
from tests.unit.capture.test_blocks import add, assert_empty, finish, make, numbers_of

ROWS = batch(plain(1000), text=["größe", None] * 500)
SIZE = ROWS.remove_column(ROWS.schema.get_field_index(REPLY)).nbytes
FRAME = 4096
"""More than a file of rows has besides their bytes."""
MEMORY = 4_000_000


def test_rows_come_back_as_they_were_and_lie_in_a_file_without_a_name(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", 10 * SIZE)
    before = pa.total_allocated_bytes()
    mapped = spool.write(ROWS)
    assert mapped.equals(ROWS)
    assert mapped.schema.equals(ROWS.schema)
    assert pa.total_allocated_bytes() - before < 100_000, "the ack subjects alone are in memory"
    assert SIZE <= spool.bytes < SIZE + FRAME
    assert list((tmp_path / "spool").iterdir()) == []
    part = mapped.slice(10, 5)
    del mapped
    gc.collect()
    assert spool.bytes >= SIZE
    assert part.equals(ROWS.slice(10, 5)), "who still reads them can"
    del part
    gc.collect()
    assert spool.bytes == 0
    (tmp_path / "spool").rmdir()
    part = spool.write(ROWS.slice(100, 10))  # the directory is made again
    assert part.equals(ROWS.slice(100, 10))
    assert spool.bytes < SIZE / 50 + FRAME
    spool.close()


def test_rows_that_cannot_be_written_are_salvaged_in_the_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = ObjectWriter.write

    def failing(self: ObjectWriter, table: pa.Table) -> None:
        write(self, table)
        if layout.ERROR not in table.schema.names:
            raise pa.ArrowInvalid("after some bytes")

    monkeypatch.setattr(ObjectWriter, "write", failing)
    spool = Spool(tmp_path / "spool", 10 * SIZE)
    sink = SpoolFile(spool)
    encoded = ENCODER.encode_or_salvage(BLOCK, "age", [ROWS], sink=sink)
    assert (encoded.name.quarantine, encoded.in_file, encoded.messages) == (True, True, 1000)
    assert spool.bytes == encoded.data.size
    assert read(encoded).column("error").to_pylist() == ["ArrowInvalid: after some bytes"] * 1000
    sink.close()
    spool.close()


def test_the_files_never_exceed_the_size_and_leave_room_for_the_objects(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 5 * SIZE)
    kept = [spool.write(ROWS) for _ in range(2)]
    assert not spool.has_room(SIZE)
    with pytest.raises(OSError, match="size is used up") as caught:
        spool.write(ROWS)
    assert caught.value.errno == errno.ENOSPC
    rows = spool.bytes
    sink = SpoolFile(spool)
    sink.write(b"x" * SIZE * 2)
    assert not sink.failed
    assert spool.bytes == rows + 2 * SIZE
    with pytest.raises(OSError, match="size is used up"):
        sink.write(b"x" * (SIZE + 1))
    assert sink.failed
    sink.close()
    assert spool.bytes == rows
    kept.clear()
    gc.collect()
    assert spool.bytes == 0
    spool.close()


def test_an_object_is_gone_with_its_last_use(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 10 * SIZE)
    sink = SpoolFile(spool)
    assert sink.write(pa.py_buffer(b"abc")) == 3
    assert sink.tell() == 3
    data = sink.getvalue()
    sink.close()
    memoryview(data).cast("B")[1:2] = b"X"
    assert data.to_pybytes() == b"aXc"
    assert spool.bytes == 3
    del data
    gc.collect()
    assert spool.bytes == 0
    spool.close()


def test_a_disk_that_hangs_is_given_up_until_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "TIMEOUT", 0.2)
    spool, answer, answered = Spool(tmp_path, 10 * SIZE), threading.Event(), threading.Event()
    spool.disk.submit(answer.wait)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="the disk did not answer"):
            spool.write(ROWS)
    spool.disk.submit(answered.set)
    answer.set()
    assert answered.wait(30)
    assert spool.write(ROWS).equals(ROWS)
    spool.close()


def spooling(directory: Path, size: int, scenario: Callable[[Blocks, Spooling], Awaitable[None]]) -> None:
    """Run a scenario with blocks and their spool, which are empty at the end."""

    async def whole() -> None:
        blocks, spool = make(), Spool(directory, size)
        work = Spooling(blocks, spool, MEMORY)
        await scenario(blocks, work)
        finish(blocks, [block for block in blocks if block.sealed_by] + blocks.seal_all("drain"))
        assert_empty(blocks)
        assert (blocks.large, blocks.spooled) == ({}, {})
        async with asyncio.timeout(30):  # until the last thread has let go of the last rows
            while spool.bytes:
                await asyncio.sleep(0.01)
                gc.collect()
        work.close()

    asyncio.run(whole())


async def spool_all(work: Spooling) -> int:
    """Spool as much as possible; how many steps that took."""
    return len([step async for step in work.steps()]) if work.begin(starved=True) else 0


def by_key(blocks: Blocks) -> dict[str | None, Block]:
    return {block.id.key: block for block in blocks}


@pytest.mark.parametrize("seed", range(2))
def test_blocks_keep_their_rows_whatever_is_spooled_sealed_and_released(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)

    async def scenario(blocks: Blocks, work: Spooling) -> None:
        sealed: list[Block] = []
        steps = 0
        for _ in range(60):
            keys = [(chance.choice(["fast"] * 8 + ["a", "b"]), 0) for _ in range(chance.randint(1, 400))]
            assert add(blocks, keys, size=chance.choice([10, 500, 2000])) == []
            rows, action = {block: numbers_of(block) for block in blocks}, chance.random()
            if action < 0.5:
                steps += await spool_all(work)
            elif action < 0.7:
                sealed += blocks.seal_largest(Amount(messages=1))
            elif sealed:
                released = sealed.pop(chance.randrange(len(sealed)))
                finish(blocks, [released])
                del rows[released]
            assert {block: sorted(numbers_of(block)) for block in blocks} == {
                block: sorted(numbers) for block, numbers in rows.items()
            }
            assert blocks.resident <= blocks.memory
            assert work.spool.bytes <= 2_000_000
        assert steps > 5

    spooling(tmp_path, 2_000_000, scenario)


def test_rows_that_are_released_while_they_are_written_stay_released(tmp_path: Path) -> None:
    async def scenario(blocks: Blocks, work: Spooling) -> None:
        add(blocks, [("a", 0)] * 300 + [("b", 0)] * 700, size=1000)
        assert work.begin(starved=True)
        task = asyncio.ensure_future(anext(work.steps()))
        await asyncio.sleep(0)
        numbers = numbers_of(by_key(blocks)["b"])
        finish(blocks, blocks.seal([by_key(blocks)["a"]], "test"))
        await task
        assert numbers_of(by_key(blocks)["b"]) == numbers
        assert work.spool.bytes > 0

    spooling(tmp_path, 10_000_000, scenario)


def test_nothing_is_spooled_for_a_while_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    async def scenario(blocks: Blocks, work: Spooling) -> None:
        add(blocks, [("a", 0)] * 1000, size=1000)
        monkeypatch.setattr(work.spool, "write", refuse)
        assert await spool_all(work) == 0
        assert (work.failures, work.active) == (1, False)
        monkeypatch.undo()
        assert not work.begin(starved=True)
        monkeypatch.setattr(spool_module.time, "monotonic", lambda: 1e12)
        assert await spool_all(work) == 1
        monkeypatch.undo()

    spooling(tmp_path, 10_000_000, scenario)
