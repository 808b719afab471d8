"""Has a process start and end sooner: it imports what its configuration needs, and looks at that only once."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, MutableMapping

from jetcapture_py.config.model import Config
from jetcapture_py.plugins import is_reference

WEBSOCKETS = "aiohttp"


@contextlib.contextmanager
def imports(config: Config, env: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """What works with `config` is to be imported inside the block.

    What was imported stays to the end, so the garbage collector passes it over, now and for ever: as the modules come,
    at every full collection, and when the process ends. numpy's linear algebra, which nothing here uses, gets no
    thread for every core, each of which waits for work in a loop at first.
    """
    if not (is_reference(config.decode.format) or is_reference(config.key)):  # code of the user's own may need them
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
    """Import nats-py as if the library for ws:// were missing, which S3, Azure or anything else may have installed.

    It is imported by whatever asks for it afterwards.
    """
    if WEBSOCKETS in sys.modules:
        return
    sys.modules[WEBSOCKETS] = None  # type: ignore[assignment]  # which is how Python spells "missing"
    try:
        import nats.aio.transport  # noqa: F401
    finally:
        del sys.modules[WEBSOCKETS]
