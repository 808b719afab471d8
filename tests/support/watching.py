"""What a process needs while it runs."""

from __future__ import annotations

import threading
from typing import Self

import psutil


class Watch:
    """Samples a process until it ends or the block does: its highest resident memory, in bytes, and its CPU seconds."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.peak = 0
        self.cpu = 0.0

    def _sample(self) -> None:
        while not self._over.wait(0.02):
            try:
                with self._process.oneshot():
                    self.peak = max(self.peak, self._process.memory_info().rss)
                    times = self._process.cpu_times()
            except psutil.Error:
                return
            self.cpu = times.user + times.system

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
