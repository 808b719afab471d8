"""What was published is what the archive holds: every byte, every header, every message, for every reader."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.maintain.compact import CompactionSettings
from spark_jobs.archive import read_archive
from spark_jobs.compact import compact
from spark_jobs.replay import replay
from tests.support.batches import HALVES, HOSTILE
from tests.support.nats_server import NatsServer
from tests.support.publishing import Headers, Publisher
from tests.support.running import (
    STREAM,
    Command,
    Message,
    connection,
    consumer,
    objects,
    publish,
    remove_unfinished,
    settings,
    until,
)
from tests.support.streams import Stored, read_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Start = Callable[..., NatsServer]

KEYS = (
    *("plain", "with-dash", "100%", "a%2Fb", "x=y", "a/b", "back\\slash", "q?uestion", "#hash", "[set]", "{a}"),
    *("caret^", "pi|pe", "<tag>", "'single'", '"double"', "co:lon", "été", "日本", "🚀", "a,b;c", "+plus", "~"),
    *(layout.DEFAULT_PARTITION, "e\u0301", "x" * 200),
)
HEADERS: tuple[list[tuple[str, str]] | None, ...] = (
    None,
    [],
    [("A", "1")],
    [("A", "1"), ("B", ""), ("A", "2"), ("A", "1")],
    [("X-Ümlaut".encode("ascii", "ignore").decode(), "é 日本"), ("Trailing", "blank ")],
)


def mixed(count: int) -> list[Message]:
    source = random.Random(7)
    messages: list[Message] = []
    for index in range(count):
        if index % 2000 == 1999:
            payload = source.randbytes(1_000_000)
        elif index % 10 == 0:
            payload = b""
        else:
            payload = source.randbytes(source.randrange(300))
        subject = f"orders.{KEYS[source.randrange(len(KEYS))]}" if index % 50 else "orders"
        messages.append((subject, payload, source.choice(HEADERS)))
    return messages


def grouped(headers: list[tuple[str, str]] | None) -> list[tuple[str, list[str]]] | None:
    """Headers as the archive has them: each name once, with its values in order."""
    if headers is None:
        return None
    found: dict[str, list[str]] = {}
    for name, value in headers:
        found.setdefault(name, []).append(value)
    return list(found.items())


def archived(root: Path, *, quarantine: bool = False) -> pa.Table:
    names = [name for name in objects(root) if name.quarantine is quarantine]
    tables = [pq.read_table(pa.BufferReader((root / name.path).read_bytes())) for name in names]
    table = pa.concat_tables(tables, promote_options="permissive").sort_by(layout.SEQ)
    assert len(set(table[layout.SEQ].to_pylist())) == table.num_rows
    return table


@pytest.mark.spark
@pytest.mark.exhaustive
def test_100_000_mixed_messages_come_back_byte_for_byte_and_every_engine_counts_them(
    nats_server: Start, tmp_path: Path, spark: SparkSession
) -> None:
    server, root, count = nats_server(), tmp_path / "archive", 100_000
    messages = mixed(count)
    assert asyncio.run(publish(server.url, messages, subjects=("orders", "orders.>"))) == count
    with Command(tmp_path, settings(server.url, root, key="{subject[1]}")) as replica:
        assert replica.start("--until-caught-up").wait(600) == 0, replica.log

    state = asyncio.run(consumer(server.url))
    assert (state.num_pending, state.num_ack_pending) == (0, 0)

    table = archived(root)
    assert table[layout.SEQ].to_pylist() == list(range(1, count + 1))
    assert table[layout.SUBJECT].to_pylist() == [subject for subject, _, _ in messages]
    assert table[layout.PAYLOAD].to_pylist() == [payload for _, payload, _ in messages]
    assert table[layout.HEADERS].to_pylist() == [grouped(headers) for _, _, headers in messages]
    for name in objects(root):
        subjects = set(pq.read_table(pa.BufferReader((root / name.path).read_bytes()))[layout.SUBJECT].to_pylist())
        assert subjects == {f"orders.{name.key}" if name.key is not None else "orders"}

    directory = root / STREAM
    assert pyarrow.dataset.dataset(directory, partitioning="hive").count_rows() == count
    files = f"{directory}/**/*.parquet"
    query = f"SELECT count(*), count(DISTINCT key) FROM read_parquet('{files}', hive_partitioning=true)"
    assert duckdb.sql(query).fetchall() == [(count, len(KEYS))]
    assert pl.scan_parquet(files, hive_partitioning=True).select(pl.len()).collect().item() == count
    spark.conf.set("spark.sql.sources.partitionColumnTypeInference.enabled", "false")
    try:
        frame = spark.read.parquet(str(directory))
        assert frame.count() == count
        found = {row["key"] for row in frame.select("key").distinct().collect()}
        assert found == {*KEYS, None}
    finally:
        spark.conf.unset("spark.sql.sources.partitionColumnTypeInference.enabled")


COLUMNS = {
    "id": "int64",
    "name": "string",
    "amount": "double",
    "price": "decimal(12,2)",
    "at": "timestamp",
    "city": {"type": "string", "path": "customer.city"},
    "tags": "list<string>",
}
WRONG = (
    *(b'{"id": "1"}', b'{"id": 1.5}', b'{"id": true}', b'{"id": 9223372036854775808}', b'{"id": 1e400}'),
    *(b'{"amount": 1e999}', b'{"amount": "1"}', b'{"name": 5}', b'{"name": {"a": 1}}', b'{"price": 1.005}'),
    *(b'{"price": 99999999999.99}', b'{"price": "NaN"}', b'{"at": "yesterday"}', b'{"at": "2026-02-30T00:00:00Z"}'),
    *(b'{"at": "2026-01-01T00:00:00"}', b'{"at": 5}', b'{"customer": 5}', b'{"customer": {"city": []}}'),
    *(b'{"tags": "a"}', b'{"tags": [1]}'),
)


def document(index: int) -> tuple[bytes, dict[str, Any]]:
    moment = f"2026-03-{index % 28 + 1:02}T{index % 24:02}:30:00.{index % 1_000_000:06}Z"
    values: dict[str, Any] = {
        "id": index,
        "name": f'n{index} "quoted" }}{{][ \\ é 日本 \n',
        "amount": index / 8,
        "price": f"{index}.25",
        "at": moment,
        "city": f"c{index % 9}",
        "tags": [f"t{index % 3}", "}{"],
    }
    body = {**values, "customer": {"city": values["city"], "vip": index % 2 == 0}, "ignored": [1, {"a": None}]}
    del body["city"]
    if index % 7 == 0:
        del body["tags"]
        values["tags"] = None
    if index % 11 == 0:
        body["customer"] = None
        values["city"] = None
    text = json.dumps(body, ensure_ascii=index % 2 == 0, indent=2 if index % 13 == 0 else None)
    return text.encode(), values


def test_of_60_000_json_messages_every_valid_one_has_its_values_and_every_hostile_one_is_quarantined(
    nats_server: Start, tmp_path: Path
) -> None:
    source = random.Random(11)
    hostile = (*filter(None, HOSTILE), *WRONG)  # an empty payload is a row of nulls
    payloads: list[bytes] = []
    expected: dict[int, dict[str, Any]] = {}
    while len(payloads) < 60_000:
        if source.random() < 0.1:
            payloads += list(HALVES) if source.random() < 0.2 else [source.choice(hostile)]
        else:
            payload, values = document(len(payloads))
            payloads.append(payload)
            expected[len(payloads)] = values
    server, root = nats_server(), tmp_path / "archive"
    asyncio.run(publish(server.url, (("orders.x", payload, None) for payload in payloads)))
    configuration = settings(server.url, root, decode={"format": "json", "columns": COLUMNS}, key="{city}")
    with Command(tmp_path, configuration) as replica:
        assert replica.start("--until-caught-up").wait(600) == 0, replica.log

    table = archived(root)
    assert table[layout.SEQ].to_pylist() == list(expected)
    for name in ("id", "name", "amount", "city", "tags"):
        assert table[name].to_pylist() == [values[name] for values in expected.values()], name
    assert [str(price) for price in table["price"].to_pylist()] == [values["price"] for values in expected.values()]
    moments = [value.strftime("%Y-%m-%dT%H:%M:%S.%fZ") for value in table["at"].to_pylist()]
    assert moments == [values["at"] for values in expected.values()]
    assert table[layout.PAYLOAD].to_pylist() == [payloads[seq - 1] for seq in expected]

    bad = archived(root, quarantine=True)
    assert bad.num_rows == len(payloads) - len(expected) > 5000
    assert bad[layout.PAYLOAD].to_pylist() == [payloads[seq - 1] for seq in bad[layout.SEQ].to_pylist()]
    assert set(bad[layout.SEQ].to_pylist()).isdisjoint(expected)
    assert all(bad["error"].to_pylist())


SUBJECTS = 40
OURS = ("Nats-Msg-Id:", "Jetcapture-")


def headers_of(index: int) -> Headers | None:
    if index % 10 == 0:
        return None
    plain = [("Trace", f"{index:032x}"), ("X-Region", "eu")]
    if index % 10 == 1:
        return [*plain, ("X-Region", "us"), ("Empty", ""), ("Text", "naïve: 値, a:b, 'q' \"d\" \\ \t.")]
    return plain


def message(index: int) -> tuple[str, bytes, Headers | None]:
    payload = random.Random(index).randbytes(index % 300)
    return f"orders.{index % SUBJECTS}.{'eu' if index % 3 else 'us'}", payload, headers_of(index)


async def create(url: str) -> None:
    async with connection(url) as client:
        await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"])


async def publish_slowly(url: str, messages: int) -> None:
    """Slowly enough that the kills fall into it."""
    async with connection(url) as client, Publisher(client) as publisher:
        for index in range(messages):
            await publisher.publish(*message(index))
            if index % 200 == 0:
                await asyncio.sleep(0.1)
        await publisher.flush()


def started(replica: Command) -> int:
    return len(list(replica.events("capture.started")))


async def capture_through_crashes(url: str, messages: int, kills: int, directory: Path, root: Path) -> None:
    """Publish, and meanwhile capture with two replicas that are killed again and again."""
    source = random.Random(3)
    block = {"interval": "2s", "max_age": "1s", "max_messages": 500}
    configuration = settings(url, root, source={"ack_wait": "5s"}, key="{subject[2]}", block=block)
    await create(url)
    publishing = asyncio.create_task(publish_slowly(url, messages))
    await asyncio.sleep(0.5)
    replicas = [Command(directory, configuration, name).start() for name in ("one", "two")]
    starts = dict.fromkeys(replicas, 0)  # how many each had logged before it was started last
    for _ in range(kills):
        await asyncio.sleep(source.uniform(0.8, 1.6))
        replica = source.choice(replicas)
        replica.kill()
        starts[replica] = started(replica)
        replica.start()
    await asyncio.wait_for(publishing, 300)
    await until(lambda: all(started(each) > before for each, before in starts.items()), "both take signals")
    for replica in replicas:
        replica.process.send_signal(signal.SIGTERM)
    assert [replica.wait() for replica in replicas] == [0, 0], [replica.log for replica in replicas]
    with Command(directory, configuration, "last") as last:
        assert last.start("--until-caught-up").wait() == 0, last.log


def by_subject(messages: Iterable[Stored]) -> dict[str, list[tuple[tuple[str, ...], bytes]]]:
    found: dict[str, list[tuple[tuple[str, ...], bytes]]] = defaultdict(list)
    for each in messages:
        lines = tuple(line for line in each.headers if not line.startswith(OURS))
        found[each.subject].append((lines, each.payload))
    return found


@pytest.mark.spark
@pytest.mark.parametrize(("messages", "kills"), [(10_000, 3), pytest.param(100_000, 5, marks=pytest.mark.exhaustive)])
def test_a_stream_captured_through_crashes_compacted_and_replayed_is_the_same(
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
