"""Reads of held DataFrames, views and tables while the archive changes: is each right, or says "read it again"?

    python -m tests.held_reads --count 500 [--connect [sc://localhost:15002]] [--seed 1]

One thread stores objects as a capture does, some of them with copies of messages that are stored already; another
compacts them, again and again. Meanwhile DataFrames of `read_archive`, views, cached DataFrames and cached tables are
planned, kept, read, refreshed, and their caches evicted at random. What is read has to be the messages that were stored
when it was planned, each once, and the same at every later read; or the read has to fail.

`--connect` does it over Spark Connect, with a server of its own or a given one, which forgets plans after some other
queries. An object that is gone ends most queries with Spark's own error, which is counted apart.
Exit code 1 when a read was wrong, or failed with an error that doesn't say what to do.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.logger import PySparkLogger
from pyspark.sql import DataFrame, SparkSession

from jetcapture_py.archive import layout
from jetcapture_py.maintain.compact import CompactionSettings
from spark_jobs.archive import archive_view, read_archive
from spark_jobs.compact import compact
from tests.support.archives import encoded
from tests.support.connect import connect_server

logger = logging.getLogger(__name__)

STREAM = "ORDERS"
KEYS = ("eu", "us", "apac")
BUCKETS = tuple(range(1_700_000_100, 1_700_000_100 + 3 * 900, 900))
OTHER_QUERIES = 40
"""More than the plans of a session that a Spark Connect server keeps."""
RIGHT, AGAIN, GONE = "right", "read it again", "an object is gone"


class Capture:
    """Stores objects under `root`. `begun` and `done` have the messages of each key: of all that were or are being
    stored, and of all that were."""

    def __init__(self, root: Path, chance: random.Random) -> None:
        self.begun: dict[str, set[int]] = {key: set() for key in KEYS}
        self.done: dict[str, set[int]] = {key: set() for key in KEYS}
        self._root, self._chance, self._last = root, chance, 0

    def store(self) -> None:
        """Store a block, in the way of a local store: nothing of it is to be seen before all of it is there."""
        key, bucket = self._chance.choice(KEYS), self._chance.choice(BUCKETS)
        here = range(BUCKETS.index(bucket), self._last, len(BUCKETS))
        again = [seq for seq in sorted(self.done[key] & set(here))[-40:] if self._chance.random() < 0.5]
        new = [seq for seq in range(self._last, self._last + 60) if seq % len(BUCKETS) == BUCKETS.index(bucket)]
        self._last += 60
        seqs = {*again, *new} if self._chance.random() < 0.5 else set(new)
        block = encoded(((seq, bucket * 1_000_000 + seq) for seq in seqs), key=key, bucket=bucket)
        self.begun[key] |= seqs
        path = self._root / block.name.path
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{path.name}.tmp")
        half.write_bytes(block.data)
        half.rename(path)
        self.done[key] |= seqs


@dataclass
class Held:
    """Something that is kept, and what it has to read: `least` and perhaps more of `most`, as it did at `first`."""

    frame: DataFrame
    view: str | None
    least: set[int]
    most: set[int]
    first: list[int] | None = None
    reads: int = 0

    def check(self, found: list[int]) -> str:
        if self.first is None:
            if len(found) != len(set(found)) or not self.least <= set(found) <= self.most:
                missing, more = len(self.least - set(found)), len(set(found) - self.most)
                return f"{len(found)} rows, {len(set(found))} messages, {missing} missing, {more} unknown"
            self.first = found
        return RIGHT if found == self.first else f"{len(found)} rows in place of {len(self.first)}"


@dataclass
class Reader:
    """Plans, keeps and reads; `outcomes` counts how the reads ended."""

    spark: SparkSession
    root: Path
    capture: Capture
    chance: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)
    held: list[Held | None] = field(default_factory=lambda: [None] * 8)

    def step(self) -> None:
        """Read something that is held, after something was done to what is kept of it."""
        place = self.chance.randrange(len(self.held))
        try:
            held = self.held[place] = self.held[place] or self._plan(place)
            self._disturb(held)
            outcome = held.check(self._read(held))
        except Exception as error:  # whatever Spark or Python raises is an outcome
            outcome = _said(error)
            if self.chance.random() < 0.7:  # else it has to go on saying so
                self.held[place] = None
        self.outcomes[outcome] += 1

    def _plan(self, place: int) -> Held:
        keys = [self.chance.choice(KEYS)] if self.chance.random() < 0.3 else list(KEYS)
        read: dict[str, Any] = {
            "keys": keys if len(keys) == 1 else None,
            "dedupe": self.chance.choice(("auto", "auto", "full")),
            "engine": self.chance.choice(("spark", "spark", "spark", "arrow")),
        }
        least = set[int]().union(*(self.capture.done[key] for key in keys))
        view = f"held_{place}" if place % 2 else None
        if view is None:
            frame = read_archive(self.spark, str(self.root), STREAM, **read)
        else:
            frame = archive_view(self.spark, str(self.root), STREAM, view, **read)
        most = set[int]().union(*(self.capture.begun[key] for key in keys))
        if place in (2, 6):
            frame.cache()
        if place in (3, 7):
            self.spark.sql(f"CACHE {'LAZY ' * (place == 7)}TABLE {view}").collect()
        return Held(frame, view, least, most)

    def _disturb(self, held: Held) -> None:
        done = self.chance.random()
        if done < 0.25 and held.view:
            self.spark.sql(f"REFRESH TABLE {held.view}").collect()
        elif done < 0.35:
            self.spark.catalog.refreshByPath(f"{self.root}/{STREAM}")
        elif done < 0.45:
            self.spark.catalog.clearCache()
        elif done < 0.55:
            held.frame.unpersist()
        elif done < 0.65:
            for number in range(OTHER_QUERIES):
                self.spark.range(number).isEmpty()

    def _read(self, held: Held) -> list[int]:
        held.reads += 1
        if held.view is None or self.chance.random() < 0.2:
            frame = held.frame
        elif self.chance.random() < 0.5:
            frame = self.spark.table(held.view)
        else:
            frame = self.spark.sql(f"SELECT * FROM {held.view} WHERE {layout.SEQ} >= 0")
        return sorted(frame.select(layout.SEQ).toArrow().column(0).to_pylist())


def _said(error: Exception) -> str:
    text = str(error)
    if "read it again" in text:
        return AGAIN
    # a local file that goes after Spark opened it, and before it is opened once more for reading, is not called missing
    return GONE if any(name in text for name in ("FILE_NOT_EXIST", "PATH_NOT_FOUND", "NoSuchFileException")) else text


def held_reads(spark: SparkSession, root: Path, count: int, seed: int) -> Counter[str]:
    """How reads ended, the archive at `root` changing all the time.

    At least `count` reads, of which one was right, and at least one compaction.
    """
    capture = Capture(root, random.Random(seed))
    for _ in range(30):
        capture.store()
    reader = Reader(spark, root, capture, random.Random(seed + 1))
    chance, compactions = random.Random(seed + 2), 0

    def compacted() -> None:
        nonlocal compactions
        summary = compact(spark, str(root), STREAM, CompactionSettings(after=0, grace=chance.choice((0, 1, 3))))
        assert not summary.errors, summary.errors
        compactions += 1

    with _again_and_again(capture.store, 0.3), _again_and_again(compacted, 5):
        number = 0
        while number < count or not (wrong(reader.outcomes) or (compactions and reader.outcomes[RIGHT])):
            number += 1
            reader.step()
            if number % 20 == 0:
                logger.info("%d reads: %s", number, dict(reader.outcomes))
    return reader.outcomes


@contextlib.contextmanager
def _again_and_again(work: Callable[[], None], pause: float) -> Iterator[None]:
    """Do `work` in a thread, with pauses; what it raises is raised at the end."""
    stopped, errors = threading.Event(), list[Exception]()

    def run() -> None:
        try:
            while not stopped.wait(pause):
                work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
    if errors:
        raise errors[0]


def wrong(outcomes: Counter[str]) -> list[str]:
    """What no read may end with."""
    return [outcome for outcome in outcomes if outcome not in (RIGHT, AGAIN, GONE)]


@contextlib.contextmanager
def _session(home: Path, connect: str | None) -> Iterator[SparkSession]:
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    with contextlib.ExitStack() as stack:
        if connect is not None:
            url = connect or stack.enter_context(connect_server(home))
            spark = SparkSession.builder.remote(url).getOrCreate()
        else:
            settings = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2"}
            builder = SparkSession.builder.master("local[2]").config("spark.sql.warehouse.dir", str(home))
            spark = builder.config(map=settings).getOrCreate()
            spark.sparkContext.setLogLevel("OFF")
        yield spark
        spark.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--connect", nargs="?", const="", metavar="URL", help="over Spark Connect")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True
    with tempfile.TemporaryDirectory(prefix="jetcapture-held-") as directory:
        home = Path(directory)
        with _session(home, options.connect) as spark:
            outcomes = held_reads(spark, home / "archive", options.count, options.seed)
    for outcome, times in outcomes.most_common():
        print(times, outcome)
    return 1 if wrong(outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
