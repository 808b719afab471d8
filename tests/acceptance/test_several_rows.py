"""Messages of many rows, through a capture that is killed: every row is read once, every message acknowledged."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jetcapture_py.archive import layout
from spark_jobs.archive import read_archive
from tests.support.nats_server import NatsServer
from tests.support.publishing import Publisher
from tests.support.running import CONSUMER, STREAM, Command, connection, objects, remove_unfinished, settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KILLS = 5
LARGE, ROWS, MESSAGES = 10_000, 100, 1_000


def payloads() -> Iterator[bytes]:
    """One message of 10,000 rows among 1,000 of 100 rows; each row has a number of its own."""
    number = 0
    for index in range(MESSAGES + 1):
        count = LARGE if index == MESSAGES // 2 else ROWS
        lines = (json.dumps({"number": number + row, "region": f"r{index % 3}"}) for row in range(count))
        yield "\n".join(lines).encode()
        number += count


async def capture_through_kills(url: str, directory: Path, root: Path) -> None:
    """Publish slowly, so that the kills fall into it."""
    sections = {
        "source": {"ack_wait": "5s"},
        "decode": {"format": "json", "rows": "lines", "columns": {"number": "int64", "region": "string"}},
        "key": "{region}",
        "block": {"interval": "5s", "max_age": "1s"},
    }
    configuration = settings(url, root, **sections)
    source = random.Random(5)
    async with connection(url) as client:
        await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"])
        with Command(directory, configuration).start() as command:
            every = (MESSAGES + 1) // (KILLS + 1)
            async with Publisher(client) as publisher:
                for index, payload in enumerate(payloads()):
                    await publisher.publish("orders.new", payload)
                    if index % 10 == 0:
                        await publisher.flush()
                        await asyncio.sleep(0.05)
                    if index % every == every - 1 and index > every:
                        await asyncio.sleep(source.uniform(0.1, 1.2))
                        command.kill()
                        command.start()
                await publisher.flush()
        with Command(directory, configuration, "last") as last:
            assert last.start("--until-caught-up").wait() == 0, last.log[-2000:]
        info = await client.jetstream().consumer_info(STREAM, CONSUMER)
        assert info.num_ack_pending == 0
        assert info.ack_floor is not None
        assert info.ack_floor.stream_seq == MESSAGES + 1


@pytest.mark.spark
@pytest.mark.exhaustive
def test_every_row_of_messages_with_many_rows_is_read_once_after_kills(
    nats_server: Callable[..., NatsServer], tmp_path: Path, spark: SparkSession
) -> None:
    root = tmp_path / "archive"
    server = nats_server()
    asyncio.run(capture_through_kills(server.url, tmp_path, root))
    remove_unfinished(root)
    frame = read_archive(spark, str(root), STREAM)
    has_payload = frame[layout.PAYLOAD].isNotNull().alias("has_payload")
    found = frame.select("number", layout.SEQ, layout.ROW, "key", has_payload).collect()
    assert Counter(row["number"] for row in found) == Counter(range(LARGE + ROWS * MESSAGES))
    expected = [(index + 1, row) for index in range(MESSAGES + 1) for row in range(LARGE if index == 500 else ROWS)]
    assert sorted((row[layout.SEQ], row[layout.ROW]) for row in found) == expected
    assert all(row["has_payload"] == (row[layout.ROW] == 0) for row in found), "the payload is in a message's first row"
    keys = {row[layout.SEQ]: row["key"] for row in found}
    assert keys == {seq: f"r{(seq - 1) % 3}" for seq in range(1, MESSAGES + 2)}
    assert sum(name.rows for name in objects(root)) >= len(found)
    assert not any(name.quarantine for name in objects(root))
