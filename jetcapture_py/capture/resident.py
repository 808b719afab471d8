"""Return memory that the allocator keeps, once it is a lot.

Kept memory is reused at no cost, while returned memory has to be mapped again page by page: doing so after each block
took a seventh of the CPU time.
"""

from __future__ import annotations

import os

import pyarrow as pa

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Resident:
    """Watches the process's resident memory, which may grow by `step` bytes before unused memory is returned."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._low = _resident() or 0

    def release_unused(self) -> None:
        """Return unused memory if the process has grown, or always where its size is unknown."""
        now = _resident()
        if now is not None and now <= self._low + self._step:
            self._low = min(self._low, now)
            return
        pa.default_memory_pool().release_unused()
        self._low = _resident() or 0


def _resident() -> int | None:
    """Return the resident bytes of this process without mapped files; None where unavailable."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  cheaper
            _, resident, mapped, *_ = map(int, file.read().split())
            return (resident - mapped) * _PAGE
    except OSError:
        return None
