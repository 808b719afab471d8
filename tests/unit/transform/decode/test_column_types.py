"""The types that users write in `decode.columns`."""

from __future__ import annotations

import pyarrow as pa
import pytest

from jetcapture_py.config.column_types import parse_type

UTC = pa.timestamp("us", "UTC")
TYPES = {
    "int8": pa.int8(),
    "uint64": pa.uint64(),
    "float32": pa.float32(),
    "bool": pa.bool_(),
    "binary": pa.binary(),
    **dict.fromkeys(("int", "long"), pa.int64()),
    **dict.fromkeys(("float", "double"), pa.float64()),
    **dict.fromkeys(("str", "  String ", "json"), pa.string()),
    **dict.fromkeys(("timestamp", "timestamp[us, UTC]", "timestamp[us, tz=UTC]"), UTC),
    "date": pa.date32(),
    "decimal(18, 2)": pa.decimal128(18, 2),
    "decimal(5)": pa.decimal128(5, 0),
    "list<int>": pa.list_(pa.int64()),
    "map<string, list<json>>": pa.map_(pa.string(), pa.list_(pa.string())),
    "list<struct<sku: string, price: decimal(9,2), at: timestamp[us, UTC]>>": pa.list_(
        pa.struct([("sku", pa.string()), ("price", pa.decimal128(9, 2)), ("at", UTC)])
    ),
}
ASKED = {
    "did you mean string?": ["strng"],
    "did you mean int64?": ["int46"],
    "one of bool": ["wat", ""],
    "list<T>": ["list", "list<int64"],
    "brackets": ["list<int64>>"],
    "one item type": ["list<int64, string>"],
    "as in struct<": ["struct<>", "struct<a>"],
    "case-insensitive": ["struct<a: int64, A: string>"],
    "map<string, int64>": ["map<int64, string>", "map<string>"],
    "decimal(p, s)": ["decimal"],
    "1 to 38 digits": ["decimal(39, 2)", "decimal(4, 5)"],
    "write timestamp": ["timestamp[ns]"],
    "32 deep": ["list<" * 1000 + "int" + ">" * 1000],
    "unknown type 'a\\nb'": ["a\nb"],
}


def test_a_type_is_read_as_users_write_it() -> None:
    assert {text: parse_type(text) for text in TYPES} == TYPES


def test_a_wrong_type_is_refused_in_one_line_with_a_hint() -> None:
    for hint, text in ((hint, text) for hint, texts in ASKED.items() for text in texts):
        with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is looked at below
            parse_type(text)
        assert hint in str(caught.value)
        assert str(caught.value).isprintable()
