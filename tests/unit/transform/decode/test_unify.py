from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa

from jetcapture_py.archive.schema import conform, unify, unify_batches


def batch(**columns: Any) -> pa.RecordBatch:
    arrays = [each if isinstance(each, pa.Array) else pa.array(each) for each in columns.values()]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def decimals(value: str, precision: int, scale: int) -> pa.Array:
    return pa.array([Decimal(value)], pa.decimal128(precision, scale))


INT = pa.int64()
AB = {"a": None, "b": None}
_A, _B = pa.struct([("a", INT)]), pa.struct([("b", pa.string())])


def maps(entries: list[tuple[Any, Any]], value: pa.DataType, key: pa.DataType = pa.string()) -> pa.Array:  # noqa: B008
    return pa.array([entries], pa.map_(key, value))


def together(*batches: pa.RecordBatch) -> list[dict[str, Any]]:
    schema = unify_batches(batches)
    table = pa.Table.from_batches([conform(each, schema) for each in batches], schema)
    table.validate(full=True)
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def test_equal_schemas_are_left_alone() -> None:
    one, other = batch(a=[1]), batch(a=[2])
    schema = unify([one.schema, other.schema])
    assert schema is one.schema or schema.equals(one.schema)
    assert conform(other, schema) is other


def test_missing_columns_are_null_in_the_order_of_first_appearance() -> None:
    rows = [list(row.items()) for row in together(batch(b=[1]), batch(a=["x"], b=[2]))]
    assert rows == [[("b", 1), ("a", None)], [("b", 2), ("a", "x")]]


RECONCILED: list[tuple[pa.Array, pa.Array, list[Any]]] = [
    (pa.array([1]), pa.array([0.5]), [1.0, 0.5]),
    (pa.array([2**53, None]), pa.array([0.5]), [2.0**53, None, 0.5]),
    (pa.array([2**53 + 1]), pa.array([0.5]), ["9007199254740993", "0.5"]),
    (pa.array([2**64 - 1], pa.uint64()), pa.array([0.5]), ["18446744073709551615", "0.5"]),
    (pa.array([{"a": [2**53 + 1]}]), pa.array([{"a": [0.5]}]), ['{"a":[9007199254740993]}', '{"a":[0.5]}']),
    (pa.array([1], pa.int8()), pa.array([2**40]), [1, 2**40]),
    (pa.array([2**64 - 1], pa.uint64()), pa.array([-(2**63)]), [Decimal(2**64 - 1), Decimal(-(2**63))]),
    (pa.array([2**32 - 1], pa.uint32()), pa.array([2**63 - 1]), [2**32 - 1, 2**63 - 1]),
    (pa.array([255], pa.uint8()), pa.array([-128], pa.int8()), [255, -128]),
    (pa.array([255], pa.uint8()), pa.array([2**64 - 1], pa.uint64()), [255, 2**64 - 1]),
    (decimals("1.50", 10, 2), decimals("0.0001", 12, 4), [Decimal("1.5"), Decimal("0.0001")]),
    (decimals("1.50", 10, 2), pa.array([2**63 - 1]), [Decimal("1.5"), Decimal(2**63 - 1)]),
    (decimals("1", 38, 0), decimals("0.5", 38, 10), ["1", "0.5000000000"]),
    (decimals("1.50", 10, 2), pa.array([0.5]), ["1.50", "0.5"]),
    (pa.array([None]), pa.array(["x"]), [None, "x"]),
    (pa.array([1, None]), pa.array(["x"]), ["1", None, "x"]),
    (pa.array([True]), pa.array([1]), ["true", "1"]),
    (pa.array([{"a": 1, "b": None}]), pa.array(["x"]), ['{"a":1}', "x"]),
    (pa.array([[1, None]]), pa.array([0.5]), ["[1,null]", "0.5"]),
    (pa.array([[1], None, []]), pa.array([[0.5]]), [[1.0], None, [], [0.5]]),
    (pa.array([[1], [None]]), pa.array([["x"]]), [["1"], [None], ["x"]]),
    (pa.array([{"a": 1}, None]), pa.array([{"b": [{"c": 1}]}]), [AB | {"a": 1}, None, AB | {"b": [{"c": 1}]}]),
    (pa.array([[{"a": 1}, None], None]), pa.array([[{"a": "x"}]]), [[{"a": "1"}, None], None, [{"a": "x"}]]),
    (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), pa.array([["x"]]), ['{"k":1}', '["x"]']),
    (maps([("k", {"a": 1})], _A), maps([("k", {"b": "x"})], _B), [[("k", AB | {"a": 1})], [("k", AB | {"b": "x"})]]),
    (maps([("k", 1), ("l", None)], INT), maps([("k", "x")], pa.string()), [[("k", "1"), ("l", None)], [("k", "x")]]),
    (maps([("k", 2**53 + 1)], pa.int64()), maps([("k", 0.5)], pa.float64()), ['{"k":9007199254740993}', '{"k":0.5}']),
    (maps([], pa.null()), maps([("k", True)], pa.bool_()), [[], [("k", True)]]),
    (maps([(1, True)], pa.bool_(), pa.int32()), maps([("x", True)], pa.bool_()), [[("1", True)], [("x", True)]]),
    (pa.array([0], pa.timestamp("us", "UTC")), pa.array(["x"]), ["1970-01-01T00:00:00Z", "x"]),
]


def test_types_are_reconciled_and_no_value_is_lost() -> None:
    for one, other, expected in RECONCILED:
        assert [row["x"] for row in together(batch(x=one), batch(x=other))] == expected
        swapped = together(batch(x=other), batch(x=one))
        assert [row["x"] for row in swapped[len(other) :] + swapped[: len(other)]] == expected


def test_names_that_differ_in_case_are_one_column() -> None:
    assert together(batch(ID=[1]), batch(id=[2])) == [{"ID": 1}, {"ID": 2}]
    assert together(batch(s=[{"A": 1}]), batch(s=[{"a": 0.5}])) == [{"s": {"A": 1.0}}, {"s": {"A": 0.5}}]


def test_slices_give_the_values_of_their_own_rows() -> None:
    entries = pa.array([[("k", 1)], None, [("l", 2), ("m", 3)], []], pa.map_(pa.string(), pa.int64()))
    lists, structs = [[{"a": 1}], None, [{"a": 2}, {"a": 3}], [None]], [{"b": [1]}, None, {"b": None}, {"b": [2, 3]}]
    whole = batch(x=lists, y=structs, z=entries)
    other = batch(x=[[{"a": 0.5, "z": "z"}]], y=[{"b": ["t"], "c": 1}], z=maps([("k", "t")], pa.string()))
    schema = unify([whole.schema, other.schema])
    complete = conform(whole, schema).to_pylist()
    for start in range(5):
        for length in range(5 - start):
            assert conform(whole.slice(start, length), schema).to_pylist() == complete[start : start + length]


def test_many_schemas_give_the_same_columns_in_any_order() -> None:
    schemas = [batch(x=values).schema for values in ([1], [0.5], [[1]], [None])]
    assert unify(schemas) == unify(schemas[::-1]) == pa.schema([("x", pa.string())])
