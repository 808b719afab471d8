"""How fast archived messages are replayed, acknowledged, with ids and provenance: jetcapture on Spark's local[2]
against nats-py's publish_async with 500 under way and ids. The same messages, alternating, medians and their ratio.

    python -m benchmarks.replay [--messages 200000] [--rounds 5]

The first replay is reported by itself: it starts Spark's Python workers and finds its code uncompiled. publish_async
has its messages in memory before its time begins; the replay reads, sorts and publishes them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import nats
import pyarrow as pa
import pyarrow.parquet as pq
from nats.js.errors import NotFoundError
from pyspark.sql import SparkSession

from benchmarks.others import rates as print_rates
from jetcapture_py.archive import layout
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.model import parse
from jetcapture_py.jetstream.publish.publisher import Publisher
from jetcapture_py.jetstream.wire.client import Connection
from spark_jobs.archive import read_archive
from spark_jobs.replay import replay
from spark_jobs.replaying.origin import origin_of
from tests.support.nats_server import NatsServer

STREAM, TARGET = "ORDERS", "REPLAY"
IN_FLIGHT = 500


async def fill(url: str, archive: str, count: int, size: int) -> None:
    """Publish the messages, on 200 subjects, and capture them."""
    client = Connection()
    await client.connect(url)
    await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"])
    async with Publisher(client) as publisher:
        for start in range(0, count, 10_000):
            numbers = range(start, min(count, start + 10_000))
            data = os.urandom(len(numbers) * size // 2).hex().encode()
            payloads = [data[at * size : (at + 1) * size] for at in range(len(numbers))]
            await publisher.publish_batch(pa.array([f"orders.{n % 4}.{n % 50}" for n in numbers]), pa.array(payloads))
    await client.close()
    settings = {
        "nats": {"servers": [url]},
        "source": {"stream": STREAM, "consumer": "archive"},
        "key": "{subject[1]}",
        "store": {"url": archive},
    }
    await Capture(parse(settings)).run(asyncio.Event(), until_caught_up=True)


async def fresh(url: str) -> None:
    """An empty target stream."""
    client = await nats.connect(url)
    js = client.jetstream()
    with contextlib.suppress(NotFoundError):
        await js.delete_stream(TARGET)
    await js.add_stream(name=TARGET, subjects=["replay.>"])
    await client.close()


async def stored(url: str) -> int:
    """Messages in the target stream."""
    client = await nats.connect(url)
    info = await client.jetstream().stream_info(TARGET)
    await client.close()
    return int(info.state.messages)


def start() -> SparkSession:
    """Spark as the jobs start it, but with two cores wherever it runs."""
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.log.level", "ERROR").config("spark.ui.showConsoleProgress", "false")
    return builder.config("spark.driver.host", "127.0.0.1").config("spark.sql.session.timeZone", "UTC").getOrCreate()


def with_replay(spark: SparkSession, url: str, archive: str) -> int:
    """Replay the whole archive."""
    frame = read_archive(spark, archive, STREAM)
    done = replay(frame, url, "replay.{subject}", origin=origin_of(archive, STREAM, {}))
    assert done.duplicates == 0
    return done.published


Loaded = list[tuple[str, bytes, dict[str, str]]]


def load(archive: str) -> Loaded:
    """The archive's messages in order, each with an id."""
    columns = [layout.SUBJECT, layout.SEQ, layout.PAYLOAD]
    paths = [str(path) for path in Path(archive, STREAM).rglob("*.parquet")]
    table = pa.concat_tables([pq.ParquetFile(path).read(columns) for path in paths]).sort_by(layout.SEQ)
    rows = zip(*(table[name].to_pylist() for name in columns), strict=True)
    return [(f"replay.{subject}", data, {"Nats-Msg-Id": f"{STREAM}:{seq}:baseline"}) for subject, seq, data in rows]


async def with_publish_async(url: str, messages: Loaded) -> int:
    """Publish them with nats-py."""
    client = await nats.connect(url)
    js = client.jetstream(publish_async_max_pending=IN_FLIGHT)
    for subject, payload, headers in messages:
        await js.publish_async(subject, payload, headers=headers)
    await js.publish_async_completed()
    await client.close()
    return len(messages)


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--size", type=int, default=250, help="payload bytes")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    logging.getLogger("jetcapture").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory, "nats")) as server:
        archive = str(Path(directory, "archive"))
        asyncio.run(fill(server.url, archive, options.messages, options.size))
        messages = load(archive)
        spark = start()
        ways: dict[str, Callable[[], int]] = {
            "replay": lambda: with_replay(spark, server.url, archive),
            "publish_async": lambda: asyncio.run(with_publish_async(server.url, messages)),
        }

        def timed(name: str) -> float:
            asyncio.run(fresh(server.url))
            began = time.perf_counter()
            count = ways[name]()
            seconds = time.perf_counter() - began
            assert count == options.messages == asyncio.run(stored(server.url))
            return options.messages / seconds

        print(f"first replay, cold {timed('replay'):>10,.0f} messages/s")
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, values in rates.items():
                values.append(timed(name))
        for name, values in rates.items():
            print_rates("`replay`, with ids" if name == "replay" else "nats-py's `publish_async`, with ids", values)
        spark.stop()


if __name__ == "__main__":
    main()
