"""The types that users write in `decode.columns`."""

from __future__ import annotations

import pyarrow as pa
import pytest

from jetcapture_py.config.column_types import parse_type

UTC = pa.timestamp("us", "UTC")
TYPES = {
    "int8": pa.int8(),
    "uint64": pa.uint64(),
    "int": pa.int64(),
    "long": pa.int64(),
    "float32": pa.float32(),
    "float": pa.float64(),
    "double": pa.float64(),
    "str": pa.string(),
    "  String ": pa.string(),
    "bool": pa.bool_(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": UTC,
    "timestamp[us, UTC]": UTC,
    "timestamp[us, tz=UTC]": UTC,
    "json": pa.string(),
    "decimal(18, 2)": pa.decimal128(18, 2),
    "decimal(5)": pa.decimal128(5, 0),
    "list<int>": pa.list_(pa.int64()),
    "map<string, list<json>>": pa.map_(pa.string(), pa.list_(pa.string())),
    "list<struct<sku: string, price: decimal(9,2), at: timestamp[us, UTC]>>": pa.list_(
        pa.struct([("sku", pa.string()), ("price", pa.decimal128(9, 2)), ("at", UTC)])
    ),
}
HINTS = {
    "strng": "did you mean string?",
    "int46": "did you mean int64?",
    "wat": "one of bool",
    "": "one of bool",
    "list": "list<T>",
    "list<int64": "list<T>",
    "list<int64>>": "brackets",
    "list<int64, string>": "one item type",
    "struct<>": "as in struct<",
    "struct<a>": "as in struct<",
    "struct<a: int64, A: string>": "case-insensitive",
    "map<int64, string>": "map<string, int64>",
    "map<string>": "map<string, int64>",
    "decimal": "decimal(p, s)",
    "decimal(39, 2)": "1 to 38 digits",
    "decimal(4, 5)": "1 to 38 digits",
    "timestamp[ns]": "write timestamp",
    "list<" * 1000 + "int" + ">" * 1000: "32 deep",
    "a\nb": "unknown type 'a\\nb'",
}


def test_a_type_is_read_as_users_write_it() -> None:
    assert {text: parse_type(text) for text in TYPES} == TYPES


def test_a_wrong_type_is_refused_in_one_line_with_a_hint() -> None:
    for text, hint in HINTS.items():
        with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is looked at below
            parse_type(text)
        assert hint in str(caught.value)
        assert str(caught.value).isprintable()
