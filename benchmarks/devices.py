"""How many objects an archive of many slow keys has, minute by minute, with `jetcapture maintain` beside the capture.

    python -m benchmarks.devices [--minutes 30] [--messages 170703] [--devices 50] [--every 1m] [--interval 15m]
                                 [--after 10m] [--grace 5m] [--table]

Publishes the messages evenly over these minutes, each device on a subject of its own, to one capture whose settings are
the defaults but for the interval. Prints every minute how many objects there are, for how many keys and intervals, and
what is to come: objects of complete buckets beyond one for each key and interval. At the end it waits until the last
bucket has ended, drains the capture, makes one more pass, and counts again; `jetcapture verify` then proves that all
messages are stored.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.config.units import parse_duration
from jetcapture_py.jetstream.publish.publisher import Publisher
from tests.support.nats_server import NatsServer
from tests.support.publishing import connect
from tests.support.running import STREAM, Command, objects, settings

STEP = 1.0
"""Seconds between two batches of messages."""
MINUTE = 60.0
MARGIN = 30.0
"""Seconds after which the watermark has passed a bucket's end."""


async def publish(url: str, messages: int, devices: int, seconds: float) -> None:
    """Publish messages evenly."""
    client = await connect(url)
    started, sent = time.monotonic(), 0
    async with Publisher(client) as publisher:
        while sent < messages:
            due = min(messages, int(messages * (time.monotonic() - started + STEP) / seconds))
            numbers = range(sent, due)
            subjects = pa.array([f"orders.device{number % devices:02}" for number in numbers])
            payloads = pa.array([b'{"reading": %d, "unit": "C", "ok": true}' % number for number in numbers])
            if len(subjects):
                await publisher.publish_batch(subjects, payloads)
            sent = due
            await asyncio.sleep(STEP)
    await client.close()


async def add_stream(url: str) -> None:
    """Make the stream."""
    client = await connect(url)
    await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"])
    await client.close()


def surplus(names: Sequence[ObjectName], ended: float) -> int:
    """Count the objects beyond one for each key and interval, of buckets that began before `ended`."""
    groups = Counter(name.group for name in names if name.bucket < ended)
    return sum(groups.values()) - len(groups)


def maintain(path: Path, *options: str, log: Path) -> subprocess.Popen[bytes]:
    """Start `jetcapture maintain`."""
    with log.open("ab") as output:
        words = [sys.executable, "-m", "jetcapture_py", "maintain", str(path), *options]
        return subprocess.Popen(words, stdout=output, stderr=output)


def report(archive: Path, started: float, ended: float) -> None:
    """Print how many objects there are."""
    names = objects(archive)
    print(
        f"{(time.time() - started) / MINUTE:>6.1f} min {len(names):>6,} objects for"
        f" {len({name.group for name in names}):>6,} keys and intervals,"
        f" {surplus(names, ended):>6,} to be merged in complete buckets,"
        f" {sum(name.rows for name in names):>9,} rows",
        flush=True,
    )


def main() -> None:
    """Publish, capture and maintain at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--messages", type=int, default=170_703)
    parser.add_argument("--devices", type=int, default=50)
    parser.add_argument("--every", default="1m")
    parser.add_argument("--interval", default="15m")
    parser.add_argument("--after", default="10m")
    parser.add_argument("--grace", default="5m")
    parser.add_argument("--table", action="store_true", help="keep an Iceberg table, too")
    chosen = parser.parse_args()
    interval, after = parse_duration(chosen.interval), parse_duration(chosen.after)
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory, "nats")) as server:
        home, archive = Path(directory), Path(directory, "archive")
        kept: dict[str, Any] = {"compact": {"after": chosen.after, "grace": chosen.grace}}
        if chosen.table:
            catalog = {"type": "sql", "uri": f"sqlite:///{home}/catalog.db"}
            kept["table"] = {"name": "bench.devices", "catalog": catalog}
        sections = settings(server.url, archive, block={"interval": chosen.interval}, maintain=kept)
        asyncio.run(add_stream(server.url))
        log = home / "maintain.log"
        with Command(home, sections) as capture:
            capture.start()
            started = time.time()
            service = maintain(capture.path, "--every", chosen.every, log=log)
            seconds = chosen.minutes * MINUTE

            async def watch() -> None:
                work = asyncio.create_task(publish(server.url, chosen.messages, chosen.devices, seconds))
                while not work.done():
                    await asyncio.wait([work], timeout=MINUTE)
                    await asyncio.to_thread(report, archive, started, time.time() - interval - after)
                await work

            asyncio.run(watch())
            complete = (time.time() // interval + 1) * interval + after + MARGIN
            while time.time() < complete:
                time.sleep(min(MINUTE, complete - time.time() + 1))
                report(archive, started, time.time() - interval - after)
            service.send_signal(signal.SIGTERM)
            if service.wait():
                raise SystemExit(log.read_text())
            capture.drain()
            print("all is stored, the last bucket is complete; one more pass:", flush=True)
            maintain(capture.path, log=log).wait()
            report(archive, started, time.time())
            words = [sys.executable, "-m", "jetcapture_py", "verify", str(capture.path), "--deep"]
            words += ["--table"] if chosen.table else []
            print(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False).stdout)
        text = log.read_text()
        failed = [line for line in text.splitlines() if "maintain.failed" in line]
        print(f"{text.count('maintain.done')} passes, {len(failed)} failed", *failed, sep="\n")


if __name__ == "__main__":
    main()
