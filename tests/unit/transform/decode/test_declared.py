"""Values of declared columns: what each format's value becomes, and which messages fail.

JSON has a reference of its own in `unit/properties/test_json.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import msgpack
import pytest

from jetcapture_py.transform.decode import make_decoder
from tests.support.batches import Declared, batch_of, decode_settings, outcomes

STAMP = datetime(2026, 1, 31, 12, 0, 0, 123_456, UTC)
ITEM = "list<struct<sku: string, tags: list<string>, price: decimal(5, 2), at: timestamp, n: map<str, int>>>"
ITEM_TEXT = '{"sku": "a", "tags": [null, "t"], "price": 1.5, "at": "2026-01-01T00:00:00Z", "n": {"k": 1}}'
NOTHING = {"sku": None, "tags": None, "price": None, "at": None, "n": None}
FULL = {"sku": "a", "tags": [None, "t"], "price": Decimal("1.50"), "n": [("k", 1)]}
FULL |= {"at": datetime(2026, 1, 1, tzinfo=UTC)}
TEXTS = ['{"b": 1,  "a": [1.0, 1e2]}', '"é\\n"', "12345678901234567890123", "[]", "true"]

BAD_ITEMS = ['[{}, {"price": 1.234}]', '[{"at": "2026-01-01"}]', '[{"n": {"k": 1.5}}]', '[{"sku": 1}]']
BAD_TIMES = [1, "", "x", msgpack.ExtType(7, b"1234"), msgpack.Timestamp(2**40), msgpack.Timestamp(-(2**62), 5)]
packed = msgpack.Timestamp.from_datetime

ENCODE: dict[str, Callable[[Any], bytes]] = {
    "json": lambda text: b'{"x": %b}' % text.encode(),
    "msgpack": lambda value: msgpack.packb({"x": value, "skipped": [value]}),
    "csv": str.encode,
}
TABLE: list[tuple[str, Declared, dict[Any, Any], list[Any]]] = [
    ("json", Declared("json"), {**{text: text for text in TEXTS}, "null": None}, []),
    ("json", Declared("list<json>"), {'[1, null, "a", {"b": 2}]': ["1", None, '"a"', '{"b": 2}']}, []),
    ("json", Declared(ITEM), {f"[null, {{}}, {ITEM_TEXT}]": [None, NOTHING, FULL], "[]": []}, BAD_ITEMS),
    ("msgpack", Declared("int8"), {127: 127, -128: -128, None: None}, [128, 1.0, "1", True, b"1"]),
    ("msgpack", Declared("uint64"), {2**64 - 1: 2**64 - 1}, [-1]),
    ("msgpack", Declared("float64"), {1: 1.0, 0.1: 0.1, float("inf"): float("inf")}, ["1", True]),
    ("msgpack", Declared("float32"), {1.5: 1.5, float("-inf"): float("-inf")}, [4e38]),
    ("msgpack", Declared("binary"), {b"\xff": b"\xff"}, ["aGk=", 1]),
    ("msgpack", Declared("decimal(5, 2)"), {"1.5": Decimal("1.50"), 7: Decimal(7)}, ["1.005", 1000, "x"]),
    ("msgpack", Declared("date"), {"2026-01-31": date(2026, 1, 31)}, ["2026-02-30", 1]),
    ("msgpack", Declared("timestamp"), {packed(STAMP): STAMP, "2026-01-31T12:00:00.123456Z": STAMP}, BAD_TIMES),
    ("msgpack", Declared("list<int64>"), {(1, 2): [1, 2]}, [[1.5], 1]),
    ("msgpack", Declared("map<string, int64>"), {}, [{1: 1}, [1]]),
    ("msgpack", Declared("json"), {"x": '"x"', 1: "1"}, [{(1, 2): 1}]),
    ("csv", Declared("int8"), {"127": 127, "-128": -128}, ["128", "1.0", "0x1", " 1", "1 ", "+1", "1_0", "٣", "true"]),
    ("csv", Declared("uint64"), {"18446744073709551615": 2**64 - 1}, ["-1", "18446744073709551616"]),
    ("csv", Declared("float64"), {"1": 1.0, "-1.5e3": -1500.0}, ["1e400", "nan", "inf", "1.", ".5", "0x1p3"]),
    ("csv", Declared("float32"), {"1.5": 1.5}, ["4e38"]),
    ("csv", Declared("bool"), {"true": True, "FALSE": False}, ["1", "yes", "t"]),
    ("csv", Declared("decimal(5, 2)"), {"1.5": Decimal("1.50"), "-999.99": Decimal("-999.99")}, ["1.005", "1000", "x"]),
    ("csv", Declared("date"), {"2026-01-31": date(2026, 1, 31)}, ["2026-02-30", "31.1.2026"]),
    ("csv", Declared("binary"), {"aGk=": b"hi"}, ["aGk", "%"]),
    ("csv", Declared("timestamp"), {"2026-01-31T13:00:00.123456+01:00": STAMP}, ["2026-01-31T12:00:00", "1767225600"]),
    ("csv", Declared("timestamp", unit="ms"), {"1500": datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC)}, ["x", "1" * 30]),
    ("csv", Declared("list<int64>"), {'"[1, null]"': [1, None]}, ["[1.5]", '"[""1""]"']),
    ("csv", Declared("struct<a: int64>"), {'"{""a"": 1}"': {"a": 1}}, ["{", '"{""a"": ""1""}"']),
    ("csv", Declared("json"), {'"{""x"": [1.50]}"': '{"x": [1.50]}'}, ["{"]),
]
"""Format, type, the stored value of each value that is accepted, and values that fail their message."""


@pytest.mark.parametrize("format_", ENCODE)
def test_a_value_is_stored_as_its_declared_type_or_fails_its_message(format_: str) -> None:
    for name, declared, accepted, refused in TABLE:
        if name != format_:
            continue
        decoder = make_decoder(decode_settings(format=format_, columns={"x": declared}))
        payloads = [ENCODE[format_](value) for value in [*accepted, *refused]]
        rows = outcomes(decoder.decode(batch_of(payloads)), len(payloads))
        expected = [*({"x": value} for value in accepted.values()), *[None] * len(refused)]
        assert rows == expected, declared
        assert [outcomes(decoder.decode(batch_of([payload])), 1)[0] for payload in payloads] == expected, declared


COLUMNS = {
    "city": Declared("string", path="customer.address.city"),
    "zip": Declared("string", path="customer.address.zip"),
    "name": Declared("string", path="customer.name"),
    "a.b": Declared("int64"),
    "key": Declared("int64"),
}


def test_paths_reach_into_objects_and_reserved_names_get_an_underscore() -> None:
    sent = [
        b'{"customer": {"name": "n", "address": {"city": "c", "zip": "z"}}, "a.b": 1, "key": 2}',
        b'{"customer": {"address": null}}',
        b"{}",
        b'{"customer": []}',
        b'{"customer": {"address": "here"}}',
    ]
    decoded = make_decoder(decode_settings(format="json", columns=COLUMNS)).decode(batch_of(sent))
    nothing = {"city": None, "zip": None, "name": None, "a.b": None, "key_": None}
    full = {"city": "c", "zip": "z", "name": "n", "a.b": 1, "key_": 2}
    assert outcomes(decoded, 5) == [full, nothing, nothing, None, None]
    packed_too = [msgpack.packb(json.loads(payload)) for payload in sent]
    decoded = make_decoder(decode_settings(format="msgpack", columns=COLUMNS)).decode(batch_of(packed_too))
    assert outcomes(decoded, 5) == [full, nothing, nothing, None, None]


def test_one_field_can_be_read_in_several_shapes() -> None:
    columns = {
        "customer": Declared("json"),
        "id": Declared("int64", path="customer.id"),
        "id_text": Declared("json", path="customer.id"),
    }
    sent = [b'{"customer": {"id": 7}}', b'{"customer": {"id": "7"}}', b'{"customer": 7}', b"{}"]
    decoded = make_decoder(decode_settings(format="json", columns=columns)).decode(batch_of(sent))
    full = {"customer": '{"id": 7}', "id": 7, "id_text": "7"}
    assert outcomes(decoded, 4) == [full, None, None, dict.fromkeys(full)]
