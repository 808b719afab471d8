"""Columns as text: what is read back from JSON and CSV is what was in the columns."""

from __future__ import annotations

import csv
import io
import json
import math
from base64 import b64encode
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given

from jetcapture_py.archive.block_writer import NULL, csv_header, csv_lines, json_lines

ODD = ["", NULL, '"', '""', "a,b", "a\nb", "\r\n", "\r", "\\", "\\n", " a ", "\x00", "\x1f", "\x7f", "é", "🚀", "null"]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(ODD)
deep = st.fixed_dictionaries({"x": st.none() | st.integers(0, 9)})
moments = st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))
COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "text": (pa.string(), texts),
    "large": (pa.large_string(), texts),
    "int": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "small": (pa.uint8(), st.integers(0, 255)),
    "float": (pa.float64(), st.floats()),
    "single": (pa.float32(), st.floats(width=32)),
    "flag": (pa.bool_(), st.booleans()),
    "bytes": (pa.binary(), st.binary(max_size=8)),
    "at": (pa.timestamp("us", "UTC"), moments),
    "local": (pa.timestamp("ms"), moments.map(lambda moment: moment.replace(microsecond=0, tzinfo=None))),
    "day": (pa.date32(), st.dates(date(1900, 1, 1), date(2200, 1, 1))),
    "clock": (pa.time64("us"), st.times()),
    "lasted": (pa.duration("us"), st.integers(-(10**9), 10**9).map(lambda us: timedelta(microseconds=us))),
    "price": (pa.decimal128(12, 3), st.decimals(-(10**6), 10**6, places=3)),
    "nothing": (pa.null(), st.none()),
    "list": (pa.list_(pa.string()), st.lists(st.none() | texts, max_size=3)),
    "deep": (
        pa.struct([("a", pa.list_(pa.struct([("x", pa.int64())]))), ('q"', pa.binary())]),
        st.fixed_dictionaries({"a": st.none() | st.lists(st.none() | deep), 'q"': st.none() | st.binary(max_size=3)}),
    ),
    "map": (
        pa.map_(pa.string(), pa.list_(pa.string())),
        st.dictionaries(texts, st.lists(texts, max_size=2), max_size=3).map(lambda found: list(found.items())),
    ),
}


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    """Rows with all columns, a part of an array that has others before and after it."""
    count = draw(st.integers(1, 4))
    arrays = []
    for kind, values in COLUMNS.values():
        column = draw(st.lists(st.none() | values, min_size=count + 2, max_size=count + 2))
        arrays.append(pa.array(column, kind))
    return pa.RecordBatch.from_arrays(arrays, names=list(COLUMNS)).slice(1, count)


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, datetime):
        return f"{value.replace(tzinfo=None).isoformat(timespec='microseconds')}{'Z' if value.tzinfo else ''}"
    if isinstance(value, time):
        return value.isoformat(timespec="microseconds")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value // timedelta(microseconds=1)
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return {key: plain(item) for key, item in value}
    return [plain(each) for each in value] if isinstance(value, list) else value


def expected(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    rows = batch.to_pylist()
    for row in rows:
        if row["map"] == []:
            row["map"] = {}
    return [{name: plain(value) for name, value in row.items()} for row in rows]


@given(batches())
def test_json_lines_are_what_the_rows_are(batch: pa.RecordBatch) -> None:
    lines = bytes(json_lines(batch)).split(b"\n")
    assert lines.pop() == b""
    found = [json.loads(line, parse_float=Decimal, parse_int=int) for line in lines]
    for row, wanted in zip(found, expected(batch), strict=True):
        assert list(row) == list(COLUMNS)
        if row["single"] is not None:
            assert pa.scalar(float(row.pop("single")), pa.float32()).as_py() == wanted.pop("single")
        for name in ("float", "price"):
            if row[name] is not None:
                assert type(wanted[name])(row.pop(name)) == wanted.pop(name)
        assert row == wanted


@given(batches())
def test_csv_is_what_the_rows_are(batch: pa.RecordBatch) -> None:
    text = (csv_header(batch.schema.names) + bytes(csv_lines(batch))).decode()
    header, *rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    assert header == list(COLUMNS)
    for row, wanted, stored in zip(rows, expected(batch), batch.to_pylist(), strict=True):
        fields = dict(zip(header, row, strict=True))
        for name, value in wanted.items():
            field = fields[name]
            if stored[name] is None:
                assert field == NULL, name
            elif name in ("float", "single"):
                number = float(field)
                same = number == stored[name] or (math.isnan(number) and math.isnan(stored[name]))
                assert same or pa.scalar(number, pa.float32()).as_py() == stored[name]
            elif name in ("list", "deep", "map"):
                assert json.loads(field) == value
            elif name == "flag":
                assert field == ("true" if value else "false")
            elif name == "price":
                assert Decimal(field) == value
            else:
                assert field == str(value), name


@given(st.lists(st.none() | texts, min_size=1))
def test_null_empty_and_what_looks_like_a_null_differ_in_csv(values: list[str | None]) -> None:
    lines = bytes(csv_lines(pa.RecordBatch.from_arrays([pa.array(values, pa.string())], ["text"]))).decode()
    read = io.StringIO(lines, newline="")
    for value in values:
        if value is None:
            assert read.readline() == f"{NULL}\n"
        elif value in ("", NULL):
            assert read.readline() == f'"{value}"\n'
        else:
            quoted = '"' in value or "," in value or "\n" in value or "\r" in value
            text = '"' + value.replace('"', '""') + '"' if quoted else value
            assert read.read(len(text) + 1) == f"{text}\n"


def test_a_type_without_a_text_is_an_error() -> None:
    batch = pa.RecordBatch.from_arrays([pa.nulls(1, pa.month_day_nano_interval())], ["a"])
    for lines in (json_lines, csv_lines):
        with pytest.raises(pa.ArrowNotImplementedError):
            lines(batch)
