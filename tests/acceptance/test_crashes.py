"""Processes are killed, servers too; nothing acknowledged is missing and nothing is read twice."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jetcapture_py.publish import Publisher
from spark_jobs.archive import read_archive
from tests.support.nats_server import NatsServer
from tests.support.running import STREAM, Command, connection, consumer, settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES = 200_000
KILLS, SERVER_KILLS = 12, 2


@pytest.mark.spark
@pytest.mark.timeout(420)
def test_200_000_messages_survive_kills_of_two_replicas_and_of_the_server(
    nats_server: Callable[..., NatsServer], tmp_path: Path, spark: SparkSession
) -> None:
    server, root = nats_server(), tmp_path / "archive"
    columns = {"id": "int64", "region": "string"}
    configuration = settings(
        server.url,
        root,
        source={"ack_wait": "5s"},
        decode={"format": "json", "columns": columns},
        key="{region}",
        block={"max_age": "2s"},
    )
    source = random.Random(20261121)

    async def publish(done: asyncio.Event) -> None:
        """Slowly enough that the kills fall into it; with ids, because the server is killed as well."""
        async with connection(server.url) as client:
            await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"])
            async with Publisher(client, window=500) as publisher:
                for index in range(MESSAGES):
                    body = b'{"id":%d,"region":"r%d","text":"%s"}' % (index, index % 4, b"x" * 150)
                    await publisher.publish(f"orders.{index % 7}", body, [("Nats-Msg-Id", str(index))])
                    if index % 2000 == 0:
                        await asyncio.sleep(0.15)
                await publisher.flush()
        done.set()

    async def scenario() -> None:
        done = asyncio.Event()
        publishing = asyncio.create_task(publish(done))
        await asyncio.sleep(0.5)
        replicas = [Command(tmp_path, configuration, name).start() for name in ("one", "two")]
        plan = ["replica"] * KILLS + ["server"] * SERVER_KILLS
        source.shuffle(plan)
        for victim in plan:
            await asyncio.sleep(source.uniform(0.3, 2.0))
            if victim == "server":
                server.kill()
                server.start()
            else:
                replica = source.choice(replicas)
                assert replica.process.poll() is None, replica.log
                replica.kill()
                replica.start()
        await asyncio.wait_for(done.wait(), 120)
        await publishing
        for replica in replicas:
            replica.process.send_signal(signal.SIGTERM)
        assert [replica.wait() for replica in replicas] == [0, 0], [replica.log for replica in replicas]

    asyncio.run(scenario())
    with Command(tmp_path, configuration, "last") as last:
        assert last.start("--until-caught-up").wait(60) == 0, last.log
    state = asyncio.run(consumer(server.url))
    assert (state.num_pending, state.num_ack_pending) == (0, 0)

    async def stored() -> int:
        async with connection(server.url) as client:
            return int((await client.jetstream().stream_info(STREAM)).state.messages)

    held = asyncio.run(stored())
    assert held >= MESSAGES
    frame = read_archive(spark, str(root), STREAM)
    assert frame.count() == held
    assert frame.select("_nats_seq").distinct().count() == held
    assert frame.select("id").distinct().count() == MESSAGES
