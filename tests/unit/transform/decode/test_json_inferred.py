from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given

from jetcapture_py.archive.schema import conform, unify
from jetcapture_py.transform.batch import BatchTooWideError
from jetcapture_py.transform.decode.json_inferred import InferringDecoder
from tests.support.batches import batch_of, outcomes


def decode(*documents: Any, by: InferringDecoder | None = None) -> pa.RecordBatch:
    """The fields of `documents`, all of which are decoded; a bytes object is a payload as it is."""
    payloads = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in documents]
    decoded = (by or InferringDecoder(conflict="widen")).decode(batch_of(payloads))
    assert decoded.failures == ()
    return decoded.fields


def column(*values: Any) -> pa.Array:
    """The one column that `values` make."""
    return decode(*({"x": value} for value in values)).column("x")


AB = {"a": None, "b": None}
DEEP = pa.struct([("a", pa.int64()), ("b", pa.struct([("c", pa.list_(pa.bool_()))]))])
TYPES: list[tuple[list[Any], pa.DataType]] = [
    ([True, None], pa.bool_()),
    ([1, -(2**63), 2**63 - 1], pa.int64()),
    ([1.5, None], pa.float64()),
    (["2026-01-01T00:00:00Z"], pa.string()),
    ([[1], [], None, [None]], pa.list_(pa.int64())),
    ([{"a": 1, "b": {"c": [True]}}], DEEP),
]


def test_types_follow_the_values_and_lose_none() -> None:
    for values, expected in TYPES:
        array = column(*values)
        assert array.type == expected
        assert array.to_pylist() == values


LONG = "x" * 1001
WIDENED: list[tuple[list[list[Any]], list[Any]]] = [
    ([[1], [0.5, 2]], [0.5, 2.0]),
    ([[0.5], [2**53, -(2**53)]], [2.0**53, -(2.0**53)]),
    ([[2**53 + 1, 1.0]], ["9007199254740993", "1.0"]),
    ([[2**53 + 1], [7], [1.5, 8]], ["1.5", "8"]),
    ([[1.5], [-(2**53) - 1]], ["-9007199254740993"]),
    ([[7, 2**63, 2**64]], ["7", "9223372036854775808", "18446744073709551616"]),
    ([[[2**53 + 1], [1.0]]], [["9007199254740993"], ["1.0"]]),
    ([[{"id": 2**53 + 1}], [{"id": 1.5}]], [{"id": "1.5"}]),
    ([[{"a": 1}], [1], [{"a": 1, "b": None}]], ['{"a":1,"b":null}']),
    ([[[1, "a", {"b": None}, None]]], [["1", "a", '{"b":null}', None]]),
    ([[{"a": 1}, {"b": "x"}, {"a": 0.5}, {}, None]], [AB | {"a": 1.0}, AB | {"b": "x"}, AB | {"a": 0.5}, AB, None]),
    ([[{"a": 1}, {LONG: 1}]], ['{"a":1}', f'{{"{LONG}":1}}']),
    ([["a", 1, 1.5, True, None]], ["a", "1", "1.5", "true", None]),
    ([[[1, "é"], {}, False, "s"]], ['[1,"é"]', "{}", "false", "s"]),
    ([[True, 1, {"a": [1]}]], ["true", "1", '{"a":[1]}']),
    ([[{f"c{i}": i} for i in range(1001)]], [f'{{"c{i}":{i}}}' for i in range(1001)]),
]
"""Batches, and what the last one is: integers are doubles only while every one of them is exact, text is JSON."""


def test_a_column_widens_to_what_holds_all_its_values() -> None:
    for batches, expected in WIDENED:
        decoder = InferringDecoder(conflict="widen")
        columns = [decode(*({"x": value} for value in values), by=decoder).column("x") for values in batches]
        assert columns[-1].to_pylist() == expected


def test_a_number_that_is_too_large_fails_alone() -> None:
    payloads = [b'{"x": 1}', b'{"x": 1e400}', b'{"x": ' + b"9" * 5000 + b"}", b'{"x": 2}']
    rows = outcomes(InferringDecoder(conflict="widen").decode(batch_of(payloads)), 4)
    assert rows == [{"x": 1}, None, None, {"x": 2}]


