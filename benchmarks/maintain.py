"""Compaction of small objects by `jetcapture compact`, and by `jetcapture spark compact`: rate and memory.

    python -m benchmarks.maintain [--objects 20000] [--keys 40] [--together 50] [--rounds 1] [--directory /tmp]
                                  [--archive DIRECTORY] [--without-spark]
    python -m benchmarks.maintain --beside 1000000 [--objects 4000] [--rounds 3]

Each object has 500 JSON messages of 1 KB, about 250 KB after compression. Those of a key and hour are 50, or
`--together`, as when blocks are sealed early. Every run compacts a copy of the same archive, whose files are
links to the same bytes; both have the same target size and no grace period, and take turns. Spark's run includes its
start, and its memory is that of its Python workers and of Java.

With `--beside`, a daemon captures so many messages of 250 bytes from a stream, alone, and while `jetcapture maintain`
compacts the objects of another archive on the same machine, pass after pass; the daemon's rates are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from benchmarks.compare.orders import Scenario
from benchmarks.compare.orders import fill as publish
from benchmarks.compare.runners import JSON
from benchmarks.growth import watch
from jetcapture_py.archive.layout import BlockId
from jetcapture_py.archive.schema import ENVELOPE
from jetcapture_py.archive.writer import Encoder
from jetcapture_py.store.archive import ArchiveFiles
from tests.support.archives import put
from tests.support.nats_server import NatsServer
from tests.support.publishing import connect
from tests.support.running import STREAM, Command, settings

ROWS, PAYLOAD = 500, 1000
INTERVAL = 3600
START = 1_700_000_000 // INTERVAL * INTERVAL
TARGET = "256MiB"
POLL = 0.05
COLUMNS = 64
"""Different columns of payloads."""


def payloads(seed: int) -> pa.Array:
    """JSON of which a little more than half cannot be compressed."""
    chance = np.random.default_rng(seed)
    texts = []
    for number in range(ROWS):
        noise = chance.bytes(PAYLOAD * 55 // 100 // 2 * 2).hex()[: PAYLOAD - 60]
        texts.append(b'{"order": %d, "region": "eu", "status": "paid", "note": "%s"}' % (number, noise.encode()))
    return pa.array(texts, pa.binary())


def fill(root: Path, objects: int, keys: int, together: int) -> None:
    """Store so many small objects."""
    encoder = Encoder(stream=STREAM, interval=INTERVAL, compression="zstd", consumer="archive")
    columns = [payloads(seed) for seed in range(COLUMNS)]
    for index in range(objects):
        row, key = divmod(index, keys)
        bucket = START + row // together * INTERVAL
        seqs = row * keys * ROWS + 1 + key + keys * np.arange(ROWS)
        times = bucket * 1_000_000 + (row % together * ROWS + np.arange(ROWS)) * 1_000
        arrays = [
            {
                "_nats_subject": lambda: pa.repeat(f"orders.{key}", ROWS),  # noqa: B023
                "_nats_seq": lambda: pa.array(seqs),  # noqa: B023
                "_nats_timestamp": lambda: pa.array(times, pa.timestamp("us", "UTC")),  # noqa: B023
                "_nats_payload": lambda: columns[index % COLUMNS],  # noqa: B023
                "_nats_delivered": lambda: pa.repeat(pa.scalar(1, pa.int32()), ROWS),
            }.get(field.name, lambda: pa.nulls(ROWS, field.type))()  # noqa: B023
            for field in ENVELOPE
        ]
        block = BlockId(key=f"key{key:03}", bucket=bucket)
        put(root, encoder.encode(block, "pressure", [pa.RecordBatch.from_arrays(arrays, schema=ENVELOPE)]))


def linked(root: Path, copy: Path) -> None:
    """Make a copy of the archive whose files are links: objects are never modified."""
    for path in root.rglob("*.parquet"):
        target = copy / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, target)


def resident(process: psutil.Process, cpu: dict[int, float]) -> int:
    """Return the resident bytes of a process and of all that it started; note the CPU seconds of each in `cpu`."""
    total = 0
    for member in (process, *process.children(recursive=True)):
        try:
            total += member.memory_info().rss
            cpu[member.pid] = sum(member.cpu_times()[:2])
        except psutil.Error:
            continue
    return total


def run(words: list[str]) -> tuple[float, float, int]:
    """Run a command; return its seconds, and the CPU seconds and most memory of it and its processes."""
    started, peak = time.monotonic(), 0
    cpu: dict[int, float] = {}
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                peak = max(peak, resident(watched, cpu))
            except psutil.Error:
                break
            time.sleep(POLL)
        if process.wait():
            raise SystemExit(f"{' '.join(words)} failed")
    return time.monotonic() - started, sum(cpu.values()), peak


def configured(copy: Path, config: Path) -> Path:
    """Write the configuration with which an archive is compacted."""
    config.write_text(
        f"source: {{stream: {STREAM}, consumer: archive}}\nstore: {{url: {copy}}}\n"
        f"maintain: {{compact: {{target: {TARGET}, grace: 0s}}}}\n"
    )
    return config


@contextmanager
def maintaining(root: Path, directory: Path) -> Iterator[None]:
    """Compact one copy of the archive after another."""
    stop, begun = threading.Event(), threading.Event()

    def work() -> None:
        for number in count():
            copy = directory / f"maintained-{number}"
            linked(root, copy)
            words = [sys.executable, "-m", "jetcapture_py", "maintain", str(configured(copy, directory / "kept.yaml"))]
            with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                while process.poll() is None and not stop.wait(POLL):
                    if not begun.is_set() and any(path.stat().st_nlink == 1 for path in copy.rglob("*.parquet")):
                        begun.set()  # it has written one
                process.kill()
            shutil.rmtree(copy)
            if stop.is_set():
                return

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def captured(url: str, scenario: Scenario, directory: Path) -> float:
    """Capture the stream with a new consumer; return the messages per second, from the first to the last."""
    directory.mkdir()
    sections: dict[str, Any] = {"source": {"stream": scenario.stream}, "key": "{region}", "decode": JSON}
    with Command(directory, settings(url, directory / "archive", **sections)) as command:
        command.start("--until-caught-up")
        steps = asyncio.run(watch(url, scenario.stream, command, scenario.messages, scenario.messages))
        if command.wait():
            raise SystemExit(command.log[-2000:])
    return scenario.messages / (steps[-1].seconds - steps[0].seconds)


def beside(root: Path, directory: Path, messages: int, rounds: int) -> None:
    """Print the daemon's rate alone, and beside maintenance."""
    scenario = Scenario(messages=messages)
    with NatsServer(directory / "nats") as server:
        for number in range(rounds):
            rates = []
            for name in ("alone", "beside maintain"):
                asyncio.run(publish(server.url, scenario))
                home = directory / f"{name.replace(' ', '-')}-{number}"
                if name == "alone":
                    rates.append(captured(server.url, scenario, home))
                else:
                    with maintaining(root, directory):
                        rates.append(captured(server.url, scenario, home))
                asyncio.run(remove_stream(server.url, scenario.stream))
                shutil.rmtree(home)
            alone, kept = rates
            print(f"alone {alone:>9,.0f} messages/s, beside maintain {kept:>9,.0f}: {kept / alone:.2f}", flush=True)


