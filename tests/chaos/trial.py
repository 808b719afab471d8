"""One run: a world, faults from a seed, then a quiet end and the check. It ends in bounded time, with a verdict."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.check import Verdict, Watermarks, check
from tests.chaos.faults import FAULTS
from tests.chaos.replica import ChaosError
from tests.chaos.world import Shape, World

Storm = Callable[[World], Coroutine[Any, Any, None]]
_SAMPLE = 0.25
SETTLE = 90.0
"""Seconds after the last fault until everything must be captured."""
_CODES = {0, 1, -9, -15}
"""-15: SIGTERM came before there was anything to drain."""
_UNKNOWN = re.compile(r"[A-Z]\w+(: |$)")
"""How the log of a daemon begins to tell of an exception that nobody foresaw."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to. `ends` counts why daemons ended by themselves."""

    verdict: Verdict
    counts: Mapping[str, int]
    codes: Mapping[int, int]
    ends: Mapping[str, int]
    published: int
    seconds: float
    verified: Mapping[str, Any]

    @property
    def problems(self) -> list[str]:
        """Broken promises, one line each."""
        return self.verdict.problems


async def trial(
    directory: Path, shape: Shape, seed: int, storm: Storm, say: Callable[[str], None] = print, settle: float = SETTLE
) -> Outcome:
    """Let `storm` loose on a world, mend it, and check. Raises ChaosError when it hangs."""
    began = time.monotonic()
    async with World(directory, shape, seed, say) as world:
        marks = Watermarks(world.archive)
        play, watching = asyncio.create_task(_play(world, storm, settle)), asyncio.create_task(_watch(world, marks))
        try:
            await asyncio.wait((play, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(play, watching)
        for task in (play, watching):
            if not task.cancelled() and (error := task.exception()):
                raise ChaosError(f"{_text(error)}; the logs lie in {directory}") from error
        marks.look()
        world.say("everything is captured; checking")
        verdict = await asyncio.to_thread(check, world.archive, world.ledger, marks, world.jetstream.created)
        verified = await asyncio.to_thread(world.verify)
        if not _agrees(verified, verdict):
            verdict.problems.append(f"jetcapture verify does not agree: {json.dumps(verified)[:1000]}")
        return Outcome(
            verdict=verdict,
            counts=world.counts,
            codes=sum((replica.codes for replica in world.replicas), Counter()),
            ends=_ends(world, verdict.problems),
            published=world.publisher.published,
            seconds=time.monotonic() - began,
            verified=verified,
        )


async def _play(world: World, storm: Storm, settle: float) -> None:
    await storm(world)
    world.say("no more faults")
    await world.heal()
    await world.settle(settle)
    await world.stop_daemons()


async def _watch(world: World, marks: Watermarks) -> None:
    """Read the watermark, and see that the harness itself is well."""
    while True:
        world.check_alive()
        await asyncio.to_thread(marks.look)
        await asyncio.sleep(_SAMPLE)


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _text(error: BaseException) -> str:
    """What went wrong, in one line; of several things the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, ChaosError) else repr(error)


def _agrees(verified: Mapping[str, Any], verdict: Verdict) -> bool:
    """Whether `verify` comes to the same, of the archive and of the stream that is there now."""
    kinds, counts = {finding["kind"] for finding in verified["findings"]}, verified["counts"]
    clean = not verified["exit"] and kinds.isdisjoint({"holes", "damaged", "foreign"})
    return clean and verified["verdict"] == "complete" and (counts["stored"], counts["duplicates"]) == verdict.present


def _ends(world: World, problems: list[str]) -> Counter[str]:
    """Why daemons ended; what none of them should ever write to its log is a problem."""
    ends: Counter[str] = Counter()
    for replica in world.replicas:
        for event in replica.command.events("capture.failed"):
            ends[event["error"]] += 1
        warned = replica.command.events("python.warning")
        problems.extend(f"{replica} warns: {event['message']}" for event in warned)
        if "Traceback" in replica.command.log:
            problems.append(f"{replica} wrote a traceback")
        if odd := replica.codes.keys() - _CODES:
            problems.append(f"{replica} ended with {sorted(odd)}")
    if world.broken_drains:
        problems.append(f"{world.broken_drains} daemons did not drain in time although nothing was broken any more")
    problems += [f"a daemon ended with an error that nobody foresaw: {end}" for end in ends if _UNKNOWN.match(end)]
    return ends


def in_turn(names: Sequence[str], pause: float = 1.0) -> Storm:
    """Faults one after another, while the publisher publishes."""

    async def storm(world: World) -> None:
        await warmed_up(world)
        for number, name in enumerate(names):
            draw = random.Random(f"{world.seed}/{number}/{name}")
            await FAULTS[name].inject(world, draw)
            await asyncio.sleep(pause * draw.uniform(0.5, 1.5))

    return storm


def at_once(rates: Mapping[str, float], seconds: float, enough: Callable[[World], bool]) -> Storm:
    """Faults at so many a second, by name, of all groups at the same time, until the time is over or it is `enough`.

    What a group does and draws follows from the seed alone, however fast the machine is.
    """

    async def storm(world: World) -> None:
        await warmed_up(world)
        usable = {name: rate for name, rate in rates.items() if rate > 0 and FAULTS[name].needs(world)}
        groups = sorted({FAULTS[name].group for name in usable})
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(_group(world, group, {n: r for n, r in usable.items() if FAULTS[n].group == group}))
                for group in groups
            ]
            deadline = asyncio.get_running_loop().time() + seconds
            while asyncio.get_running_loop().time() < deadline and not enough(world):
                await asyncio.sleep(0.2)
            for task in running:
                task.cancel()

    return storm


async def _group(world: World, group: str, rates: Mapping[str, float]) -> None:
    """Faults of one group at random times; a fault that lasts takes the time from the pause after it."""
    draw = random.Random(f"{world.seed}/{group}")
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due = max(due + draw.expovariate(sum(rates.values())), loop.time() - 10)
        name = draw.choices(list(rates), list(rates.values()))[0]
        own = random.Random(draw.getrandbits(64))
        await asyncio.sleep(max(0.0, due - loop.time()))
        await FAULTS[name].inject(world, own)


async def warmed_up(world: World) -> None:
    """The daemons are running and have begun to acknowledge."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if (await world.jetstream.consumer()).get("ack_floor", {}).get("stream_seq", 0) > 0:
            return
        await asyncio.sleep(0.1)
    raise ChaosError("the daemons do not begin to capture")


def every(seconds: float, name: str, enough: Callable[[World], bool], limit: float) -> Storm:
    """One fault again and again, until it is `enough`; raises ChaosError when that takes more than `limit` seconds."""

    async def storm(world: World) -> None:
        await warmed_up(world)
        loop = asyncio.get_running_loop()
        began, done = loop.time(), 0
        while not enough(world):
            if loop.time() - began > limit:
                raise ChaosError(
                    f"{world.publisher.published} messages and {done} times {name} took over {limit:.0f} s"
                )
            draw = random.Random(f"{world.seed}/{done}")
            done += 1
            await asyncio.sleep(max(0.0, began + done * seconds - loop.time()))
            await FAULTS[name].inject(world, draw)

    return storm


def together(storms: Sequence[Storm]) -> Storm:
    """Several at the same time, until all have ended."""

    async def storm(world: World) -> None:
        async with asyncio.TaskGroup() as tasks:
            for each in storms:
                tasks.create_task(each(world))

    return storm


def each_once(names: Sequence[str]) -> Storm:
    """Every fault once: those of a group one after another, the groups at the same time."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(FAULTS[name].group, []).append(name)

    async def storm(world: World) -> None:
        await warmed_up(world)
        async with asyncio.TaskGroup() as tasks:
            for group, own in groups.items():
                draw = random.Random(f"{world.seed}/{group}")
                draw.shuffle(own)
                tasks.create_task(_each(world, own, draw))

    return storm


async def _each(world: World, names: Sequence[str], draw: random.Random) -> None:
    for name in names:
        await FAULTS[name].inject(world, random.Random(draw.getrandbits(64)))
        await asyncio.sleep(draw.uniform(0, 1) * world.shape.hold)
