"""Faster start and exit: import only what the configuration needs, and keep the garbage collector off it."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, MutableMapping

from jetcapture_py.config.model import Config

WEBSOCKETS = "aiohttp"


@contextlib.contextmanager
def imports(config: Config, env: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Import the modules that work with `config` inside the block.

    Imported modules stay until the end, so the garbage collector ignores them: while they load, at every full
    collection, and when the process ends. numpy's linear algebra, which is not used here, starts no thread per core.
    """
    if not config.has_user_code:  # user code may need them
        env.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()
    try:
        if not any(url.lower().startswith("ws") for url in config.nats.servers):
            _without_websockets()
        yield
    finally:
        gc.freeze()
        gc.enable()


def _without_websockets() -> None:
    """Import nats-py as if the library for ws:// were missing, which other extras may have installed.

    Later imports find it.
    """
    if WEBSOCKETS in sys.modules:
        return
    sys.modules[WEBSOCKETS] = None  # type: ignore[assignment]  # Python's marker for a missing module
    try:
        import nats.aio.transport  # noqa: F401
    finally:
        del sys.modules[WEBSOCKETS]