async def remove_stream(url: str, stream: str) -> None:
    """Remove a stream with its consumers."""
    client = await connect(url)
    await client.jetstream().delete_stream(stream)
    await client.close()


def main() -> None:
    """Make the archive, and measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=20_000)
    parser.add_argument("--keys", type=int, default=40)
    parser.add_argument("--together", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--archive", type=Path, help="keep the archive here, or take the one that is here")
    parser.add_argument("--without-spark", action="store_true")
    parser.add_argument("--beside", type=int, metavar="MESSAGES", help="measure a daemon beside it instead")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
        root = chosen.archive or Path(directory, "archive")
        if not root.exists():
            fill(root, chosen.objects, chosen.keys, chosen.together)
        size = sum(file.size for file in ArchiveFiles(str(root), {}).files(STREAM))
        print(f"{chosen.objects:,} objects, {size / 1e9:.2f} GB", flush=True)
        if chosen.beside:
            beside(root, Path(directory), chosen.beside, chosen.rounds)
            return
        config = Path(directory, "config.yaml")
        for number in range(chosen.rounds):
            for name in ("compact", "spark compact")[: 1 if chosen.without_spark else 2]:
                copy = Path(directory, f"{name.replace(' ', '-')}-{number}")
                linked(root, copy)
                configured(copy, config)
                options = ["--config", str(config), "--target-size", TARGET, "--grace", "0s"]
                words = ["compact", str(config)] if name == "compact" else ["spark", "compact", *options]
                seconds, cpu, peak = run([sys.executable, "-m", "jetcapture_py", *words])
                left = sum(1 for _ in ArchiveFiles(str(copy), {}).files(STREAM))
                print(
                    f"{name:14} {seconds:>7.1f} s {cpu:>7.1f} CPU s {chosen.objects / seconds:>7,.0f} objects/s"
                    f" {size / seconds / 1e6:>7.1f} MB/s {peak >> 20:>6,} MiB, {left:,} objects left",
                    flush=True,
                )


if __name__ == "__main__":
    main()
