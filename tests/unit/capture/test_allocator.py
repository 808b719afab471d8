from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest

from jetcapture_py.capture import allocator
from jetcapture_py.capture.allocator import Resident

ALLOCATE = """
import ctypes, threading
from jetcapture_py.capture import allocator
{setting}
allocator.use_system_allocator()
import pyarrow as pa
meet = threading.Barrier(4)
def work():
    held = [pa.allocate_buffer(100_000) for _ in range(10)]
    meet.wait()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(pa.default_memory_pool().backend_name, flush=True)
ctypes.CDLL(None).malloc_stats()
"""


def run(setting: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATE.format(setting=setting)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries are not told")
def test_threads_share_the_memory_that_was_freed() -> None:
    said, arenas = run("")
    assert said == "system"
    assert "Arena 0:" in arenas
    assert "Arena 1:" not in arenas


def test_what_the_environment_says_is_left_as_it_is() -> None:
    said, _ = run('import os; os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "mimalloc"')
    assert said == "mimalloc"


class Pool:
    def __init__(self) -> None:
        self.released = 0

    def release_unused(self) -> None:
        self.released += 1


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    found = Pool()
    monkeypatch.setattr(pa, "default_memory_pool", lambda: found)
    return found


def test_memory_is_given_back_when_the_process_has_grown_by_the_step(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([100, 199, 200, 201, 150, 250, 251, 120, 110, 90, 190, 191, 80])
    monkeypatch.setattr(allocator, "_resident", lambda: next(sizes))
    watched = Resident(100)  # starts at 100
    found = []
    for _ in range(9):
        watched.release_unused()
        found.append(pool.released)
    # 199 and 200 are within the step; 201 is not, which leaves 150, and 251 not, which leaves 120; 110 and 90 are less
    assert found == [0, 0, 1, 1, 2, 2, 2, 2, 3]


def test_where_nobody_tells_it_is_always_given_back(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_resident", lambda: None)
    watched = Resident(1 << 40)
    watched.release_unused()
    watched.release_unused()
    assert pool.released == 2


def test_linux_tells() -> None:
    assert (allocator._resident() or 0) > 1 << 20
