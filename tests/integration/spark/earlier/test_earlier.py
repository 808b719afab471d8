"""An archive of an earlier version is read, restored, continued, verified and compacted like one of today.

It has two streams of 120 messages. ORDERS lies under keys: every message is there twice, in objects that overlap, and
three are in the quarantine. EVENTS lies in 4 bundles.
"""

from __future__ import annotations

import asyncio
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.config.model import Config, NatsConfig
from jetcapture_py.verify.proof import verify
from spark_jobs.archive import read_archive
from spark_jobs.compact import compact
from spark_jobs.restore import prepare, restore
from spark_jobs.restoring.arguments import RestoreCommand
from spark_jobs.restoring.send import Maker
from tests.support.nats_server import NatsServer
from tests.support.running import capture_all, config, connection, objects

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

COUNT = 120
KEYS = ("007", "eu", "a/b", "", None)
SECTIONS: dict[str, dict[str, Any]] = {
    "ORDERS": {"key": "{region}", "block": {"interval": "5m"}},
    "EVENTS": {"key": "{device}", "block": {"interval": "5m", "bundles": 4}},
}
Row = tuple[int, str, str | None, float | None]
"""Sequence, payload, key and amount, which is an integer in some objects and a float in others."""


def payload(stream: str, seq: int) -> str:
    if stream == "EVENTS":
        return json.dumps({"id": seq, "device": f"d{seq % 20:02}"})
    if seq % 40 == 0:
        return f"not json {seq}"
    row: dict[str, Any] = {"id": seq, "region": KEYS[seq % 5], "amount": seq if seq <= 60 else seq / 4}
    return json.dumps(row if seq <= 60 else {**row, "tags": [{"name": f"t{seq % 3}"}]})


def expected(stream: str, count: int, *, quarantine: bool = False) -> list[Row]:
    rows: list[Row] = []
    for seq in range(1, count + 1):
        text = payload(stream, seq)
        if text.startswith("{") is not quarantine:
            sent = {} if quarantine else json.loads(text)
            rows.append((seq, text, sent.get("region") or sent.get("device"), sent.get("amount")))
    return rows


def read(spark: SparkSession, root: Path, stream: str, **how: Any) -> list[Row]:
    frame = read_archive(spark, f"file://{root}", stream, **how)
    names = [name for name in ("key", "amount") if name in frame.columns]
    rows = frame.select(layout.SEQ, layout.PAYLOAD, *names).orderBy(layout.SEQ).collect()
    found = (row.asDict() for row in rows)
    return [(row[layout.SEQ], row[layout.PAYLOAD].decode(), row.get("key"), row.get("amount")) for row in found]


def is_whole(spark: SparkSession, root: Path, count: int, *engines: str) -> None:
    for engine in engines:
        for stream in SECTIONS:
            assert read(spark, root, stream, engine=engine) == expected(stream, count)
        quarantined = read(spark, root, "ORDERS", engine=engine, quarantine=True)
        assert quarantined == expected("ORDERS", count, quarantine=True)


async def publish(url: str, stream: str, first: int, last: int) -> None:
    async with connection(url) as client:
        for seq in range(first, last + 1):
            await client.jetstream().publish(f"{stream.lower()}.new", payload(stream, seq).encode())


@pytest.mark.exhaustive
def test_an_archive_of_an_earlier_version_is_as_good_as_one_of_today(
    nats_server: Callable[..., NatsServer], spark: SparkSession, tmp_path: Path
) -> None:
    root, server = tmp_path / "archive", nats_server()
    zipfile.ZipFile(Path(__file__).with_name("archive-e211d04.zip")).extractall(root)
    is_whole(spark, root, COUNT, "spark", "arrow")

    def settings(stream: str) -> Config:
        source = {"stream": stream, "consumer": "again"}
        return config(server.url, root, source=source, decode={"format": "json"}, **SECTIONS[stream])

    for stream in SECTIONS:
        request = RestoreCommand(url=f"file://{root}", stream=stream, target=stream)
        restore(prepare(request, Maker.here()), NatsConfig(servers=(server.url,)))
        asyncio.run(publish(server.url, stream, COUNT + 1, COUNT + 20))
        asyncio.run(capture_all(settings(stream)))  # what is archived once more, and what is new
        assert asyncio.run(verify(settings(stream), content=True)).complete
    is_whole(spark, root, COUNT + 20, "spark")

    for stream in SECTIONS:
        for quarantine in (False, True):
            if stream == "ORDERS" or not quarantine:
                summary = compact(
                    spark, f"file://{root}", stream, quarantine=quarantine, older_than=0, grace=0, incomplete=True
                )
                assert summary.errors == ()
        assert asyncio.run(verify(settings(stream), content=True)).complete
    is_whole(spark, root, COUNT + 20, "spark")
    names = objects(root)
    groups = [name.group for name in names if name.first_seq <= COUNT]
    assert len(set(groups)) == len(groups)
    for name in names:
        assert (layout.KEY in pq.read_schema(root / name.path).names) is not name.quarantine
