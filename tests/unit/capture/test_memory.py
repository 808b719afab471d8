from __future__ import annotations

import subprocess
import sys

import pytest

ALLOCATE = """
import ctypes, threading
from jetcapture_py.capture import memory as lean
{setting}
lean.use_system_allocator()
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
