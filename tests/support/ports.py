"""Free ports for servers whose port must be configured before they start."""

from __future__ import annotations

import itertools
import os
import random
import socket

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_PORTS = range(20_000 + _WORKER, 32_000, _WORKERS)
"""Below the ephemeral ports of Linux and macOS: no outgoing connection takes one before the server starts.

Each worker has ports of its own: a test that stops a server must not find another test's server on its port.
"""
_next = itertools.cycle(random.Random().sample(_PORTS, len(_PORTS)))  # Hypothesis seeds the shared generator only


def free_port() -> int:
    """Return a port that nobody listens on, a different one each time."""
    return next(filter(_is_free, _next))


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
