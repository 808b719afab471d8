"""The start: hold SIGHUP, import only what the configuration needs, and exempt it from garbage collection."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jetcapture_py.config.model import Config

WEBSOCKETS = "aiohttp"


def hold_hangups() -> bool:
    """Hold SIGHUP, which would end the process, until `release_hangups`; return whether there is a terminal.

    Threads that are started meanwhile leave it to the main thread.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    return has_terminal()


def release_hangups() -> None:
    """Deliver SIGHUP to its handler, also one that was held."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def has_terminal() -> bool:
    """Whether the process has a controlling terminal: the system takes it away when it closes, and sends SIGHUP."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


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
