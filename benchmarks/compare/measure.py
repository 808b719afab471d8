"""One run, measured from outside: the server says when the first message goes out and when the last is acknowledged.

So starting an interpreter or a runtime is not part of the rate. CPU seconds are those of the process and its children
after the first message went out; those before are reported separately.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from nats.aio.client import Client

from benchmarks.compare.runners import ACK_WAIT, Runner, Work
from benchmarks.compare.storage import Stored
from tests.support.busy import busy_loops

BEFORE, DURING = 0.005, 0.02
"""Seconds between two requests to the server, before the first message and from then on."""
STUCK = 120.0
"""Seconds without any progress after which a run has failed."""
GRACE = 60.0


class FailedError(Exception):
    """The run did not do the work; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one run took: seconds, CPU seconds (`cpu`: from the first message on; `server_cpu`: of the server), peak
    resident bytes; what it left."""

    seconds: float
    cpu: float
    cpu_before: float
    peak: int
    redelivered: int
    stored: Stored
    server_cpu: float = 0.0


class Process:
    """A process whose CPU time and memory are known after its end."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        self.cpu = 0.0
        self.peak = 0
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=Path(__file__).parents[2],  # where jetcapture_py is, installed or not
            )
        self._seen = psutil.Process(self._popen.pid)

    def look(self) -> float:
        """Its CPU seconds so far; 0 when it has ended."""
        with contextlib.suppress(psutil.Error, OSError):
            self.peak = max(self.peak, _high_water(self._popen.pid) or self._seen.memory_info().rss)
            times = self._seen.cpu_times()
            return times.user + times.system + times.children_user + times.children_system
        return 0.0

    def ended(self) -> bool:
        """Whether it has ended. Raises FailedError if it failed."""
        if self._popen.returncode is None:
            pid, status, usage = os.wait4(self._popen.pid, os.WNOHANG)
            if pid == 0:
                return False
            self._popen.returncode = os.waitstatus_to_exitcode(status)
            self.cpu = usage.ru_utime + usage.ru_stime
        if self._popen.returncode not in (0, -signal.SIGTERM):
            last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise FailedError(f"exit code {self._popen.returncode}: {' '.join(last)[-500:]}")
        return True

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it has not ended."""
        if self._popen.returncode is None:
            os.kill(self._popen.pid, number)  # Popen's own would reap it first, and its usage would be lost

    async def wait(self, timeout: float) -> None:
        """Wait for its end. Raises FailedError when that takes too long."""
        deadline = time.monotonic() + timeout
        while not self.ended():
            if time.monotonic() > deadline:
                raise FailedError(f"it did not end within {timeout:.0f} s")
            self.look()
            await asyncio.sleep(DURING)


async def measure(client: Client, runner: Runner, work: Work) -> Measured:
    """Run `runner` on a consumer of its own. Raises FailedError."""
    scenario = work.scenario
    config = {
        "durable_name": work.consumer,
        "ack_policy": "explicit",
        "ack_wait": ACK_WAIT * 10**9,
        "max_ack_pending": scenario.unacked,
        **runner.consumer(scenario),
    }
    await _ask(client, "CREATE", work, {"stream_name": scenario.stream, "config": config, "action": "create"})
    command = runner.command(work)
    server = psutil.Process(work.server)
    served = _cpu(server)
    with busy_loops(scenario.busy):
        processes = [Process(command, work.directory / f"{index}.log") for index in range(scenario.replicas)]
        try:
            seconds, before = await _watch(client, work, processes)
            served = _cpu(server) - served
            for process in processes:
                process.look()
                if not runner.ends:
                    process.send(signal.SIGTERM)
            for process in processes:
                await process.wait(GRACE)
            delivered = (await _ask(client, "INFO", work))["delivered"]["consumer_seq"]
        finally:
            for process in processes:
                process.send(signal.SIGKILL)
            for process in processes:
                with contextlib.suppress(FailedError):
                    await process.wait(GRACE)
            await _ask(client, "DELETE", work)
    stored = work.target.stored(runner.files, runner.identity) if runner.files else Stored()
    if runner.files and stored.different != scenario.messages:
        raise FailedError(f"{stored.different} of {scenario.messages} messages are stored")
    return Measured(
        seconds=seconds,
        cpu=sum(process.cpu for process in processes) - before,
        cpu_before=before,
        peak=sum(process.peak for process in processes),
        redelivered=delivered - scenario.messages,
        stored=stored,
        server_cpu=served,
    )


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _watch(client: Client, work: Work, processes: list[Process]) -> tuple[float, float]:
    """Seconds from the first delivery to the last acknowledgement, and CPU seconds used before the first delivery."""
    last = (0, 0)
    began = before = 0.0
    progressed = time.perf_counter()
    while True:
        ended = [process.ended() for process in processes]
        info = await _ask(client, "INFO", work)
        now = time.perf_counter()
        seen = (info["delivered"]["consumer_seq"], info["ack_floor"]["stream_seq"])
        cpu = sum(process.look() for process in processes)
        if seen[0] and not began:
            began, before = now, cpu
        if seen[1] >= work.scenario.messages:
            return now - began, before
        if all(ended):
            raise FailedError(f"it ended with {work.scenario.messages - seen[1]} unacknowledged")
        if seen != last:
            last, progressed = seen, now
        elif now - progressed > STUCK:
            raise FailedError(f"stuck for {STUCK:.0f} s with {info['num_ack_pending']} unacknowledged")
        await asyncio.sleep(DURING if began else BEFORE)


async def _ask(client: Client, what: str, work: Work, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The server's answer about the run's consumer, whose settings may be newer than this nats-py."""
    subject = f"$JS.API.CONSUMER.{what}.{work.scenario.stream}.{work.consumer}"
    answer: dict[str, Any] = json.loads(
        (await client.request(subject, json.dumps(body).encode() if body else b"", timeout=10)).data
    )
    if "error" in answer:
        raise RuntimeError(f"{subject}: {answer['error']}")
    return answer


def _high_water(pid: int) -> int:
    """Peak resident bytes on Linux; 0 elsewhere."""
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0
