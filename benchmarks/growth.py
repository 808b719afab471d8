"""Whether the ten-millionth message costs what the first one did: one daemon, one stream, from start to end.

    python -m benchmarks.growth [--messages 10000000] [--size 250] [--keys 4] [--bundles 0] [--raw]
    python -m benchmarks.growth --objects 1000 10000 100000 [--deep]

Asks the operating system for the process's CPU seconds whenever another million is acknowledged, and for its resident
memory all the time. Prints both for every step, and the last step against the first. The first step begins with the
first delivery, so that starting up is no part of it.

With `--objects`, whether objects cost the same however many there are: for archives of each of these numbers of them,
which are made first, the CPU and the memory of `jetcapture verify`, of it with `--json`, with `--deep` too if that is
asked for, and of what compaction and `read_archive` plan before they read messages (needs the extra `spark`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import nats
import psutil

from benchmarks.compare.orders import Scenario, fill
from benchmarks.compare.runners import JSON
from benchmarks.growth_objects import report
from benchmarks.others import row
from tests.support.nats_server import NatsServer
from tests.support.running import CONSUMER, Command, objects, settings

POLL = 0.05


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the way: acknowledged messages at its end, seconds, CPU seconds, most resident bytes."""

    acked: int
    seconds: float
    cpu: float
    peak: int

    def per_million(self, before: Step) -> float:
        """CPU seconds for a million messages, since the end of the step before."""
        return (self.cpu - before.cpu) / (self.acked - before.acked) * 1e6


async def watch(url: str, stream: str, command: Command, messages: int, every: int) -> list[Step]:
    """Look at the process until it has acknowledged everything; the first entry is the first delivery."""
    client = await nats.connect(url)
    context = client.jetstream()
    process = psutil.Process(command.process.pid)
    began, peak, steps = time.perf_counter(), 0, list[Step]()
    cpu = 0.0
    while not steps or steps[-1].acked < messages:
        if command.process.poll() is not None:
            raise SystemExit(f"the daemon ended early:\n{command.log[-2000:]}")
        await asyncio.sleep(POLL)
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            cpu, peak = times.user + times.system, max(peak, process.memory_info().rss)
        with contextlib.suppress(nats.js.errors.NotFoundError):  # the daemon makes the consumer
            info = await context.consumer_info(stream, CONSUMER)
            delivered = info.delivered.consumer_seq if info.delivered else 0
            acked = delivered - (info.num_ack_pending or 0)
            if (delivered and not steps) or (
                steps and acked >= min(steps[-1].acked // every * every + every, messages)
            ):
                now = time.perf_counter() - began
                steps.append(Step(acked=acked if steps else 0, seconds=now, cpu=cpu, peak=peak))
                peak = 0
    await client.close()
    return steps


def main() -> None:
    """Run once and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--size", type=int, default=250, help="payload bytes")
    parser.add_argument("--keys", type=int, default=4)
    parser.add_argument("--bundles", type=int, default=0, help="block.bundles")
    parser.add_argument("--raw", action="store_true", help="do not decode")
    parser.add_argument("--objects", type=int, nargs="+", help="archives of so many objects in place of messages")
    parser.add_argument("--deep", action="store_true", help="with --objects: prove every byte, too")
    options = parser.parse_args()
    if options.objects:
        report(options.objects, deep=options.deep)
        return
    every = min(1_000_000, max(1, options.messages // 10))
    scenario = Scenario(size=options.size, keys=options.keys, messages=options.messages)
    sections: dict[str, Any] = {"source": {"stream": scenario.stream}, "block": {"bundles": options.bundles}}
    sections |= {"key": "{subject[1]}"} if options.raw else {"key": "{region}", "decode": JSON}
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory, "nats")) as server:
        asyncio.run(fill(server.url, scenario))
        root = Path(directory, "archive")
        with Command(Path(directory), settings(server.url, root, **sections)) as command:
            command.start("--until-caught-up")
            steps = asyncio.run(watch(server.url, scenario.stream, command, options.messages, every))
            if command.wait() != 0:
                raise SystemExit(command.log[-2000:])
        stored = objects(root)
        rows = sum(name.rows for name in stored)
        if rows != options.messages:
            raise SystemExit(f"{rows:,} rows are stored")
    layout = f"{options.bundles} bundles" if options.bundles else "keys"
    start = f"started with {steps[0].cpu:.2f} s of CPU"
    print(f"{scenario} in {layout}, {'raw' if options.raw else 'json'}; {start}, {len(stored):,} objects")
    for before, step in pairwise(steps):
        rate = (step.acked - before.acked) / (step.seconds - before.seconds)
        print(
            f"{step.acked:>12,} messages {rate:>10,.0f} messages/s {step.per_million(before):>8.2f} CPU s/million"
            f" {step.peak >> 20:>6,} MiB"
        )
    first, last = steps[1].per_million(steps[0]), steps[-1].per_million(steps[-2])
    peak = max(step.peak for step in steps) >> 20
    what = f"CPU s per million, first and last tenth of {scenario}"
    row(what, f"{first:.2f} and {last:.2f}", f"at most {peak:,} MiB")


if __name__ == "__main__":
    main()
