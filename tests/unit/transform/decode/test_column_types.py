from __future__ import annotations

import pyarrow as pa
import pytest

from jetcapture_py.config.column_types import parse_type
from jetcapture_py.transform.decode import RawDecoder, make_decoder
from tests.support.batches import Declared, batch_of, decode_settings, outcomes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int8", pa.int8()),
        ("uint64", pa.uint64()),
        ("int", pa.int64()),
        ("long", pa.int64()),
        ("float32", pa.float32()),
        ("float", pa.float64()),
        ("double", pa.float64()),
        ("str", pa.string()),
        ("  String ", pa.string()),
        ("bool", pa.bool_()),
        ("binary", pa.binary()),
        ("date", pa.date32()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestamp[us, UTC]", pa.timestamp("us", "UTC")),
        ("timestamp[us, tz=UTC]", pa.timestamp("us", "UTC")),
        ("json", pa.string()),
        ("decimal(18, 2)", pa.decimal128(18, 2)),
        ("decimal(5)", pa.decimal128(5, 0)),
        ("list<int>", pa.list_(pa.int64())),
        ("map<string, list<json>>", pa.map_(pa.string(), pa.list_(pa.string()))),
        (
            "list<struct<sku: string, price: decimal(9,2), at: timestamp[us, UTC]>>",
            pa.list_(
                pa.struct(
                    [("sku", pa.string()), ("price", pa.decimal128(9, 2)), ("at", pa.timestamp("us", "UTC"))],
                )
            ),
        ),
    ],
)
def test_a_type_is_read_as_users_write_it(text: str, expected: pa.DataType) -> None:
    assert parse_type(text) == expected


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("strng", "did you mean string?"),
        ("int46", "did you mean int64?"),
        ("wat", "one of bool"),
        ("", "one of bool"),
        ("list", "list<T>"),
        ("list<int64", "list<T>"),
        ("list<int64>>", "brackets"),
        ("list<int64, string>", "one item type"),
        ("struct<>", "as in struct<"),
        ("struct<a>", "as in struct<"),
        ("struct<a: int64, A: string>", "case-insensitive"),
        ("map<int64, string>", "map<string, int64>"),
        ("map<string>", "map<string, int64>"),
        ("decimal", "decimal(p, s)"),
        ("decimal(39, 2)", "1 to 38 digits"),
        ("decimal(4, 5)", "1 to 38 digits"),
        ("timestamp[ns]", "write timestamp"),
        ("list<" * 1000 + "int" + ">" * 1000, "32 deep"),
        ("a\nb", "unknown type 'a\\nb'"),
    ],
)
def test_a_wrong_type_is_refused_in_one_line_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is looked at below
        parse_type(text)
    assert hint in str(caught.value)
    assert str(caught.value).isprintable()


def test_the_raw_decoder_takes_every_message_and_gives_no_fields() -> None:
    decoder = make_decoder(decode_settings(format="raw", columns={}))
    decoded = decoder.decode(batch_of([b"", b"\xff", None]))
    assert decoded.fields.num_columns == 0
    assert decoded.messages is None
    assert decoded.failures == ()
    assert outcomes(decoded, 3) == [{}, {}, {}]


def test_a_format_may_name_a_class_of_the_users_own() -> None:
    decoder = make_decoder(decode_settings(format="jetcapture_py.transform.decode:RawDecoder", columns={}))
    assert isinstance(getattr(decoder, "decoder", None), RawDecoder)


@pytest.mark.parametrize(
    ("fmt", "columns", "hint"),
    [
        ("no_such_module:thing", {}, "cannot import"),
        ("jetcapture_py.transform.decode:nothing", {}, "cannot import"),
        ("builtins:dict", {}, "no method decode"),
    ],
)
def test_a_format_that_cannot_be_had_is_refused(fmt: str, columns: dict[str, Declared], hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        make_decoder(decode_settings(format=fmt, columns=columns))
