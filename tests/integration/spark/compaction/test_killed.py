"""Compaction is killed again and again while it works, and while others read."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.compaction.plan import TOLERANCE
from spark_jobs.archive import read_archive
from spark_jobs.compact import compact
from tests.integration.spark.conftest import HOUR, Archive

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

TARGET = 64 << 10
GRACE = 2
STARTS = 600.0
WAITS = {"writing": 0.5, "waiting": 1.0, "removing": 0.01}
"""Seconds within which a compaction is killed after what it began."""
SOME = ("writing", "removing")
EVERY = ("writing", "writing", "waiting", "removing", "removing")


def fill(archive: Archive, objects: int) -> int:
    """Small objects of four groups, some of which overlap, repeat others, or are of a recreated stream. Returns how
    many messages there are."""
    chance = random.Random(7)
    messages = 0
    for key, bucket in (("a", HOUR), ("a", HOUR + 900), (None, HOUR), (None, HOUR + 900)):
        first, last = 1, [1]
        for number in range(objects // 4):
            kind, times = chance.random(), None
            seqs = list(range(first, first + chance.randint(20, 60)))
            if kind < 0.1:
                seqs = last[::2]
            elif kind < 0.2:
                seqs, times = last, [bucket * 1_000_000 + 500_000_000 + number] * len(last)
                messages += len(seqs)
            elif kind < 0.5:
                seqs = list(range(max(1, first - 15), seqs[-1] + 1))
            archive.write(seqs, key, bucket=bucket, timestamps=times, payloads=[chance.randbytes(60) for _ in seqs])
            first, last = max(first, seqs[-1] + 1), seqs
        messages += first - 1
    return messages


def names(root: Path) -> list[ObjectName]:
    found = (f"{directory}/{file}" for directory, _, files in os.walk(root) for file in files)
    return [name for name in (layout.parse_path(path[len(f"{root}/") :]) for path in found) if name is not None]


def sizes_of_groups(root: Path) -> list[list[int]]:
    """The sizes of each group's objects, in the order of their sequences."""
    found = sorted(names(root), key=lambda name: (repr(name.group), name.first_seq))
    groups = groupby(found, key=lambda name: name.group)
    return [[(root / name.path).stat().st_size for name in group] for _, group in groups]


class Reader(threading.Thread):
    """Counts the archive's messages by the rule of `layout`, over and over, until it is told to stop."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self._known: dict[str, Any] = {}
        self._stopped = threading.Event()
        self._error: Exception | None = None
        self._counts = [self._count()]  # and everything is read before the first object changes

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join()

    def run(self) -> None:
        try:
            while not self._stopped.wait(0.1):
                self._counts.append(self._count())
        except Exception as error:
            self._error = error

    def counts(self) -> list[int]:
        """What it counted."""
        if self._error is not None:
            raise self._error
        return self._counts

    def _count(self) -> int:
        alone, shared = layout.split_overlapping(names(self._root))
        groups: dict[object, list[Any]] = {}
        for name in shared:
            groups.setdefault(name.group, []).append(self._messages(name))
        once = sum(len(self._messages(name)) for name in alone)
        return once + sum(len(np.unique(np.concatenate(each))) for each in groups.values())

    def _messages(self, name: ObjectName) -> Any:
        """A number for each message of an object; objects do not change, so each is read once."""
        if name.path not in self._known:
            table = pq.ParquetFile(self._root / name.path).read([layout.SEQ, layout.TIMESTAMP])
            times = table[layout.TIMESTAMP].cast(pa.int64()).to_numpy() - name.bucket * 1_000_000
            self._known[name.path] = (table[layout.SEQ].to_numpy() << 32) + times
        return self._known[name.path]


class Job:
    """A compaction in processes of its own."""

    def __init__(self, url: str, log: Path) -> None:
        words = ["--target-size", str(TARGET), "--older-than", "0s", "--grace", f"{GRACE}s"]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "spark_jobs.compact", url, "ORDERS", *words],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def killed_when(self, condition: Callable[[], bool], delay: float) -> bool:
        """Kill all of it `delay` seconds after `condition` has come true; whether it was still running."""
        deadline = time.monotonic() + STARTS
        while not condition() and self._process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(delay)
        running = self._process.poll() is None
        self._process.kill()
        for process in psutil.process_iter():  # Spark's workers are a process group of their own, of the same session
            try:
                if os.getsid(process.pid) == self._process.pid:
                    os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()
        return running


@pytest.mark.exhaustive
@pytest.mark.parametrize(("count", "moments"), [(400, SOME), (2000, EVERY)], ids=["400", "2000"])
def test_killed_at_every_stage_and_run_again_every_message_is_there_once_and_no_reader_counts_wrong(
    spark: SparkSession, archive: Archive, tmp_path: Path, count: int, moments: tuple[str, ...]
) -> None:
    messages = fill(archive, count)
    sources = {name.path for name in names(archive.root)}
    assert len(sources) == count
    directories = {(archive.root / path).parent for path in sources}

    def objects() -> int:
        return sum(len(os.listdir(directory)) for directory in directories)  # noqa: PTH208 - the quickest way

    def read() -> int:
        return read_archive(spark, archive.url, "ORDERS").count()

    chance = random.Random(5)
    log = tmp_path / "compact.log"
    killed = []
    with Reader(archive.root) as reader:
        for moment in moments:
            before = objects()
            reached = {
                "writing": lambda before=before: objects() > before or b"waiting" in log.read_bytes(),
                "waiting": lambda: b"waiting" in log.read_bytes(),
                "removing": lambda before=before: objects() < before,
            }[moment]
            running = Job(archive.url, log).killed_when(reached, chance.uniform(0, WAITS[moment]))
            killed.append((moment, running, objects()))
            if moment == "waiting":
                assert read() == messages
        summary = compact(spark, archive.url, "ORDERS", target_size=TARGET, older_than=0, grace=0)
        assert summary.errors == ()
        assert read() == messages
    counts = reader.counts()
    assert len(counts) > 20
    assert set(counts) == {messages}
    assert [running for _, running, _ in killed].count(True) >= len(moments) - 1, killed
    assert not sources & {name.path for name in names(archive.root)}
    raw = [
        pq.ParquetFile(archive.root / name.path).read([layout.SEQ, layout.TIMESTAMP]) for name in names(archive.root)
    ]
    assert sum(table.num_rows for table in raw) == messages
    sizes = sizes_of_groups(archive.root)
    assert sum(map(len, sizes)) >= count // 50
    for group in sizes:
        assert max(group) <= TARGET * TOLERANCE, sizes
        for first, second in pairwise(group):  # a small object stays only beside one that would become too large
            assert min(first, second) >= TARGET / TOLERANCE or first + second > TARGET * TOLERANCE, sizes
