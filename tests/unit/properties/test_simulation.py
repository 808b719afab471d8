"""Every command beside every other on the simulated store, stopped at every step; `make simulate` runs more of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from tests.simulation.actors import simulated
from tests.simulation.schedules import at_random, faults, interleavings, interruptions, run


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with simulated():
        yield


@pytest.mark.parametrize("archive", ["keys", "tombstone"])
def test_every_interleaving_of_compaction_and_erasure(archive: str) -> None:
    assert sum(1 for _ in interleavings(archive, ("maintain", "erase"), store="conditional")) > 1000


@pytest.mark.parametrize("other", ["write", "query"])
def test_every_interleaving_of_compaction_and_another(other: str) -> None:
    assert sum(1 for _ in interleavings("two", ("maintain", other), store="conditional")) > 1000


@pytest.mark.parametrize(
    ("archive", "actors"),
    [
        ("pair", ("erase", "again", "maintain")),
        ("copy", ("maintain", "erase", "erase")),
        ("quarantine", ("redecode", "erase", "maintain")),
        ("covered", ("repair", "repair", "erase")),
    ],
)
@pytest.mark.parametrize("store", ["conditional", "local"])
def test_every_interruption_by_two_others(archive: str, actors: tuple[str, str, str], store: str) -> None:
    assert sum(1 for _ in interruptions(archive, actors, store)) > 10


@pytest.mark.parametrize("store", ["conditional", "local"])
@pytest.mark.parametrize(
    ("archive", "actor"),
    [*product(["old"], ["maintain", "expire", "erase", "write"]), ("unreadable", "redecode"), ("damaged", "repair")],
)
def test_every_fault_at_every_operation(archive: str, actor: str, store: str) -> None:
    assert sum(1 for _ in faults(archive, actor, store)) > 40


def test_every_interruption_and_every_fault_beside_a_table() -> None:
    assert sum(1 for _ in interruptions("grown", ("maintain", "write", "maintain"), store="conditional")) > 70
    assert sum(1 for _ in faults("aged", "expire", store="conditional")) > 150


def test_schedules_at_random() -> None:
    for seed in range(60):
        run(at_random(seed))
