"""Scale in and out, or replace replicas by those of another version, under load: what is lost, redelivered or delayed?

    python -m tests.scaling --replicas 10 --low 3 --rate 3000
    python -m tests.scaling --replicas 4 --other /opt/jetcapture-0.1.0/bin/python

The real command, as many times as there are replicas, captures a stream that is published to all the time. Replicas get
SIGTERM, as from Kubernetes. With `--other`, the replicas of that interpreter's version are replaced by those of this
one, one by one, and back. Exit code 1 when something was lost, read twice, redelivered although it had not been in
flight, or stored later than `drain_timeout`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
from nats.aio.client import Client

from jetcapture_py.archive import layout
from tests.support.nats_server import NatsServer
from tests.support.publishing import Publisher
from tests.support.running import CONSUMER, STREAM, Command, connection, objects, settings, until

MAX_AGE = 1.0
DRAIN = 60.0
ACK_WAIT = "10m"
"""Longer than any run: what a replica leaves unacknowledged is missing until the end."""
SETTLED = 2.0
"""Seconds over which the usual lag is observed."""
NOISE = 2.0
TIMEOUT = 600.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended; `in_flight` are the messages that replicas held when they got SIGTERM."""

    published: int
    stored: int
    rows: int
    redelivered: int
    in_flight: int
    codes: list[int]
    usual_lag: float
    delays: list[float]
    """Seconds from each SIGTERM until the lag was as usual again."""
    verified: bool

    @property
    def clean(self) -> bool:
        return (
            self.verified
            and self.stored == self.published
            and self.rows - self.stored <= self.redelivered <= self.in_flight
            and not any(self.codes)
            and max(self.delays) < DRAIN
        )


@dataclass
class Load:
    """Messages that are published at a rate, until `stop`; each says when it was published."""

    client: Client
    rate: int
    published: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        began = time.monotonic()
        try:
            async with Publisher(self.client) as publisher:
                while not self.stop.is_set():
                    for _ in range(int((time.monotonic() - began) * self.rate) - self.published):
                        payload = b"%.3f" % time.time()
                        await publisher.publish(f"orders.{self.published % 4}", payload.ljust(200), None)
                        self.published += 1
                    await publisher.flush()
                    await asyncio.sleep(0.02)
        finally:
            self.stopped.set()


