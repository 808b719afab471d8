"""Which type `read_archive` gives a column that objects store with different types, and that no value changes."""

from __future__ import annotations

import struct
from decimal import Decimal
from typing import TYPE_CHECKING, Any, get_args

import pyarrow as pa
import pytest
from pyspark.sql import Row

from jetcapture_py.archive import layout
from jetcapture_py.errors import JetcaptureError
from spark_jobs.archive import Engine, read_archive
from tests.integration.spark.conftest import Archive

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


def decimals(value: str, precision: int, scale: int) -> pa.Array:
    return pa.array([Decimal(value)], pa.decimal128(precision, scale))


def map_of(key: pa.DataType, value: pa.DataType, entries: list[tuple[Any, Any]]) -> pa.Array:
    return pa.array([entries], pa.map_(key, value))


UNSIGNED = pa.array([2**64 - 1], pa.uint64())
STRUCT = pa.array([{"a": 1, "b": None}])
CASES: dict[str, tuple[pa.Array, pa.Array, str, Any, Any]] = {
    "decimals": (
        *(decimals("1.5", 10, 2), decimals("0.0001", 12, 4), "decimal(12,4)"),
        *(Decimal("1.5"), Decimal("0.0001")),
    ),
    "decimal and integer": (
        *(decimals("99999999.99", 10, 2), pa.array([2**63 - 1]), "decimal(21,2)"),
        *(Decimal("99999999.99"), Decimal(2**63 - 1)),
    ),
    "uint64 and int64": (UNSIGNED, pa.array([-(2**63)]), "decimal(20,0)", Decimal(2**64 - 1), Decimal(-(2**63))),
    "large integer and double": (pa.array([2**53 + 1]), pa.array([0.5]), "string", "9007199254740993", "0.5"),
    "no decimal holds both": (decimals("1", 38, 0), decimals("0.5", 38, 10), "string", "1", "0.5000000000"),
    "map with integers for keys": (
        *(map_of(pa.int32(), pa.null(), [(1, None)]), map_of(pa.int32(), pa.string(), [(2, "x")]), "map<int,string>"),
        *({1: None}, {2: "x"}),
    ),
    "null that became a struct": (
        *(STRUCT, pa.array([{"b": {"c": 1}}]), "struct<a:bigint,b:struct<c:bigint>>"),
        *(Row(a=1, b=None), Row(a=None, b=Row(c=1))),
    ),
    "timestamp and text": (
        *(pa.array([1_500_000], pa.timestamp("us", "UTC")), pa.array(["x"]), "string"),
        *("1970-01-01T00:00:01.500000Z", "x"),
    ),
    "integer and double": (pa.array([1]), pa.array([1.5]), "double", 1.0, 1.5),
    "flag and integer": (pa.array([True]), pa.array([3]), "string", "true", "3"),
    "struct and text": (pa.array([{"a": 1}]), pa.array(["x"]), "string", '{"a":1}', "x"),
    "null": (pa.nulls(1), pa.nulls(1), "string", None, None),
    "empty list": (pa.array([[]], pa.list_(pa.null())), pa.array([["x"]]), "array<string>", [], ["x"]),
    "dictionary": (pa.array(["x"]), pa.array(["x"]).dictionary_encode(), "string", "x", "x"),
}
"""By column: as two objects have it, its type where both are read, and the values then."""


def test_types_meet_where_no_value_changes(spark: SparkSession, archive: Archive) -> None:
    archive.write([1], columns={name: case[0] for name, case in CASES.items()})
    archive.write([2], columns={name: case[1] for name, case in CASES.items()})
    frame = read_archive(spark, archive.url, "ORDERS", columns=[*CASES, layout.SEQ])
    assert {name: kind for name, kind in frame.dtypes if name in CASES} == {
        name: case[2] for name, case in CASES.items()
    }
    first, second = (row.asDict() for row in frame.orderBy(layout.SEQ).collect())
    for name, (_, _, _, *values) in CASES.items():
        assert [first[name], second[name]] == values, name


