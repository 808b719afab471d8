"""MessagePack with declared and inferred columns."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import hypothesis.strategies as st
import msgpack
import pyarrow as pa
import pytest
from hypothesis import given

from jetcapture_py.transform.decode import make_decoder
from jetcapture_py.transform.decode.json_inferred import InferringDecoder
from jetcapture_py.transform.decode.msgpack import OBJECT_FORMAT
from jetcapture_py.transform.keys import make_key
from tests.support.batches import Declared, batch_of, decode_settings, outcomes


def values(declared: Declared, *sent: Any) -> list[Any]:
    """What each value gives in a column; "failure" where its message fails. Each is decoded among the others."""
    payloads = [msgpack.packb({"x": value, "skipped": [value]}) for value in sent]
    decoder = make_decoder(decode_settings(format="msgpack", columns={"x": declared}))
    rows = outcomes(decoder.decode(batch_of(payloads)), len(payloads))
    alone = [outcomes(decoder.decode(batch_of([payload])), 1)[0] for payload in payloads]
    assert repr(rows) == repr(alone)
    return ["failure" if row is None else row["x"] for row in rows]


STAMP = datetime(2026, 1, 31, 12, 0, 0, 123_456, UTC)


@pytest.mark.parametrize(
    ("declared", "good", "bad"),
    [
        ("int8", {127: 127, -128: -128}, [128, 1.0, "1", True, b"1"]),
        ("uint64", {2**64 - 1: 2**64 - 1}, [-1]),
        ("float64", {1: 1.0, 0.1: 0.1, float("inf"): float("inf")}, ["1", True]),
        ("float32", {1.5: 1.5, float("-inf"): float("-inf")}, [4e38]),
        ("bool", {True: True}, [0, "true"]),
        ("string", {"é": "é"}, [b"x", 1]),
        ("binary", {b"\xff": b"\xff"}, ["aGk=", 1]),
        ("decimal(5, 2)", {"1.5": Decimal("1.50"), 7: Decimal("7.00"), 0.25: Decimal("0.25")}, ["1.005", 1000, "x"]),
        ("date", {"2026-01-31": date(2026, 1, 31)}, ["2026-02-30", 1]),
        (
            "timestamp",
            {msgpack.Timestamp.from_datetime(STAMP): STAMP, "2026-01-31T12:00:00.123456Z": STAMP},
            [1, "", "x", msgpack.ExtType(7, b"1234"), msgpack.Timestamp(2**40), msgpack.Timestamp(-(2**62), 5)],
        ),
        ("list<int64>", {(1, 2): [1, 2]}, [[1.5], 1]),
        ("map<string, int64>", {}, [{1: 1}, [1]]),
        ("json", {"x": '"x"', 1: "1"}, [{(1, 2): 1}]),
    ],
)
def test_no_type_is_coerced_into_another(declared: str, good: dict[Any, Any], bad: list[Any]) -> None:
    found = values(Declared(declared), *good, *bad, None)
    assert found == [*good.values(), *["failure"] * len(bad), None]


def test_nanoseconds_are_cut_off_and_each_encoding_of_a_timestamp_is_read() -> None:
    stamps = [msgpack.Timestamp(1), msgpack.Timestamp(1, 999_999_999), msgpack.Timestamp(-1, 999_999_999)]
    found = values(Declared("timestamp"), *stamps)
    assert [each.timestamp() for each in found] == [1, 1.999999, -0.000001]


def test_a_nan_is_kept() -> None:
    (found,) = values(Declared("float32"), float("nan"))
    assert found != found


def test_extensions_and_bytes_are_shown_in_json_text() -> None:
    assert values(Declared("json"), {"a": b"hi", "e": msgpack.ExtType(5, b"hi")}) == [
        '{"a":"aGk=","e":{"code":5,"data":"aGk="}}'
    ]


def test_inferred_columns_have_the_types_of_messagepack() -> None:
    decoder = InferringDecoder(OBJECT_FORMAT)
    documents = [
        {"i": 1, "b": b"\xff", "t": msgpack.Timestamp.from_datetime(STAMP), "n": {"x": 1.5}, "l": [b"a"]},
        {"i": 2, "n": {1: 2}, "e": msgpack.ExtType(5, b"hi")},
        {"b": "text"},
    ]
    payloads = [msgpack.packb(document) for document in documents]
    first = decoder.decode(batch_of(payloads[:1]))
    assert first.fields.schema.field("b").type == pa.binary()
    assert first.fields.schema.field("t").type == pa.timestamp("us", "UTC")
    rows = outcomes(decoder.decode(batch_of([*payloads, b"\x90", b"\x81\x01\x02"])), 5)
    assert rows[0] == {"i": 1, "b": '"/w=="', "t": STAMP, "n": '{"x":1.5}', "l": [b"a"], "e": None}
    assert rows[1] == {"i": 2, "b": None, "t": None, "n": '{"1":2}', "l": None, "e": '{"code":5,"data":"aGk="}'}
    assert rows[2] == {"i": None, "b": "text", "t": None, "n": None, "l": None, "e": None}
    assert rows[3:] == [None, None]


@pytest.mark.parametrize(
    ("template", "document", "key"),
    [
        ("{x}", {"x": "a"}, "a"),
        ("{x}", {"x": 1.5}, "1.5"),
        ("{x}", {"x": 2**63}, "9223372036854775808"),
        ("{x}", {"x": True}, "true"),
        ("{x}", {"x": b"a"}, None),
        ("{x}", {"x": [1]}, None),
        ("{x}", {}, None),
        ("{x.y}", {"x": {"y": "deep"}}, "deep"),
        ("{x.y}", {"x": {str(number): 0 for number in range(20)} | {"y": 7}}, "7"),
        ("{x.y}", {"x.y": 1, "x": {"y": 2}}, "1"),
    ],
)
def test_a_key_of_inferred_fields_is_taken_from_the_message_alone(
    template: str, document: Any, key: str | None
) -> None:
    batch = batch_of([msgpack.packb(document)])
    made = make_key(template, decode_settings(format="msgpack"))
    assert made(batch, pa.RecordBatch.from_arrays([], names=[])).to_pylist() == [key]


documents = st.dictionaries(
    st.sampled_from("abx"),
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=3) | st.lists(st.integers(0, 9)),
)


@st.composite
def payloads_of(draw: st.DrawFn) -> bytes:
    packed: bytes = msgpack.packb(draw(documents))
    return packed[: draw(st.integers(0, len(packed)))] if draw(st.booleans()) else packed


@given(st.lists(payloads_of(), min_size=1, max_size=5))
def test_a_damaged_message_changes_no_other(payloads: list[bytes]) -> None:
    decoder = make_decoder(decode_settings(format="msgpack", columns={"a": Declared("int64"), "b": Declared("string")}))
    together = outcomes(decoder.decode(batch_of(payloads)), len(payloads))
    assert together == [outcomes(decoder.decode(batch_of([payload])), 1)[0] for payload in payloads]