def test_what_holds_nothing_gives_no_column() -> None:
    fields = decode({"a": None, "b": {}, "c": [], "d": [None, {}], "e": {"f": None}, "g": 1})
    assert fields.schema.names == ["g"]
    decoded = InferringDecoder(conflict="widen").decode(batch_of([b"{}", b"[]", b'{"a": null}']))
    assert decoded.fields.num_columns == 0
    assert outcomes(decoded, 3) == [{}, None, {}]
    assert InferringDecoder(conflict="widen").decode(batch_of([b"{}"])).messages is None


def test_names_that_spark_takes_for_one_are_kept_apart_at_every_level() -> None:
    fields = decode({"id": 1, "ID": 2, "Id": 3, "s": {"A": 1, "a": 2, "": 3}, "key": 4, "key_": 5, "_nats_seq": 6})
    nested = {"_": 3, "A": 1, "a_": 2}
    assert fields.to_pylist() == [{"ID": 2, "Id_": 3, "id__": 1, "s": nested, "key_": 4, "key__": 5, "_nats_seq_": 6}]
    decoder = InferringDecoder(conflict="widen")
    decode({"id": 1}, by=decoder)
    assert decode({"id": 1, "ID": 2}, by=decoder).to_pylist() == [{"id": 1, "ID_": 2}]


def test_a_batch_has_the_columns_with_a_value_in_it_and_names_all_known_ones() -> None:
    decoder = InferringDecoder(conflict="widen")
    decode({"a": 1, "s": {"x": 1, "y": [{"u": 1, "v": 2}]}}, by=decoder)
    decoded = decoder.decode(batch_of([b'{"b": "x", "s": {"y": [{"v": 3}, {}]}}', b'{"a": null}']))
    assert decoded.fields.to_pylist() == [{"s": {"y": [{"v": 3}, {"v": None}]}, "b": "x"}, {"s": None, "b": None}]
    nested = pa.struct([("x", pa.int64()), ("y", pa.list_(pa.struct([("u", pa.int64()), ("v", pa.int64())])))])
    assert decoded.columns == pa.schema({"a": pa.int64(), "s": nested, "b": pa.string()})


EMPTY: list[tuple[Any, Any]] = [
    ({"s": {"x": 1}}, {"s": {}}),
    ({"s": [{"x": {"y": 1}}]}, {"s": [{"x": {}}, {}]}),
    ({"s": [1]}, {"s": []}),
    ({"s": [{"x": 1}]}, {"s": []}),
]


def test_what_is_empty_differs_from_what_is_missing_once_the_column_is_known() -> None:
    for before, after in EMPTY:
        decoder = InferringDecoder(conflict="widen")
        decode(before, by=decoder)
        empty, missing = decode(after, {}, by=decoder).column("s").to_pylist()
        assert empty is not None
        assert missing is None


def test_more_than_a_thousand_columns_fail_the_messages_that_bring_them() -> None:
    decoder = InferringDecoder(conflict="widen")
    payloads = [json.dumps({f"c{i}": i}).encode() for i in range(1005)]
    decoded = decoder.decode(batch_of([*payloads, b'{"c0": 1, "new": 2}', b'{"c0": 1, "c999": 2}']))
    assert decoded.fields.num_columns == 1000
    assert [each.index for each in decoded.failures] == [1000, 1001, 1002, 1003, 1004, 1005]
    assert {each.stage for each in decoded.failures} == {"schema"}
    assert "no room for 'new'" in decoded.failures[-1].error
    assert outcomes(decoder.decode(batch_of([b'{"c5": 7}', payloads[-1]])), 2)[1] is None


def test_no_message_makes_the_schema_grow_without_end() -> None:
    decoder = InferringDecoder(conflict="widen")
    monster = {f"c{i}": {f"f{j}": j for j in range(100)} for i in range(200)}
    row = decode(monster, by=decoder).to_pylist()[0]
    assert [value if isinstance(value, dict) else json.loads(value) for value in row.values()] == list(monster.values())
    assert sum(isinstance(value, dict) for value in row.values()) == 100
    assert decode({"new": {"a": 1}}, by=decoder).to_pylist()[0]["new"] == '{"a":1}'


def test_a_name_too_long_for_a_column_fails_its_message_alone() -> None:
    decoder = InferringDecoder(conflict="widen")
    payloads = [b'{"a": 1}', json.dumps({"a": 2, "é" * 501: 1}).encode(), json.dumps({"x" * 1000: 3}).encode()]
    decoded = decoder.decode(batch_of(payloads))
    assert [(each.index, each.stage) for each in decoded.failures] == [(1, "schema")]
    assert "has 1002 bytes, more than 1000; declare decode.columns" in decoded.failures[0].error
    assert decoded.fields.schema.names == ["a", "x" * 1000]


