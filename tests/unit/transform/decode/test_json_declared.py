from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from jetcapture_py.transform.decode.json_declared import ObjectDecoder
from tests.support.batches import Declared, batch_of, outcomes


def decode(columns: dict[str, Declared], *payloads: bytes) -> list[dict[str, Any] | None]:
    return outcomes(ObjectDecoder(columns).decode(batch_of(payloads)), len(payloads))


def values(declared: Declared, *texts: str) -> list[Any]:
    """What each JSON text gives in a column; "failure" where its message fails. Each is decoded among the others."""
    rows = decode({"x": declared}, *(f'{{"x": {text}}}'.encode() for text in texts))
    alone = [decode({"x": declared}, f'{{"x": {text}}}'.encode())[0] for text in texts]
    assert rows == alone
    return ["failure" if row is None else row["x"] for row in rows]


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[misc,arg-type]


def test_a_failure_says_what_is_wrong_with_its_own_payload() -> None:
    sent = batch_of([b'{"id": 1}', b"", None, b'{"z": "\xff"}', b"\xff", b'{"id": 2}'])
    decoded = ObjectDecoder({"id": Declared("int64")}).decode(sent)
    assert {failure.index: failure.error for failure in decoded.failures} == {
        1: "the payload is empty",
        2: "the payload is empty",
        3: "invalid UTF-8 (byte 7)",
        4: "invalid UTF-8 (byte 0)",
    }
    assert decoded.messages.to_pylist() == [0, 5]


def test_an_empty_batch_gives_no_rows() -> None:
    assert decode({"id": Declared("int64"), "l": Declared("list<struct<a: date>>")}) == []


def test_messages_is_none_when_every_message_gives_a_row() -> None:
    assert ObjectDecoder({"id": Declared("int64")}).decode(batch_of([b"{}", b'{"id": 1}'])).messages is None


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("int64", ["true", '"1"', "1.5", "1.0", "1e3", "[]", "{}"]),
        ("bool", ["0", '"true"', "[]"]),
        ("float64", ['"1"', "true", "1e400", "-1e400", "9" * 400]),
        ("float32", ["3.5e38", "-3.5e38", '"1"']),
        ("string", ["1", "true", "[]", "{}"]),
        ("binary", ['"abc"', '"a b="', "1", '"a-_="']),
        ("list<int64>", ["1", "{}", '["1"]', "[1, 2.5]", "[[1]]"]),
        ("struct<a: int64>", ["1", "[]", '{"a": "1"}']),
        ("map<string, int64>", ["1", "[]", '{"a": "1"}']),
    ],
)
def test_no_type_is_coerced_into_another(kind: str, texts: list[str]) -> None:
    assert values(Declared(kind), *texts, "null") == ["failure"] * len(texts) + [None]


def test_dates_are_days_that_exist() -> None:
    texts = ['"2024-02-29"', '"2023-02-29"', '"2024-2-9"', '"0000-01-01"', '"2024-02-29T00:00:00Z"', "1", "null"]
    assert values(Declared("date"), *texts) == [date(2024, 2, 29), *["failure"] * 5, None]


def test_a_day_or_time_is_valid_if_arrow_can_read_it() -> None:
    days = [
        f"{year}-{month:02}-{day:02}"
        for year in ("2023", "2024", "1900", "2000", "9999", "0001", "0400")
        for month in range(14)
        for day in range(33)
    ]
    zones = [
        f"{sign}{hour:02}:{minute:02}" for sign in "+-" for hour in (0, 9, 19, 20, 23, 24, 30) for minute in (0, 59, 60)
    ]
    clocks = [
        f"{hour:02}:{minute:02}:{second:02}"
        for hour in (0, 9, 19, 23, 24, 30)
        for minute in (0, 59, 60)
        for second in (0, 59, 60)
    ]
    stamps = [f"2026-05-06T{clock}{zone}" for clock in clocks for zone in (*zones, "Z", ".5Z", ".1234567Z")]

    def read(texts: list[str], to: pa.DataType) -> list[bool]:
        def reads(text: str) -> bool:
            try:
                return bool(pa.array([text.replace(".1234567", ".123456")]).cast(to).is_valid()[0].as_py())
            except pa.ArrowInvalid:
                return False

        return [reads(text) for text in texts]

    found = decode({"x": Declared("date")}, *(b'{"x":"%b"}' % day.encode() for day in days))
    assert [row is not None for row in found] == read(days, pa.date32())
    found = decode({"x": Declared("timestamp")}, *(b'{"x":"%b"}' % stamp.encode() for stamp in stamps))
    assert [row is not None for row in found] == read(stamps, pa.timestamp("us", "UTC"))


