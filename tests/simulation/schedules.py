"""The schedules that are run: every interleaving of two actors, and random ones; what fails is shrunk and told."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product

from tests.simulation.world import ARCHIVES, FAULTS, PLAYERS, Schedule, ViolationError, World


def interleavings(archive: str, actors: tuple[str, str], conditional: bool) -> Iterator[World]:
    """Every interleaving of two actors with at most two changes of turn, also with a stop of the one that is left.

    Yields worlds that have been run.
    """
    for first, second in ((0, 1), (1, 0)):
        for i in range(1 << 30):
            for j in range(1 << 30):
                turns = ((first, i), (second, j), (first, 1 << 30))
                world = _ran(Schedule(archive, actors, turns, conditional=conditional))
                yield world
                if not world.used[1]:
                    break
                yield _ran(replace(world.schedule, faults=((second, j, "stop"),)))
            yield _ran(Schedule(archive, actors, ((first, i),), ((first, i, "stop"),), conditional))
            if not world.used[0]:
                break


def faults(archive: str, actor: str, conditional: bool) -> Iterator[World]:
    """Every fault at every operation of an actor that is alone. Yields worlds that have been run."""
    for fault in FAULTS:
        for step in range(1 << 30):
            world = _ran(Schedule(archive, (actor,), (), ((0, step, fault),), conditional))
            yield world
            if world.steps[0] < step:
                break


def units(seed: int) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Every archive, actor or pair of actors, and kind of store, in an order by the seed: arguments of `every`."""
    choices = [*((name,) for name in PLAYERS), *combinations_with_replacement(PLAYERS, 2)]
    found = [
        (archive, actors, conditional)
        for archive, actors, conditional in product(ARCHIVES, choices, (True, False))
        if archive != "bundles" or "write" not in actors
    ]
    random.Random(seed).shuffle(found)
    return iter(found)


def every(archive: str, actors: tuple[str, ...], conditional: bool) -> Iterator[World]:
    """Every fault of one actor, or every interleaving of two."""
    if len(actors) == 1:
        return faults(archive, actors[0], conditional)
    return interleavings(archive, (actors[0], actors[1]), conditional)


def at_random(seed: int) -> Schedule:
    """A schedule of two to four actors with some faults."""
    chance = random.Random(seed)
    archive = chance.choice(ARCHIVES)
    names = [name for name in PLAYERS if (archive, name) != ("bundles", "write")]
    actors = tuple(chance.choices(names, k=chance.choice([2, 2, 2, 3, 4])))
    turns = tuple(
        (chance.randrange(len(actors)), chance.choice([1, 2, 5, 10, 20])) for _ in range(chance.randint(1, 9))
    )
    faults = tuple(
        (number, step, chance.choice(FAULTS))
        for number in range(len(actors))
        for step in chance.sample(range(50), chance.choice([0, 0, 0, 1, 2]))
    )
    return Schedule(archive, actors, turns, faults, chance.random() < 0.8)


class FailedError(ViolationError):
    """A schedule that fails, with its story."""

    def __init__(self, schedule: Schedule, reason: str, story: Sequence[str]) -> None:
        super().__init__("\n".join([reason, repr(schedule), *(f"  {line}" for line in story)]))
        self.schedule, self.reason, self.story = schedule, reason, story


def _ran(schedule: Schedule) -> World:
    world = World(schedule)
    try:
        world.run()
    except ViolationError:
        raise story_of(shrunk(schedule)) from None
    return world


def run(schedule: Schedule) -> None:
    """Run a schedule. Raises FailedError with the shrunk one."""
    _ran(schedule)


def _fails(schedule: Schedule) -> bool:
    try:
        World(schedule).run()
    except ViolationError:
        return True
    return False


def shrunk(schedule: Schedule) -> Schedule:
    """Leave out faults and changes of turn while the schedule fails."""
    while True:
        smaller = next(filter(_fails, _smaller(schedule)), None)
        if smaller is None:
            return schedule
        schedule = smaller


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    turns, faults = schedule.turns, schedule.faults
    for at in range(len(faults)):
        yield replace(schedule, faults=faults[:at] + faults[at + 1 :])
    for at in range(len(turns)):
        yield replace(schedule, turns=turns[:at] + turns[at + 1 :])
    last = len(schedule.actors) - 1
    if last > 1 and last not in [turn[0] for turn in (*turns, *faults)]:
        yield replace(schedule, actors=schedule.actors[:-1])


def story_of(schedule: Schedule) -> FailedError:
    """Tell a schedule that fails."""
    world = World(schedule, told=[])
    assert world.told is not None
    try:
        world.run()
    except ViolationError as error:
        return FailedError(schedule, str(error), world.told)
    raise AssertionError(f"not repeatable: {schedule}")
