"""Free ports for servers whose port must be configured before they start, and the wait until they listen on it."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import subprocess
import time
from pathlib import Path

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_PORTS = range(20_000 + _WORKER, 32_000, _WORKERS)
"""Below the ephemeral ports of Linux and macOS: no outgoing connection takes one before the server starts.

Each worker has ports of its own: a test that stops a server must not find another test's server on its port.
"""
_next = itertools.cycle(random.Random().sample(_PORTS, len(_PORTS)))  # Hypothesis seeds the shared generator only


def free_port() -> int:
    return next(filter(_is_free, _next))


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def await_listening(process: subprocess.Popen[bytes], port: int, log: Path, within: float = 60) -> None:
    """Wait until a server that was started listens on its port; fail with its log if it ends, or takes too long."""
    deadline = time.monotonic() + within
    while not accepts(port):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, f"it does not answer: {process.args!r}\n{log.read_text()}"
        time.sleep(0.02)


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
