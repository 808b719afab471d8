"""Spark's readers return of random archives exactly the rows that a model without our code expects.

So does its reader of buckets: what the one without Spark returns (`unit/reading/test_bucket.py`).
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from jetcapture_py.archive import layout
from jetcapture_py.reading import bucket as without_spark
from jetcapture_py.reading.selection import Selection
from spark_jobs import archive as with_spark
from tests.integration.spark.conftest import HOUR, Archive
from tests.support import kv
from tests.support.engines import EVERYTHING, check_reads
from tests.support.random_archives import STREAM, RandomArchive, archives

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import SparkSession

    from jetcapture_py.reading.plan import Dedupe

pytestmark = pytest.mark.spark


class InSpark:
    """`read_archive` for Spark, with one of its readers."""

    def __init__(self, spark: SparkSession, engine: str) -> None:
        self._spark, self._engine = spark, engine

    def read(
        self,
        archive: RandomArchive,
        *,
        selection: Selection = EVERYTHING,
        quarantine: bool = False,
        columns: Sequence[str] | None = None,
        dedupe: Dedupe = "auto",
    ) -> pa.Table:
        how: dict[str, Any] = {"engine": self._engine, "dedupe": dedupe, "columns": columns, **selection.arguments()}
        return with_spark.read_archive(self._spark, archive.url, STREAM, quarantine=quarantine, **how).toArrow()


def check(spark: SparkSession, drawn: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        archive = drawn.draw(archives(Path(directory)))
        check_reads(drawn, archive, [InSpark(spark, "spark"), InSpark(spark, "arrow")])


@settings(max_examples=6)
@given(some.data())
def test_every_message_is_read_once_with_its_values(spark: SparkSession, drawn: Any) -> None:
    check(spark, drawn)


@pytest.mark.exhaustive
@settings(max_examples=50, derandomize=False)
@given(some.data())
def test_every_message_of_many_archives_is_read_once_with_its_values(spark: SparkSession, drawn: Any) -> None:
    check(spark, drawn)


# ---------------------------------------------------------------------- buckets

MARKERS = [{"Nats-Marker-Reason": reason} for reason in ("MaxAge", "Purge", "Remove")]
HEADERS: list[dict[str, str]] = [*([{}] * 12), kv.DELETE, kv.PURGE, {"KV-Operation": "PUT"}, *MARKERS]
KEYS = [*(f"k{number}" for number in range(12)), "$KV.origin.a.b", "$KV.s", "$OTHER.s.a"]
WAYS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (3, {"history": True}),
    (5, {"as_of": 40}),
    (10_000, {"as_of": kv.second(320), "max_msgs_per_subject": 3, "max_age": "4m"}),
    (2, {"as_of": kv.second(190), "max_age": 0, "columns": ["key_name", "n", "revision"]}),
]
"""With the rows of a batch in Spark."""


def fill(archive: Archive, choose: random.Random, *, continues: bool, **limits: Any) -> None:
    """Random changes, some stored twice, in quarantine, or both; the bucket is created again at second 200."""
    changes: list[kv.Change] = []
    for _ in range(300):
        ttl = choose.choice([None, None, *kv.TTLS, *map(str, range(1, 60))])
        changes.append((choose.choice(KEYS), choose.choice(HEADERS) | ({} if ttl is None else kv.expiring(ttl))))
    anew: list[kv.Change] = [(change[0], change[1], 200 + number) for number, change in enumerate(changes[:100])]
    kv.store(archive, changes[:120], n=[*range(120)], columns={"operation": ["x"] * 120, "a.b": ["y"] * 120})
    kv.store(archive, changes[100:150], first=101)
    for first in (140, 150):
        failed = {layout.STAGE: ["decode"] * 20, layout.ERROR: ["bad"] * 20}
        kv.store(archive, changes[first - 1 : first + 19], first=first, quarantine=True, columns=failed)
    several = {layout.ROW: pa.array([0, 1], pa.int32()), "n": [5, 6]}
    times = [(HOUR + 175) * 1_000_000] * 2
    archive.write([175, 175], None, stream=kv.STREAM, subject="$KV.s.k1", timestamps=times, columns=several)
    kv.store(archive, anew, first=1 if continues else 180)  # what starts again continues nothing
    kv.note(archive, kv.second(0).isoformat(), **limits)
    kv.note(archive, kv.second(200).isoformat(), continues=continues, **limits)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_spark_reads_of_any_bucket_what_is_read_without_it(
    spark: SparkSession, archive: Archive, conf: Callable[[str, str], None], seed: int
) -> None:
    choose = random.Random(seed)
    limits = {"max_msgs_per_subject": seed % 3 + 1, "max_age": choose.choice([0, 100 * 10**9])}
    fill(archive, choose, continues=seed % 2 == 0, **limits)
    rows = 0
    for batch_rows, way in WAYS:
        conf("spark.sql.execution.arrow.maxRecordsPerBatch", str(batch_rows))
        table = with_spark.read_bucket(spark, archive.url, "s", **way).toArrow()
        own = without_spark.read_bucket(archive.url, "s", **way).read_all()
        assert [(f.name, f.type) for f in own.schema] == [(f.name, f.type) for f in table.schema]
        assert sorted(map(str, own.to_pylist())) == sorted(map(str, table.to_pylist())), way
        rows += own.num_rows
    assert rows > 80
