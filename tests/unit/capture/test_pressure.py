"""The gate lets no more through than fits, in the order of arrival, and everything in the end."""

from __future__ import annotations

import asyncio
import gc
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from jetcapture_py.capture.pressure import CaptureMemory, WeightedSemaphore
from jetcapture_py.config.shares import CAPTURE_BYTES


@pytest.mark.parametrize("seed", range(5))
def test_what_is_within_never_weighs_more_than_the_limit_but_for_one_piece_alone(seed: int) -> None:
    async def scenario() -> None:
        draw, gate = random.Random(seed), WeightedSemaphore(100)
        weights = [draw.choice((1, 10, 60, 100, 250)) for _ in range(60)]
        within: list[int] = []
        order: list[int] = []

        async def work(number: int, weight: int, steps: int) -> None:
            async with gate.acquire(weight):
                order.append(number)
                within.append(weight)
                assert sum(within) <= 100 or within == [weight]
                assert gate.taken == sum(within)
                for _ in range(steps):
                    await asyncio.sleep(0)
                within.remove(weight)

        async with asyncio.TaskGroup() as tasks:
            for number, weight in enumerate(weights):
                tasks.create_task(work(number, weight, draw.randrange(5)))
        assert order == list(range(60))
        assert gate.taken == 0

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_who_is_cancelled_or_fails_leaves_room() -> None:
    async def scenario() -> None:
        gate = WeightedSemaphore(10)
        async with gate.acquire(10):
            waiting = [asyncio.create_task(_within(gate, 5)) for _ in range(3)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await asyncio.sleep(0)
        assert await asyncio.gather(*waiting[1:]) == [10, 5]
        with pytest.raises(ValueError, match="broken"):
            async with gate.acquire(10):
                raise ValueError("broken")
        assert gate.taken == 0

    asyncio.run(asyncio.wait_for(scenario(), 60))


async def _within(gate: WeightedSemaphore, weight: int) -> int:
    async with gate.acquire(weight):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return gate.taken


class Holder:
    """A capture that holds so many bytes, of which some are in open blocks."""

    def __init__(self, memory: CaptureMemory, held: int, opened: int) -> None:
        self._held = held, opened
        memory.join(self)

    def held(self) -> tuple[int, int]:
        return self._held


def test_a_capture_alone_may_use_all_memory() -> None:
    memory = CaptureMemory(1200)
    alone = Holder(memory, 1000, 900)
    assert (memory.part, memory.elsewhere(alone), memory.open_bytes(alone)) == (1200, 0, 600)


def test_captures_that_share_memory_ask_for_equal_parts_and_may_hold_what_others_leave() -> None:
    unit = CAPTURE_BYTES
    memory = CaptureMemory(14 * unit)
    busy, quiet, third = Holder(memory, 7 * unit, 5 * unit), Holder(memory, 0, 0), Holder(memory, unit, unit)
    assert (memory.limit, memory.part, memory.encoding.limit) == (12 * unit, 4 * unit, 4.5 * unit)
    assert [memory.elsewhere(each) // unit for each in (busy, quiet, third)] == [1, 8, 7]
    assert [memory.open_bytes(each) // unit for each in (busy, quiet, third)] == [5, 2, 2], "at least an equal part"
    memory.leave(third)
    assert memory.part == 6.5 * unit
    del quiet
    gc.collect()
    assert memory.part == memory.limit == 14 * unit, "one that is forgotten holds nothing"


def test_captures_leave_at_least_half_of_the_memory_to_messages() -> None:
    memory = CaptureMemory(4 * CAPTURE_BYTES)
    held = [Holder(memory, 0, 0) for _ in range(10)]
    assert memory.limit == 2 * CAPTURE_BYTES
    assert memory.part == memory.limit // len(held)


def test_a_capture_may_join_in_another_thread_while_the_memory_of_the_others_is_added_up() -> None:
    memory = CaptureMemory(4 * CAPTURE_BYTES)
    found = []

    class Joined(Holder):
        def held(self) -> tuple[int, int]:
            with ThreadPoolExecutor(1) as threads:
                found.append(threads.submit(Holder, memory, 0, 0).result())
            return super().held()

    members = [Joined(memory, 1, 1) for _ in range(3)]
    assert memory.elsewhere(members[0]) == 2
    assert memory.limit == 2 * CAPTURE_BYTES
    for member in (*members[1:], *found):
        memory.leave(member)
    assert memory.encoding.limit == 4 * CAPTURE_BYTES * memory.encoding.limit // memory.limit
