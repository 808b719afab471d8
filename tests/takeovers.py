"""The active one of three replicas in `source.mode: ordered` ends, again and again: how soon does another receive?

    python -m tests.takeovers --count 100 --signal KILL|TERM|STOP [--stopped 30]

Messages are published all the time. Each round the active replica, a process of the real command, is killed, drained,
or stopped and continued after `--stopped` seconds; printed is after how many seconds the server delivered to another
one. A replica that has ended is started again. In the end every message must be in the archive.
Exit code 1 when one is missing, or no other replica took over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

from jetcapture_py.archive import layout
from jetcapture_py.capture.side_tasks import end
from tests.support.nats_server import NatsServer
from tests.support.running import CONSUMER, STREAM, Command, connection, objects, rows, settings

POLL = 0.01
PATIENCE = 60.0


async def pinned(client: Client) -> str:
    """The pin id of the active replica; "" without one."""
    answer = await client.request(f"$JS.API.CONSUMER.INFO.{STREAM}.{CONSUMER}", b"", timeout=10)
    groups: list[dict[str, Any]] = json.loads(answer.data).get("priority_groups") or [{}]
    return str(groups[0].get("pinned_client_id") or "")


class Takeovers:
    """Three replicas, and how long each takeover took, in `seconds`."""

    def __init__(self, url: str, directory: Path, client: Client) -> None:
        self.archive, self.client = directory / "archive", client
        self.seconds: list[float] = []
        sections = {"source": {"mode": "ordered"}, "block": {"max_age": "200ms"}}
        self._commands = {
            name: Command(directory, settings(url, self.archive, nats={"inbox_prefix": name}, **sections), name=name)
            for name in ("replica0", "replica1", "replica2")
        }
        self._pulled: dict[str, str] = {}  # which replica has pulled with a pin id

    async def start(self) -> None:
        """Start all, and wait until one is active."""
        await self.client.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{CONSUMER}", cb=self._on_pull)
        for command in self._commands.values():
            command.start()
        await self._other("")
        await asyncio.sleep(2)

    async def publish(self) -> None:
        """Publish until canceled."""
        while True:
            await self.client.jetstream().publish("orders.a", b"", timeout=30)
            await asyncio.sleep(0.005)

    async def round(self, number: signal.Signals, stopped: float) -> float:
        """Have the active replica receive the signal; return after how many seconds another one received."""
        while (before := await pinned(self.client)) not in self._pulled:
            await asyncio.sleep(POLL)
        command = self._commands[self._pulled[before]]
        began = time.monotonic()
        command.process.send_signal(number)
        await self._other(before)
        seconds = time.monotonic() - began
        if number is signal.SIGSTOP:
            await asyncio.sleep(max(0.0, stopped - seconds))
            command.process.send_signal(signal.SIGCONT)
        else:
            await asyncio.to_thread(command.wait)
            command.start()
        await asyncio.sleep(1.5)  # the others stand by
        return seconds

    async def _other(self, before: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while (pin := await pinned(self.client)) in ("", before):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody took over, the pin is {pin or 'free'}")
            await asyncio.sleep(POLL)

    async def _on_pull(self, pull: Msg) -> None:
        """Only the active replica pulls with the pin id; the reply subject says which one that is."""
        if pin := json.loads(pull.data).get("id"):
            self._pulled[pin] = pull.reply.partition(".")[0]

    async def end(self, published: int) -> set[int]:
        """Drain all; return the sequences up to `published` that are missing."""
        await asyncio.sleep(3)
        for command in self._commands.values():
            command.process.send_signal(signal.SIGTERM)
        for command in self._commands.values():
            await asyncio.to_thread(command.wait)
        stored = sum(name.rows for name in objects(self.archive))
        seqs = {row[layout.SEQ] for row in rows(self.archive)}
        print(f"{published} published, {len(seqs)} in the archive, {stored - len(seqs)} stored again", flush=True)
        return set(range(1, published + 1)) - seqs

    def kill(self) -> None:
        """Leave no process."""
        for command in self._commands.values():
            command.kill()


async def run(count: int, number: signal.Signals, stopped: float) -> int:
    """Take over so many times; the exit code."""
    with tempfile.TemporaryDirectory() as name, NatsServer(Path(name, "nats")) as server:
        async with connection(server.url) as client:
            await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"], deny_delete=True, deny_purge=True)
            trial = Takeovers(server.url, Path(name), client)
            publishing = asyncio.create_task(trial.publish())
            try:
                await trial.start()
                for index in range(count):
                    trial.seconds.append(await trial.round(number, stopped))
                    print(f"{index + 1}  {trial.seconds[-1]:.2f} s", flush=True)
                await end(publishing)
                info = await client.jetstream().stream_info(STREAM)
                missing = await trial.end(info.state.last_seq)
            finally:
                publishing.cancel()
                trial.kill()
    taken = sorted(trial.seconds)
    print(f"{number.name}: {count} takeovers, median {statistics.median(taken):.2f} s, longest {taken[-1]:.2f} s")
    if missing:
        print(f"{len(missing)} messages are missing, the first is {min(missing)}")
    return int(bool(missing))


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.takeovers", description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--signal", choices=("KILL", "TERM", "STOP"), default="KILL")
    parser.add_argument("--stopped", type=float, default=30.0, help="seconds until SIGCONT")
    options = parser.parse_args()
    return asyncio.run(run(options.count, signal.Signals[f"SIG{options.signal}"], options.stopped))


if __name__ == "__main__":
    sys.exit(main())
