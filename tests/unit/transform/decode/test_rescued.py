from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.inferred import InferredColumns, merged
from jetcapture_py.config.column_types import MAX_DEPTH
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.transform.decode import json_inferred
from jetcapture_py.transform.decode.json_inferred import InferringDecoder
from jetcapture_py.transform.decode.msgpack import OBJECT_FORMAT
from tests.support.batches import batch_of, outcomes

Rows = list[dict[str, Any]]
BIG = 2**53 + 1


def decode(decoder: InferringDecoder, *documents: Any) -> Rows:
    """The rows of documents in one batch, without nulls."""
    decoded = decoder.decode(batch_of([json.dumps(document).encode() for document in documents]))
    rows = outcomes(decoded, len(documents))
    return [{name: value for name, value in (row or {}).items() if value is not None} for row in rows]


def kept(decoder: InferringDecoder, *documents: Any) -> Rows:
    """The rows with what was rescued, as an object, under `rescued`."""
    rows = decode(decoder, *documents)
    return [
        {("rescued" if name == layout.RESCUED else name): json.loads(value) if name == layout.RESCUED else value}
        | {other: row[other] for other in row if other not in (name, layout.RESCUED)}
        if (name := layout.RESCUED) in row and (value := row[name])
        else row
        for row in rows
    ]


RESCUED: list[tuple[str, Rows, Rows]] = [
    ("text", [{"x": 1}, {"x": "n/a"}], [{"x": 1}, {"rescued": {"x": "n/a"}}]),
    ("most decide, not the first", [{"x": "?"}, {"x": 1}, {"x": 2}], [{"rescued": {"x": "?"}}, {"x": 1}, {"x": 2}]),
    (
        "most, of those with a value",
        [{"x": []}, {"x": [{}]}, {"x": 1}],
        [{"rescued": {"x": []}}, {"rescued": {"x": [{}]}}, {"x": 1}],
    ),
    ("a number in text", [{"x": "a"}, {"x": 1}], [{"x": "a"}, {"rescued": {"x": 1}}]),
    ("an object for a number", [{"x": 1}, {"x": {"a": 1}}], [{"x": 1}, {"rescued": {"x": {"a": 1}}}]),
    ("true is no number", [{"x": 1}, {"x": True}], [{"x": 1}, {"rescued": {"x": True}}]),
    ("a fraction beside a large integer", [{"x": BIG}, {"x": 0.5}], [{"x": BIG}, {"rescued": {"x": 0.5}}]),
    ("a large integer beside a fraction", [{"x": 0.5}, {"x": BIG}], [{"x": 0.5}, {"rescued": {"x": BIG}}]),
    ("beyond int64", [{"x": 1}, {"x": 2**63}], [{"x": 1}, {"rescued": {"x": 2**63}}]),
    (
        "a field of an object",
        [{"a": {"b": 1}}, {"a": {"b": "?"}}],
        [{"a": {"b": 1}}, {"a": {"b": None}, "rescued": {"a.b": "?"}}],
    ),
    ("an element", [{"a": [1, "?", 2]}], [{"a": [1, None, 2], "rescued": {"a[1]": "?"}}]),
    (
        "a field of an element",
        [{"a": [{"b": 1}, {"b": []}]}],
        [{"a": [{"b": 1}, {"b": None}], "rescued": {"a[1].b": []}}],
    ),
    (
        "two of one message",
        [{"x": 1, "y": 1}, {"x": "?", "y": "!"}],
        [{"x": 1, "y": 1}, {"rescued": {"x": "?", "y": "!"}}],
    ),
]


def test_a_value_that_does_not_fit_is_rescued_and_the_rest_of_its_message_stays() -> None:
    for name, documents, expected in RESCUED:
        assert kept(InferringDecoder(), *documents) == expected, name
        decoder = InferringDecoder()  # in batches of one, the first message decides
        if not name.startswith("most"):
            assert [row for document in documents for row in kept(decoder, document)] == expected, name


def test_a_column_widens_only_where_no_value_changes() -> None:
    decoder = InferringDecoder()
    assert decode(decoder, {"x": 1}) + decode(decoder, {"x": 0.5}) + decode(decoder, {"x": 2}) == [
        {"x": 1},
        {"x": 0.5},
        {"x": 2.0},
    ]
    assert decoder.types == {"x": "double"}
    decode(decoder, {"o": {"a": 1}}, {"o": {"b": "new"}})
    assert decoder.types["o"] == {"a": "int53", "b": "string"}


def test_empty_lists_and_objects_decide_no_type() -> None:
    for empty, value in (([], {"a": 1}), ({}, "text"), ([[]], True), ({"a": []}, [1])):
        decoder, other = InferringDecoder(), InferringDecoder()
        decode(decoder, {"x": empty})
        other.learn(decoder.types)
        assert kept(decoder, {"x": value}) == kept(other, {"x": value}) == [{"x": value}]
        decoder.learn(merged({"x": [None]}, decoder.types))
        assert kept(decoder, {"x": value}) == [{"x": value}]


