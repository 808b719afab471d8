"""Captures with many keys in bundles: every message once, few objects, each with the keys of its bundle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import duckdb
import polars as pl
import pyarrow.parquet as pq
import pytest

from jetcapture_py import log
from jetcapture_py.archive import footer, layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.config.block import MANY_KEYS
from jetcapture_py.errors import ConfigError
from tests.support.nats_server import NatsServer
from tests.support.running import Message, capture_all, config, objects, publish, running, until

Start = Callable[..., NatsServer]
KEYS = 300
BUNDLES = 16


def of(*numbers: int) -> list[Message]:
    """A message of each number; its key is the number, modulo `KEYS`, and none where that is 0."""
    return [
        (f"orders.x.{number % KEYS}" if number % KEYS else "orders.x", b'{"n":%d}' % number, None) for number in numbers
    ]


def key_of(number: int) -> str | None:
    return str(number % KEYS) if number % KEYS else None


def rows(root: Path, names: list[layout.ObjectName]) -> list[tuple[int, str | None, str]]:
    """Sequence, key and bundle of every row."""
    found = []
    for name in names:
        table = pq.ParquetFile(root / name.path).read([layout.SEQ, layout.KEY])
        found += [(row[layout.SEQ], row[layout.KEY], name.bundle) for row in table.to_pylist()]
    return found


def test_every_message_is_in_the_bundle_of_its_key_and_there_are_as_many_objects_as_bundles(
    nats_server: Start, tmp_path: Path
) -> None:
    server, root = nats_server(), tmp_path / "archive"
    asyncio.run(publish(server.url, of(*range(1, 3001))))
    settings = config(
        server.url,
        root,
        key="{subject[2]}",
        decode={"format": "json"},
        block={"bundles": BUNDLES, "interval": "1d", "max_age": "1h"},
    )
    asyncio.run(capture_all(settings))
    names = objects(root)
    buckets = {name.bucket for name in names}
    assert len(names) == BUNDLES * len(buckets), "each block was sealed once"
    found = rows(root, names)
    assert sorted(seq for seq, *_ in found) == list(range(1, 3001))
    for seq, key, bundle in found:
        assert (key, bundle) == (key_of(seq), bundle_of(key, BUNDLES))
    for name in names:
        entries = footer.entries(pq.read_metadata(root / name.path).metadata)
        assert (entries["bundles"], entries.get("key")) == (str(BUNDLES), None)
    pattern = f"{root}/ORDERS/*/*/*/*.parquet"
    source = f"read_parquet('{pattern}', hive_partitioning=true)"
    expected = [seq for seq in range(1, 3001) if seq % KEYS == 7]
    assert [row[0] for row in duckdb.sql(f"SELECT n FROM {source} WHERE key = '7' ORDER BY n").fetchall()] == expected
    scan = pl.scan_parquet(pattern, hive_partitioning=True).filter(pl.col("key") == "7")
    assert sorted(scan.collect()["n"].to_list()) == expected
    table = pq.read_table(root / "ORDERS", filters=[("key", "=", "7")])
    assert sorted(table.column("n").to_pylist()) == expected


def test_a_url_with_the_key_cannot_be_combined_with_bundles(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"store.url: cannot contain \{key\} with block.bundles"):
        config("nats://127.0.0.1:4222", f"{tmp_path}/{{key}}", block={"bundles": 4})


def test_a_capture_with_many_open_keys_and_no_bundles_says_so_once(
    nats_server: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, many = nats_server(), MANY_KEYS + 1
    messages = [(f"orders.x.{number}", b"x", None) for number in range(many)]

    def said() -> list[object]:
        return [getattr(record, log.FIELDS) for record in caplog.records if record.msg == "keys.many"]

    async def scenario() -> None:
        await publish(server.url, messages)
        async with running(config(server.url, tmp_path / "archive", key="{subject[2]}")):
            await until(lambda: bool(said()), "it is said")

    with caplog.at_level(logging.WARNING, "jetcapture"):
        asyncio.run(scenario())
    assert said() == [{"open_keys": many, "advice": "set block.bundles, or use a coarser key"}]
