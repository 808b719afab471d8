"""Limits of the real process: what it holds, and that it stores every message, however little it may hold."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nats.js.api import ConsumerConfig

from jetcapture_py.archive import layout
from jetcapture_py.archive.writer import EncodedBlock, Encoder
from jetcapture_py.capture.pipeline import Capture
from tests.support.archives import Archive
from tests.support.nats_server import NatsServer
from tests.support.outages import Plan, endure
from tests.support.running import (
    CONSUMER,
    STREAM,
    Command,
    Message,
    config,
    connection,
    consumer,
    objects,
    publish,
    rows,
    settings,
)
from tests.support.watching import Watch

Start = Callable[..., NatsServer]


def bound(limit: int) -> int:
    """The most resident memory, as docs/sizing.md says, for so many MiB of `limits.memory`; in bytes."""
    return (400 + 2 * limit) << 20


def messages(count: int, size: int, keys: int = 1) -> Iterable[Message]:
    source = random.Random(1)
    return ((f"orders.k{index % keys}", b"%d %b" % (index, source.randbytes(size)), None) for index in range(count))


def captured(directory: Path, configuration: dict[str, Any]) -> tuple[Watch, dict[str, Any]]:
    with Command(directory, configuration) as command:
        with Watch(command.start("--until-caught-up").process.pid) as watch:
            assert command.wait(600) == 0, command.log[-2000:]
        (counters,) = command.events("capture.stopped")
    return watch, counters


def stored(root: Path) -> Counter[int]:
    found: Counter[int] = Counter()
    for name in objects(root):
        with (root / name.path).open("rb") as file:
            found.update(pq.ParquetFile(file).read(columns=[layout.SEQ]).column(0).to_pylist())
    return found


def once(count: int) -> dict[int, int]:
    return dict.fromkeys(range(1, count + 1), 1)


@pytest.mark.exhaustive
def test_memory_stays_near_its_limit_when_storing_is_slower_than_receiving(nats_server: Start, tmp_path: Path) -> None:
    server, root = nats_server(), tmp_path / "archive"
    count = asyncio.run(publish(server.url, messages(50_000, 4000)))  # 200 MB
    slow: dict[str, Any] = {"store": {"concurrency": 1}, "block": {"compression": "gzip"}}
    configuration = settings(server.url, root, limits={"memory": "32MiB"}, **slow)
    watch, counters = captured(tmp_path, configuration)
    assert stored(root) == once(count)
    assert counters["redelivered"] == 0
    assert watch.peak < bound(32), f"{watch.peak >> 20} MiB"


def test_what_encoding_needs_is_counted_and_given_back(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, seen = nats_server(), []
    encode = Encoder.encode_or_salvage

    def watched(self: Encoder, *block: Any) -> EncodedBlock:
        seen.append((capture.ledger.held, sum(batch.nbytes for batch in block[2])))
        return encode(self, *block)

    monkeypatch.setattr(Encoder, "encode_or_salvage", watched)
    asyncio.run(publish(server.url, messages(1000, 1000)))
    capture = Capture(config(server.url, tmp_path / "archive"))
    asyncio.run(capture.run(asyncio.Event(), until_caught_up=True))
    assert capture.ledger.total == 0
    assert sum(size for _, size in seen) > 1_000_000  # of two blocks, if a bucket has ended meanwhile
    assert all(held > 2.5 * size for held, size in seen)  # as received, sorted, encoded


def test_hostile_fields_cost_no_more_memory_than_others_and_no_neighbor(nats_server: Start, tmp_path: Path) -> None:
    server, root = nats_server(), tmp_path / "archive"
    wide = {f"f{number}": number for number in range(999)}
    hostile = json.dumps({"l": [wide, *({"f1": 1} for _ in range(50_000))]}).encode()
    payloads = [hostile] * 10 + [b'{"a":%d}' % number for number in range(2000)]
    asyncio.run(publish(server.url, (("orders.x", payload, None) for payload in payloads)))
    limits = {"memory": "64MiB"}
    watch, _ = captured(tmp_path, settings(server.url, root, decode={"format": "json"}, limits=limits))
    assert [row[layout.SEQ] for row in rows(root, quarantine=True)] == [*range(1, 11)]
    assert [row[layout.SEQ] for row in rows(root)] == [*range(11, 2011)]
    assert watch.peak < bound(100), f"{watch.peak >> 20} MiB"


@pytest.mark.exhaustive
def test_many_messages_of_8_mb_pass_through_a_small_memory_unchanged(nats_server: Start, tmp_path: Path) -> None:
    server, root = nats_server("max_payload: 8MB"), tmp_path / "archive"
    payloads = (random.Random(index).randbytes(8_000_000 - index) for index in range(50))
    digests = []

    def large() -> Iterable[Message]:
        for payload in payloads:
            digests.append(hashlib.sha256(payload).digest())
            yield "orders.big", payload, None

    asyncio.run(publish(server.url, large()))
    watch, counters = captured(tmp_path, settings(server.url, root, limits={"memory": "64MiB"}))
    assert stored(root) == once(50)
    found = {}
    for name in objects(root):
        for row in pq.read_table(root / name.path, columns=[layout.SEQ, layout.PAYLOAD]).to_pylist():
            found[row[layout.SEQ]] = hashlib.sha256(row[layout.PAYLOAD]).digest()
    assert [found[seq] for seq in sorted(found)] == digests
    assert counters["redelivered"] == 0
    assert watch.peak < bound(64), f"{watch.peak >> 20} MiB"


@pytest.mark.exhaustive
def test_thousands_of_keys_with_few_open_blocks_need_little_memory(nats_server: Start, tmp_path: Path) -> None:
    server, root = nats_server(), tmp_path / "archive"
    count = asyncio.run(publish(server.url, messages(7500, 500, keys=5000)))
    limits = {"memory": "64MiB", "open_blocks": 100}
    watch, counters = captured(tmp_path, settings(server.url, root, key="{subject[1]}", limits=limits))
    assert stored(root) == once(count)
    assert {name.key for name in objects(root)} == {f"k{index}" for index in range(5000)}
    assert counters["sealed_by"]["pressure"] > 100
    assert watch.peak < bound(0), f"{watch.peak >> 20} MiB"


@pytest.mark.parametrize(
    ("silent", "rate", "size", "most"),
    [(True, 3000, 50, 6000), pytest.param(False, 1000, 8000, 50_000, marks=pytest.mark.exhaustive)],
)
def test_a_store_that_is_away_holds_up_the_stream_and_nothing_else(
    tmp_path: Path, silent: bool, rate: int, size: int, most: int
) -> None:
    """Small messages reach the limit of the unacknowledged first, large ones that of memory."""
    slow = {"rate": rate, "rate_after": rate // 10}  # which a busy machine keeps up with
    times: dict[str, Any] = {"seconds": 8, "before": 1, "ack_wait": "2s", "max_age": "0.3s"}
    times |= {"connect_timeout": 0.5, "read_timeout": 1}
    plan = Plan(**slow, **times, size=size, memory="32MiB", max_ack_pending=most, silent=silent)
    seen = asyncio.run(endure(tmp_path, plan))
    assert seen.stored == once(seen.published)
    assert seen.published > 8 * rate
    assert set(seen.delivered) == {1}  # kept alive four times as long as ack_wait
    assert seen.redelivered == 0
    assert seen.pending > 2 * rate  # so nothing more was pulled than is allowed
    assert seen.unacked <= most
    assert 0.3 * (32 << 20) < seen.unacked_down * size < 32 << 20 or seen.unacked_down == most
    assert seen.peak < bound(32), f"{seen.peak >> 20} MiB"
    assert {status for status, _ in seen.ready(0, seen.down)} == {200}
    late = seen.ready(seen.down + 6, seen.up)
    assert late
    assert all(status == 503 and "s3://archive/nats" in text for status, text in late)
    assert seen.readiness[-1][1] == 200
    assert seen.drained == 0


@pytest.mark.exhaustive
def test_a_long_queue_of_redeliveries_and_what_is_new_are_worked_off(nats_server: Start, tmp_path: Path) -> None:
    server, root = nats_server(), tmp_path / "archive"

    async def scenario() -> int:
        await publish(server.url, messages(50_000, 100))
        async with connection(server.url) as client:
            stream = client.jetstream()
            wanted = ConsumerConfig(durable_name=CONSUMER, ack_wait=60, max_ack_pending=50_000)
            await stream.add_consumer(STREAM, wanted)
            taking = await stream.pull_subscribe_bind(CONSUMER, STREAM)
            taken: set[int] = set()
            while len(taken) < 50_000:
                taken.update(each.metadata.sequence.stream for each in await taking.fetch(5000, timeout=120))
            await stream.add_consumer(STREAM, replace(wanted, ack_wait=2))
        return await publish(server.url, messages(10_000, 100))

    count = asyncio.run(scenario())
    _, counters = captured(tmp_path, settings(server.url, root, source={"ack_wait": "2s"}))
    assert set(stored(root)) == set(once(count))
    assert counters["redelivered"] >= 50_000
    state = asyncio.run(consumer(server.url))
    assert (state.num_pending, state.num_ack_pending) == (0, 0)


READ = """
import sys
from jetcapture_py import read_archive
from tests.support.memory import peak_resident
print(sum(batch.num_rows for batch in read_archive(sys.argv[1], "ORDERS", dedupe=sys.argv[2])))
print(peak_resident())
"""


@pytest.mark.exhaustive
def test_five_million_rows_are_read_in_bounded_memory(tmp_path: Path) -> None:
    size, noise = 50_000, np.random.default_rng(0)
    random_bytes = pa.Array.from_buffers(pa.binary(100), size, [None, pa.py_buffer(noise.bytes(100 * size))])
    for number in range(100):
        columns = {layout.PAYLOAD: random_bytes.cast(pa.binary()), "amount": pa.array(noise.random(size))}
        seqs = range(number * size + 1, (number + 1) * size + 1)
        Archive(tmp_path).write(seqs, "ab"[number % 2], bucket=900 * (number // 10), columns=columns)
    for dedupe in ("auto", "full"):
        done = subprocess.run([sys.executable, "-c", READ, str(tmp_path), dedupe], capture_output=True, check=True)
        count, peak = map(int, done.stdout.split())
        assert count == 100 * size
        assert peak < 500 << 20, f"{peak >> 20} MiB"
