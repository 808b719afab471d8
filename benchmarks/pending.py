"""What unacknowledged messages cost nats-server: its CPU and what it writes to disk, in both modes, at a steady rate.

Each run publishes at the same rate, receives with the mode's source, and acknowledges each message once a number of
later ones has arrived, which is what a capture with that many in open blocks does; in shared mode it keeps them alive
as the daemon does. Runs alternate; prints medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import psutil
import pyarrow as pa

from jetcapture_py.capture.side_tasks import KEEP_ALIVE_PER_WAIT
from jetcapture_py.capture.stats import Stats
from jetcapture_py.config.model import loads
from jetcapture_py.jetstream.acks import packed, positions
from jetcapture_py.jetstream.ordered_acks import Ordered
from jetcapture_py.jetstream.shared import Acks, Shared
from jetcapture_py.jetstream.source import PullSource
from jetcapture_py.ledger import Ledger, Memory
from tests.support.nats_server import NatsServer
from tests.support.publishing import Publisher, connect
from tests.support.running import until

STREAM, CONSUMER, BATCH = "BENCH", "held", 100
MODES: dict[str, type[Acks]] = {"shared": Shared, "ordered": Ordered}


class Usage(NamedTuple):
    """The server's usage per second; `pending` is its number of unacknowledged messages."""

    cpu: float
    written: float
    pending: float


class Held:
    """Received messages until they are acknowledged."""

    def __init__(self, mode: str) -> None:
        self._ordered = mode == "ordered"
        self._replies: deque[pa.BinaryArray] = deque()
        self.count = 0

    def add(self, replies: pa.BinaryArray) -> None:
        """Add received messages, the last ones."""
        if self._ordered:
            replies = packed(*positions(STREAM, CONSUMER, replies))
        self._replies.append(replies)
        self.count += len(replies)

    def pop(self, keep: int) -> pa.BinaryArray:
        """Remove and return the first ones, so that about `keep` are left."""
        due = []
        while self._replies and self.count - len(self._replies[0]) >= keep:
            due.append(self._replies.popleft())
            self.count -= len(due[-1])
        return pa.concat_arrays(due) if due else pa.array([], pa.binary())

    def all(self) -> pa.BinaryArray:
        """Return all of them."""
        return pa.concat_arrays(self._replies) if self._replies else pa.array([], pa.binary())


async def publish(url: str, first: int, rate: int, ended: asyncio.Event) -> None:
    """Publish `first` messages at once, and then `rate` a second."""
    client = await connect(url)
    payload = b"x" * 250
    async with Publisher(client) as publisher:
        for number in range(first):
            await publisher.publish(f"bench.{number % 4}", payload)
        began, sent = time.monotonic(), 0
        while not ended.is_set():
            for number in range(BATCH):
                await publisher.publish(f"bench.{number % 4}", payload)
            await publisher.flush()
            sent += BATCH
            await asyncio.sleep(max(0.0, began + sent / rate - time.monotonic()))
    await client.close()


async def usage(mode: str, pending: int, rate: int, seconds: float) -> Usage:
    """Hold `pending` messages for that long."""
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory)) as server:
        client = await connect(server.url)
        stream = client.jetstream()
        await stream.add_stream(name=STREAM, subjects=["bench.>"], deny_delete=True, deny_purge=True)
        limit = f"max_ack_pending: {max(50_000, 3 * pending)}, allow_many_unacked: true"
        config = loads(
            f"nats: {{servers: ['{server.url}']}}\n"
            f"source: {{stream: {STREAM}, consumer: {CONSUMER}, mode: {mode}, {limit}}}\nstore: {{url: 'memory://x'}}"
        )
        held, ended = Held(mode), asyncio.Event()
        source = PullSource(config, Ledger(Memory(config.limits.memory)))
        acks = MODES[mode](source, Stats())
        await acks.open()
        owning = asyncio.create_task(acks.run())
        tasks = [
            asyncio.create_task(source.pulls.run()),
            asyncio.create_task(publish(server.url, pending, rate, ended)),
        ]

        async def receive() -> None:
            while (batch := await source.receive()) is not None:
                held.add(acks.admit(batch).replies)
                if len(due := held.pop(pending)):
                    await acks.ack(due)

        async def unacknowledged() -> int:
            return (await stream.consumer_info(STREAM, CONSUMER)).num_ack_pending or 0

        async def keep_alive() -> None:
            while mode == "shared":
                await asyncio.sleep(source.state.ack_wait / KEEP_ALIVE_PER_WAIT)
                await acks.keep_alive(held.all())

        tasks.append(asyncio.create_task(receive()))
        renewing = asyncio.create_task(keep_alive())
        await until(lambda: held.count >= pending, "all are held")
        await asyncio.sleep(seconds / 4)  # until the first burst is on disk
        process = psutil.Process(server.pid)
        before, began = process.cpu_times(), time.monotonic()
        written, seen = process.io_counters().write_bytes, []
        while time.monotonic() < began + seconds:
            await asyncio.sleep(1)
            seen.append(await unacknowledged())
        took, after = time.monotonic() - began, process.cpu_times()
        cpu = (after.user + after.system - before.user - before.system) / took
        written = process.io_counters().write_bytes - written
        ended.set()
        renewing.cancel()
        await tasks[1]
        await acks.stop()
        owning.cancel()
        await asyncio.gather(*tasks)
        await acks.close(pa.array([], pa.binary()))
        await client.close()
        return Usage(cpu, written / took, statistics.median(seen))


async def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pending", type=int, nargs="+", default=[0, 50_000, 300_000])
    parser.add_argument("--rate", type=int, default=5000, help="messages per second")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    runs: dict[tuple[int, str], list[Usage]] = {}
    for _ in range(chosen.rounds):
        for pending in chosen.pending:
            for mode in MODES:
                runs.setdefault((pending, mode), []).append(await usage(mode, pending, chosen.rate, chosen.seconds))
    for (pending, mode), usages in runs.items():
        cpu, written, seen = (statistics.median(values) for values in zip(*usages, strict=True))
        print(f"{pending:>9,} {mode:8} {cpu:6.1%} of a core  {written / 1e6:6.1f} MB/s written  {seen:>9,.0f} pending")


if __name__ == "__main__":
    asyncio.run(main())
