"""Memory and completeness with many keys: runs the real command and watches its resident memory.

Publishes messages to evenly used keys, captures them until caught up, then reads every object's sequences and
compares them with what was published.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import pyarrow.parquet as pq

from benchmarks.others import row
from jetcapture_py.archive import layout
from tests.support.nats_server import NatsServer
from tests.support.running import Command, Message, consumer, objects, publish, settings


def messages(count: int, keys: int, size: int) -> list[Message]:
    """`count` messages of `size` bytes, on subjects that make `keys` keys."""
    return [(f"orders.k{index % keys}", b"%-*d" % (size, index), None) for index in range(count)]


def watch(command: Command) -> tuple[int, float]:
    """Wait for the process to end; its peak resident memory in bytes and its CPU seconds."""
    process = psutil.Process(command.process.pid)
    peak, cpu = 0, 0.0
    while command.process.poll() is None:
        try:
            peak = max(peak, process.memory_info().rss)
            times = process.cpu_times()
            cpu = times.user + times.system
        except psutil.Error:
            break
        time.sleep(0.05)
    return peak, cpu


def main() -> None:
    """Run once and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=1000, help="payload bytes")
    parser.add_argument("--bundles", type=int, default=0, help="block.bundles")
    parser.add_argument("--memory", default="256MiB", help="limits.memory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory, "nats")) as server:
        root = Path(directory, "archive")
        asyncio.run(publish(server.url, messages(options.messages, options.keys, options.size)))
        limits = {"memory": options.memory}
        sections = {"limits": limits, "block": {"bundles": options.bundles}}
        with Command(Path(directory), settings(server.url, root, key="{subject[1]}", **sections)) as command:
            began = time.perf_counter()
            peak, cpu = watch(command.start("--until-caught-up"))
            seconds = time.perf_counter() - began
            if command.wait() != 0:
                raise SystemExit(command.log[-2000:])
        state = asyncio.run(consumer(server.url))
        names = objects(root)
        found: Counter[int] = Counter()
        for name in names:
            with (root / name.path).open("rb") as file:
                found.update(pq.ParquetFile(file).read(columns=[layout.SEQ]).column(0).to_pylist())
    what = f"{options.messages:,} messages of {options.size:,} B, {options.keys:,} keys, {options.memory}"
    more = f"{cpu:.0f} CPU s, {seconds:.0f} s, {len(names):,} objects, {state.num_redelivered} redelivered"
    row(what, f"at most {peak / (1 << 20):,.0f} MiB", more)
    if set(found) != set(range(1, options.messages + 1)):
        raise SystemExit("some are missing")


if __name__ == "__main__":
    main()
