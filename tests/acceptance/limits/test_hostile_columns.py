"""A few messages with very many, very long or deeply nested fields, against the real process and a small memory."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from tests.support.nats_server import NatsServer
from tests.support.running import Command, connection, objects, publish, settings, until
from tests.support.watching import Watch

Start = Callable[..., NatsServer]
BOUND = 600 << 20
SMALL = {"decode": {"format": "json"}, "limits": {"memory": "64MiB"}}


def text(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def small(count: int) -> Iterator[bytes]:
    return (b'{"a":%d}' % number for number in range(count))


def fields(prefix: str, count: int) -> dict[str, int]:
    return {f"{prefix}{number}": number for number in range(count)}


def nested_before_small() -> Iterator[bytes]:
    """4.8 GB when every later batch had all fields ever seen."""
    yield text({"n": {f"k{number}": fields("f", 999) for number in range(10)}})
    yield from small(60_000)


def long_names() -> Iterator[bytes]:
    """3.4 GB, and 2.2 GB of archive, when names were not bounded."""
    yield from (text({f"{number}{'x' * 500_000}": number}) for number in range(100))
    yield from small(2000)


def wide_items_in_long_lists() -> Iterator[bytes]:
    yield from repeat(text({"l": [fields("f", 999), *({"f1": 1} for _ in range(50_000))]}), 10)
    yield from small(2000)


def ids_as_names() -> Iterator[bytes]:
    yield from (text({"users": {f"user-{number}": {"name": "n", "age": number}}}) for number in range(20_000))


def outcome(root: Path) -> tuple[Counter[int], Counter[int]]:
    """How often each sequence is in the archive and in the quarantine."""
    archived, quarantined = Counter[int](), Counter[int]()
    for name in objects(root):
        with (root / name.path).open("rb") as file:
            seqs = pq.ParquetFile(file).read(columns=[layout.SEQ]).column(0).to_pylist()
        (quarantined if name.quarantine else archived).update(seqs)
    return archived, quarantined


@pytest.mark.parametrize(
    ("attack", "refused"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (nested_before_small, range(0)),
                (long_names, range(1, 101)),
                (ids_as_names, range(0)),
            )
        ),
        (wide_items_in_long_lists, range(1, 11)),
    ],
)
def test_hostile_fields_cost_no_more_memory_than_others_and_no_neighbour(
    nats_server: Start, tmp_path: Path, attack: Callable[[], Iterator[bytes]], refused: range
) -> None:
    server, root = nats_server(), tmp_path / "archive"
    count = asyncio.run(publish(server.url, (("orders.x", payload, None) for payload in attack())))
    command = Command(tmp_path, settings(server.url, root, **SMALL))
    with command, Watch(command.start("--until-caught-up").process.pid) as watch:
        assert command.wait(600) == 0, command.log[-2000:]
    archived, quarantined = outcome(root)
    assert quarantined == Counter(refused)
    assert archived == Counter(set(range(1, count + 1)) - set(refused))
    assert watch.peak < BOUND, f"{watch.peak >> 20} MiB"


def test_messages_that_come_one_by_one_do_not_hold_all_known_columns_each(nats_server: Start, tmp_path: Path) -> None:
    """654 MiB for 661 of them, when each was held as a batch with all 999 columns."""
    server, root, count = nats_server(), tmp_path / "archive", 150

    async def one_by_one(command: Command) -> None:
        async with connection(server.url) as client:
            for number in range(count):
                await client.publish("orders.x", text(fields("c", 999)) if not number else b'{"c1":1}')
                await asyncio.sleep(0.06)  # a batch is what comes in 50 ms
            await client.flush()
            consumer = client.jetstream()

            async def received() -> bool:
                state = await consumer.consumer_info("ORDERS", "archive")
                return bool(state.num_ack_pending == count)

            await until(received, "everything is received")
        command.process.terminate()

    asyncio.run(publish(server.url, []))
    command = Command(tmp_path, settings(server.url, root, **SMALL))
    with command, Watch(command.start().process.pid) as watch:
        asyncio.run(one_by_one(command))
        assert command.wait() == 0, command.log[-2000:]
    assert outcome(root) == (Counter(range(1, count + 1)), Counter())
    assert watch.peak < 200 << 20, f"{watch.peak >> 20} MiB"
