"""Reading a stream live with `spark.read.format("nats")` on local[2], against a bare socket that does nothing else.

    python -m benchmarks.live_read [--messages 1000000] [--size 250] [--rounds 5]

All read the same stored messages, published once, alternating, in one run. The socket pulls from a consumer without
acknowledgements and only looks where each message ends. Spark makes all columns of every message, and either writes
them to nowhere or counts each of them; loading and planning are part of its time. One round of each warms up the JVM,
Spark's Python workers and the server's cache, and is not counted. Prints the median rate of each way and its range.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from benchmarks.others import rates as print_rates
from jetcapture_py.jetstream.publish.publisher import Publisher
from tests.support.nats_server import NatsServer
from tests.support.publishing import connect

STREAM = "BENCH"
PULL = 50_000
CHUNK = 1 << 18
ROWS = 50_000


async def fill(url: str, messages: int, size: int) -> None:
    """Publish what is read."""
    client = await connect(url)
    await client.jetstream().add_stream(name=STREAM, subjects=["bench.>"])
    subjects = pa.array([f"bench.{index % 4}" for index in range(ROWS)])
    payloads = pa.array([b"x" * size] * ROWS)
    async with Publisher(client) as publisher:
        for start in range(0, messages, ROWS):
            rows = min(ROWS, messages - start)
            await publisher.publish_batch(subjects.slice(0, rows), payloads.slice(0, rows))
    await client.close()


class BareSocket:
    """The least that anybody has to do to read a stream: frames are found and counted."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._socket = socket.create_connection((address.hostname, address.port))
        self._send(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nSUB in 1\r\nSUB answer 2\r\n')

    def _send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def _ask(self, request: str, body: bytes) -> None:
        self._send(b"PUB $JS.API.%s answer %d\r\n%s\r\n" % (request.encode(), len(body), body))
        answer = b""
        while not answer.endswith(b"}\r\n") or b"_response" not in answer:
            answer += self._socket.recv(CHUNK)

    def read(self, messages: int) -> None:
        """Receive that many messages."""
        consumer = {"name": "bare", "ack_policy": "none", "mem_storage": True, "inactive_threshold": 30 * 10**9}
        body = json.dumps({"stream_name": STREAM, "action": "create", "config": consumer}).encode()
        self._ask("CONSUMER.CREATE.BENCH.bare", body)
        pull = b'{"batch":%d,"expires":30000000000}' % PULL
        received, asked = 0, 0
        tail = b""
        while received < messages:
            while asked < min(messages, received + 2 * PULL):
                self._send(b"PUB $JS.API.CONSUMER.MSG.NEXT.BENCH.bare in %d\r\n%s\r\n" % (len(pull), pull))
                asked += PULL
            buffer = tail + self._socket.recv(CHUNK)
            found, position = _count(buffer)
            received += found
            tail = buffer[position:]
        self._ask("CONSUMER.DELETE.BENCH.bare", b"")
        self._socket.close()


def _count(buffer: bytes) -> tuple[int, int]:
    """Messages in `buffer`, and where the first incomplete frame begins."""
    find, end, position, found = buffer.find, len(buffer), 0, 0
    while True:
        eol = find(b"\r\n", position)
        if eol < 0:
            return found, position
        if buffer.startswith(b"MSG ", position):
            stop = eol + 4 + int(buffer[buffer.rfind(b" ", position, eol) : eol])
            if stop > end:
                return found, position
            found += 1
            position = stop
        else:
            position = eol + 2  # INFO, PING, +OK


def live(spark: SparkSession, url: str) -> DataFrame:
    """The stream as a table with all columns."""
    options = {"servers": url, "stream": STREAM, "includeHeaders": "true"}
    return spark.read.format("nats").options(**options).load()


def to_nowhere(spark: SparkSession, url: str) -> None:
    """Every row, with all columns."""
    live(spark, url).write.format("noop").mode("overwrite").save()


def count(spark: SparkSession, url: str, messages: int) -> None:
    """The values of every column."""
    frame = live(spark, url)
    (counted,) = frame.select(*(sf.count(column).alias(column) for column in frame.columns)).collect()
    assert counted["_nats_payload"] == counted["_nats_seq"] == messages


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=250, help="payload bytes")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.warehouse.dir", tempfile.gettempdir())
        .getOrCreate()
    )
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory)) as server:
        asyncio.run(fill(server.url, options.messages, options.size))
        ways: dict[str, Callable[[], object]] = {
            "bare socket": lambda: BareSocket(server.url).read(options.messages),
            "noop write": lambda: to_nowhere(spark, server.url),
            "count": lambda: count(spark, server.url, options.messages),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(options.rounds + 1):
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                if number:
                    rates[name].append(options.messages / (time.perf_counter() - began))
    spark.stop()
    limit = statistics.median(rates["bare socket"])
    for name, values in rates.items():
        middle = statistics.median(values)
        print(f"{name:12}{middle:>10,.0f} messages/s   {min(values):,.0f} to {max(values):,.0f}   {middle / limit:.2f}")
        print_rates(f"`nats` format, {name}" if name != "bare socket" else "a bare socket that parses nothing", values)


if __name__ == "__main__":
    main()
