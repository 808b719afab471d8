"""An archive and its stream as one table while they are published to, captured, maintained, and cut short.

JETCAPTURE_TEST_SECONDS says for how long; a minute has a kill of the query, and three seconds a batch read.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from nats.js.api import StreamConfig

from jetcapture_py.archive import layout, watermark
from spark_jobs.archive import read_stream
from tests.integration.spark.live import Live
from tests.support.publishing import Publisher, connect
from tests.support.running import CONSUMER, STREAM, Command, objects, settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECONDS = int(os.environ.get("JETCAPTURE_TEST_SECONDS", "30"))
READS, KILLS = max(3, SECONDS // 3), max(2, SECONDS // 60)
PUBLISHERS, GROUP = 3, 10
"""Messages that a publisher sends at once."""
KEPT = 600 + 5 * SECONDS
"""Messages that the stream keeps from the middle of the test on."""
TIMEOUT = 600 + SECONDS
SECTIONS: dict[str, Any] = {
    "decode": {"format": "json", "columns": {"publisher": "int32", "n": "int64"}},
    "key": "{publisher}",
    "block": {"interval": "30s", "max_age": "3s"},
    "maintain": {"compact": {"after": "0s", "grace": f"{max(60, SECONDS // 5)}s"}},
}


class World:
    """A stream with publishers, a capture and maintenance of its archive, and a streaming query that is killed."""

    def __init__(self, live: Live, directory: Path) -> None:
        self.live, self.directory, self.root = live, directory, directory / "archive"
        self.capture = Command(directory, settings(live.server.url, self.root, **SECTIONS), "capture")
        self.sent = [0] * PUBLISHERS
        self.stored = self.archived = self.query_lives = 0
        """Sequences up to which everything is in the stream, and in the archive, at the least; starts of the query."""
        self.stopping = threading.Event()

    # ------------------------------------------------------------------ the stream

    def publish(self) -> None:
        """Publish until told to stop, but nothing that the stream could drop before the watermark covers it."""
        asyncio.run(self._publish())

    async def _publish(self) -> None:
        client = await connect(self.live.server.url)
        try:
            await asyncio.gather(self._watch(client), *(self._publish_as(number) for number in range(PUBLISHERS)))
        finally:
            await client.close()

    async def _publish_as(self, number: int) -> None:
        client = await connect(self.live.server.url)
        async with Publisher(client) as publisher:
            while not self.stopping.is_set():
                if self.stored - self.archived < KEPT // 2:
                    for _ in range(GROUP):
                        payload = json.dumps({"publisher": number, "n": self.sent[number]}).encode()
                        await publisher.publish(f"orders.{number}", payload)
                        self.sent[number] += 1
                    await publisher.flush()
                await asyncio.sleep(random.uniform(0, 0.6))
        await client.close()

    async def _watch(self, client: Any) -> None:
        """Shorten the stream's retention in the middle."""
        stream, middle, shortened = client.jetstream(), time.monotonic() + SECONDS / 2, False
        mark = self.root / watermark.path(STREAM, CONSUMER)
        while not self.stopping.is_set():
            if mark.exists():
                self.archived = watermark.ConsumerWatermark.decode(mark.read_bytes(), STREAM, "").seq
            state = (await stream.stream_info(STREAM)).state
            self.stored = state.last_seq
            if not shortened and time.monotonic() > middle and self.stored - self.archived < KEPT // 2:
                await stream.update_stream(StreamConfig(name=STREAM, subjects=["orders.>"], max_msgs=KEPT))
                shortened = True
            await asyncio.sleep(0.1)
        assert shortened

    # ------------------------------------------------------------------ the streaming query

    def kill_the_query(self) -> None:
        """Kill the query and its JVM again and again, after a batch or more of each life."""
        while self.query_lives < KILLS and not self.stopping.is_set():
            self._live_once(self.batches() + random.randrange(1, 4))
            self.query_lives += 1

    def _live_once(self, batches: int) -> None:
        with self.query() as process:
            wait(lambda: self.stopping.is_set() or self.batches() >= batches, "it does batches", process)
            self.stopping.wait(random.uniform(0, SECONDS / KILLS / 2))  # at any moment of a batch
            assert process.poll() is None, (self.directory / "query.log").read_text()

    @contextmanager
    def query(self, *once: str) -> Iterator[subprocess.Popen[bytes]]:
        """A process with the query, which is killed at the end of the block."""
        words = [sys.executable, "-m", "tests.integration.spark.stream_to_batches", str(self.capture.path)]
        with (self.directory / "query.log").open("ab") as log:
            process = subprocess.Popen(
                [*words, str(self.directory), *once], stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # it has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def batches(self) -> int:
        commits = self.directory / "checkpoint/commits"
        names = [path.name for path in commits.iterdir()] if commits.exists() else []
        return 1 + max((int(name) for name in names if name.isdecimal()), default=-1)  # Spark removes old ones

    def check_query(self) -> None:
        """Every message is in one batch, later ones in later batches."""
        last, found = 0, set()
        for batch in sorted((self.directory / "batches").iterdir()):
            rows = pq.read_table(batch).to_pylist()
            seqs = sorted(row[layout.SEQ] for row in rows)
            assert seqs == list(range(last + 1, last + 1 + len(seqs))), (batch.name, last)
            last += len(seqs)
            found |= {(row["publisher"], row["n"]) for row in rows}
        assert last == sum(self.sent)
        assert found == {(number, n) for number, count in enumerate(self.sent) for n in range(count)}

    # ------------------------------------------------------------------ batch reads

    def check_read(self, spark: SparkSession) -> int:
        """Read everything: the messages up to one sequence, which is the last one when the read begins, or later."""
        known = self.stored
        frame = read_stream(spark, config=self.capture.path)
        count, distinct, messages, first, last = frame.selectExpr(
            "count(*)", "count(DISTINCT _nats_seq)", "count(DISTINCT publisher, n)", "min(_nats_seq)", "max(_nats_seq)"
        ).collect()[0]
        assert (count, distinct, messages, first) == (last, last, last, 1)
        assert last >= known
        return int(last)


def wait(condition: Callable[[], bool], what: str, process: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process is None or process.poll() is None, f"it ended before {what}"
        assert time.monotonic() < deadline, f"it never was so that {what}"
        time.sleep(0.05)


@contextmanager
def maintained(world: World) -> Iterator[None]:
    words = [sys.executable, "-m", "jetcapture_py", "maintain", str(world.capture.path), "--every", "20s"]
    with (world.directory / "maintain.log").open("ab") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.spark
@pytest.mark.exhaustive
def test_reads_are_exact_while_everything_changes(spark: SparkSession, live: Live, tmp_path: Path) -> None:
    world, began, last = World(live, tmp_path), time.monotonic(), 0
    with ThreadPoolExecutor(2) as threads, world.capture.start(), maintained(world):
        try:
            publishing = threads.submit(world.publish)
            wait(lambda: publishing.done() or world.archived > 0, "something is archived")
            killing = threads.submit(world.kill_the_query)
            for reads in itertools.count(1):
                if reads > READS and time.monotonic() > began + SECONDS and killing.done():
                    break
                assert not publishing.done(), publishing.result()
                last, before = world.check_read(spark), last
                assert last >= before
            killing.result()
        finally:
            world.stopping.set()
        publishing.result()
        print(f"{reads - 1} reads, {world.query_lives} kills, {sum(world.sent)} messages in "
              f"{time.monotonic() - began:.0f} s, {len(objects(world.root))} objects")  # fmt: skip
        with world.query("--once") as process:
            assert process.wait(TIMEOUT) == 0, (tmp_path / "query.log").read_text()
        world.check_query()
        assert world.check_read(spark) == sum(world.sent)
        world.capture.drain()
        live.purge()  # everything is in the archive alone
        assert world.check_read(spark) == sum(world.sent)
