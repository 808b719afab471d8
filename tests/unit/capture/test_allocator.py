from __future__ import annotations

import os
import subprocess
import sys
from unittest.mock import Mock

import pyarrow as pa
import pytest

from jetcapture_py.capture import allocator
from jetcapture_py.capture.allocator import Resident

ALLOCATE = """
import ctypes, threading
from jetcapture_py.capture import allocator
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


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries are not told")
def test_threads_share_the_memory_that_was_freed_unless_the_environment_names_an_allocator() -> None:
    def run(**environment: str) -> tuple[str, str]:
        command = [sys.executable, "-c", ALLOCATE]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
        return done.stdout.strip(), done.stderr

    allocator_name, arenas = run()
    assert allocator_name == "system"
    assert "Arena 0:" in arenas
    assert "Arena 1:" not in arenas
    assert run(ARROW_DEFAULT_MEMORY_POOL="mimalloc")[0] == "mimalloc"


def test_memory_is_given_back_when_the_process_has_grown_by_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "linux":
        assert (allocator._resident() or 0) > 1 << 20
    pool = Mock()
    monkeypatch.setattr(pa, "default_memory_pool", lambda: pool)
    sizes = iter([100, 199, 200, 201, 150, 250, 251, 120, 110, 90, 190, 191, 80])
    monkeypatch.setattr(allocator, "_resident", lambda: next(sizes))
    watched = Resident(100)  # starts at 100
    found = []
    for _ in range(9):
        watched.release_unused()
        found.append(pool.release_unused.call_count)
    # 199 and 200 are within the step; 201 is not, which leaves 150, and 251 not, which leaves 120; 110 and 90 are less
    assert found == [0, 0, 1, 1, 2, 2, 2, 2, 3]
    monkeypatch.setattr(allocator, "_resident", lambda: None)
    Resident(1 << 40).release_unused()
    assert pool.release_unused.call_count == 4