def test_a_json_column_holds_the_text_of_any_value() -> None:
    texts = ['{"b": 1,  "a": [1.0, 1e2]}', '"é\\n"', "12345678901234567890123", "[]", "true", "null"]
    assert values(Declared("json"), *texts) == [*texts[:-1], None]
    assert values(Declared("list<json>"), '[1, null, "a", {"b": 2}]') == [["1", None, '"a"', '{"b": 2}']]


def test_nested_types_hold_nulls_at_every_level() -> None:
    kind = Declared(
        "list<struct<sku: string, tags: list<string>, price: decimal(5, 2), at: timestamp, n: map<str, int>>>"
    )
    good = '[null, {}, {"sku": "a", "tags": [null, "t"], "price": 1.5, "at": "2026-01-01T00:00:00Z", "n": {"k": 1}}]'
    nothing = {"sku": None, "tags": None, "price": None, "at": None, "n": None}
    full = {"sku": "a", "tags": [None, "t"], "price": Decimal("1.50"), "at": utc(2026, 1, 1), "n": [("k", 1)]}
    bad = ['[{}, {"price": 1.234}]', '[{"at": "2026-01-01"}]', '[{"n": {"k": 1.5}}]', '[{"sku": 1}]']
    assert values(kind, good, *bad, "[]", "null") == [[None, nothing, full], *["failure"] * 4, [], None]


def test_paths_reach_into_objects() -> None:
    columns = {
        "city": Declared("string", path="customer.address.city"),
        "zip": Declared("string", path="customer.address.zip"),
        "name": Declared("string", path="customer.name"),
        "a.b": Declared("int64"),
    }
    rows = decode(
        columns,
        b'{"customer": {"name": "n", "address": {"city": "c", "zip": "z"}}, "a.b": 1}',
        b'{"customer": {"address": null}}',
        b"{}",
        b'{"customer": []}',
        b'{"customer": {"address": "here"}}',
    )
    nothing = {"city": None, "zip": None, "name": None, "a.b": None}
    assert rows == [{"city": "c", "zip": "z", "name": "n", "a.b": 1}, nothing, nothing, None, None]


def test_one_field_can_be_read_in_several_shapes() -> None:
    columns = {
        "customer": Declared("json"),
        "id": Declared("int64", path="customer.id"),
        "id_text": Declared("json", path="customer.id"),
    }
    rows = decode(columns, b'{"customer": {"id": 7}}', b'{"customer": {"id": "7"}}', b'{"customer": 7}', b"{}")
    full = {"customer": '{"id": 7}', "id": 7, "id_text": "7"}
    assert rows == [full, None, None, dict.fromkeys(full)]


def test_names_the_archive_reserves_get_an_underscore() -> None:
    assert decode({"key": Declared("int64")}, b'{"key": 1}') == [{"key_": 1}]


@pytest.mark.parametrize(
    ("columns", "hint"),
    [
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
    ],
)
def test_wrong_declarations_are_refused_when_the_decoder_is_made(columns: dict[str, Declared], hint: str) -> None:
    with pytest.raises(ValueError, match=hint) as caught:
        ObjectDecoder(columns)
    assert str(caught.value).isprintable()
