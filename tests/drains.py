"""SIGTERM under a backlog, again and again: does a drained process leave anything behind?

    python -m tests.drains --count 50 [--servers far|replicated] [--size 10000] [--busy 4]

Each time the real command captures from a full stream with a small or large `max_ack_pending` and an `ack_wait` of ten
minutes, gets SIGTERM at a random moment, and must exit with 0. Then the server must have no unacknowledged message that
does not come at once when somebody pulls, and the archive must hold every message that was delivered.

`--servers far` is a cluster in which another server than the one that jetcapture is connected to leads the consumer;
`replicated` is a stream of three replicas. `--busy` runs that many busy loops beside it.
Exit code 1 when a drain failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import nats.errors

from tests.support.busy import busy_loops
from tests.support.nats_server import NatsServer, cluster_configs
from tests.support.publishing import Publisher
from tests.support.running import CONSUMER, STREAM, Command, connection, consumer, objects, settings

BACKLOG, BACKLOG_BYTES = 400_000, 1 << 30
ACK_LIMITS = (1000, 5000, 50_000)
QUIET = 2.0
"""Seconds without a message after which a pull has brought everything that was to be delivered again."""


@dataclass(frozen=True, kw_only=True)
class Drain:
    """How one drain ended: `left` messages were unacknowledged, `returned` of them came at once to the next pull."""

    code: int
    seconds: float
    max_ack_pending: int
    delivered: int
    stored: int
    left: int
    returned: int

    @property
    def clean(self) -> bool:
        return self.code == 0 and self.left == self.returned and self.stored == self.delivered - self.left


async def drains(url: str, directory: Path, count: int) -> AsyncIterator[Drain]:
    """Drain `count` captures of the stream, one after another, each from its beginning."""
    for number in range(count):
        place = directory / f"drain-{number}"
        place.mkdir()
        yield await _drain(url, place, random.choice(ACK_LIMITS))
        shutil.rmtree(place)


async def _drain(url: str, directory: Path, max_ack_pending: int) -> Drain:
    source = {"max_ack_pending": max_ack_pending, "ack_wait": "10m"}
    with Command(directory, settings(url, directory / "archive", source=source)) as command:
        command.start()
        await asyncio.to_thread(_receives, command, directory / "archive")
        await asyncio.sleep(random.uniform(0, 1))
        command.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        code = await asyncio.to_thread(command.wait, 120)
        seconds = time.monotonic() - began
    state = await consumer(url)
    delivered, left = state.delivered.stream_seq, state.num_ack_pending
    returned = await _pull(url, delivered, left) if left else 0
    async with connection(url) as client:
        await client.jetstream().delete_consumer(STREAM, CONSUMER)
    stored = sum(name.rows for name in objects(directory / "archive"))
    return Drain(
        code=code,
        seconds=seconds,
        max_ack_pending=max_ack_pending,
        delivered=delivered,
        stored=stored,
        left=left,
        returned=returned,
    )


def _receives(command: Command, archive: Path) -> None:
    deadline = time.monotonic() + 120
    while not any(archive.rglob("*.parquet")) and command.process.poll() is None:
        assert time.monotonic() < deadline, f"nothing was stored:\n{command.log}"
        time.sleep(0.01)


async def _pull(url: str, delivered: int, wanted: int) -> int:
    """How many messages up to sequence `delivered` the consumer delivers at once."""
    found: set[int] = set()
    async with connection(url) as client:
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox, pending_msgs_limit=-1, pending_bytes_limit=-1)
        pull = b'{"batch":%d,"expires":60000000000}' % (wanted + 1000)
        await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{CONSUMER}", pull, reply=inbox)
        with contextlib.suppress(nats.errors.TimeoutError):
            while len(found) < wanted:
                message = await subscription.next_msg(QUIET)
                if message.reply and (seq := message.metadata.sequence.stream) <= delivered:
                    found.add(seq)
    return len(found)


# ------------------------------------------------------------------ servers


@contextlib.asynccontextmanager
async def full_stream(directory: Path, topology: str, messages: int, size: int = 200) -> AsyncIterator[str]:
    """Servers with a stream full of messages of `size` bytes; where jetcapture is to connect to."""
    with contextlib.ExitStack() as stack:
        configs = [""] if topology == "single" else cluster_configs()
        servers = [NatsServer(directory / f"server-{number}", text) for number, text in enumerate(configs)]
        for server in servers:
            await asyncio.to_thread(stack.enter_context, server)
        replicas = 3 if topology == "replicated" else 1
        async with connection(servers[0].url) as client:
            jetstream = client.jetstream()
            for attempt in range(100):
                try:
                    await jetstream.add_stream(name=STREAM, subjects=["orders.>"], num_replicas=replicas)
                    break
                except (nats.errors.Error, TimeoutError):  # the cluster has no leader yet
                    assert attempt < 99, "the cluster does not come up"
                    await asyncio.sleep(0.2)
            async with Publisher(client) as publisher:
                for index in range(messages):
                    await publisher.publish(f"orders.{index % 3}", b"%0*d" % (size, index), None)
                await publisher.flush()
            cluster = (await jetstream.stream_info(STREAM)).cluster
        leader = int(cluster.leader[1:]) if cluster and cluster.leader and topology != "single" else 0
        yield servers[(leader + 1) % len(servers)].url


# ------------------------------------------------------------------ by hand


async def _run(options: argparse.Namespace, directory: Path) -> int:
    failed, longest = 0, 0.0
    messages = min(BACKLOG, BACKLOG_BYTES // options.size)
    async with full_stream(directory, options.servers, messages, options.size) as url:
        with busy_loops(options.busy):
            async for drain in drains(url, directory, options.count):
                failed += not drain.clean
                longest = max(longest, drain.seconds)
                print("ok    " if drain.clean else "FAILED", drain, flush=True)
    print(f"{options.count} drains, {failed} failed, the longest took {longest:.1f} s")
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--servers", choices=("single", "far", "replicated"), default="single")
    parser.add_argument("--size", type=int, default=200, help="bytes of a message")
    parser.add_argument("--busy", type=int, default=0)
    with tempfile.TemporaryDirectory(prefix="jetcapture-drains-") as directory:
        return asyncio.run(_run(parser.parse_args(), Path(directory)))


if __name__ == "__main__":
    sys.exit(main())
