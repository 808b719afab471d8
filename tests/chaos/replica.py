"""A daemon, supervised as Kubernetes would."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter

from tests.support.running import Command

RESTART_AFTER = 0.2


class ChaosError(Exception):
    """The run cannot go on, or a promise is broken."""


class Replica:
    """A daemon, supervised as Kubernetes would: whatever it ends with, it is started again."""

    def __init__(self, name: str, command: Command) -> None:
        self.name, self.command = name, command
        self.stopped = False  # by SIGSTOP
        self.codes: Counter[int] = Counter()
        self._wanted = True

    def __str__(self) -> str:
        return self.name

    @property
    def alive(self) -> bool:
        """Whether its process runs (or is stopped)."""
        return self.command.process.poll() is None

    async def supervise(self) -> None:
        """Start it, and again whenever it ends, until `end`."""
        while self._wanted:
            self.command.start()
            self.stopped = False
            while (code := self.command.process.poll()) is None:
                await asyncio.sleep(0.05)
            self.codes[code] += 1
            await asyncio.sleep(RESTART_AFTER)

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal, if there is a process."""
        if self.alive:
            self.command.process.send_signal(number)
            self.stopped = number is signal.SIGSTOP or (self.stopped and number is not signal.SIGCONT)
            return True
        return False

    @property
    def broken_drains(self) -> int:
        """How often it has given messages back, because they could not be stored within `drain_timeout`."""
        return sum("drain_timeout" in event["error"] for event in self.command.events("capture.failed"))

    async def show_stacks(self) -> None:
        """Have it write to its log where it is, and end."""
        if self.signal(signal.SIGABRT):
            await asyncio.sleep(0.5)

    async def end(self, patience: float) -> None:
        """SIGTERM for good. After `patience` seconds its stacks go to its log, and it is killed."""
        self._wanted = False
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + patience
        while self.alive and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self.alive:
            await self.show_stacks()
            raise ChaosError(f"{self.name} did not end within {patience:.0f} s of SIGTERM; its stacks are in its log")
