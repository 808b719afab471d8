"""The ledger: who may use how much, alone and with others, and the turns to encode."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from jetcapture_py.config.shares import CAPTURE_BYTES
from jetcapture_py.ledger import Ledger, Memory


@pytest.mark.parametrize("seed", range(2))
def test_what_is_within_never_weighs_more_than_the_limit_but_for_one_piece_alone(seed: int) -> None:
    async def scenario() -> None:
        draw, gate = random.Random(seed), Ledger(Memory(267))
        weights = [draw.choice((1, 10, 60, 100, 250)) for _ in range(60)]
        within: list[int] = []
        order: list[int] = []

        async def work(number: int, weight: int, steps: int) -> None:
            async with gate.encoding(weight):
                order.append(number)
                within.append(weight)
                assert sum(within) <= 100 or within == [weight]
                assert gate["encoding"] == sum(within)
                for _ in range(steps):
                    await asyncio.sleep(0)
                within.remove(weight)

        async with asyncio.TaskGroup() as tasks:
            for number, weight in enumerate(weights):
                tasks.create_task(work(number, weight, draw.randrange(5)))
        assert order == list(range(60))
        assert gate["encoding"] == 0

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_who_is_cancelled_or_fails_leaves_room() -> None:
    async def scenario() -> None:
        gate = Ledger(Memory(27))
        async with gate.encoding(10):
            waiting = [asyncio.create_task(_within(gate, 5)) for _ in range(3)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await asyncio.sleep(0)
        assert await asyncio.gather(*waiting[1:]) == [10, 5]
        with pytest.raises(ValueError, match="broken"):
            async with gate.encoding(10):
                raise ValueError("broken")
        assert gate["encoding"] == 0

    asyncio.run(asyncio.wait_for(scenario(), 60))


async def _within(gate: Ledger, weight: int) -> int:
    async with gate.encoding(weight):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return gate["encoding"]


def test_a_capture_alone_may_use_all_memory() -> None:
    ledger = Ledger(Memory(1200))
    with ledger.joined():
        ledger["open"], ledger["asked"] = 900, 100
        assert (ledger.memory.part, ledger.elsewhere, ledger.may_open, ledger.free) == (1200, 0, 600, 200)


def test_captures_that_share_memory_ask_for_equal_parts_and_may_hold_what_others_leave() -> None:
    unit = CAPTURE_BYTES
    memory = Memory(14 * unit)
    busy, quiet, third = (Ledger(memory) for _ in range(3))
    with busy.joined(), quiet.joined():
        with third.joined():
            busy["open"], busy["waiting"], third["open"] = 5 * unit, 2 * unit, unit
            assert (memory.limit, memory.part) == (12 * unit, 4 * unit)
            assert [ledger.elsewhere // unit for ledger in (busy, quiet, third)] == [1, 8, 7]
            assert [ledger.may_open // unit for ledger in (busy, quiet, third)] == [5, 2, 2], "at least an equal part"
            assert [ledger.free // unit for ledger in (busy, quiet, third)] == [4, 4, 4]
        assert memory.part == 6.5 * unit
        assert memory.bytes.total() == 7 * unit, "one that has left holds nothing"
        third["open"] = 0
        assert memory.bytes.total() == 7 * unit, "and changes nothing"


def test_captures_leave_at_least_half_of_the_memory_to_messages() -> None:
    memory = Memory(4 * CAPTURE_BYTES)
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(Ledger(memory).joined())
        assert memory.limit == 2 * CAPTURE_BYTES
        assert memory.part == memory.limit // 10
