from __future__ import annotations

from typing import Any

import pyarrow as pa

from jetcapture_py.archive.sparse import MAX_BYTES, ColumnSet

NESTED = pa.struct([("x", pa.int64()), ("y", pa.list_(pa.struct([("u", pa.string()), ("v", pa.float64())])))])
KNOWN = ColumnSet(pa.schema([("a", pa.int64()), ("b", pa.string()), ("n", NESTED)]))
WIDE = ColumnSet(pa.schema([*(pa.field(f"c{i}", pa.int64()) for i in range(500)), *KNOWN.schema]))


def table(**columns: Any) -> pa.Table:
    return pa.table({"_nats_seq": pa.array(range(len(next(iter(columns.values())))))} | columns)


def test_an_object_has_every_known_column_in_one_order() -> None:
    rows = table(b=["x", None], a=[1, 2])
    found = KNOWN.complete(rows)
    assert found.schema.names == ["_nats_seq", "a", "b", "n"]
    assert found.select(rows.schema.names) == rows
    assert found.column("n").type == NESTED
    assert found.column("n").null_count == 2
    assert KNOWN.complete(found) is found


def test_fields_that_nested_objects_lack_are_added_at_every_depth() -> None:
    rows = table(a=[1, 2, 3], b=["x"] * 3, n=[{"y": [{"v": 1.5}, None]}, None, {"y": []}])
    found = KNOWN.complete(rows).column("n")
    assert found.type == NESTED
    assert found.to_pylist() == [{"x": None, "y": [{"u": None, "v": 1.5}, None]}, None, {"x": None, "y": []}]


def test_columns_keep_the_type_that_they_were_decoded_with_and_others_stay_with_values_or_not() -> None:
    found = KNOWN.complete(table(a=pa.array([1], pa.int64()), b=pa.array([2], pa.int64())))
    assert found.schema.field("b").type == pa.int64()
    rows = table(stage=pa.nulls(2, pa.string()), c1=[1, 2])
    assert WIDE.complete(rows).schema.names == ["_nats_seq", "stage", "c1"]
    (batch,) = rows.to_batches()
    assert WIDE.with_values(batch) == batch


def test_columns_without_values_are_left_out_where_there_are_many() -> None:
    nested = pa.array([{"y": [{"u": "s"}]}, {"x": None}], NESTED)
    rows = table(c1=[1, None], c2=pa.nulls(2, pa.int64()), a=[None, 5], n=nested)
    assert WIDE.bytes > MAX_BYTES > KNOWN.bytes
    (batch,) = rows.to_batches()
    assert WIDE.with_values(batch).schema.names == ["_nats_seq", "c1", "a", "n"]
    found = WIDE.complete(rows)
    assert found.schema.names == ["_nats_seq", "c1", "a", "n"]
    assert found.column("n").to_pylist() == [{"y": [{"u": "s"}]}, {"y": None}]


def test_an_empty_object_keeps_one_field() -> None:
    for value in ({"y": []}, {"x": None}, {"y": [{"u": None}]}, {"y": [None]}):
        (found,) = WIDE.complete(table(n=pa.array([value], NESTED))).column("n").to_pylist()
        assert found is not None
        assert len(found) == 1


def test_columns_without_values_need_no_memory_of_their_own() -> None:
    known = ColumnSet(pa.schema([(f"c{i}", pa.int64()) for i in range(100)]))
    before = pa.total_allocated_bytes()
    found = known.complete(table(c5=pa.array(range(100_000))))
    assert len(found.schema) == 101
    assert pa.total_allocated_bytes() - before < 4 * 100_000 * 8
