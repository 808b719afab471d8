"""Objects whose columns drifted are read in few scans, whatever combinations of types they have."""

from __future__ import annotations

import struct
from random import Random
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from spark_jobs.archive import MAX_SCANS, Dedupe, Engine, read_archive
from tests.integration.spark.conftest import HOUR, Archive

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

KINDS: list[tuple[pa.Array | None, str | None]] = [
    (pa.array([1]), "1"),
    (pa.array([0.5]), "0.5"),
    (pa.array(["x"]), "x"),
    (pa.array([{"y": 2}]), '{"y":2}'),
    (pa.array([[None]], pa.list_(pa.null())), "[null]"),
    (pa.nulls(1), None),
    (None, None),
]
"""A column's value as it is stored, or not at all, and as it is read where other objects have text."""
COLUMNS = ["a", "b", "c", "d"]


def scans(frame: DataFrame) -> int:
    """How many scans are planned; a frame that has run shows each of them twice."""
    return str(frame._jdf.queryExecution().executedPlan().toString()).count("FileScan parquet")


@pytest.fixture(scope="module")
def drifted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Archive, list[tuple[int, ...]]]:
    """Pairs of objects with a message in common, each pair with other types, and what has to be read."""
    archive, random = Archive(tmp_path_factory.mktemp("drifted")), Random(1)
    expected = []
    for first in range(0, 200, 10):
        chosen = {name: random.choice(KINDS) for name in COLUMNS}
        for seqs in ([first, first + 1], [first + 1, first + 3]):
            columns = {name: pa.concat_arrays([kind] * 2) for name, (kind, _) in chosen.items() if kind is not None}
            archive.write(seqs, bucket=HOUR + 60 * (first // 100), columns=columns)
        expected += [(first + each, *(text for _, text in chosen.values())) for each in (0, 1, 3)]
    return archive, expected


@pytest.mark.parametrize(
    ("engine", "dedupe"),
    [("spark", "auto"), pytest.param("spark", "full", marks=pytest.mark.exhaustive), ("arrow", "auto")],
)
def test_a_drift_of_several_columns_takes_no_scan_for_each_combination(
    spark: SparkSession, drifted: tuple[Archive, list[tuple[int, ...]]], engine: Engine, dedupe: Dedupe
) -> None:
    archive, expected = drifted
    frame = read_archive(spark, archive.url, "ORDERS", columns=[layout.SEQ, *COLUMNS], engine=engine, dedupe=dedupe)
    assert scans(frame) <= (0 if engine == "arrow" else 2 * MAX_SCANS)
    assert sorted(tuple(row) for row in frame.collect()) == expected


def test_a_column_that_became_wider_is_read_in_one_scan(spark: SparkSession, archive: Archive) -> None:
    narrow, single = pa.array([-(2**31)], pa.int32()), pa.array([0.1], pa.float32())
    archive.write([1], a=narrow, b=pa.array([-7], pa.int8()), c=single, d=[["x"]])
    archive.write([2], a=[2**62], b=[0.5], c=[0.1])
    archive.write([3], a=pa.nulls(1), b=pa.nulls(1), c=pa.nulls(1))
    archive.write([4], b=pa.array([65535], pa.uint16()))
    frame = read_archive(spark, archive.url, "ORDERS", columns=[layout.SEQ, "a", "b", "c"])
    assert [kind for _, kind in frame.dtypes] == ["bigint", "bigint", "double", "double"]
    assert scans(frame) == 1
    (value,) = struct.unpack("f", struct.pack("f", 0.1))
    assert sorted(tuple(row) for row in frame.collect()) == [
        (1, -(2**31), -7.0, value),
        (2, 2**62, 0.5, 0.1),
        (3, None, None, None),
        (4, None, 65535.0, None),
    ]


def test_unsigned_integers_beside_floats_keep_their_values(spark: SparkSession, archive: Archive) -> None:
    archive.write([1], a=pa.array([2**32 - 1], pa.uint32()))
    archive.write([2], a=[0.5])
    frame = read_archive(spark, archive.url, "ORDERS")
    assert sorted(row["a"] for row in frame.collect()) == [0.5, 2**32 - 1]
