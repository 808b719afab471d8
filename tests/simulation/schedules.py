"""The schedules that are run: faults of one actor, interleavings of two and three, and random ones.

What fails is shrunk and told.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement, count, islice, product
from typing import NamedTuple, TypeVar

from tests.simulation.actors import CAPTURES
from tests.simulation.catalogue import EXPIRING, FLAWED, QUARANTINES
from tests.simulation.prepared import ARCHIVES, END, ORIGINS, PLAYERS, READERS, TABLES
from tests.simulation.store import CHANGES, STORES
from tests.simulation.world import FAULTS, OLD, REWRITING, Schedule, ViolationError, World

_FIRST = 2000
"""So many schedules mix all units; after that, units run one by one."""
_RANDOM = 300
"""Then one schedule in so many is random: these take longer."""
T = TypeVar("T")


class Unit(NamedTuple):
    """Actors on one archive and store, whose schedules are enumerated together."""

    archive: str
    actors: tuple[str, ...]
    store: str


def in_turn(iterators: Iterable[Iterator[T]]) -> Iterator[T]:
    """Yield the next one of each, again and again, until all have ended."""
    left = deque(iterators)
    while left:
        current = left.popleft()
        for item in islice(current, 1):
            yield item
            left.append(current)


Choice = tuple[int, tuple[tuple[int, int], ...], tuple[tuple[int, int, str], ...]]
"""The rank of a schedule, its turns and faults."""
_ALL, _CHANGE, _AFTER, _LAST = 1, 2, 3, 4
RANKS = range(_LAST + 1)
"""0: before a removal, where what the actor has read may be out of date."""


def _points(asked: Sequence[str], chance: random.Random) -> list[tuple[int, int]]:
    """An actor's operations before which a turn may end, each with a rank; the last one is its end.

    First comes what can lose a message: between what an actor has seen and its removal. Then comes what is before
    another change or a wait, and after a change or a listing. Elsewhere an actor reads what others hardly change.
    """

    def rank(step: int) -> int:
        if step < len(asked) and asked[step] in {*CHANGES, "sleep"}:
            return 0 if asked[step] == "remove" else _CHANGE
        return _AFTER if step == len(asked) or (step and asked[step - 1] in {*CHANGES, "list"}) else _LAST

    return [(step, rank(step)) for step in chance.sample(range(len(asked) + 1), len(asked) + 1)]


@cache
def _asked(unit: Unit, number: int, *turns: tuple[int, int]) -> Sequence[str]:
    """What one of the actors asks for."""
    world = World(Schedule(unit.archive, unit.actors, turns, store=unit.store), checked=False)
    with suppress(ViolationError):  # the schedule itself says so
        world.play()
    return world.players[number].asked


def _alone(unit: Unit, number: int) -> Sequence[str]:
    return _asked(unit._replace(actors=(unit.actors[number],)), 0)


def faults(unit: Unit, _: int, chance: random.Random) -> Iterator[Choice]:
    """Every fault at every operation of an actor that is alone; first what is damaged."""
    asked = _alone(unit, 0)
    written = {"write", "create"} if unit.actors[0] in REWRITING else set()
    kinds = {"lost": {*CHANGES, "lock"}, "not done": {*CHANGES, "lock"}, "damaged": written}
    for step, rank in _points(asked, chance):
        for fault in chance.sample(FAULTS, len(FAULTS)):
            if step < len(asked) and (fault not in kinds or asked[step] in kinds[fault]):
                yield 0 if fault == "damaged" else max(rank, _CHANGE), (), ((0, step, fault),)


def interleavings(unit: Unit, upto: int, chance: random.Random) -> Iterator[Choice]:
    """Every interleaving of two actors with at most two changes of turn, also with a stop of the one that is left."""
    for first in range(len({*unit.actors})):
        second, alone = 1 - first, _alone(unit, first)
        for step, rank in _points(alone, chance):
            if not step or rank > upto:
                continue
            begin, last = (first, step), step == len(alone)
            yield max(rank, _ALL), (begin, (second, END)), ()
            if not last:
                yield rank + 1, (begin,), ((first, step, "stop"),)
            asked = _asked(unit, second, begin, (second, END))
            for other, its in _points(asked, chance):
                turns = (begin, (second, other), (first, END))
                if 0 < other < len(asked):
                    if not last:
                        yield max(rank, its), turns, ()
                    yield max(rank, its) + 1, turns, ((second, other, "stop"),)


def interruptions(unit: Unit, _: int, chance: random.Random) -> Iterator[Choice]:
    """Every interruption of one actor by two others, which then run to their end; first before it removes something.

    Later come `write` and `other`: of what is in the archive, they store no more than `again`.
    """
    asked, later = _alone(unit, 0), len({"write", "other"} & {*unit.actors})
    for step, rank in _points(asked, chance):
        yield rank + later, ((0, step), (1, END), (2, END)), ()


_EVERY = {1: faults, 2: interleavings, 3: interruptions}


def run_all(unit: Unit, rank: int, chance: random.Random) -> Iterator[World]:
    """Run a unit's schedules of a rank, until one fails."""
    for its, turns, faults in _EVERY[len(unit.actors)](unit, rank, chance):
        if min(its, _LAST) == rank:
            world = run(Schedule(unit.archive, unit.actors, turns, faults, unit.store))
            yield world
            if world.story:
                break


