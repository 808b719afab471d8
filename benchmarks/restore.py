"""How fast a stream is restored from a local archive, end to end, beside `replay` of the same archive, and the most
memory that all processes but the server's had together.

    python -m benchmarks.restore [--messages 1000000] [--size 250] [--rounds 3] [--replay]

The stream has 200 subjects and 4 keys; each round restores into a new server.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.others import rates as print_rates
from benchmarks.replay import STREAM, fill, fresh, start, with_replay
from jetcapture_py.config.model import NatsConfig
from jetcapture_py.restoring.command import prepare, restore
from jetcapture_py.restoring.request import RestoreRequest
from jetcapture_py.store.archive import open_archive
from tests.support.nats_server import NatsServer


class Memory(threading.Thread):
    """Watches the memory of this process and its children, without servers: `peak` in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._ended = threading.Event()

    def run(self) -> None:
        """Watch until stopped."""
        while not self._ended.wait(0.1):
            self.peak = max(
                self.peak, sum(map(_memory, [psutil.Process(), *psutil.Process().children(recursive=True)]))
            )

    def stop(self) -> None:
        """Stop watching."""
        self._ended.set()
        self.join()


def _memory(process: psutil.Process) -> int:
    try:
        return 0 if process.name() == "nats-server" else int(process.memory_info().rss)
    except psutil.Error:
        return 0


@contextmanager
def watched() -> Iterator[Memory]:
    """Watch the memory for a block."""
    memory = Memory()
    memory.start()
    try:
        yield memory
    finally:
        memory.stop()


def restored(archive: str) -> float:
    """Restore into a new server; the seconds from the listing of the archive to the server's last answer."""
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory, "nats")) as server:
        began = time.perf_counter()
        prepared = prepare(RestoreRequest(files=open_archive(archive, {}), stream=STREAM, target=STREAM))
        ready = time.perf_counter()
        assert restore(prepared, NatsConfig(servers=(server.url,))) == prepared.survey.messages
        end = time.perf_counter()
        print(f"  {ready - began:.1f} s to survey, {end - ready:.1f} s to restore, {len(prepared.plan.parts)} ranges")
        return end - began


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=250, help="payload bytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replay", action="store_true", help="also replay the archive once per round")
    options = parser.parse_args()
    logging.getLogger("jetcapture").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory, "nats")) as server:
        archive = f"file://{directory}/archive"
        asyncio.run(fill(server.url, archive, options.messages, options.size))
        size = sum(path.stat().st_size for path in Path(directory, "archive").rglob("*.parquet"))
        print(f"archive: {size / 1e6:,.0f} MB; load of the machine: {psutil.getloadavg()}")
        ways: dict[str, Callable[[], float]] = {"restore": lambda: restored(archive)}
        if options.replay:
            spark = start()

            def replayed() -> float:
                asyncio.run(fresh(server.url))
                began = time.perf_counter()
                assert with_replay(spark, server.url, archive) == options.messages
                return time.perf_counter() - began

            ways["replay"] = replayed
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, values in rates.items():
                with watched() as memory:
                    values.append(options.messages / ways[name]())
                print(f"{name:8} {values[-1]:>10,.0f} messages/s, at most {memory.peak / 2**20:,.0f} MiB", flush=True)
        for name, values in rates.items():
            print_rates(f"`{name}` of {options.messages:,} messages of {options.size} B", values)


if __name__ == "__main__":
    main()
