"""An archive and its stream as one table, against the sum of its parts; and streaming from the archive.

python -m benchmarks.read_stream [--rows 5000000] [--live 100000] [--rounds 3] [--batches 1 4]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import yaml
from nats.js.api import StreamConfig as NatsStream
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st

from benchmarks.others import row
from benchmarks.read_archive import STREAM, archive
from jetcapture_py.archive import layout, stream_config, watermark
from jetcapture_py.config.model import Config, parse
from spark_jobs.archive import read_archive, read_stream
from spark_jobs.datasource.combined import JetcaptureDataSource
from spark_jobs.job import session
from tests.support.nats_server import NatsServer
from tests.support.publishing import Publisher, connect

DECODE = {
    "format": "json",
    "columns": {"region": "string", "amount": "int64", "quantity": "int64", "order_id": "string"},
}
RAW = (layout.STREAM, layout.SUBJECT, layout.SEQ, layout.TIMESTAMP, layout.DELIVERED, layout.PAYLOAD)
DECODED = (layout.SEQ, layout.TIMESTAMP, "region", "amount", "quantity", "order_id")


async def fill(url: str, root: Path, rows: int, live: int) -> None:
    """Create a stream whose first message follows the archive's last one, and what the archive says about it."""
    client = await connect(url)
    await client.jetstream().add_stream(NatsStream(name=STREAM, subjects=["orders.>"], first_seq=rows + 1))
    async with Publisher(client) as publisher:
        for number in range(live):
            text = (
                f'{{"amount": {number}, "quantity": 3, "region": "eu", "order_id": "{number}", "note": "{"x" * 150}"}}'
            )
            await publisher.publish("orders.eu", text.encode())
    answer = await client.request(f"$JS.API.STREAM.INFO.{STREAM}")
    created = str(parse_created(answer.data))
    await client.close()
    mark = watermark.ConsumerWatermark(
        stream=STREAM, consumer="archive", created=created, seq=rows, time=datetime(2026, 5, 2, tzinfo=UTC)
    )
    note = stream_config.StreamConfig(stream=STREAM, created=created, config={})
    for path, data in (
        (watermark.path(STREAM, "archive"), mark.encode()),
        (stream_config.path(STREAM, created), note.encode()),
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def parse_created(answer: bytes) -> str:
    """When the stream was created, as the server writes it."""
    return str(json.loads(answer)["created"])


def seconds(rounds: int, action: Callable[[], object]) -> float:
    """The median of some rounds, after one that compiles."""
    action()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def scan(frame: DataFrame) -> None:
    """Read everything."""
    frame.write.format("noop").mode("overwrite").save()


def stream(spark: SparkSession, path: Path, schema: st.StructType, size: int, batches: int) -> tuple[float, float]:
    """Read the archive in `batches` of `size` rows, as a streaming query, and then the live rows.

    Return the seconds of the whole query, and those of the batches from the archive.
    """
    frame = spark.readStream.format("jetcapture").schema(schema).option("config", str(path))
    frame = frame.option("maxOffsetsPerTrigger", size)
    with tempfile.TemporaryDirectory() as checkpoint:
        began = time.perf_counter()
        writer = frame.load().writeStream.format("noop").option("checkpointLocation", checkpoint)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        whole = time.perf_counter() - began
        archived = query.recentProgress[:batches]
    return whole, sum(batch["durationMs"]["triggerExecution"] for batch in archived) / 1000


def compare(spark: SparkSession, url: str, root: Path, path: Path, config: Config, chosen: argparse.Namespace) -> None:
    """Print all figures."""
    rows, rounds = chosen.rows, chosen.rounds
    live = spark.read.format("nats").option("servers", url).option("stream", STREAM).option("format", "json")
    live = live.option("columns", "region string, amount bigint, quantity bigint, order_id string")
    alone = seconds(rounds, lambda: scan(read_archive(spark, str(root), STREAM)))
    nats = seconds(rounds, lambda: scan(live.load()))
    both = seconds(rounds, lambda: scan(read_stream(spark, config=config)))
    print(
        f"archive {alone:.2f} s, stream {nats:.2f} s, both {both:.2f} s: {both / (alone + nats):.2f} of the sum",
        flush=True,
    )
    row(
        "`read_stream`, archive and stream", f"{both:.2f} s", f"{both / (alone + nats):.2f} times the sum of each alone"
    )
    every = read_archive(spark, str(root), STREAM)
    for name, columns in (("raw", RAW), ("decoded", DECODED)):
        schema = every.select(*columns).schema
        native = seconds(rounds, lambda columns=columns: scan(every.select(*columns)))  # type: ignore[misc]
        for count in chosen.batches:
            times = [stream(spark, path, schema, -(-rows // count), count) for _ in range(rounds + 1)][1:]
            whole, batches = (statistics.median(part) for part in zip(*times, strict=True))
            print(
                f"streaming, {name}, {count} batches: {rows / batches:,.0f} rows/s, {native / batches:.2f} of the "
                f"native reader; with the query's start and the live rows {whole:.1f} s in place of {batches:.1f} s",
                flush=True,
            )
            more = f"{native / batches:.2f} times `read_archive` in batch"
            row(f"`read_stream`, streaming, {name}, {count} batches", f"{rows / batches:,.0f} rows/s", more)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--live", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    chosen = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="jetcapture-"))
    root, path = base / "archive", base / "capture.yaml"
    try:
        archive(root, chosen.rows, 0.0)
        with NatsServer(base / "nats") as server:
            asyncio.run(fill(server.url, root, chosen.rows, chosen.live))
            settings = {
                "nats": {"servers": [server.url]},
                "source": {"stream": STREAM, "consumer": "archive"},
                "decode": DECODE,
                "key": "{region}",
                "store": {"url": str(root)},
            }
            path.write_text(yaml.safe_dump(settings))
            spark = session("read_stream benchmark")
            spark.dataSource.register(JetcaptureDataSource)
            compare(spark, server.url, root, path, parse(settings), chosen)
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
