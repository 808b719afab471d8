"""Receiving and acknowledging, with decoding and storing off: jetcapture's source against nats-py's `fetch()` loop.

Both work on the same stored messages in the same run, alternating, and end when the server says that every message is
acknowledged. Prints each way's median rate over the rounds, and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import nats
import pyarrow as pa
from nats.js.api import AckPolicy, ConsumerConfig

from benchmarks.others import rates as print_rates
from jetcapture_py.capture.stats import Stats
from jetcapture_py.config.model import loads
from jetcapture_py.jetstream.shared import Shared
from jetcapture_py.jetstream.source import PullSource
from jetcapture_py.ledger import Ledger, Memory
from tests.support.nats_server import NatsServer
from tests.support.publishing import Publisher, connect

STREAM = "BENCH"


async def fill(url: str, messages: int, size: int) -> None:
    """Publish what both sides will receive."""
    client = await connect(url)
    await client.jetstream().add_stream(name=STREAM, subjects=["bench.>"])
    payload = b"x" * size
    async with Publisher(client) as publisher:
        for index in range(messages):
            await publisher.publish(f"bench.{index % 4}", payload)
    await client.close()


async def acknowledged(client: nats.NATS, consumer: str, messages: int) -> None:
    """Wait until the server has every acknowledgement."""
    stream = client.jetstream()
    while True:
        info = await stream.consumer_info(STREAM, consumer)
        if info.num_pending == 0 and info.num_ack_pending == 0 and info.ack_floor.stream_seq == messages:
            return
        await asyncio.sleep(0.005)


async def with_fetch(url: str, consumer: str, messages: int) -> None:
    """The loop of nats-py's documentation, with its acknowledgements not awaited one by one."""
    client = await nats.connect(url)
    config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, max_ack_pending=50_000, ack_wait=120)
    subscription = await client.jetstream().pull_subscribe("bench.>", consumer, STREAM, config=config)
    received = 0
    while received < messages:
        batch = await subscription.fetch(5000, timeout=5)
        received += len(batch)
        for message in batch:
            await message.ack()
    await acknowledged(client, consumer, messages)
    await client.close()


async def with_source(url: str, consumer: str, messages: int) -> None:
    """What the daemon's intake does, without what follows it."""
    config = loads(
        f"nats: {{servers: ['{url}']}}\nsource: {{stream: {STREAM}, consumer: {consumer}}}\nstore: {{url: 'memory://x'}}"
    )
    source = PullSource(config, Ledger(Memory(config.limits.memory)))
    acks = Shared(source, Stats())
    await acks.open()
    pulling = asyncio.create_task(source.pulls.run())
    received = 0
    while received < messages:
        batch = await source.receive()
        assert batch is not None
        received += len(batch)
        await acks.ack(batch.replies)
    client = await nats.connect(url)
    await acknowledged(client, consumer, messages)
    await client.close()
    await acks.stop()
    pulling.cancel()
    await acks.close(pa.array([], pa.binary()))


async def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--size", type=int, default=250, help="payload bytes")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ways: dict[str, Callable[[str, str, int], Awaitable[None]]] = {"nats-py": with_fetch, "jetcapture": with_source}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory)) as server:
        await fill(server.url, options.messages, options.size)
        for number in range(options.rounds):
            for name, receive in ways.items():
                began = time.perf_counter()
                await receive(server.url, f"{name}{number}", options.messages)
                rates[name].append(options.messages / (time.perf_counter() - began))
    for name, values in rates.items():
        print_rates(f"receive and acknowledge, {name}", values)


if __name__ == "__main__":
    asyncio.run(main())
