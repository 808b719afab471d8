"""Planning to read one day of an archive with very many objects, in Spark: time, and memory of all processes.

    python -m benchmarks.plan_names [--names 10000 100000 1000000] [--rounds 3]

The objects of the day and of the one before are written, because a time slice may be a day long, as only the footer
says. Those of earlier days are names alone, which the archive lists with them: what a store takes to list so many
objects is not in the figures. Each number of names has a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from benchmarks.others import row
from benchmarks.restore import watched
from jetcapture_py.archive import layout
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.store.ports import Entry
from spark_jobs.archive import read_archive
from spark_jobs.job import session
from tests.support.archives import encoded, put

DAY = datetime(2026, 5, 1, tzinfo=UTC)
KEYS, INTERVAL = 10, 900
_DAY = 86_400
EACH = 100
"""Messages of an object."""


def names(root: Path, count: int) -> list[Entry]:
    """Return paths of so many objects of earlier days, the latest ones first, as a listing has them."""
    found: list[Entry] = []
    bucket, seq = int(DAY.timestamp()) - _DAY, 1 << 40
    while len(found) < count:
        bucket -= INTERVAL
        for key in range(KEYS):
            seq -= EACH
            name = layout.ObjectName(
                stream="ORDERS",
                key=str(key),
                bucket=bucket,
                first_seq=seq,
                last_seq=seq + EACH - 1,
                rows=EACH,
                digest=f"{seq:016x}",
            )
            found.append(Entry(f"{root}/{name.path}", size=40_000, modified=0.0))
    return found[:count]


def fill(root: Path) -> None:
    """Write the objects of two days."""
    seq = 1 << 41
    for bucket in range(int(DAY.timestamp()) - _DAY, int(DAY.timestamp()) + _DAY, INTERVAL):
        for key in range(KEYS):
            times = [bucket * 1_000_000 + number for number in range(EACH)]
            put(root, encoded(zip(range(seq, seq + EACH), times, strict=True), key=str(key), bucket=bucket))
            seq += EACH


def measure(root: Path, count: int, rounds: int) -> None:
    """Plan, read, and print the figures of an archive with `count` objects."""
    of_day = KEYS * _DAY // INTERVAL
    made = names(root, count - 2 * of_day)
    listed = ArchiveFiles._list

    def find(self: ArchiveFiles, directory: str, *, deep: bool = True) -> Iterator[Entry]:
        yield from listed(self, directory, deep=deep)
        yield from made if deep else ()

    ArchiveFiles._list = find  # type: ignore[method-assign]
    with watched() as memory:
        spark = session("plan_names benchmark")
        times = []
        for number in range(rounds + 1):
            began = time.perf_counter()
            frame = read_archive(spark, str(root), "ORDERS", start=DAY, end=DAY + timedelta(days=1))
            times.append(time.perf_counter() - began)
            if not number and frame.count() != of_day * EACH:
                raise SystemExit("not the day's rows")
    what = f"`read_archive`, planning {of_day} of {count:,} objects"
    row(what, f"{statistics.median(times[1:]):.2f} s", f"{memory.peak / (1 << 20):,.0f} MiB in all processes")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", type=Path, help="measure this archive, in this process")
    chosen = parser.parse_args()
    if chosen.root is not None:
        measure(chosen.root, chosen.names[0], chosen.rounds)
        return
    with tempfile.TemporaryDirectory(prefix="jetcapture-") as directory:
        fill(Path(directory))
        for count in chosen.names:
            words = ["--root", directory, "--names", str(count), "--rounds", str(chosen.rounds)]
            subprocess.run([sys.executable, "-m", "benchmarks.plan_names", *words], check=True)


if __name__ == "__main__":
    main()
