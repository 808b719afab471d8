"""Chunks that move to files and back: every block keeps its rows, and what is counted stays right."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.capture import spooling
from jetcapture_py.capture.blocks import Block, Blocks
from jetcapture_py.capture.spool import Spool
from jetcapture_py.capture.spooling import Spooling
from tests.unit.capture.test_blocks import add, assert_empty, finish, make, numbers_of

MEMORY = 4_000_000


def check(blocks: Blocks, owners: dict[Block, list[int]]) -> None:
    opened = [block for block in blocks if not block.sealed_by]
    assert blocks.memory.open_away == sum(block.away for block in opened)
    assert blocks.resident == sum(block.bytes - block.away for block in opened)
    assert all(0 <= block.away <= block.bytes for block in blocks)
    for block, numbers in owners.items():
        assert sorted(numbers_of(block)) == sorted(numbers)


async def settled(spool: Spool) -> None:
    await asyncio.wrap_future(spool.threads.submit(lambda: None))


async def spool_all(work: Spooling) -> int:
    """Spool as much as possible; how many steps that took."""
    return len([step async for step in work.steps()]) if work.begin(starved=True) else 0


@pytest.mark.parametrize("seed", range(6))
def test_blocks_keep_their_rows_whatever_is_spooled_sealed_and_released(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)

    async def scenario() -> None:
        blocks, spool = make(), Spool(tmp_path, 2_000_000)
        work = Spooling(blocks, spool, MEMORY)
        sealed: list[Block] = []
        steps = 0
        for _ in range(60):
            keys = [(chance.choice(["fast"] * 8 + ["a", "b"]), 0) for _ in range(chance.randint(1, 400))]
            full = add(blocks, keys, size=chance.choice([10, 500, 2000]))
            assert full == []
            action = chance.random()
            if action < 0.5:
                steps += await spool_all(work)
            elif action < 0.7:
                sealed += blocks.seal_most(messages=1)
            elif sealed:
                finish(blocks, [sealed.pop(chance.randrange(len(sealed)))])
            owners = {block: numbers_of(block) for block in blocks}
            check(blocks, owners)
            assert spool.bytes <= 2_000_000
        assert steps > 5
        finish(blocks, sealed + blocks.seal_all("drain"))
        assert_empty(blocks)
        assert (blocks.memory.open_away, blocks.memory.large, blocks.memory.sparse) == (0, {}, {})
        await settled(spool)
        assert spool.bytes == 0
        spool.close()

    asyncio.run(scenario())


def test_what_a_slow_key_leaves_of_a_file_is_made_smaller_when_room_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spooling, "SMALL", 0)

    async def scenario() -> None:
        blocks, spool = make(), Spool(tmp_path, 2_200_000)
        work = Spooling(blocks, spool, MEMORY)
        for _ in range(4):
            add(blocks, [("slow", 0)] * 10 + [("fast", 0)] * 90, size=2500)
            assert await spool_all(work) == 1
        before = spool.bytes
        fast = next(block for block in blocks if block.id.key == "fast")
        (slow,) = (block for block in blocks if block is not fast)
        numbers = numbers_of(slow)
        finish(blocks, blocks.seal([fast], "test"))
        assert len(blocks.memory.sparse) == 4
        add(blocks, [("fast", 0)] * 90, size=2500)
        assert await spool_all(work) >= 2
        await settled(spool)
        assert spool.bytes < before
        assert numbers_of(slow) == numbers
        check(blocks, {})
        finish(blocks, blocks.seal_all("drain"))
        assert_empty(blocks)
        spool.close()

    asyncio.run(scenario())


def test_rows_that_are_released_while_they_are_written_stay_released(tmp_path: Path) -> None:
    async def scenario() -> None:
        blocks, spool = make(), Spool(tmp_path, 10_000_000)
        work = Spooling(blocks, spool, MEMORY)
        add(blocks, [("a", 0)] * 300 + [("b", 0)] * 700, size=1000)
        assert work.begin(starved=True)
        task = asyncio.ensure_future(anext(work.steps()))
        await asyncio.sleep(0)
        a = next(block for block in blocks if block.id.key == "a")
        b = next(block for block in blocks if block is not a)
        numbers = numbers_of(b)
        finish(blocks, blocks.seal([a], "test"))
        await task
        assert numbers_of(b) == numbers
        assert spool.bytes > 0
        check(blocks, {})
        finish(blocks, blocks.seal_all("drain"))
        assert_empty(blocks)
        await settled(spool)
        assert spool.bytes == 0
        spool.close()

    asyncio.run(scenario())


def test_nothing_is_spooled_for_a_while_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    async def scenario() -> None:
        blocks, spool = make(), Spool(tmp_path, 10_000_000)
        work = Spooling(blocks, spool, MEMORY)
        add(blocks, [("a", 0)] * 1000, size=1000)
        monkeypatch.setattr(spool, "write", refuse)
        assert await spool_all(work) == 0
        assert (work.failures, work.active) == (1, False)
        monkeypatch.undo()
        assert not work.begin(starved=True)
        monkeypatch.setattr(spooling.time, "monotonic", lambda: 1e12)
        assert await spool_all(work) == 1
        monkeypatch.undo()
        spool.close()

    asyncio.run(scenario())


def test_spooling_begins_at_its_share_of_the_memory_and_not_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        blocks, spool = make(), Spool(tmp_path, 10_000_000)
        work = Spooling(blocks, spool, MEMORY)
        add(blocks, [("a", 0)] * 800, size=1000)
        assert not work.begin(starved=False)
        add(blocks, [("a", 0)] * 800, size=1000)
        assert work.begin(starved=False)
        async for _ in work.steps():
            pass
        assert blocks.resident <= MEMORY // 8
        spool.close()

    asyncio.run(scenario())
