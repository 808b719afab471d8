"""Reduce the memory and CPU of a capture's process."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import MutableMapping
from importlib.abc import MetaPathFinder

UNUSED = "pandas"
_POOL = "ARROW_DEFAULT_MEMORY_POOL"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MALLOC = {_M_TRIM_THRESHOLD: 1 << 30, _M_MMAP_THRESHOLD: 32 << 20, _M_ARENA_MAX: 1}


class _Missing(MetaPathFinder):
    """An import hook that reports one module as not installed."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == UNUSED:
            raise ModuleNotFoundError(f"No module named {UNUSED!r}", name=UNUSED)


def use_system_allocator(env: MutableMapping[str, str] = os.environ) -> None:
    """Make pyarrow use the C library's allocator, unless `env` chooses another; call it before importing pyarrow.

    Its own allocator keeps more memory after a peak: 2.1 GiB against 1.7 GiB with `limits.memory: 1GiB` and
    messages of 100 KB, 250 against 200 MiB with messages of 250 bytes, for the same CPU.
    """
    if env.setdefault(_POOL, "system") == "system":
        _keep_what_was_freed()


def _keep_what_was_freed() -> None:
    """Make the C library share freed memory between threads, where it has such a setting.

    With one arena per thread, messages of 250 bytes take 290 instead of 240 MiB at the peak, and messages of 10 KB a
    quarter more kernel time. `Resident` returns excess memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in _MALLOC.items():
            mallopt(option, value)


def without_pandas() -> None:
    """Make pyarrow treat pandas as missing in this process.

    Where pandas is installed, as for Spark, pyarrow imports it at the first conversion to check for pandas objects:
    0.3 s during the first batch, and 60 MB. It checks only once. Other code can still import pandas, but pyarrow then
    treats its objects as plain sequences.
    """
    import pyarrow as pa

    finder = _Missing()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([0]).to_numpy()
    finally:
        sys.meta_path.remove(finder)
