"""`jetcapture query` against DuckDB's own `read_parquet`, and Spark's `read_archive`, on the same objects, alternating.

    python -m benchmarks.query [--rows 5000000] [--rounds 5] [--overlap 0.05] [--spark] [--dir DIR]

First 1,001 messages from the shell. Then two archives of the same rows, one of which has objects that overlap, as in
`benchmarks.read_archive`. Planning is what happens before the statement runs, and is shown apart; the peak memory is
that of a process that plans and runs the statement once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.others import row
from benchmarks.read_archive import STREAM, archive
from jetcapture_py.manage.query import connect
from jetcapture_py.reading.duckdb import ArchiveViews
from jetcapture_py.reading.plan import ReadRequest
from jetcapture_py.store.archive import ArchiveFiles

STATEMENTS = {
    "count": "SELECT count(*) FROM {}",
    "filtered aggregate": "SELECT region, sum(amount), avg(quantity) FROM {} WHERE amount > 50000 GROUP BY region",
    "full scan": "SELECT count(COLUMNS(*)), sum(hash(COLUMNS(*))) FROM {}",
}
Timed = Callable[[str], tuple[float, float]]
"""Runs a statement: seconds of planning, and of the statement."""


@contextmanager
def plain(root: Path) -> Iterator[Timed]:
    """DuckDB's own reader."""
    with tempfile.TemporaryDirectory() as directory, connect(Path(directory)) as connection:

        def run(statement: str) -> tuple[float, float]:
            paths = f"read_parquet('{root}/{STREAM}/**/*.parquet', hive_partitioning = true)"
            began = time.perf_counter()
            connection.sql(statement.format(paths)).to_arrow_table()
            return 0.0, time.perf_counter() - began

        yield run


@contextmanager
def query(root: Path) -> Iterator[Timed]:
    """The views of `jetcapture query`."""
    with ExitStack() as stack:
        links, spilled = (Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2))
        connection = stack.enter_context(connect(spilled))
        request = ReadRequest(files=ArchiveFiles(str(root), {}), stream=STREAM)
        views = ArchiveViews(connection, links)

        def run(statement: str) -> tuple[float, float]:
            began = time.perf_counter()
            views.create("archive", request.plan(for_sql=True))
            planned = time.perf_counter()
            connection.sql(statement.format("archive")).to_arrow_table()
            return planned - began, time.perf_counter() - planned

        yield run


@contextmanager
def spark(root: Path) -> Iterator[Timed]:
    """Spark's reader."""
    from benchmarks.read_archive import ACTIONS
    from benchmarks.read_archive import timed as timed_in_spark
    from spark_jobs.archive import read_archive
    from spark_jobs.job import session

    actions = {STATEMENTS[name]: action for name, action in ACTIONS.items()}
    active = session("query benchmark")
    yield lambda statement: timed_in_spark(lambda: read_archive(active, str(root), STREAM), actions[statement])


WAYS = {"read_parquet": plain, "query": query, "spark": spark}


def peak(way: str, root: Path, statement: str) -> float:
    """The peak memory of a new process that runs a statement, in MiB."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (way, root, statement))


def _peak(way: str, root: Path, statement: str) -> float:
    with WAYS[way](root) as run:
        run(statement)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024  # its own; `ru_maxrss` begins with the parent's


def compare(root: Path, ways: list[str], rounds: int, overlap: float) -> None:
    """Print medians of every way for every statement."""
    figures: list[tuple[float, float]] = []
    with ExitStack() as stack:
        runs = {way: stack.enter_context(WAYS[way](root)) for way in ways}
        for name, statement in STATEMENTS.items():
            times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for number in range(rounds + 1):  # the first one fills caches
                for way in ways[:: 1 if number % 2 else -1]:
                    seconds = runs[way](statement)
                    if number:
                        times[way].append(seconds)
            base = statistics.median(acting for _, acting in times["read_parquet"])
            for way, measured in times.items():
                planning, acting = (statistics.median(part) for part in zip(*measured, strict=True))
                memory = "" if way == "spark" else f", peak {peak(way, root, statement):,.0f} MiB"
                print(
                    f"{name:20} {way:14} planning {planning:6.3f} s, statement {acting:6.3f} s "
                    f"({acting / base:.2f} x){memory}",
                    flush=True,
                )
                if way == "query":
                    figures.append((planning + acting, (planning + acting) / base))
    row(
        f"`jetcapture query`: {', '.join(STATEMENTS)}; {overlap:.0%} of the objects overlapped",
        f"{', '.join(f'{total:.2f}' for total, _ in figures)} s",
        f"{', '.join(f'{ratio:.2f}' for _, ratio in figures)} times DuckDB's own reader",
    )


def from_the_shell(root: Path, rounds: int) -> None:
    """Print how long a command takes that counts 1,001 messages."""
    archive(root, 1001, 0.0)
    command = [sys.executable, "-m", "jetcapture_py", "query", str(root), STREAM, STATEMENTS["count"].format("archive")]
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - began)
        assert done.stdout.split()[-1] == "1001"
    what = "`jetcapture query`, 1,001 messages from the shell"
    row(what, f"{statistics.median(times):.2f} s", f"{min(times):.2f} to {max(times):.2f}")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--overlap", type=float, default=0.05)
    parser.add_argument("--spark", action="store_true", help="Spark's reader too")
    parser.add_argument("--dir", type=Path, help="keep the archives here, and take those that are there")
    chosen = parser.parse_args()
    base = chosen.dir or Path(tempfile.mkdtemp(prefix="jetcapture-"))
    try:
        small = Path(tempfile.mkdtemp(dir=base))
        from_the_shell(small, chosen.rounds)
        shutil.rmtree(small)
        for overlap in (0.0, chosen.overlap):
            root = base / f"{chosen.rows}-{overlap}"
            if not root.exists():
                archive(root, chosen.rows, overlap)
            objects = len(list(root.rglob("*.parquet")))
            print(f"\n{chosen.rows:,} rows in {objects} objects, {overlap:.0%} of them overlapped by another")
            compare(root, ["read_parquet", "query", *(["spark"] if chosen.spark else [])], chosen.rounds, overlap)
    finally:
        if chosen.dir is None:
            shutil.rmtree(base)


if __name__ == "__main__":
    main()
