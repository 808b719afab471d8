"""CSV and TSV: what a record may look like, and that no payload changes another's row."""

from __future__ import annotations

import csv
import io
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from jetcapture_py.transform.decode.delimited import DelimitedDecoder
from tests.support.batches import Declared, batch_of, outcomes
from tests.support.memory import forget_peak, peak_resident

TWO = {"a": Declared("int64"), "b": Declared("string")}


def decode(columns: dict[str, Declared], *payloads: bytes, **settings: Any) -> list[dict[str, Any] | None]:
    return outcomes(DelimitedDecoder(columns, **settings).decode(batch_of(payloads)), len(payloads))


def errors(columns: dict[str, Declared], *payloads: bytes, **settings: Any) -> list[str]:
    decoded = DelimitedDecoder(columns, **settings).decode(batch_of(payloads))
    return [failure.error for failure in decoded.failures]


def rows_of(columns: dict[str, Declared], *payloads: bytes, **settings: Any) -> list[tuple[int, dict[str, Any]]]:
    decoded = DelimitedDecoder(columns, **settings).decode(batch_of(payloads))
    messages = range(len(payloads)) if decoded.messages is None else decoded.messages.to_pylist()
    return list(zip(messages, decoded.fields.to_pylist(), strict=True))


QUOTES = (b'1,"x', b'1,x"', b'1,a"b"c', b'1,"a"b', b'1, "a"', b"1,a\rb", b"1,a\r")
ERRORS = {
    b"": "the payload is empty",
    **dict.fromkeys((b"\n", b"\n1,x", b"1,x\n\n"), "a blank line"),
    b"1": "expected 2 fields, got 1",
    b"1,x,y": "expected 2 fields, got 3",
    b"1,x\n2,y": "expected one record, got 2",
    **dict.fromkeys(QUOTES, "unexpected quote or line break"),
    b"1,\xff": "invalid UTF-8 (byte 2)",
    b"x,y": "column 'a': expected a whole number, got 'x'",
}


def test_anything_but_one_record_fails_alone_and_says_why() -> None:
    assert {payload: errors(TWO, payload)[0] for payload in ERRORS} == ERRORS
    good = {"a": 5, "b": "five"}
    for payload in ERRORS:
        assert decode(TWO, b"5,five", payload, b'5,"five"', payload, b"5,five") == [good, None, good, None, good]


def test_the_null_text_is_null_only_without_quotes() -> None:
    rows = decode(TWO, b"1,NULL", b'2,"NULL"', b"3,", b"NULL,x", null_text="NULL")
    assert rows == [{"a": 1, "b": None}, {"a": 2, "b": "NULL"}, {"a": 3, "b": ""}, {"a": None, "b": "x"}]


def test_fields_may_be_separated_by_another_character() -> None:
    columns = {"a": Declared("string"), "b": Declared("string")}
    for delimiter in ";|\t^.- ":
        sent = [f"x{delimiter}y", f'"x{delimiter}y"{delimiter}"z"', "x,y"]
        rows = decode(columns, *(text.encode() for text in sent), delimiter=delimiter)
        assert rows == [{"a": "x", "b": "y"}, {"a": f"x{delimiter}y", "b": "z"}, None]


def test_a_header_names_the_fields_of_its_own_message() -> None:
    columns = {**TWO, "c": Declared("int32", path="C C")}
    good = [b"a,b\n1,x", b"b,more,a\ny,z,2", b'"C C",a\r\n7,3\r\n']
    bad = [b"a,b", b"a,a\n1,2", b"x,y\n1,2", b"a,b\n", b"a,b\n1", b'a,"b\n1,x', b"", b"a,b\n1,x\n2,y"]
    assert rows_of(columns, *good, *bad, header=True) == [
        (0, {"a": 1, "b": "x", "c": None}),
        (1, {"a": 2, "b": "y", "c": None}),
        (2, {"a": 3, "b": None, "c": 7}),
    ]


def test_countless_fields_take_memory_message_by_message_and_names_of_a_header_are_bounded() -> None:
    batch = batch_of([b"a," * 250_000] * 32)
    forget_peak()
    before = peak_resident()
    decoded = DelimitedDecoder(TWO).decode(batch)
    assert len(decoded.failures) == 32
    assert peak_resident() - before < 5 * batch.rows.nbytes
    sent = b"a,b" + b"," * 100_000 + b"\n1,x"
    assert errors(TWO, sent, header=True) == ["the header names more than 10000 fields"]


def test_lines_are_records_and_one_bad_record_fails_its_whole_message() -> None:
    sent = [b'1,x\n2,"y\nz"\n', b"3,c", b"4,d\n5", b"6,f\n7,g\nx,h", b"8,i\n\n9,j", b"10,k\r\n11,l"]
    assert [(message, row["a"]) for message, row in rows_of(TWO, *sent, lines=True)] == [
        *((0, 1), (0, 2), (1, 3)),
        *((5, 10), (5, 11)),
    ]
    assert len(errors(TWO, *sent, lines=True)) == 3
    with_header = rows_of(TWO, b"a,b\n1,x\n2,y", b"b,a\nz,3", lines=True, header=True)
    assert [(message, row["a"], row["b"]) for message, row in with_header] == [(0, 1, "x"), (0, 2, "y"), (1, 3, "z")]


pieces = st.sampled_from(['"', '""', ",", "\n", "\r\n", "\r", "a", "é", " ", "NULL", "1", "\ufeff", ""])
texts = st.lists(pieces, max_size=8).map("".join)


def reference(text: str) -> list[tuple[str, ...]] | None:
    """The records that the standard library reads, of those payloads that RFC 4180 allows."""
    text = text.removeprefix("\ufeff")
    text = text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")
    state = "start"
    for char in text.replace("\r\n", "\n"):
        if state in ("start", "plain"):
            if char == "\r" or (char == '"' and state == "plain"):
                return None
            state = "quoted" if char == '"' else "start" if char in ",\n" else "plain"
        elif state == "quoted":
            state = "closed" if char == '"' else "quoted"
        elif char == '"':
            state = "quoted"
        elif char in ",\n":
            state = "start"
        else:
            return None
    if state == "quoted" or (state == "start" and text.endswith("\n")):
        return None
    found = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    return None if not all(found) else [tuple(record) for record in found] or None


@given(st.lists(texts, min_size=1, max_size=6))
def test_each_message_gives_the_records_that_the_standard_library_reads_from_it_alone(sent: list[str]) -> None:
    columns = {"a": Declared("string"), "b": Declared("string")}
    found = rows_of(columns, *(text.encode() for text in sent), lines=True, null_text="\0none")
    expected = []
    for number, text in enumerate(sent):
        records = reference(text) if text else None
        if records and all(len(record) == 2 for record in records):
            expected += [(number, dict(zip("ab", record, strict=True))) for record in records]
    assert found == expected