class Fleet:
    """Replicas of one consumer."""

    def __init__(self, directory: Path, url: str, client: Client) -> None:
        self._directory, self._client = directory, client
        self.archive = directory / "archive"
        self._settings = settings(
            url,
            self.archive,
            source={"ack_wait": ACK_WAIT},
            key="{subject[1]}",
            block={"interval": "1h", "max_age": f"{MAX_AGE}s"},
            drain_timeout=f"{DRAIN}s",
        )
        self.replicas: list[Command] = []
        self.stopping: list[Command] = []

    async def start(self, count: int, python: str = sys.executable) -> None:
        """Start replicas, and wait until each of them has stored something."""
        added = []
        for _ in range(count):
            name = f"replica-{len(self.replicas) + len(self.stopping)}"
            safe_path = {"PYTHONSAFEPATH": "1"}  # the interpreter's own version, not that of the working directory
            added.append(Command(self._directory, self._settings, name, safe_path, python=python).start())
            self.replicas.append(added[-1])
        for each in added:
            await until(lambda each=each: any(each.events("blocks.stored")), "a replica stores", TIMEOUT)

    def terminate(self, replicas: Sequence[Command]) -> None:
        """Send SIGTERM to all of them at once."""
        for each in replicas:
            each.process.send_signal(signal.SIGTERM)
            self.replicas.remove(each)
            self.stopping.append(each)

    async def ended(self) -> None:
        """Wait until those that got SIGTERM have ended."""
        for each in self.stopping:
            await asyncio.to_thread(each.wait, TIMEOUT)

    async def lag(self) -> float:
        """Age of the oldest message that is not acknowledged, in seconds."""
        jetstream = self._client.jetstream()
        info = await jetstream.consumer_info(STREAM, CONSUMER)
        if not info.num_pending and not info.num_ack_pending:
            return 0.0
        assert info.ack_floor is not None
        oldest = await jetstream.get_msg(STREAM, seq=info.ack_floor.stream_seq + 1)
        assert oldest.data is not None
        return time.time() - float(oldest.data)

    def verify(self) -> bool:
        """Whether `jetcapture verify` proves that everything is stored and nothing is read twice."""
        words = [sys.executable, "-m", "jetcapture_py", "verify", str(self.stopping[-1].path)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if done.returncode:
            print(done.stdout, done.stderr, file=sys.stderr)
        return done.returncode == 0


@contextlib.asynccontextmanager
async def _fleet(directory: Path, rate: int) -> AsyncIterator[tuple[Fleet, Load]]:
    with NatsServer(directory / "nats") as server:
        async with connection(server.url) as client, connection(server.url) as publishing:
            await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"])
            fleet, load = Fleet(directory, server.url, client), Load(publishing, rate)
            task = asyncio.create_task(load.run())
            try:
                yield fleet, load
            finally:
                load.stop.set()
                for each in (*fleet.replicas, *fleet.stopping):
                    each.kill()
                await task


async def scaled(directory: Path, high: int, low: int, rate: int) -> Outcome:
    """From `high` replicas to `low` and back."""
    async with _fleet(directory, rate) as (fleet, load):
        await fleet.start(high)
        usual = await _usual_lag(fleet)
        delay = await _delay(fleet, usual, fleet.replicas[low:])
        await fleet.start(high - low)
        return await _outcome(fleet, load, usual, [delay])


async def replaced(directory: Path, replicas: int, rate: int, other: str) -> Outcome:
    """Replicas of `other`, an interpreter with another version, are replaced one by one, and half of them back."""
    async with _fleet(directory, rate) as (fleet, load):
        await fleet.start(replicas, other)
        usual, delays = await _usual_lag(fleet), []
        for python in [sys.executable] * replicas + [other] * (replicas // 2):
            oldest = fleet.replicas[0]
            await fleet.start(1, python)
            delays.append(await _delay(fleet, usual, [oldest]))
        return await _outcome(fleet, load, usual, delays)


async def _usual_lag(fleet: Fleet) -> float:
    """Return the greatest lag over some seconds, or that of blocks that wait, times the noise of a busy machine."""
    found, until_then = [2 * MAX_AGE], time.monotonic() + SETTLED
    while time.monotonic() < until_then:
        found.append(await fleet.lag())
        await asyncio.sleep(0.1)
    return NOISE * max(found)


async def _delay(fleet: Fleet, usual: float, replicas: Sequence[Command]) -> float:
    """Stop replicas; return the seconds until they have ended and the lag is as usual again."""
    began = time.monotonic()
    fleet.terminate(replicas)
    await fleet.ended()

    async def settled() -> bool:
        return await fleet.lag() <= usual

    await until(settled, "the lag is as usual again", TIMEOUT)
    return time.monotonic() - began


async def _outcome(fleet: Fleet, load: Load, usual: float, delays: list[float]) -> Outcome:
    load.stop.set()
    await load.stopped.wait()

    async def stored() -> bool:
        return await fleet.lag() == 0.0

    await until(stored, "everything is stored", TIMEOUT)
    fleet.terminate([*fleet.replicas])
    await fleet.ended()
    names = objects(fleet.archive)
    tables = [pq.read_table(fleet.archive / name.path, columns=[layout.SEQ, layout.DELIVERED]) for name in names]
    sequences = [seq for table in tables for seq in table.column(layout.SEQ).to_pylist()]
    redelivered = sum(sum(count > 1 for count in table.column(layout.DELIVERED).to_pylist()) for table in tables)
    return Outcome(
        published=load.published,
        stored=len(set(sequences)),
        rows=len(sequences),
        redelivered=redelivered,
        in_flight=sum(entry["unacked"] for each in fleet.stopping for entry in each.events("capture.draining")),
        codes=[each.wait() for each in fleet.stopping],
        usual_lag=usual,
        delays=delays,
        verified=await asyncio.to_thread(fleet.verify),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=10)
    parser.add_argument("--low", type=int, default=3, help="replicas between scale-in and scale-out")
    parser.add_argument("--rate", type=int, default=3000, help="messages published per second")
    parser.add_argument("--other", help="interpreter of another version, whose replicas are replaced")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jetcapture-scaling-") as directory:
        if options.other:
            run = replaced(Path(directory), options.replicas, options.rate, options.other)
        else:
            run = scaled(Path(directory), options.replicas, options.low, options.rate)
        outcome = asyncio.run(run)
    print("ok    " if outcome.clean else "FAILED", outcome)
    return int(not outcome.clean)


if __name__ == "__main__":
    sys.exit(main())
