from __future__ import annotations

import pytest

from jetcapture_py.capture import resident
from jetcapture_py.capture.resident import Resident


class Pool:
    def __init__(self) -> None:
        self.released = 0

    def release_unused(self) -> None:
        self.released += 1


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    found = Pool()
    monkeypatch.setattr(resident.pa, "default_memory_pool", lambda: found)
    return found


def test_memory_is_given_back_when_the_process_has_grown_by_the_step(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([100, 199, 200, 201, 150, 250, 251, 120, 110, 90, 190, 191, 80])
    monkeypatch.setattr(resident, "_resident", lambda: next(sizes))
    watched = Resident(100)  # starts at 100
    found = []
    for _ in range(9):
        watched.release_unused()
        found.append(pool.released)
    # 199 and 200 are within the step; 201 is not, which leaves 150, and 251 not, which leaves 120; 110 and 90 are less
    assert found == [0, 0, 1, 1, 2, 2, 2, 2, 3]


def test_where_nobody_tells_it_is_always_given_back(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "_resident", lambda: None)
    watched = Resident(1 << 40)
    watched.release_unused()
    watched.release_unused()
    assert pool.released == 2


def test_linux_tells() -> None:
    assert (resident._resident() or 0) > 1 << 20
