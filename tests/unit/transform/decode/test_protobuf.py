"""Protocol Buffers: types, presence, well-known types, and data that is meant to do harm."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from jetcapture_py.transform.batch import decode_checked
from jetcapture_py.transform.decode import make_decoder
from jetcapture_py.transform.decode.protobuf import ProtobufDecoder
from tests.support.batches import Declared, batch_of, decode_settings, outcomes
from tests.support.formats import descriptor_set, message_class

PROTO = """
syntax = "proto3";
package shop;
import "google/protobuf/any.proto";
import "google/protobuf/duration.proto";
import "google/protobuf/empty.proto";
import "google/protobuf/struct.proto";
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
message Item { string sku = 1; uint32 quantity = 2; }
message Tree { int32 value = 1; repeated Tree kids = 2; }
enum State { UNKNOWN = 0; PAID = 1; }
message Order {
  int32 i32 = 1; int64 i64 = 2; uint32 u32 = 3; uint64 u64 = 4; sint32 s32 = 5; sint64 s64 = 6;
  fixed32 f32 = 7; fixed64 f64 = 8; sfixed32 sf32 = 9; sfixed64 sf64 = 10; float f = 11; double d = 12;
  bool flag = 13; string text = 14; bytes data = 15; State state = 16;
  optional int32 maybe = 17;
  Item item = 18;
  repeated Item items = 19;
  repeated int32 numbers = 20;
  map<string, int64> counts = 21;
  map<int32, Item> by_number = 22;
  oneof choice { string left = 23; Item right = 24; }
  google.protobuf.Timestamp at = 25;
  google.protobuf.Duration took = 26;
  google.protobuf.Int64Value wrapped = 27;
  google.protobuf.StringValue wrapped_text = 28;
  google.protobuf.Struct document = 29;
  google.protobuf.Value value = 30;
  google.protobuf.Any any = 31;
  google.protobuf.Empty empty = 32;
  Tree tree = 33;
  repeated google.protobuf.Timestamp times = 34;
  repeated State states = 35;
  int32 from = 36;
}
"""
FULL: dict[str, Any] = json.loads("""{
  "i32": -2147483648, "i64": -9223372036854775808, "u32": 4294967295, "u64": 18446744073709551615, "s32": -5, "s64": -6,
  "f32": 7, "f64": 8, "sf32": -9, "sf64": -10, "f": 1.5, "d": 0.1, "flag": true, "text": "東京", "data": "/w==",
  "state": "PAID", "maybe": 0, "item": {"sku": "a", "quantity": 1}, "items": [{"sku": "b"}, {}], "numbers": [1, -2],
  "counts": {"x": 1099511627776}, "by_number": {"5": {"sku": "c"}}, "left": "l", "at": "2026-01-31T12:00:00.123456789Z",
  "took": "-1.5s", "wrapped": "7", "wrapped_text": "", "document": {"a": [1, null, "x"]}, "value": [true],
  "any": {"@type": "type.googleapis.com/shop.Item", "sku": "d"}, "empty": {}, "states": ["PAID", "UNKNOWN"],
  "tree": {"value": 1, "kids": [{"value": 2}]}, "times": ["1970-01-01T00:00:01Z"], "from": 36
}""")
STAMP = datetime(2026, 1, 31, 12, 0, 0, 123_456, UTC)
STORED = FULL | {"data": b"\xff", "counts": [("x", 2**40)], "at": STAMP, "wrapped": 7, "right": None}
STORED |= {"items": [{"sku": "b", "quantity": 0}, {"sku": "", "quantity": 0}], "value": "[true]", "empty": "{}"}
STORED |= {"by_number": [(5, {"sku": "c", "quantity": 0})], "took": timedelta(seconds=-1.5)}
STORED |= {"document": '{"a":[1.0,null,"x"]}', "any": '{"@type":"type.googleapis.com/shop.Item","sku":"d"}'}
STORED |= {"tree": {"value": 1, "kids": ['{"value":2}']}, "times": [datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)]}
TYPES = {"u32": "uint32", "u64": "uint64", "f": "float", "numbers": "list<item: int32>", "took": "duration[us]"}
TYPES |= {"by_number": "map<int32, struct<sku: string, quantity: uint32>>", "at": "timestamp[us, tz=UTC]"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return descriptor_set(tmp_path_factory.mktemp("shop"), PROTO)


@pytest.fixture(scope="module")
def order(path: Path) -> Any:
    return message_class(path, "shop.Order")


def decode(path: Path, *payloads: bytes, message: str = "shop.Order", **columns: Declared) -> list[Any]:
    decoder = ProtobufDecoder(path.read_bytes(), message, columns)
    return outcomes(decode_checked(decoder, batch_of(payloads)), len(payloads))


def full(order: Any) -> bytes:
    pool = order.DESCRIPTOR.file.pool
    return bytes(json_format.ParseDict(FULL, order(), descriptor_pool=pool).SerializeToString())


def test_every_type_has_its_column(path: Path, order: Any) -> None:
    decoder = ProtobufDecoder(path.read_bytes(), "shop.Order", {})
    decoded = decoder.decode(batch_of([full(order), b"\xff", full(order)]))
    decoded.fields.validate(full=True)
    rows = outcomes(decoded, 3)
    assert rows[1] is None
    assert rows[0] == rows[2] == {name: STORED[name] for name in decoded.fields.schema.names}
    assert decoded.fields.num_columns == 36
    types = {each.name: str(each.type) for each in decoded.fields.schema}
    assert {name: types[name] for name in TYPES} == TYPES


def test_what_is_not_set_is_its_default_or_null_where_presence_is_known(path: Path) -> None:
    (found,) = decode(path, b"")
    expected = {"i32": 0, "text": "", "flag": False, "state": "UNKNOWN", "data": b"", "numbers": [], "counts": []}
    assert {name: found[name] for name in expected} == expected
    known = ("maybe", "item", "left", "right", "at", "took", "wrapped", "wrapped_text", "document", "any", "tree")
    assert [found[name] for name in known] == [None] * len(known)


def test_an_unknown_enum_value_is_its_number_and_an_unknown_any_keeps_its_bytes(path: Path, order: Any) -> None:
    sent = order(state=7)
    sent.any.type_url, sent.any.value = "example.org/other", b"\xff"
    (found,) = decode(path, sent.SerializeToString())
    assert found["state"] == "7"
    assert found["any"] == '{"@type":"example.org/other","value":"/w=="}'
    (found,) = decode(path, b"\x08\x05\xc0\x3e\x07\xca\x3e\x01a")
    assert found["i32"] == 5, "fields that the type does not have are skipped"


NOT_UTF8 = b"\x72\x01\xff"
DAMAGED = [NOT_UTF8, b"\x0a\x01a", b"\x72\x05a", b"\x73", b"\x70\x01", b"\x0c", b"\x72\xff\xff\xff\xff\x07"]
DAMAGED += [b"\x92\x01\x02\x08\x01", b"\x9a\x01\x02\x08\x01", b"\x8a\x02" * 1000]
DAMAGED += [b"\xca\x01\x0b\x10" + b"\xff" * 9 + b"\x01", b"\xca\x01\x0a\x08" + b"\xff" * 8 + b"\x7f"]
DAMAGED += [b"\xd2\x01\x0a\x08" + b"\xff" * 8 + b"\x7f"]


def test_a_message_of_another_type_or_damaged_fails_alone(path: Path, order: Any) -> None:
    good = full(order)
    rows = decode(path, good, *(payload for damaged in DAMAGED for payload in (damaged, good)))
    assert rows[1::2] == [None] * len(DAMAGED)
    assert rows[::2] == [rows[0]] * (len(DAMAGED) + 1)


def test_declared_columns_are_found_by_path(path: Path, order: Any) -> None:
    columns = {name: Declared("json") for name in ("items", "counts", "tree", "at")}
    columns |= {"sku": Declared("string", path="item.sku"), "quantity": Declared("int64", path="item.quantity")}
    columns |= {"small": Declared("int8", path="i32"), "number": Declared("json", path="i64")}
    columns |= {"seconds": Declared("timestamp", path="f32", unit="s")}
    rows = decode(path, full(order), order(i32=5).SerializeToString(), **columns)
    assert rows[0] is None
    given = {"small": 5, "items": "[]", "counts": "{}", "number": "0", "seconds": datetime(1970, 1, 1, tzinfo=UTC)}
    assert rows[1] == {**dict.fromkeys(columns), **given}
    columns["small"] = Declared("int32", path="i32")
    (row,) = decode(path, full(order), **columns)
    assert row["items"] == '[{"sku":"b"},{}]'
    assert row["counts"] == '{"x":1099511627776}'
    assert row["tree"] == '{"value":1,"kids":[{"value":2}]}'
    assert row["at"] == '"2026-01-31T12:00:00.123456789Z"'


def test_delimited_messages_are_rows_and_one_bad_one_fails_them_all(path: Path, order: Any) -> None:
    def delimited(*sent: bytes) -> bytes:
        return b"".join(bytes([len(each)]) + each for each in sent)

    one, two = order(i32=1).SerializeToString(), order(i32=2).SerializeToString()
    columns = {"i32": Declared("int32")}
    config = decode_settings(
        format="protobuf", schema_file=path, message="shop.Order", rows="delimited", columns=columns
    )
    sent = [delimited(one, two), delimited(one, NOT_UTF8), delimited(two)[:-1], b"", delimited(b"", two), b"\xff" * 9]
    decoded = make_decoder(config).decode(batch_of(sent))
    rows = list(zip(decoded.messages.to_pylist(), decoded.fields.to_pylist(), strict=True))
    assert rows == [(0, {"i32": 1}), (0, {"i32": 2}), (4, {"i32": 0}), (4, {"i32": 2})]
    errors = {failure.index: failure.error for failure in decoded.failures}
    assert errors.keys() == {1, 2, 3, 5}
    assert errors[1].startswith("row 1: ")


def test_required_fields_and_closed_enums_of_proto2_hold(tmp_path: Path) -> None:
    text = """
    syntax = "proto2";
    package old;
    enum E { A = 1; }
    enum F { Z = 0; }
    message M {
      required int32 id = 1; optional E e = 2; optional string s = 3; optional group G = 4 { optional int32 x = 5; }
      map<string, F> by = 6;
    }
    """
    path = descriptor_set(tmp_path, text)
    kind = message_class(path, "old.M")
    sent = kind(id=1, e=1, s="x")
    sent.g.x = 5
    new = b"\x08\x01\x10\x07" + b"2\x05\x0a\x01k\x10\x07"  # both with a number that the enum does not have
    bad = [b"\x08\x01\x1a\x01\xff", b"\x08\x01\x30\x01"]
    rows = decode(path, sent.SerializeToString(), b"", new, *bad, message="old.M")
    assert rows[0] == {"id": 1, "e": "A", "s": "x", "g": {"x": 5}, "by": []}
    assert rows[1] is None
    assert rows[2] == {"id": 1, "e": None, "s": None, "g": None, "by": []}
    assert rows[3:] == [None, None]


def test_a_descriptor_set_without_googles_own_files_is_enough(tmp_path: Path) -> None:
    (tmp_path / "a.proto").write_text(PROTO)
    (tmp_path / "b.proto").write_text('syntax = "proto3"; import "a.proto"; message B { shop.Order order = 1; }')
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{tmp_path}", f"-o{tmp_path}/set.pb"]
    subprocess.run([*command, "a.proto"], check=True)
    assert decode(tmp_path / "set.pb", b"\x08\x05", i32=Declared("int32")) == [{"i32": 5}]
    subprocess.run([*command, "b.proto"], check=True)
    with pytest.raises(ValueError, match=r"lacks a\.proto: write it with protoc --include_imports"):
        decode(tmp_path / "set.pb", message="B")
