"""Spark's `read_bucket` gives of a random bucket what the one without Spark gives: `unit/reading/test_bucket.py`."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.reading import bucket as without_spark
from spark_jobs import archive as with_spark
from tests.integration.spark.conftest import HOUR, Archive
from tests.support.kv import DELETE, PURGE, STREAM, TTLS, Change, expiring, note, second, store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
HEADERS: list[dict[str, str]] = [
    *([{}] * 12),
    DELETE,
    PURGE,
    {"KV-Operation": "PUT"},
    *({"Nats-Marker-Reason": reason} for reason in ("MaxAge", "Purge", "Remove")),
]
KEYS = [*(f"k{number}" for number in range(12)), "$KV.origin.a.b", "$KV.s", "$OTHER.s.a"]
WAYS: list[dict[str, Any]] = [
    {},
    {"history": True},
    {"as_of": 40},
    {"as_of": second(190)},
    {"as_of": second(320), "max_msgs_per_subject": 3},
    {"as_of": second(320), "max_msgs_per_subject": 3, "max_age": "4m"},
    {"as_of": second(320), "max_age": 0, "columns": ["key_name", "n", "revision"]},
]


def fill(archive: Archive, choose: random.Random, *, continues: bool, **limits: Any) -> None:
    """Random changes, some stored twice, in quarantine, or both; the bucket is created again at second 200."""
    changes: list[Change] = []
    for _ in range(300):
        ttl = choose.choice([None, None, *TTLS, *map(str, range(1, 60))])
        changes.append((choose.choice(KEYS), choose.choice(HEADERS) | ({} if ttl is None else expiring(ttl))))
    anew: list[Change] = [(change[0], change[1], 200 + number) for number, change in enumerate(changes[:100])]
    store(archive, changes[:120], n=[*range(120)], columns={"operation": ["x"] * 120, "a.b": ["y"] * 120})
    store(archive, changes[100:150], first=101)
    for first in (140, 150):
        failed = {layout.STAGE: ["decode"] * 20, layout.ERROR: ["bad"] * 20}
        store(archive, changes[first - 1 : first + 19], first=first, quarantine=True, columns=failed)
    several = {layout.ROW: pa.array([0, 1], pa.int32()), "n": [5, 6]}
    times = [(HOUR + 175) * 1_000_000] * 2
    archive.write([175, 175], None, stream=STREAM, subject="$KV.s.k1", timestamps=times, columns=several)
    store(archive, anew, first=1 if continues else 180)  # what starts again continues nothing
    note(archive, second(0).isoformat(), **limits)
    note(archive, second(200).isoformat(), continues=continues, **limits)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_spark_reads_of_any_bucket_what_is_read_without_it(spark: SparkSession, archive: Archive, seed: int) -> None:
    choose = random.Random(seed)
    limits = {"max_msgs_per_subject": seed % 3 + 1, "max_age": choose.choice([0, 100 * 10**9])}
    fill(archive, choose, continues=seed % 2 == 0, **limits)
    rows = 0
    for batch_rows, way in zip((2, 3, 5, 7, 10_000, 3, 2), WAYS, strict=True):
        spark.conf.set(BATCH_ROWS, batch_rows)
        table = with_spark.read_bucket(spark, archive.url, "s", **way).toArrow()
        spark.conf.unset(BATCH_ROWS)
        own = without_spark.read_bucket(archive.url, "s", **way).read_all()
        assert [(f.name, f.type) for f in own.schema] == [(f.name, f.type) for f in table.schema]
        assert sorted(map(str, own.to_pylist())) == sorted(map(str, table.to_pylist())), way
        rows += own.num_rows
    assert rows > 100