def test_fields_of_structs_that_differ_in_case_only_are_one_field(spark: SparkSession, archive: Archive) -> None:
    archive.write([1], s=[{"id": 1, "t": [{"X": 1}]}])
    archive.write([2], s=[{"ID": 2, "t": [{"x": 2}]}])
    for engine in get_args(Engine):
        frame = read_archive(spark, archive.url, "ORDERS", engine=engine)
        assert dict(frame.dtypes)["s"] == "struct<id:bigint,t:array<struct<X:bigint>>>"
        found = frame.orderBy(layout.SEQ).select("s.id", "s.ID", "s.t.x").collect()
        assert [tuple(row) for row in found] == [(1, 1, [1]), (2, 2, [2])]


def test_fields_of_one_struct_that_differ_in_case_only_are_refused(spark: SparkSession, archive: Archive) -> None:
    archive.write([1], list=[[{"id": 1, "ID": 2}]], other=[3])
    with pytest.raises(JetcaptureError) as raised:
        read_archive(spark, archive.url, "ORDERS")
    expected = "column list has fields id and ID, which differ in case only: name the columns you need, without these"
    assert str(raised.value) == expected
    assert read_archive(spark, archive.url, "ORDERS", columns=["other"]).collect() == [Row(other=3)]


def test_a_session_that_tells_names_apart_by_their_case_reads_them_as_the_same(
    spark: SparkSession, archive: Archive
) -> None:
    archive.write([1], amount=[1])
    archive.write([2], Amount=[2])
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        rows = read_archive(spark, archive.url, "ORDERS", columns=["AMOUNT"]).collect()
        assert sorted(row["AMOUNT"] for row in rows) == [1, 2]
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def plan_of(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


def test_only_objects_that_store_another_type_are_read_in_workers(spark: SparkSession, archive: Archive) -> None:
    archive.write([1, 2], "a", n=[1, 2], s=["x", "y"])
    archive.write([3], "a", n=[3])
    archive.write([4], "a", n=[4], s=[{"z": 1}])
    frame = read_archive(spark, archive.url, "ORDERS").where("key = 'a' AND n > 1").select("s")
    plan = plan_of(frame)
    assert (plan.count("FileScan parquet"), plan.count("MapInArrow")) == (1, 1)
    assert "PushedFilters: [IsNotNull(n), GreaterThan(n,1)]" in plan
    assert "ReadSchema: struct<n:bigint,s:string>" in plan
    assert sorted(str(row["s"]) for row in frame.collect()) == ["None", "y", '{"z":1}']


def test_a_column_that_became_wider_is_read_in_one_scan(spark: SparkSession, archive: Archive) -> None:
    narrow, single = pa.array([-(2**31)], pa.int32()), pa.array([0.1], pa.float32())
    archive.write([1], a=narrow, b=pa.array([-7], pa.int8()), c=single, d=[["x"]])
    archive.write([2], a=[2**62], b=[0.5], c=[0.1])
    archive.write([3], a=pa.nulls(1), b=pa.nulls(1), c=pa.nulls(1))
    archive.write([4], b=pa.array([65535], pa.uint16()))
    frame = read_archive(spark, archive.url, "ORDERS", columns=[layout.SEQ, "a", "b", "c"])
    assert [kind for _, kind in frame.dtypes] == ["bigint", "bigint", "double", "double"]
    assert (plan_of(frame).count("FileScan parquet"), plan_of(frame).count("MapInArrow")) == (1, 0)
    (value,) = struct.unpack("f", struct.pack("f", 0.1))
    assert sorted(tuple(row) for row in frame.collect()) == [
        (1, -(2**31), -7.0, value),
        (2, 2**62, 0.5, 0.1),
        (3, None, None, None),
        (4, None, 65535.0, None),
    ]
