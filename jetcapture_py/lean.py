"""Keeps out of a capture's process what it does not need."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from importlib.abc import MetaPathFinder

UNUSED = "pandas"


class _Missing(MetaPathFinder):
    """Says of one module that it is not installed."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == UNUSED:
            raise ModuleNotFoundError(f"No module named {UNUSED!r}", name=UNUSED)


def with_the_systems_allocator(env: MutableMapping[str, str] = os.environ) -> None:
    """Have pyarrow, which must not have been imported yet, take its memory from the C library, unless `env` says other.

    Its own allocator keeps more of what was needed at the peak: 2.1 GiB against 1.7 GiB with `limits.memory: 1GiB` and
    messages of 100 KB, 250 against 200 MiB with messages of 250 bytes, for the same CPU.
    """
    env.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


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
