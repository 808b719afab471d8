"""Ports for servers that must be told theirs before they start."""

from __future__ import annotations

import random
import socket

_PORTS = range(20_000, 32_000)
"""Below those that systems give to connections and to whoever asks for port 0, which may be any time before a start."""


def free_port() -> int:
    """Return a port that nobody listens on."""
    (port,) = free_ports(1)
    return port


def free_ports(count: int) -> list[int]:
    """Return different ports that nobody listens on."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):  # Hypothesis gives the usual one the same seed
        if len(found) == count:
            return found
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        found.append(port)
    raise RuntimeError(f"there are no {count} free ports")
