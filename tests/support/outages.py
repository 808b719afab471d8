"""A store that is away for a while under a steady stream of messages, and what the real daemon does meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from jetcapture_py.archive import layout
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.publishing import Publisher
from tests.support.running import CONSUMER, STREAM, Command, connection, settings, until
from tests.support.versity import Versity, options

BUCKET = "archive"
TURN = 0.05


@dataclass(kw_only=True)
class Plan:
    """`seconds` of outage at `rate` messages/s of `size` bytes; `silent`: the store accepts and never answers.

    After the outage messages come at `rate_after`, or at `rate` as before, until the daemon has caught up.
    """

    seconds: float
    rate: int = 5000
    rate_after: int | None = None
    size: int = 200
    memory: str = "128MiB"
    max_ack_pending: int = 50_000
    ack_wait: str = "30s"
    max_age: str = "5s"
    silent: bool = False
    before: float = 5.0
    connect_timeout: float = 5.0
    read_timeout: float = 30.0


@dataclass
class Seen:
    """What was seen: memory in bytes, the consumer's figures at their highest, readiness as (seconds, status, text)."""

    peak: int = 0
    peak_down: int = 0
    pending: int = 0
    unacked: int = 0
    unacked_down: int = 0
    redelivered: int = 0
    readiness: list[tuple[float, int, str]] = field(default_factory=list)
    down: float = 0.0
    up: float = 0.0
    caught_up: float = 0.0
    published: int = 0
    drained: int | None = None
    log: str = ""
    stored: Counter[int] = field(default_factory=Counter)
    delivered: Counter[int] = field(default_factory=Counter)

    def ready(self, since: float, until: float) -> list[tuple[int, str]]:
        return [(status, text) for at, status, text in self.readiness if since <= at < until]


async def endure(directory: Path, plan: Plan) -> Seen:
    """Capture through an outage, catch up and drain; also the process's log and every stored sequence."""
    seen = Seen()
    port = free_port()
    with Versity(directory / "s3") as store, NatsServer(directory / "nats") as server:
        make_bucket(store)
        timeouts = {"connect_timeout": plan.connect_timeout, "read_timeout": plan.read_timeout}
        configuration = settings(
            server.url,
            f"s3://{BUCKET}/nats",
            store={"options": {**options(store.endpoint), "config_kwargs": timeouts}},
            source={"ack_wait": plan.ack_wait, "max_ack_pending": plan.max_ack_pending},
            block={"max_age": plan.max_age},
            limits={"memory": plan.memory},
            http={"listen": f"127.0.0.1:{port}"},
        )
        async with connection(server.url) as client:
            stream = client.jetstream()
            await stream.add_stream(name=STREAM, subjects=["orders.>"])
            with Command(directory, configuration) as command:
                command.start()
                await until(lambda: readiness(port)[0] == 200, "the daemon is ready")
                enough = asyncio.Event()
                watching = asyncio.create_task(_watch(seen, stream, psutil.Process(command.process.pid), port))
                publishing = asyncio.create_task(_publish(seen, client, plan, enough))
                try:
                    await until(lambda: any(command.events("blocks.stored")), "the daemon stores")
                    await asyncio.sleep(plan.before)
                    seen.down = time.monotonic()
                    store.freeze() if plan.silent else store.kill()
                    await asyncio.sleep(plan.seconds)
                    seen.up, seen.peak_down, seen.unacked_down = time.monotonic(), seen.peak, seen.unacked
                    store.thaw() if plan.silent else store.start()
                    await _caught_up(stream, plan.rate, command)
                    seen.caught_up = time.monotonic()
                    await until(lambda: readiness(port)[0] == 200, "the daemon is ready again")
                    enough.set()
                    await publishing
                    await _caught_up(stream, 1, command)
                    end = time.monotonic()
                    await until(lambda: seen.readiness[-1][0] > end and seen.readiness[-1][1] == 200, "it stays ready")
                finally:
                    watching.cancel()
                    publishing.cancel()
                    seen.log = command.log
                command.process.send_signal(signal.SIGTERM)
                seen.drained = await asyncio.to_thread(command.wait)
                seen.log = command.log
        _read(store, seen)
    return seen


async def _publish(seen: Seen, client: Any, plan: Plan, enough: asyncio.Event) -> None:
    async with Publisher(client) as publisher:
        last, due, source = time.monotonic(), 0.0, random.Random(1)
        while not enough.is_set():
            now = time.monotonic()
            due += (now - last) * (plan.rate_after if seen.up and plan.rate_after else plan.rate)
            last = now
            for _ in range(int(due) - seen.published):
                await publisher.publish(f"orders.{seen.published % 10}", source.randbytes(plan.size))
                seen.published += 1
            await publisher.flush()
            await asyncio.sleep(TURN)


async def _watch(seen: Seen, stream: Any, process: psutil.Process, port: int) -> None:
    while True:
        with contextlib.suppress(psutil.NoSuchProcess):
            seen.peak = max(seen.peak, process.memory_info().rss)
        info = await stream.consumer_info(STREAM, CONSUMER)
        seen.pending = max(seen.pending, info.num_pending)
        seen.unacked = max(seen.unacked, info.num_ack_pending)
        seen.redelivered = max(seen.redelivered, info.num_redelivered)
        at = time.monotonic()
        seen.readiness.append((at, *await asyncio.to_thread(readiness, port)))
        await asyncio.sleep(0.25)


async def _caught_up(stream: Any, most: int, command: Command) -> None:
    """Wait until fewer than `most` messages are undelivered; with 1, until none is unacknowledged either."""

    async def so() -> bool:
        assert command.process.poll() is None, command.log[-2000:]
        info = await stream.consumer_info(STREAM, CONSUMER)
        return bool(info.num_pending < most and (most > 1 or info.num_ack_pending == 0))

    await until(so, "the daemon has caught up", timeout=900)


def readiness(port: int) -> tuple[int, str]:
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        asked.request("GET", "/readyz")
        answer = asked.getresponse()
        return answer.status, answer.read().decode()
    except OSError as error:
        return 0, str(error)
    finally:
        asked.close()


def make_bucket(store: Versity) -> None:
    with contextlib.closing(store.client()) as client:
        client.create_bucket(Bucket=BUCKET)


def bodies(store: Versity) -> Iterator[tuple[layout.ObjectName, bytes]]:
    """Every object of the stream's archive in `BUCKET`; a foreign one is an error."""
    with contextlib.closing(store.client()) as client:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"nats/{STREAM}/"):
            for entry in page.get("Contents", []):
                name = layout.parse_path(entry["Key"].removeprefix("nats/"))
                assert name is not None, entry["Key"]
                yield name, client.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read()


def _read(store: Versity, seen: Seen) -> None:
    for name, body in bodies(store):
        table = pq.read_table(pa.BufferReader(body), columns=[layout.SEQ, layout.DELIVERED])
        assert table.num_rows == name.rows
        seen.stored.update(table.column(0).to_pylist())
        seen.delivered.update(table.column(1).to_pylist())
