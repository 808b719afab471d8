"""Faster start and exit: import only what the configuration needs, and exempt it from garbage collection."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jetcapture_py.config.model import Config

WEBSOCKETS = "aiohttp"


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection inside the block; exempt what exists afterwards, such as imported modules."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def imports(*configs: Config, env: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Import the modules that work with `configs` inside the block.

    Imported modules are never freed, so the garbage collector skips them: while they load, in full collections, and on
    exit. numpy's linear algebra library, which is not used here, starts no threads.
    """
    if not any(each.has_user_code for each in configs):  # user code may need them
        env.setdefault("OPENBLAS_NUM_THREADS", "1")
    with without_collection():
        if not any(each.nats.has_websockets for each in configs):
            _without_websockets()
        yield


def _without_websockets() -> None:
    """Import nats-py without its WebSocket library, even if it is installed. Later imports find the library again."""
    if WEBSOCKETS in sys.modules:
        return
    sys.modules[WEBSOCKETS] = None  # type: ignore[assignment]  # Python's marker for a missing module
    try:
        import nats.aio.transport  # noqa: F401
    finally:
        del sys.modules[WEBSOCKETS]
