"""A stream comes back from its archive: captured through crashes, compacted, replayed into an empty stream."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jetcapture_py.maintain.compact import CompactionSettings
from spark_jobs.archive import read_archive
from spark_jobs.compact import compact
from spark_jobs.replay import replay
from tests.support.nats_server import NatsServer
from tests.support.publishing import Headers, Publisher
from tests.support.running import STREAM, Command, connection, objects, remove_unfinished, settings, until
from tests.support.streams import Stored, read_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SUBJECTS = 40
OURS = ("Nats-Msg-Id:", "Jetcapture-")
"""Headers that a replay adds."""


def headers_of(index: int) -> Headers | None:
    """None, one, or several headers: repeated ones, empty ones, text of any kind."""
    if index % 10 == 0:
        return None
    plain = [("Trace", f"{index:032x}"), ("X-Region", "eu")]
    if index % 10 == 1:
        return [*plain, ("X-Region", "us"), ("Empty", ""), ("Text", "naïve: 値, a:b, 'q' \"d\" \\ \t.")]
    return plain


def message(index: int) -> tuple[str, bytes, Headers | None]:
    payload = random.Random(index).randbytes(index % 300)
    return f"orders.{index % SUBJECTS}.{'eu' if index % 3 else 'us'}", payload, headers_of(index)


async def publish_slowly(url: str, messages: int, done: asyncio.Event) -> None:
    """Slowly enough that the kills fall into it."""
    async with connection(url) as client:
        await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"])
        async with Publisher(client) as publisher:
            for index in range(messages):
                await publisher.publish(*message(index))
                if index % 200 == 0:
                    await asyncio.sleep(0.1)
            await publisher.flush()
    done.set()


def started(replica: Command) -> int:
    """How often it has started."""
    return len(list(replica.events("capture.started")))


async def capture_through_crashes(url: str, messages: int, kills: int, directory: Path, root: Path) -> None:
    """Publish, and meanwhile capture with two replicas that are killed again and again."""
    source = random.Random(3)
    block = {"interval": "2s", "max_age": "1s", "max_messages": 500}
    sections = {"source": {"ack_wait": "5s"}, "key": "{subject[2]}", "block": block}
    configuration = settings(url, root, **sections)
    done = asyncio.Event()
    publishing = asyncio.create_task(publish_slowly(url, messages, done))
    await asyncio.sleep(0.5)
    replicas = [Command(directory, configuration, name).start() for name in ("one", "two")]
    starts = dict.fromkeys(replicas, 0)  # how many each had logged before it was started last
    for _ in range(kills):
        await asyncio.sleep(source.uniform(0.8, 1.6))
        replica = source.choice(replicas)
        replica.kill()
        starts[replica] = started(replica)
        replica.start()
    await asyncio.wait_for(done.wait(), 300)
    await publishing
    await until(lambda: all(started(each) > before for each, before in starts.items()), "both take signals")
    for replica in replicas:
        replica.process.send_signal(signal.SIGTERM)
    assert [replica.wait() for replica in replicas] == [0, 0], [replica.log for replica in replicas]
    with Command(directory, configuration, "last") as last:
        assert last.start("--until-caught-up").wait() == 0, last.log


def by_subject(messages: Iterable[Stored]) -> dict[str, list[tuple[tuple[str, ...], bytes]]]:
    """Headers, without those of a replay, and payloads, in the stream's order."""
    found: dict[str, list[tuple[tuple[str, ...], bytes]]] = defaultdict(list)
    for each in messages:
        lines = tuple(line for line in each.headers if not line.startswith(OURS))
        found[each.subject].append((lines, each.payload))
    return found


@pytest.mark.spark
@pytest.mark.parametrize(("messages", "kills"), [(10_000, 3), pytest.param(100_000, 5, marks=pytest.mark.exhaustive)])
def test_a_stream_captured_through_crashes_compacted_and_replayed_is_the_same_stream(
    nats_server: Callable[..., NatsServer], tmp_path: Path, spark: SparkSession, messages: int, kills: int
) -> None:
    root = tmp_path / "archive"
    first, second = nats_server(), nats_server()
    asyncio.run(capture_through_crashes(first.url, messages, kills, tmp_path, root))
    before = asyncio.run(read_stream(first.url, STREAM))
    assert len(before) == messages
    assert Counter(bool(each.headers) for each in before) == {True: messages * 9 // 10, False: messages // 10}

    remove_unfinished(root)
    many = len(objects(root))
    summary = compact(spark, str(root), STREAM, CompactionSettings(after=0, grace=0))
    assert not summary.errors
    assert len(objects(root)) < many
    assert sum(name.rows for name in objects(root)) == messages, "copies are left"

    asyncio.run(create(second.url))
    done = replay(read_archive(spark, str(root), STREAM), second.url, "{subject}")
    assert (done.published, done.duplicates) == (messages, 0)
    after = asyncio.run(read_stream(second.url, STREAM))
    assert len(after) == messages
    assert by_subject(after) == by_subject(before)
    ids = {line for each in after for line in each.headers if line.startswith("Nats-Msg-Id:")}
    assert ids == {f"Nats-Msg-Id: {STREAM}:{seq}:{done.replay_id}" for seq in range(1, messages + 1)}


async def create(url: str) -> None:
    async with connection(url) as client:
        await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"])
