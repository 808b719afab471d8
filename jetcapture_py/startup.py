"""The start: import no more than most captures need, and exempt it from garbage collection."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

LATE = ("aiohttp", "pandas")
"""Libraries that are imported only where they are used."""


class _Late:
    """An import hook that reports some modules as not installed."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname in LATE:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Import what a command needs inside the block, without the libraries that few captures need.

    Where they are installed, as for Spark, nats-py imports aiohttp (0.15 s of CPU, 10 MB), and pyarrow imports pandas
    at its first conversion (0.25 s, 45 MB). `jetstream.connection` and `plugins` make them available where they are
    used. Imported modules are never freed, so the garbage collector skips them.

    numpy's linear algebra, which nothing here uses, would start a thread per core that spins (0.13 s of CPU each).
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    hook = _Late()
    gc.disable()
    sys.meta_path.insert(0, hook)
    try:
        yield
        if (pyarrow := sys.modules.get("pyarrow")) is not None:
            pyarrow.array([0])  # it looks for pandas once
    finally:
        sys.meta_path.remove(hook)
        gc.freeze()
        gc.enable()
