"""Settings that no decoder can be made of, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.transform.decode import RawDecoder, make_decoder
from jetcapture_py.transform.decode.avro import AvroDecoder, Registry
from jetcapture_py.transform.decode.delimited import DelimitedDecoder
from jetcapture_py.transform.decode.json_declared import ObjectDecoder
from jetcapture_py.transform.decode.protobuf import ProtobufDecoder
from tests.support.batches import Declared, batch_of, decode_settings, outcomes
from tests.support.formats import descriptor_set
from tests.unit.transform.decode.test_avro import SCHEMA, field, logical, record

NULLS = {"type": "array", "items": "null"}
WITHOUT_BYTES = "array whose items have no bytes"
INDIRECT = record(field("y", {"type": "map", "values": "R"}), name="S")
JSON: list[tuple[dict[str, Declared], str]] = [
    ({"a": Declared("strng")}, "column 'a': unknown type 'strng': did you mean string"),
    ({"a": Declared("int64"), "A": Declared("string")}, "same column to Spark"),
    ({"key": Declared("int64"), "key_": Declared("string")}, "same column to Spark"),
    ({"a": Declared("int64", unit="s")}, "column 'a': unit"),
    ({"a": Declared("timestamp", unit="h")}, "column 'a': unit"),
    ({"a": Declared("int64", path="a..b")}, "column 'a': path"),
    ({"a": Declared("int64", path="")}, "column 'a': path"),
    ({"a\ud800": Declared("int64", path="b")}, "not valid text"),
    ({'a"b': Declared("int64")}, "cannot contain quotes, backslashes or control characters"),
    ({"a": Declared("int64", path="b\\.c")}, "cannot contain quotes, backslashes or control characters"),
]
CSV: list[tuple[dict[str, Declared], str]] = [
    ({"a": Declared("int64", path="b")}, r"column .a.: path: only with decode\.header"),
    ({"a": Declared("int64"), "A": Declared("int64")}, "are the same column to Spark"),
]
AVRO_SCHEMAS: list[tuple[Any, str]] = [
    ("long", "not a record"),
    (record(), "not a record with fields"),
    (record(field("x", "no such type")), "not valid"),
    (record(field("x", "int"), field("next", ["null", "R"])), "record 'R' contains itself"),
    (record(field("x", {"type": "array", "items": INDIRECT})), "itself"),
    (record(field("x", NULLS)), WITHOUT_BYTES),
    (record(field("x", {"type": "array", "items": record(name="E")})), WITHOUT_BYTES),
    (record(field("x", logical("bytes", "decimal", precision=50))), "up to 38"),
]
AVRO_COLUMNS: list[tuple[Declared, str]] = [
    (Declared("string", path="id"), "which cannot be string"),
    (Declared("int64", path="missing"), "no field 'missing'"),
    (Declared("int64", path="customer.missing"), "no field 'customer.missing'"),
    (Declared("int64", path="id.deeper"), "no field 'id.deeper'"),
    (Declared("timestamp", path="customer.city", unit="s"), "unit: only for numbers"),
    (Declared("int64", path="customer"), "cannot be int64"),
    (Declared("decimal(10, 2)", path="id"), r"cannot be decimal128\(10, 2\): Precision is not great enough"),
]
DESCRIPTORS: list[tuple[bytes | None, str, str]] = [
    (b"\xff", "shop.v1.Row", "not a descriptor set"),
    (b"", "shop.v1.Row", "the descriptor set is empty"),
    (None, "shop.v1.Missing", "has no type shop.v1.Missing"),
    (None, "Empty", "has no fields"),
]
"""Content of the file, or None for a good one; message; reason."""
CODE = {
    "no_such_module:thing": "cannot import",
    "jetcapture_py.transform.decode:nothing": "cannot import",
    "builtins:dict": "no method decode",
}


def refused(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        make()
    assert str(caught.value).isprintable()


def test_columns_that_cannot_be_stored_are_refused() -> None:
    for columns, reason in JSON:
        refused(partial(ObjectDecoder, columns), reason)
    for columns, reason in CSV:
        refused(partial(DelimitedDecoder, columns), reason)


def test_an_avro_schema_that_cannot_be_stored_or_read_safely_is_refused(tmp_path: Path) -> None:
    for schema, reason in AVRO_SCHEMAS:
        refused(partial(AvroDecoder, schema, {}), reason)
    for column, reason in AVRO_COLUMNS:
        refused(partial(AvroDecoder, SCHEMA, {"x": column}), reason)
    refused(partial(Registry, str(tmp_path / "missing")), "registry: the directory does not exist")


def test_a_descriptor_set_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    text = 'syntax = "proto3"; package shop.v1; message Row { int64 id = 1; }'
    good = descriptor_set(tmp_path, text).read_bytes()
    (tmp_path / "empty").mkdir()
    empty = descriptor_set(tmp_path / "empty", 'syntax = "proto3"; message Empty {}').read_bytes()
    for content, message, reason in DESCRIPTORS:
        data = content if content is not None else empty if message == "Empty" else good
        refused(partial(ProtobufDecoder, data, message, {}), reason)


def test_a_decoder_of_your_own_that_cannot_be_imported_is_refused() -> None:
    for name, reason in CODE.items():
        refused(partial(make_decoder, decode_settings(format=name)), reason)
    decoder = make_decoder(decode_settings(format="jetcapture_py.transform.decode:RawDecoder"))
    assert isinstance(getattr(decoder, "decoder", None), RawDecoder)


def test_the_raw_decoder_takes_every_message_and_gives_no_fields() -> None:
    decoded = make_decoder(decode_settings(format="raw")).decode(batch_of([b"", b"\xff", None]))
    assert decoded.messages is None
    assert outcomes(decoded, 3) == [{}, {}, {}]
