"""Reads without Spark of an archive that is captured, compacted, and killed meanwhile; and of a large one."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nats.errors import Error as NatsError

from jetcapture_py import read_archive
from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.plan import units
from jetcapture_py.compaction.unit import CompactionSpec, Merged, compact_unit
from jetcapture_py.errors import VanishedError
from jetcapture_py.retry import retried
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.store.removal import remove
from tests.support.archives import write_parquet
from tests.support.nats_server import NatsServer
from tests.support.running import CONSUMER, STREAM, Command, connection, settings

SECONDS = float(os.environ.get("JETCAPTURE_READING_SECONDS", "20"))
"""How long the archive is read while it changes; 600 for an endurance test."""
COMPACTIONS, KILLS = 10.0, 7.0
"""Seconds between compactions, and between kills."""
COMMANDS = 5
"""One of this number of reads is by the command."""

pytestmark = pytest.mark.exhaustive


def compact(root: str) -> None:
    """Compact all that is there as the job does, without a grace for those who read."""
    files = Files(ArchiveFiles(root, {}))
    spec = CompactionSpec(target=8 << 20, closed=time.time() + 10 * 86_400)
    for unit in units(files.find([STREAM]), spec.target):
        for outcome in compact_unit(files, spec, unit.sources):
            if isinstance(outcome, Merged):
                remove(files.archive, outcome.removals)


def queried(root: str, output: Path) -> pa.Table:
    """The sequences, by `jetcapture query`."""
    sql = f"SELECT {layout.SEQ} FROM archive"
    words = [sys.executable, "-m", "jetcapture_py", "query", root, STREAM, sql]
    done = subprocess.run([*words, "--format", "parquet", "--output", str(output)], capture_output=True, text=True)
    if "read it again" in done.stderr:
        raise VanishedError(done.stderr)
    assert done.returncode == 0, done.stderr
    return pq.read_table(output)


class Traffic(threading.Thread):
    """Publishes numbers, and asks how far they are acknowledged."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.published = 0
        """How many messages the stream has at most."""
        self.acknowledged = 0
        """The sequence up to which all messages are acknowledged."""
        self.ended = threading.Event()

    def run(self) -> None:
        asyncio.run(self._publish())

    async def _publish(self) -> None:
        async with connection(self._url) as client:
            stream = client.jetstream()
            await stream.add_stream(name=STREAM, subjects=["orders.>"])
            while not self.ended.is_set():
                with contextlib.suppress(NatsError, TimeoutError):  # a busy machine
                    for _ in range(50):
                        self.published += 1
                        await stream.publish("orders.new", b'{"n": 1}')
                with contextlib.suppress(NatsError, TimeoutError):  # no consumer yet
                    info = await stream.consumer_info(STREAM, CONSUMER)
                    assert info.ack_floor is not None
                    self.acknowledged = info.ack_floor.stream_seq


@pytest.mark.timeout(SECONDS + 300)
def test_every_read_has_each_message_once_while_the_archive_is_captured_compacted_and_killed(
    nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    server, root, chance = nats_server(), tmp_path / "archive", random.Random(1)
    traffic = Traffic(server.url)
    traffic.start()
    while not traffic.published:
        time.sleep(0.05)
    configuration = settings(
        server.url, root, block={"interval": "1d", "max_age": "1s"}, source={"ack_wait": "5s"}, key="all"
    )
    compaction: BaseProcess | None = None
    reads = prefixes = kills = compactions = 0
    with Command(tmp_path, configuration).start() as capture:
        while not traffic.acknowledged:
            assert capture.process.poll() is None, capture.log
            time.sleep(0.05)
        began = time.monotonic()
        next_compaction, next_kill = began + 1, began + KILLS
        while time.monotonic() < began + SECONDS:
            now = time.monotonic()
            if now >= next_compaction and (compaction is None or not compaction.is_alive()):
                compaction = multiprocessing.get_context("spawn").Process(target=compact, args=(str(root),))
                compaction.start()
                compactions += 1
                next_compaction = now + COMPACTIONS
            if now >= next_kill:
                capture.kill()
                if compaction is not None and chance.random() < 0.3:
                    compaction.kill()
                capture.start()
                kills += 1
                next_kill = now + KILLS
            stored = traffic.acknowledged
            if reads % COMMANDS:
                table = retried(lambda: read_archive(str(root), STREAM, columns=[layout.SEQ]).read_all())
            else:
                table = retried(lambda: queried(str(root), tmp_path / "read.parquet"))
            seqs = np.sort(table.column(layout.SEQ).to_numpy())
            assert len(np.unique(seqs)) == len(seqs)
            assert np.array_equal(seqs[:stored], np.arange(1, stored + 1))
            assert seqs[-1] <= traffic.published
            reads += 1
            prefixes += int(seqs[-1] == len(seqs))
        traffic.ended.set()
        traffic.join()
    if compaction is not None:
        compaction.join()
    print(f"{reads} reads, {prefixes} of all messages up to one, {kills} kills, {compactions} compactions")
    assert min(reads, kills, compactions) > 0


READ = """
import sys
from jetcapture_py import read_archive
from tests.support.memory import peak_resident
print(sum(batch.num_rows for batch in read_archive(sys.argv[1], "ORDERS", dedupe=sys.argv[2])))
print(peak_resident())
"""


def test_five_million_rows_are_read_in_bounded_memory(tmp_path: Path) -> None:
    objects, rows = 100, 50_000
    noise = np.random.default_rng(0)
    payloads = pa.py_buffer(noise.bytes(100 * rows))
    for number in range(objects):
        seqs = np.arange(number * rows + 1, (number + 1) * rows + 1)
        bucket = 900 * (number // 10)
        table = pa.table(
            {
                layout.STREAM: ["ORDERS"] * rows,
                layout.SEQ: seqs,
                layout.TIMESTAMP: pa.array(bucket * 1_000_000 + seqs, pa.timestamp("us", "UTC")),
                layout.NANOS: pa.nulls(rows, pa.int16()),
                layout.PAYLOAD: pa.Array.from_buffers(pa.binary(100), rows, [None, payloads]).cast(pa.binary()),
                layout.KEY: ["ab"[number % 2]] * rows,
                "amount": noise.random(rows),
            }
        ).replace_schema_metadata({"jetcapture.interval": "86400"})
        name = ObjectName(
            stream="ORDERS",
            key="ab"[number % 2],
            bucket=bucket,
            first_seq=int(seqs[0]),
            last_seq=int(seqs[-1]),
            rows=rows,
            digest=f"{number:016x}",
        )
        (tmp_path / name.directory).mkdir(parents=True, exist_ok=True)
        write_parquet(table, tmp_path / name.path)
    for dedupe in ("auto", "full"):
        done = subprocess.run([sys.executable, "-c", READ, str(tmp_path), dedupe], capture_output=True, check=True)
        count, peak = map(int, done.stdout.split())
        assert count == objects * rows
        assert peak < 500 << 20
        print(dedupe, peak >> 20, "MiB")