def _run_ranks(groups: Sequence[Sequence[Unit]], chance: random.Random) -> Iterator[World]:
    """Run all schedules by their rank; groups take turns, each with its shortest unit first."""
    ordered = [_by_length(group) for group in groups]

    def run_group(group: Sequence[Unit], rank: int) -> Iterator[World]:
        for unit in group:
            yield from run_all(unit, rank, chance)

    for rank in RANKS:
        yield from in_turn([run_group(group, rank) for group in ordered])


def _by_length(group: Sequence[Unit]) -> list[Unit]:
    """Sort units by their number of operations; those where actors do the same as in an earlier one come later."""
    seen: Counter[object] = Counter()
    keys = {}
    for unit in group:
        asked = tuple(tuple(_alone(unit, number)) for number in range(len(unit.actors)))
        keys[unit] = (seen[asked], sum(map(len, asked)))
        seen[asked] += 1
    return sorted(group, key=keys.__getitem__)


def _grouped(units: Iterable[Unit]) -> list[list[Unit]]:
    """Group units by their actors."""
    groups: dict[tuple[str, ...], list[Unit]] = {}
    for unit in units:
        groups.setdefault(unit.actors, []).append(unit)
    return [*groups.values()]


def schedules(seed: int, part: int = 0, parts: int = 1) -> Iterator[World]:
    """Worlds that have been run, endlessly; the order follows from the seed.

    First some of everything: of two actors, one with faults, three, and random ones, each takes turns, and so do all
    actors. Then all of one archive and store for some actors after the other, which is much faster, with random ones.
    """
    chance = random.Random(seed)
    threes = product([name for name in PLAYERS if name not in READERS], repeat=3)
    choices = [*((name,) for name in PLAYERS), *combinations_with_replacement(PLAYERS, 2), *threes]
    found = (Unit(*choice) for choice in product(ARCHIVES, choices, STORES))
    units = [
        unit for unit in found if _has(unit.archive, unit.actors) and _can_be(unit.store, unit.archive, unit.actors)
    ]
    units = chance.sample(units, len(units))[part::parts]

    kinds = [_grouped(unit for unit in units if len(unit.actors) == many) for many in _EVERY]
    ones, twos, threes_ = (_run_ranks(groups, chance) for groups in kinds)
    others = (run(at_random(seed + step)) for step in count(part, parts))
    yield from islice(
        in_turn([twos, threes_, ones, twos, threes_, others, twos, threes_, twos, threes_]), _FIRST // parts
    )
    every = in_turn(in_turn(map(iter, groups)) for groups in kinds)
    each = (world for unit in every for rank in RANKS for world in run_all(unit, rank, chance))
    for number, world in enumerate(each):
        yield world
        if number % _RANDOM == 0:
            yield next(others)
    yield from others


def _has(archive: str, actors: Sequence[str]) -> bool:
    """Whether these actors can be in the archive, and one changes it: some need a quarantine, or expired objects; in
    bundles, 3 and 4 have other keys than captures say; of two lives, captures are of the first one, and a repair of the
    second, which an erasure has not searched."""
    if archive not in QUARANTINES and {"redecode", "failing", "inspect"} & {*actors}:
        return False
    if ORIGINS.get(archive, archive) not in EXPIRING and "expire" in actors:
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
        (number, step, chance.choice((*FAULTS, OLD)))
        for number in range(len(actors))
        for step in chance.sample(range(50), chance.choice([0, 0, 0, 1, 2]))
    )
    stores = [store for store in STORES if _can_be(store, archive, actors)]
    return Schedule(archive, actors, turns, faults, chance.choice(stores))


def run(schedule: Schedule) -> World:
    """Run a schedule; if it fails, the world has the story of the shrunk one."""
    world = World(schedule)
    try:
        world.run()
    except ViolationError:
        world.story = story_of(shrunk(schedule))
    return world


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


def story_of(schedule: Schedule) -> str:
    """Tell a schedule that fails."""
    world = World(schedule, told=[])
    assert world.told is not None
    try:
        world.run()
    except ViolationError as error:
        return "\n  ".join([str(error), repr(schedule), *world.told])
    raise AssertionError(f"not repeatable: {schedule}")
