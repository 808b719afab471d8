"""Gives memory back that the allocator has kept, when that has become much.

Kept memory is used again at no cost. What is given back has to be asked for again, page by page: after each block that
took a seventh of the whole CPU time.
"""

from __future__ import annotations

import os

import pyarrow as pa

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Resident:
    """Watches the process's resident memory; `step` is how many bytes it may grow before unused ones are given back."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._low = _resident() or 0

    def release_unused(self) -> None:
        """Give unused memory back, if the process has grown; always, where nobody tells whether it has."""
        now = _resident()
        if now is not None and now <= self._low + self._step:
            self._low = min(self._low, now)
            return
        pa.default_memory_pool().release_unused()
        self._low = _resident() or 0


def _resident() -> int | None:
    """Bytes of this process that are resident; None where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  cheaper
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return None
