"""Reading an archive with `read_archive` against `spark.read.parquet` on the same objects, alternating.

    python -m benchmarks.read_archive [--rows 5000000] [--rounds 5] [--overlap 0.05] [--dir DIR]

Two archives of the same rows: in one no objects overlap; in the other, some of the groups have two objects, of which
each has messages that the other lacks, and a quarter of the messages is in both. Planning is what happens before the
action starts, and is shown apart.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from benchmarks.others import row
from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import BlockId
from jetcapture_py.archive.schema import HEADERS_TYPE
from jetcapture_py.archive.writer import Encoder, ObjectWriter
from spark_jobs.archive import read_archive
from spark_jobs.job import session

STREAM = "ORDERS"
START = datetime(2026, 5, 1, tzinfo=UTC)
KEYS = ("eu", "us", "apac", "latam")
INTERVAL = 900


def archive(root: Path, rows: int, overlap: float) -> None:
    """Write `rows` messages in four keys and a day's quarters of an hour, the share `overlap` of these as two objects
    that overlap."""
    groups = [(key, bucket) for bucket in range(0, 86_400, INTERVAL) for key in KEYS]
    each = rows // len(groups)
    random = np.random.default_rng(1)
    copied = set(random.choice(len(groups), int(len(groups) * overlap), replace=False).tolist())
    for number, (key, offset) in enumerate(groups):
        bucket = int(START.timestamp()) + offset
        count = rows - each * (len(groups) - 1) if number == len(groups) - 1 else each
        table = messages(random, key, number * each + 1, bucket, count)
        if number in copied:
            write(root, key, bucket, table.slice(0, count * 3 // 4))
            write(root, key, bucket, table.slice(count // 2))
        else:
            write(root, key, bucket, table)


def messages(random: np.random.Generator, key: str, first: int, bucket: int, count: int) -> pa.Table:
    """JSON orders of about 250 bytes, with four decoded columns."""
    amounts, quantities = random.integers(100, 99_999, count), random.integers(1, 50, count)
    order = {"order_id": "", "region": key, "note": "x" * 120, "customer": {"name": "A. Customer", "city": "Bergen"}}
    head = json.dumps(order)[1:-1]
    payloads = [
        f'{{"amount": {amount}, "quantity": {quantity}, {head}, "id": {index}}}'.encode()
        for index, (amount, quantity) in enumerate(zip(amounts.tolist(), quantities.tolist(), strict=True), first)
    ]
    steps = np.sort(random.integers(0, INTERVAL * 1_000_000, count))
    return pa.table(
        {
            layout.STREAM: pa.array([STREAM]).take(pa.array(np.zeros(count, np.int64))),
            layout.SUBJECT: pa.array([f"orders.{key}"]).take(pa.array(np.zeros(count, np.int64))),
            layout.SEQ: pa.array(np.arange(first, first + count)),
            layout.TIMESTAMP: pa.array(bucket * 1_000_000 + steps, pa.timestamp("us", "UTC")),
            layout.NANOS: pa.array(np.zeros(count, np.int16)),
            layout.DELIVERED: pa.array(np.ones(count, np.int32)),
            layout.HEADERS: pa.nulls(count, HEADERS_TYPE),
            layout.PAYLOAD: pa.array(payloads, pa.binary()),
            "region": pa.array([key]).take(pa.array(np.zeros(count, np.int64))),
            "amount": pa.array(amounts),
            "quantity": pa.array(quantities),
            "order_id": pa.array([str(index) for index in range(first, first + count)]),
            layout.KEY: pa.array([key]).take(pa.array(np.zeros(count, np.int64))),
        }
    )


def write(root: Path, key: str, bucket: int, table: pa.Table) -> None:
    """Store one object."""
    encoder = Encoder(stream=STREAM, interval=INTERVAL, compression="zstd")
    with ObjectWriter(encoder, BlockId(key=key, bucket=bucket), table.schema) as writer:
        writer.write(table)
        stored = writer.finish("age")
    path = root / stored.name.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(stored.data)


ACTIONS: dict[str, Callable[[DataFrame], object]] = {
    "count": lambda frame: frame.count(),
    "filtered aggregate": lambda frame: (
        frame.where("amount > 50000").groupBy("region").agg(sf.sum("amount"), sf.avg("quantity")).collect()
    ),
    "full scan": lambda frame: frame.write.format("noop").mode("overwrite").save(),
}


def timed(open_: Callable[[], DataFrame], action: Callable[[DataFrame], object]) -> tuple[float, float]:
    """Seconds of planning and of the action."""
    began = time.perf_counter()
    frame = open_()
    planned = time.perf_counter()
    action(frame)
    return planned - began, time.perf_counter() - planned


def compare(spark: SparkSession, root: Path, rounds: int, overlap: float) -> None:
    """Print medians of both ways for every action."""
    figures: list[tuple[float, float]] = []
    ways: dict[str, Callable[[], DataFrame]] = {
        "spark.read.parquet": lambda: spark.read.parquet(f"{root}/{STREAM}"),
        "read_archive": lambda: read_archive(spark, str(root), STREAM),
    }
    for name, action in ACTIONS.items():
        for way in ways.values():
            timed(way, action)  # the first run compiles
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for number in range(rounds):
            for way in list(ways)[:: 1 if number % 2 else -1]:
                times[way].append(timed(ways[way], action))
        medians = {way: [statistics.median(part) for part in zip(*found, strict=True)] for way, found in times.items()}
        totals = {way: statistics.median(map(sum, found)) for way, found in times.items()}
        for way, (planning, acting) in medians.items():
            spread = sorted(map(sum, times[way]))
            ratio = totals[way] / totals["spark.read.parquet"]
            print(
                f"{name:20} {way:20} {totals[way]:6.2f} s ({spread[0]:.2f} to {spread[-1]:.2f}), "
                f"planning {planning:.2f}, action {acting:.2f}, {ratio:.2f} x",
                flush=True,
            )
        figures.append((totals["read_archive"], totals["read_archive"] / totals["spark.read.parquet"]))
    row(
        f"`read_archive`: {', '.join(ACTIONS)}; {overlap:.0%} of the objects overlapped",
        f"{', '.join(f'{total:.2f}' for total, _ in figures)} s",
        f"{', '.join(f'{ratio:.2f}' for _, ratio in figures)} times Spark's own reader",
    )


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--overlap", type=float, default=0.05)
    parser.add_argument("--dir", type=Path, help="keep the archives here, and take those that are there")
    chosen = parser.parse_args()
    base = chosen.dir or Path(tempfile.mkdtemp(prefix="jetcapture-"))
    try:
        spark = session("read_archive benchmark")
        for overlap in (0.0, chosen.overlap):
            root = base / f"{chosen.rows}-{overlap}"
            if not root.exists():
                archive(root, chosen.rows, overlap)
            objects = len(list(root.rglob("*.parquet")))
            rows = read_archive(spark, str(root), STREAM).count()
            if rows != chosen.rows:
                raise SystemExit(f"{rows} rows read, {chosen.rows} written")
            print(f"\n{rows:,} rows in {objects} objects, {overlap:.0%} of them overlapped by another")
            compare(spark, root, chosen.rounds, overlap)
    finally:
        if chosen.dir is None:
            shutil.rmtree(base)


if __name__ == "__main__":
    main()
