"""What was published is what the archive holds: every byte, every header, every message, for every reader."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from tests.support.batches import HALVES, HOSTILE
from tests.support.nats_server import NatsServer
from tests.support.running import STREAM, Command, Message, consumer, objects, publish, settings

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
    """Empty, binary and large payloads; subjects and headers of every kind."""
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
    """All rows in the order of their sequences; a message that is there twice fails the test."""
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
    query = (
        f"SELECT count(*), count(DISTINCT key) FROM read_parquet('{directory}/**/*.parquet', hive_partitioning=true)"
    )
    assert duckdb.sql(query).fetchall() == [(count, len(KEYS))]
    assert (
        pl.scan_parquet(f"{directory}/**/*.parquet", hive_partitioning=True).select(pl.len()).collect().item() == count
    )
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
    b'{"id": "1"}',
    b'{"id": 1.5}',
    b'{"id": true}',
    b'{"id": 9223372036854775808}',
    b'{"id": 1e400}',
    b'{"amount": 1e999}',
    b'{"amount": "1"}',
    b'{"name": 5}',
    b'{"name": {"a": 1}}',
    b'{"price": 1.005}',
    b'{"price": 99999999999.99}',
    b'{"price": "NaN"}',
    b'{"at": "yesterday"}',
    b'{"at": "2026-02-30T00:00:00Z"}',
    b'{"at": "2026-01-01T00:00:00"}',
    b'{"at": 5}',
    b'{"customer": 5}',
    b'{"customer": {"city": []}}',
    b'{"tags": "a"}',
    b'{"tags": [1]}',
)


def document(index: int) -> tuple[bytes, dict[str, Any]]:
    """A valid payload, and the row it has to become."""
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
