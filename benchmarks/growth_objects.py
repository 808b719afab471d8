"""Whether the hundred-thousandth object of an archive costs those who read it what the first one did; see `growth`.

An archive of small objects: five for each of 20 keys in every quarter of an hour, with ten messages each. The keys'
sequences alternate, so they do not follow from names. The stream no longer has the messages.

As a program, measures what Spark jobs plan: `python -m benchmarks.growth_objects ARCHIVE`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import nats
import numpy as np
import psutil
import pyarrow as pa
import yaml
from nats.js.api import AckPolicy, ConsumerConfig

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import BlockId
from jetcapture_py.archive.schema import ENVELOPE
from jetcapture_py.archive.writer import EncodedBlock, Encoder
from tests.support.archives import put
from tests.support.nats_server import NatsServer
from tests.support.running import CONSUMER, STREAM, settings

KEYS, OBJECTS_OF_A_KEY, ROWS = 20, 5, 10
INTERVAL = 900
START = 1_700_000_100 // INTERVAL * INTERVAL
POLL = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU seconds, a JVM's included, and the most resident bytes, of Python alone, that something took."""

    what: str
    cpu: float
    peak: int


def blocks(objects: int, created: str) -> Iterator[EncodedBlock]:
    """So many objects of the stream that was created then."""
    encoder = Encoder(stream=STREAM, interval=INTERVAL, compression="zstd", stream_created=created, consumer=CONSUMER)
    in_a_bucket = KEYS * OBJECTS_OF_A_KEY
    pause = INTERVAL * 1_000_000 // (in_a_bucket * ROWS)
    for index in range(objects):
        row, key = divmod(index, KEYS)
        seqs = row * KEYS * ROWS + 1 + key + KEYS * np.arange(ROWS)
        columns = {
            layout.STREAM: [STREAM] * ROWS,
            layout.SUBJECT: [f"orders.{key}"] * ROWS,
            layout.SEQ: seqs,
            layout.TIMESTAMP: START * 1_000_000 + (seqs - 1) * pause,
            layout.DELIVERED: [1] * ROWS,
            layout.PAYLOAD: [b"%d" % seq for seq in seqs],
        }
        arrays = [pa.array(columns.get(field.name, [None] * ROWS), field.type) for field in ENVELOPE]
        block = BlockId(key=f"key{key:02}", bucket=START + index // in_a_bucket * INTERVAL)
        yield encoder.encode(block, "age", [pa.RecordBatch.from_arrays(arrays, schema=ENVELOPE)])


async def acknowledged(url: str, messages: int) -> str:
    """Make a stream of which so many messages are acknowledged and gone; when it was created, as the server says."""
    client = await nats.connect(url)
    stream = client.jetstream()
    await stream.add_stream(name=STREAM, subjects=["orders.>"], first_seq=messages + 1)
    await stream.add_consumer(STREAM, ConsumerConfig(durable_name=CONSUMER, ack_policy=AckPolicy.EXPLICIT))
    answer = await client.request(f"$JS.API.STREAM.INFO.{STREAM}")
    await client.close()
    return str(json.loads(answer.data)["created"])


def peak(process: int) -> int:
    """Return the peak memory of a process in bytes; getrusage would begin with that of its parent."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) << 10 if found else 0


def proven(config: Path, *options: str) -> Cost:
    """Return the cost of `jetcapture verify`."""
    command = [sys.executable, "-m", "jetcapture_py", "verify", str(config), *options]
    most = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            most = max(most, peak(process.pid))
            time.sleep(POLL)
        process.returncode = os.waitstatus_to_exitcode(ended[1])
    if process.returncode:
        raise SystemExit("the archive is not proven to be complete")
    return Cost(what=" ".join(["verify", *options]), cpu=ended[2].ru_utime + ended[2].ru_stime, peak=most)


def measure(objects: int, *, deep: bool) -> list[Cost]:
    """Make an archive of so many objects, and prove and plan it."""
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory, "nats")) as server:
        root, config = Path(directory, "archive"), Path(directory, "config.yaml")
        for block in blocks(objects, asyncio.run(acknowledged(server.url, objects * ROWS))):
            put(root, block)
        config.write_text(yaml.safe_dump(settings(server.url, root)))
        costs = [proven(config), proven(config, "--json"), *([proven(config, "--deep")] if deep else [])]
        planned = subprocess.run(
            [sys.executable, "-m", "benchmarks.growth_objects", str(root)],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return costs + [Cost(**cost) for cost in json.loads(planned.stdout)]


def report(counts: list[int], *, deep: bool) -> None:
    """Print the figures of archives of so many objects."""
    for objects in counts:
        for cost in measure(objects, deep=deep):
            per_object = cost.cpu / objects * 1000
            print(
                f"{objects:>9,} objects  {cost.what:22} {cost.cpu:>7.2f} CPU s {per_object:>6.2f} ms/object"
                f" {cost.peak >> 20:>5,} MiB",
                flush=True,
            )


def planned(archive: str) -> list[Cost]:
    """What Spark jobs do before they read messages: find the objects, and decide what is read and merged together."""
    from jetcapture_py.compaction.files import Files
    from jetcapture_py.compaction.plan import TARGET_SIZE, units
    from jetcapture_py.store.archive import ArchiveFiles
    from spark_jobs.archive import read_archive
    from spark_jobs.job import session

    spark = session("growth")
    spark.range(1).collect()
    this = psutil.Process()
    costs = []

    def cpu() -> float:
        times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
        return sum(used.user + used.system for used in times)

    def timed(what: str, work: Callable[[], object]) -> None:
        before = cpu()
        work()
        costs.append(Cost(what=what, cpu=cpu() - before, peak=peak(this.pid)))

    timed("compact: plan", lambda: list(units(Files(ArchiveFiles(archive, {})).find([STREAM]), TARGET_SIZE)))
    timed("read_archive: plan", lambda: read_archive(spark, archive, STREAM))
    spark.stop()
    return costs


if __name__ == "__main__":
    json.dump([asdict(cost) for cost in planned(sys.argv[1])], sys.stdout)
