"""The schedules that are run: faults of one actor, interleavings of two and three, and random ones.

What fails is shrunk and told.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product

from tests.simulation.actors import CAPTURES
from tests.simulation.catalogue import FLAWED, QUARANTINES
from tests.simulation.store import STORES
from tests.simulation.world import ARCHIVES, FAULTS, ORIGINS, PLAYERS, READERS, TABLES, Schedule, ViolationError, World


def interleavings(archive: str, actors: tuple[str, str], store: str) -> Iterator[World]:
    """Every interleaving of two actors with at most two changes of turn, also with a stop of the one that is left.

    Yields worlds that have been run.
    """
    for first, second in ((0, 1), (1, 0)):
        for i in range(1 << 30):
            for j in range(1 << 30):
                turns = ((first, i), (second, j), (first, 1 << 30))
                world = _ran(Schedule(archive, actors, turns, store=store))
                yield world
                if not world.used[1]:
                    break
                yield _ran(replace(world.schedule, faults=((second, j, "stop"),)))
            yield _ran(Schedule(archive, actors, ((first, i),), ((first, i, "stop"),), store))
            if not world.used[0]:
                break


def interruptions(archive: str, actors: tuple[str, str, str], store: str) -> Iterator[World]:
    """Every interruption of one actor by two others, which then run to their end. Yields worlds that have been run."""
    for step in range(1 << 30):
        world = _ran(Schedule(archive, actors, ((0, step), (1, 1 << 30), (2, 1 << 30)), store=store))
        yield world
        if not world.used[0]:
            break


def faults(archive: str, actor: str, store: str) -> Iterator[World]:
    """Every fault at every operation of an actor that is alone. Yields worlds that have been run."""
    for fault in FAULTS:
        for step in range(1 << 30):
            world = _ran(Schedule(archive, (actor,), (), ((0, step, fault),), store))
            yield world
            if world.steps[0] < step:
                break


def units(seed: int) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Every archive, one to three actors, and kind of store: arguments of `every`.

    The order follows from the seed, but what has found most comes first.
    """
    threes = product([name for name in PLAYERS if name not in READERS], repeat=3)
    choices = [*((name,) for name in PLAYERS), *combinations_with_replacement(PLAYERS, 2), *threes]
    found = [
        (archive, actors, store)
        for archive, actors, store in product(ARCHIVES, choices, STORES)
        if _has(archive, actors) and _can_be(store, archive, actors)
    ]
    random.Random(seed).shuffle(found)
    return iter(sorted(found, key=lambda unit: not _is_likely(unit[0], unit[1])))


def _has(archive: str, actors: Sequence[str]) -> bool:
    """Whether these actors can be in the archive, and one changes it: some need a quarantine; in bundles, 3 and 4 have
    other keys than captures say; of two lives, captures are of the first one, and a repair of the second, which an
    erasure has not searched."""
    if archive not in QUARANTINES and {"redecode", "failing", "inspect"} & {*actors}:
        return False
    repair, captures = "repair" in actors, {*CAPTURES} & {*actors}
    if archive == "bundles":
        can = not repair and captures <= {"other"}
    elif archive == "lives":
        can = not (repair and (captures or "erase" in actors))
    else:
        can = repair or ORIGINS.get(archive, archive) not in FLAWED
    return can and not (actors[1:] and {*READERS} >= {*actors})


def _can_be(store: str, archive: str, actors: Sequence[str]) -> bool:
    """Whether these actors can be on a store: without conditional writes and locks, three lose what two do not; and
    DuckDB and PyIceberg open local files themselves."""
    if store == "local":
        return archive not in TABLES and not {"query", "latest"} & {*actors}
    return store != "plain" or len(actors) < 3


def _is_likely(archive: str, actors: Sequence[str]) -> bool:
    pair = {"maintain", "erase"}
    return archive in ("pair", "copy") and len(actors) == 3 and actors[0] in pair and pair <= {*actors}


def every(archive: str, actors: tuple[str, ...], store: str) -> Iterator[World]:
    """Every fault of one actor, every interleaving of two, or every interruption of one by two others."""
    if len(actors) == 1:
        return faults(archive, actors[0], store)
    if len(actors) == 3:
        return interruptions(archive, (actors[0], actors[1], actors[2]), store)
    return interleavings(archive, (actors[0], actors[1]), store)


def at_random(seed: int) -> Schedule:
    """A schedule of two to four actors with some faults."""
    chance = random.Random(seed)
    archive = chance.choice(ARCHIVES)
    count = chance.choice([2, 2, 2, 3, 4])
    actors: tuple[str, ...] = ()
    while not (actors and _has(archive, actors)):
        actors = tuple(chance.choices(PLAYERS, k=count))
    turns = tuple(
        (chance.randrange(len(actors)), chance.choice([1, 2, 5, 10, 20])) for _ in range(chance.randint(1, 9))
    )
    faults = tuple(
        (number, step, chance.choice(FAULTS))
        for number in range(len(actors))
        for step in chance.sample(range(50), chance.choice([0, 0, 0, 1, 2]))
    )
    stores = [store for store in STORES if _can_be(store, archive, actors)]
    return Schedule(archive, actors, turns, faults, chance.choice(stores))


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
