"""Buckets of the messages' own time: late and early messages lie where they belong, and are found by either time."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import footer, layout, watermark
from jetcapture_py.config.units import microseconds_of, moment_of
from jetcapture_py.verify.proof import verify
from tests.support.nats_server import NatsServer
from tests.support.running import (
    CONSUMER,
    STREAM,
    Message,
    capture_all,
    config,
    objects,
    publish,
    rows,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Start = Callable[..., NatsServer]

HOUR = 3600
NOW = datetime(2026, 5, 4, 12, 30, tzinfo=UTC)
CONFIGURATION: dict[str, Any] = {
    "source": {"max_ack_pending": 300_000},
    "decode": {"format": "json", "columns": {"id": "int64", "at": "timestamp"}},
    "key": "",
    "block": {"time": "at", "interval": "1h", "max_age": "10m"},
}


def event_times(count: int) -> list[datetime]:
    """Of messages within an hour, 5 % of them up to three days late, and some up to a day in the future."""
    source = random.Random(11)
    found = []
    for index in range(count):
        at = NOW + timedelta(seconds=index * HOUR / 2 / count)
        if index % 20 == 0:
            at -= timedelta(seconds=source.uniform(0, 3 * 86_400))
        elif index % 501 == 0:
            at += timedelta(seconds=source.uniform(HOUR, 86_400))
        found.append(at)
    return found


def of(times: list[datetime]) -> list[Message]:
    return [
        ("orders.new", json.dumps({"id": index, "at": at.isoformat()}).encode(), None) for index, at in enumerate(times)
    ]


def ids(frame: DataFrame) -> list[int]:
    return sorted(frame.select("id").toPandas()["id"].tolist())


@pytest.mark.spark
@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.exhaustive)])
def test_messages_of_which_some_are_late_or_early_lie_in_their_own_buckets_and_are_found_by_both_times(
    nats_server: Start, tmp_path: Path, spark: SparkSession, count: int
) -> None:
    """The exhaustive one asks for every range of the one time with every range of the other."""
    from spark_jobs.archive import read_archive
    from spark_jobs.compact import compact

    server, root = nats_server(), tmp_path / "archive"
    times = event_times(count)
    asyncio.run(publish(server.url, of(times)))
    settings = config(server.url, root, **CONFIGURATION)
    asyncio.run(capture_all(settings))

    names = objects(root)
    buckets = Counter(int(at.timestamp()) // HOUR * HOUR for at in times)
    assert {name.bucket: name.rows for name in names} == buckets
    assert len(names) == len(buckets), "a bucket has more than one object, and no limit asked for that"
    assert all(name.event_time and name.path.rpartition("/")[2][15] == "E" for name in names)
    found = {row["id"]: row for row in rows(root)}
    assert {number: row["at"] for number, row in found.items()} == dict(enumerate(times))
    assert all(row[layout.TIME] == row["at"] for row in found.values())
    for name in names:
        said = footer.entries(pq.read_metadata(root / name.path).metadata)
        assert said["time"] == "at"

    report = asyncio.run(verify(settings, deep=True))
    assert report.complete
    assert report.stored == count
    mark = watermark.decode((root / watermark.path(STREAM, CONSUMER)).read_bytes(), STREAM, "")
    assert mark.bucket_time == "at"

    stored = sorted(row[layout.TIMESTAMP] for row in found.values())
    bounds: list[tuple[datetime | None, datetime | None]] = [
        (None, None),
        (stored[count // 3], stored[2 * count // 3]),
        (stored[count // 2], None),
        (None, stored[count // 10]),
        (stored[-1] + timedelta(days=1), None),
    ]
    events: list[tuple[datetime | None, datetime | None]] = [
        (None, None),
        (NOW - timedelta(days=2, minutes=7), NOW - timedelta(days=1)),
        (NOW + timedelta(minutes=30), None),
        (None, NOW - timedelta(hours=3, seconds=0.5)),
        (NOW, NOW + timedelta(minutes=20)),
    ]
    every = list(product(bounds, events))
    pairs = every if count == 100_000 else [*zip(bounds, events[1:] + events[:1], strict=True), *every[:1]]
    url = f"file://{root}"
    for compacted in (False, True):
        if compacted:
            compact(spark, url, STREAM, older_than=0, grace=0, incomplete=True)
        for (start, end), (first, last) in pairs:
            frame = read_archive(
                spark, url, STREAM, start=start, end=end, event_start=first, event_end=last, columns=["id"]
            )
            expected = [
                number
                for number, row in found.items()
                if (start is None or row[layout.TIMESTAMP] >= start)
                and (end is None or row[layout.TIMESTAMP] < end)
                and (first is None or row["at"] >= first)
                and (last is None or row["at"] < last)
            ]
            assert ids(frame) == sorted(expected), (start, end, first, last)


def test_messages_without_a_time_are_in_the_quarantine_or_take_the_streams(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    headers = [("X-At", "2026-05-01T12:00:00Z")], [("X-At", "soon")], None
    asyncio.run(publish(server.url, [("orders.new", b"x", each) for each in headers]))
    block = {"time": "header.X-At", "interval": "1h"}
    asyncio.run(capture_all(config(server.url, tmp_path / "a", block=block)))
    quarantined = rows(tmp_path / "a", quarantine=True)
    assert [row["stage"] for row in quarantined] == ["time", "time"]
    assert all(not name.event_time for name in objects(tmp_path / "a") if name.quarantine)
    assert [row[layout.SEQ] for row in rows(tmp_path / "a")] == [1]

    other = config(server.url, tmp_path / "b", block={**block, "time_fallback": "timestamp"}, source={"consumer": "b"})
    asyncio.run(capture_all(other))
    found = {row[layout.SEQ]: row for row in rows(tmp_path / "b")}
    assert not rows(tmp_path / "b", quarantine=True)
    assert found[1][layout.TIME] == moment_of(microseconds_of(datetime(2026, 5, 1, 12, tzinfo=UTC)))
    assert all(found[seq][layout.TIME] == found[seq][layout.TIMESTAMP] for seq in (2, 3))