def test_learned_types_are_kept_whatever_arrives_first() -> None:
    decoder = InferringDecoder()
    decoder.learn({"id": "int64", "s": {"a": ["string"]}, "unused": "bool"})
    assert kept(decoder, {"id": "n/a", "s": {"a": [1]}}) == [
        {"s": {"a": [None]}, "rescued": {"id": "n/a", "s.a[0]": 1}}
    ]
    assert kept(decoder, {"id": 1.5}) == [{"rescued": {"id": 1.5}}]  # not every int64 is exact as a double
    assert decoder.types == {"id": "int64", "s": {"a": ["string"]}, "unused": "bool"}


def test_what_exceeds_the_limits_is_rescued_and_changes_no_column(monkeypatch: Any) -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    (row,) = kept(InferringDecoder(), {"deep": deep})
    assert list(row["rescued"]) == ["deep" + "[0]" * (MAX_DEPTH - 1)]
    monkeypatch.setattr(json_inferred, "MAX_FIELDS", 2)
    decoder = InferringDecoder()
    rows = kept(decoder, {"o": {"a": 1}}, {"o": {"b": 2, "c": 3, "d": {"e": 4}}})
    assert rows[1] == {"o": {"a": None, "b": 2}, "rescued": {"o.c": 3, "o.d": {"e": 4}}}
    monkeypatch.setattr(json_inferred, "SchemaBudget", partial(json_inferred.SchemaBudget, fields=0))
    assert kept(InferringDecoder(), {"l": [1], "o": {"a": 1}}) == [{"rescued": {"l": [1], "o.a": 1}}]


def test_with_quarantine_the_message_fails_with_the_reason_and_its_neighbors_stay() -> None:
    decoder = InferringDecoder(conflict="quarantine")
    decoded = decoder.decode(batch_of([b'{"x": 1, "y": 1}', b'{"x": "n/a", "y": 0.5, "new": 1}', b'{"x": 3}']))
    assert outcomes(decoded, 3) == [{"x": 1, "y": 1}, None, {"x": 3, "y": None}]
    assert decoder.types == {"x": "int53", "y": "int53"}  # the message that failed changed nothing
    assert "field 'x'" in decoded.failures[0].error
    assert "'n/a'" in decoded.failures[0].error


