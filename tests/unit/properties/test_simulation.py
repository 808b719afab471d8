"""Commands beside each other on the simulated store, stopped at every step; `make simulate` runs more of it."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from tests.simulation.actors import simulated
from tests.simulation.prepared import END
from tests.simulation.schedules import RANKS, Unit, at_random, run, run_all, schedules
from tests.simulation.world import OLD, Schedule


@pytest.mark.parametrize(
    ("archive", "actors", "stores"),
    [
        ("keys", "maintain erase", "conditional"),
        ("tombstone", "maintain erase", "conditional"),
        ("pair", "maintain erase", "local"),
        ("copy", "maintain erase", "local"),
        ("two", "maintain write", "conditional"),
        ("two", "maintain query", "conditional"),
        ("quarantine", "redecode failing", "conditional"),
        ("pair", "erase again maintain", "conditional local"),
        ("copy", "maintain erase erase", "conditional local"),
        ("covered", "repair repair erase", "conditional local"),
        *(("old", actor, "conditional local") for actor in ("maintain", "expire", "erase", "write")),
        ("unreadable", "redecode", "conditional local"),
        ("damaged", "repair", "conditional local"),
        ("aged", "expire", "conditional"),
    ],
)
def test_all_schedules_of_some_actors(archive: str, actors: str, stores: str) -> None:
    names = tuple(actors.split())
    least = {1: 30, 2: 1200, 3: 15}[len(names)]
    with simulated():
        for store in stores.split():
            unit, chance = Unit(archive, names, store), random.Random(1)
            worlds = [world for rank in RANKS for world in run_all(unit, rank, chance)]
            assert [world.story for world in worlds if world.story] == []
            assert len(worlds) >= least


@pytest.mark.parametrize("actors", [("maintain", "erase", "erase"), ("erase", "again", "maintain")])
def test_old_listings_lose_nothing(actors: tuple[str, ...]) -> None:
    old = tuple((number, 0, OLD) for number in range(3))
    with simulated():
        worlds = [run(Schedule("copy", actors, ((0, step), (1, 99), (2, 99)), old)) for step in range(30)]
        assert [world.story for world in worlds if world.story] == []
        assert all(player.old for world in worlds for player in world.players)


def test_a_table_is_made_beside_an_erasure() -> None:
    with simulated():
        worlds = [run(Schedule("unmade", ("maintain", "erase"), ((0, step), (1, END)))) for step in range(40)]
    assert [world.story for world in worlds if world.story] == []


def test_schedules_at_random() -> None:
    with simulated():
        assert [world.story for world in map(run, map(at_random, range(30))) if world.story] == []


def test_a_part_of_make_simulate() -> None:
    with simulated():
        worlds = list(islice(schedules(seed=1, parts=500), 20))
    assert {len(world.schedule.actors) for world in worlds} >= {1, 2, 3}
    assert len({world.schedule for world in worlds}) >= 16, "the first four are random, and may come again"
    assert [world.story for world in worlds if world.story] == []