def test_names_that_are_too_long_together_fail_the_messages_that_bring_them() -> None:
    decoder = InferringDecoder(conflict="widen")
    payloads = [json.dumps({f"{i:04}" + "x" * 990: i}).encode() for i in range(300)]
    decoded = decoder.decode(batch_of([*payloads, b'{"a": 1}']))
    assert [each.index for each in decoded.failures] == list(range(263, 300))
    assert {each.stage for each in decoded.failures} == {"schema"}
    assert "no room for '0263xxx" in decoded.failures[0].error
    assert decode({"b": 1}, by=decoder).to_pylist() == [{"b": 1}]


def test_objects_that_became_json_text_leave_their_room_to_others() -> None:
    decoder = InferringDecoder(conflict="widen")
    for turn in range(30):  # 990 fields each, of the 10,000 that there is room for
        decode({f"s{turn}": {f"k{i}": [i] for i in range(495)}}, by=decoder)
        decode({f"s{turn}": "text"}, by=decoder)
    wide = {f"k{i}": i for i in range(999)}
    assert decode({"s": wide}, by=decoder).to_pylist() == [{"s": wide}]


def test_levels_of_lists_take_room_as_fields_do() -> None:
    nested: Any = 1
    for _ in range(30):
        nested = [nested]
    monster = {f"c{i}": nested for i in range(400)}
    types = decode(monster).schema.types
    assert sum(pa.types.is_list(each) for each in types) == 10_000 // 30 + 1
    assert sum(pa.types.is_string(each) for each in types) == 400 - 10_000 // 30 - 1


def test_few_wide_messages_among_many_small_ones_come_in_smaller_batches() -> None:
    decoder = InferringDecoder(conflict="widen")
    wide = json.dumps({"n": {f"k{i}": {f"f{j}": j for j in range(99)} for i in range(99)}}).encode()
    batch = batch_of([wide, *([b'{"a": 1}'] * 5000)])
    with pytest.raises(BatchTooWideError):
        decoder.decode(batch)
    assert decoder.decode(batch.slice(0, 50)).fields.num_rows == 50
    assert decoder.decode(batch.slice(1, 5000)).fields.schema.names == ["a"]


def test_a_message_whose_columns_are_too_large_fails_alone() -> None:
    items = [{f"f{j}": j for j in range(999)}, *({"f1": 1} for _ in range(10_000))]
    payloads = [json.dumps({"a": 1, "l": items}).encode(), b"not JSON"]
    decoded = InferringDecoder(conflict="widen").decode(batch_of(payloads))
    assert [each.stage for each in decoded.failures] == ["schema", "decode"]
    assert "declare decode.columns" in decoded.failures[0].error


def test_a_long_list_is_no_larger_in_a_column_than_in_its_message() -> None:
    (row,) = decode(b'{"l":[' + b",".join([b"1"] * 3_000_000) + b"]}").column("l")
    assert len(row) == 3_000_000


def test_deep_nesting_is_kept_as_json_text_or_fails_alone() -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")):
        texts = [opening * depth + "1" + closing * depth for depth in [3, 40, 300, *range(430, 1100, 21), 10_000]]
        decoded = InferringDecoder(conflict="widen").decode(batch_of([f'{{"x": {text}}}'.encode() for text in texts]))
        rows = outcomes(decoded, len(texts))
        for text, row in zip(texts, rows, strict=True):
            assert row is None or _text_of(row["x"]) == text
        assert None not in rows[:3]
        assert rows[-1] is None


def _text_of(value: Any) -> str:
    """The JSON that `value` was, when a string in it is JSON text."""
    if isinstance(value, list):
        return f"[{_text_of(value[0])}]"
    return f'{{"a":{_text_of(value["a"])}}}' if isinstance(value, dict) else str(value)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abAx"), inner, max_size=3),
    max_leaves=8,
)
documents = st.dictionaries(st.sampled_from(["a", "b", "A", "key", "long name"]), values)


@given(st.lists(st.lists(documents, min_size=1, max_size=3), min_size=1, max_size=4))
def test_batches_of_different_replicas_always_fit_one_schema(batches: list[list[dict[str, Any]]]) -> None:
    parts = [decode(*batch) for batch in batches]
    schema = unify([part.schema for part in parts])
    table = pa.Table.from_batches([conform(part, schema) for part in parts], schema)
    table.validate(full=True)
    assert table.num_rows == sum(part.num_rows for part in parts) or not schema.names