SCALARS: list[Any] = [None, True, 1, -5, BIG, 2**63, 0.25, "a", "", "1"]


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth < 3 and kind < 0.15:
        return [value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if depth < 3 and kind < 0.35:
        return {name: value(rng, depth + 1) for name in rng.sample("abc", rng.randrange(4))}
    return rng.choice(SCALARS)


def put(target: dict[str, Any], path: str, found: Any) -> None:
    """Put a rescued value back to its path, where there is nothing."""
    at: Any = target
    keys = [int(part[1:-1]) if part.startswith("[") else part for part in path.replace("[", ".[").split(".")]
    for key, following in zip(keys, [*keys[1:], None], strict=True):
        if isinstance(key, int):
            at += [None] * (key + 1 - len(at))
        elif at.get(key) is None:
            at[key] = None
        if following is None:
            assert at[key] is None
            at[key] = found
        elif at[key] is None:
            at[key] = [] if isinstance(following, int) else {}
        at = at[key]


def plain(found: Any) -> Any:
    """The scalars: columns tell no null, no missing field and no empty object or list from one another."""
    if isinstance(found, dict):
        return {name: inner for name, field in found.items() if (inner := plain(field)) is not None} or None
    if isinstance(found, list):
        items = [plain(item) for item in found]
        while items and items[-1] is None:
            items.pop()
        return items or None
    return found


def test_random_histories_lose_nothing_and_each_column_keeps_its_type() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        decoders, types, columns = [InferringDecoder() for _ in range(3)], {}, {}
        for _ in range(rng.randrange(4, 12)):
            documents = [
                {name: value(rng) for name in rng.sample("xyz", rng.randrange(1, 4))}
                for _ in range(rng.randrange(1, 6))
            ]
            at = rng.randrange(3)
            if rng.random() < 0.2:
                decoders[at] = InferringDecoder()  # a restart
            decoders[at].learn(types)
            for document, row in zip(documents, kept(decoders[at], *documents), strict=True):
                for path, found in row.pop("rescued", {}).items():
                    put(row, path, found)
                assert plain(row) == plain(document), (seed, document)
            types = merged(types, decoders[at].types)
            for name, type_ in types.items():
                before = columns.setdefault(name, type_)
                assert merged(before, type_) == type_, (seed, name)  # only ever wider
                columns[name] = type_


def test_merged_types_are_the_first_ones_widened() -> None:
    one = {"a": "int53", "b": "int64", "c": {"d": ["int53"], "e": "bool"}, "f": "string"}
    other = {"a": "double", "b": "double", "c": {"d": ["double"], "g": "bool"}, "f": "int53", "h": [None]}
    assert merged(one, other) == {
        "a": "double",
        "b": "int64",
        "c": {"d": ["double"], "e": "bool", "g": "bool"},
        "f": "string",
        "h": [None],
    }
    assert pa.types.is_int64(InferringDecoder().decode(batch_of([b'{"x": 1}'])).fields.schema.field("x").type)


def test_values_with_equal_paths_and_numbers_that_json_lacks_are_kept() -> None:
    assert kept(InferringDecoder(), {"a.b": 1, "a": {"b": 1}}, {"a.b": "p", "a": {"b": "q"}})[1]["rescued"] == {
        "a.b": "p",
        "a.b_": "q",
    }
    decoder = InferringDecoder(OBJECT_FORMAT)
    decoder.learn({"x": "string", "y": "bool"})
    document = {"x": float("nan"), "y": [{"z": float("-inf")}]}
    (row,) = outcomes(decoder.decode(batch_of([msgspec.msgpack.encode(document)])), 1)
    assert row is not None
    assert json.loads(row[layout.RESCUED]) == {"x": "nan", "y": [{"z": "-inf"}]}
    deep = b'{"y": ' + b"[" * 900 + b"]" * 900 + b"}"
    assert not InferringDecoder().decode(batch_of([deep])).failures


def test_a_message_with_too_many_values_that_do_not_fit_fails_alone(monkeypatch: Any) -> None:
    monkeypatch.setattr(json_inferred, "MAX_CELLS", 1000)
    decoder = InferringDecoder()
    decoder.learn({"x": ["int53"]})
    assert kept(decoder, {"x": ["a"] * 10})[0]["rescued"]["x[9]"] == "a"
    decoded = decoder.decode(batch_of([json.dumps({"x": ["a"] * 100}).encode()]))
    assert decoded.failures[0].stage == "schema"
    assert decoded.failures[0].error.startswith("more than")


def test_a_list_of_too_many_values_that_do_not_fit_is_refused_before_all_are_looked_at(monkeypatch: Any) -> None:
    monkeypatch.setattr(json_inferred, "MAX_CELLS", 30_000)
    looked_at: list[Any] = []
    wider = json_inferred.wider_kind
    monkeypatch.setattr(json_inferred, "wider_kind", lambda known, kind: looked_at.append(kind) or wider(known, kind))
    decoder = InferringDecoder()
    decoder.learn({"x": ["int53"], "y": [{"z": "int53"}]})
    for document in ({"x": ["a"] * 20_000}, {"y": [{"z": "a"}] * 9_000}):
        assert decoder.decode(batch_of([json.dumps(document).encode()])).failures[0].stage == "schema"
    assert len(looked_at) < 15_000  # of 29,000


def test_the_file_of_types_has_them_in_the_order_that_names_the_columns() -> None:
    def decoded(types: Any) -> Any:
        data = InferredColumns(stream="S", consumer="c", types=types).encode()
        return InferredColumns.decode(data, "S", "path").types

    first, again = InferringDecoder(), InferringDecoder()
    assert decode(first, {"id": 1}) + decode(first, {"Id": 2}) == [{"id": 1}, {"Id_": 2}]
    again.learn(decoded(merged({}, first.types)))
    assert decode(again, {"Id": 2, "id": 1}) == [{"id": 1, "Id_": 2}]
    for type_ in ("decimal", [], ["int64", "bool"], {"a": 1}):
        data = json.dumps({"format": 1, "stream": "S", "consumer": "c", "types": {"x": type_}}).encode()
        with pytest.raises(JetcaptureError, match="path is damaged: expected a type"):
            InferredColumns.decode(data, "S", "path")


def test_replicas_that_meet_names_of_other_case_in_another_order_then_name_their_columns_alike() -> None:
    first, second, later = ({"id": 1, "o": {"k": "a"}}, {"Id": 2, "o": {"K": "b"}}, {"id": 3, "Id": 4})
    one, other = InferringDecoder(), InferringDecoder()
    assert decode(one, first) + decode(one, second) == [{"id": 1, "o": {"k": "a"}}, {"Id_": 2, "o": {"K_": "b"}}]
    assert decode(other, second) + decode(other, first) == [{"Id": 2, "o": {"K": "b"}}, {"id_": 1, "o": {"k_": "a"}}]
    assert other.learn(one.types)  # ends open objects, which have the columns swapped
    assert decode(other, later, first | second)[0] == decode(one, later)[0] == {"id": 3, "Id_": 4}
    assert not other.learn(one.types)
