"""Keeps out of a capture's process what it does not need."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import MutableMapping
from importlib.abc import MetaPathFinder

UNUSED = "pandas"
_POOL = "ARROW_DEFAULT_MEMORY_POOL"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NICENESS = 10
_MALLOC = {_M_TRIM_THRESHOLD: 1 << 30, _M_MMAP_THRESHOLD: 32 << 20, _M_ARENA_MAX: 1}


class _Missing(MetaPathFinder):
    """Says of one module that it is not installed."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == UNUSED:
            raise ModuleNotFoundError(f"No module named {UNUSED!r}", name=UNUSED)


def use_system_allocator(env: MutableMapping[str, str] = os.environ) -> None:
    """Have pyarrow, which must not have been imported yet, take its memory from the C library, unless `env` says other.

    Its own allocator keeps more of what was needed at the peak: 2.1 GiB against 1.7 GiB with `limits.memory: 1GiB` and
    messages of 100 KB, 250 against 200 MiB with messages of 250 bytes, for the same CPU.
    """
    if env.setdefault(_POOL, "system") == "system":
        _keep_what_was_freed()


def _keep_what_was_freed() -> None:
    """Have the C library use what was freed again, in whatever thread, where it can be told so.

    With memory of its own for every thread, which it gives back in small change, 250 bytes take 290 in place of 240 MiB
    at the peak, and 10 KB a quarter more of the kernel's time. `Resident` gives back what is too much.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in _MALLOC.items():
            mallopt(option, value)


def lower_thread_priority() -> None:
    """Let the other threads of this machine go before the calling one, where threads have a niceness of their own.

    The server waits for who receives and acknowledges, and not for who decodes and stores.
    """
    if sys.platform == "linux":
        os.nice(_NICENESS)


def without_pandas() -> None:
    """Have pyarrow take pandas for missing, from now on and in this process.

    Where pandas is installed, as it is for Spark, pyarrow imports it at the first conversion to see whether it was
    given something of it: 0.3 s in the middle of the first batch, and 60 MB. It looks only once. Others can still
    import pandas, but pyarrow no longer tells its objects from plain sequences.
    """
    import pyarrow as pa

    finder = _Missing()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([0]).to_numpy()
    finally:
        sys.meta_path.remove(finder)
