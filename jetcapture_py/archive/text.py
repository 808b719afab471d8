"""Convert columns to JSON values and CSV fields, a column at a time, without a Python object per value.

| type | JSON | CSV |
|---|---|---|
| timestamp | RFC 3339 with microseconds, with `Z` unless it has no zone | the same |
| date, time | `2026-05-01`, `12:00:00.000000` | the same |
| float | a number; null for NaN and infinity | a number, `NaN`, `Inf`, `-Inf` |
| duration | a number of its units | the same |
| binary | base64 | the same |
| list, struct, map | arrays and objects | their JSON |
| null | null | `\\N` |
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

NULL = "\\N"
"""Null in CSV, never quoted. Many databases use it; some readers cannot distinguish empty fields from empty text."""

_ESCAPED = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_CONTROL = r"[\x00-\x1f]"
_DATE_END = 10
"""Length of a date in characters."""


def json_values(array: pa.Array) -> pa.StringArray:
    """Return the JSON text of each value, without nulls. Raises pa.ArrowNotImplementedError for a type without one."""
    types, kind = pa.types, array.type
    if types.is_null(kind):
        return _constant("null", len(array))
    if types.is_struct(kind):
        return _or_null(_objects(array), array)
    if types.is_map(kind):
        return _or_null(_maps(array), array)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _or_null(_lists(array), array)
    text = _plain(array)
    if types.is_floating(kind):
        text = pc.if_else(pc.is_finite(array.cast(pa.float64())), text, pa.scalar(None, pa.string()))
    elif not (types.is_integer(kind) or types.is_boolean(kind) or types.is_decimal(kind) or types.is_duration(kind)):
        text = _quoted(text)
    return text.fill_null("null")


def csv_fields(array: pa.Array) -> pa.StringArray:
    """Return the CSV field of each value, without nulls. Raises pa.ArrowNotImplementedError for a type without one."""
    types, kind = pa.types, array.type
    if types.is_null(kind):
        return _constant(NULL, len(array))
    if types.is_nested(kind):
        text = pc.if_else(array.is_valid(), json_values(array), pa.scalar(None, pa.string()))
        return _csv_text(text).fill_null(NULL)
    text = _plain(array)
    if types.is_floating(kind):
        for arrow, ours in (("nan", "NaN"), ("-nan", "NaN"), ("inf", "Inf"), ("-inf", "-Inf")):
            text = pc.if_else(pc.equal(text, arrow), ours, text)
    elif not (types.is_primitive(kind) or types.is_decimal(kind)):
        text = _csv_text(text)
    return text.fill_null(NULL)


def csv_header(names: list[str]) -> bytes:
    """Return the line of column names."""
    return b",".join(name.encode() for name in _csv_text(pa.array(names, pa.string())).to_pylist()) + b"\n"


def json_lines(batch: pa.RecordBatch) -> memoryview:
    """Return each row as a JSON object on a line."""
    parts: list[Any] = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        parts += [f"{',' if parts else '{'}{_quoted(pa.array([name]))[0].as_py()}:", json_values(column)]
    return _bytes(pc.binary_join_element_wise(*parts, "}\n", ""))


def csv_lines(batch: pa.RecordBatch) -> memoryview:
    """Return each row as a line of CSV (RFC 4180, with LF)."""
    parts: list[Any] = []
    for column in batch.columns:
        parts += [*([","] if parts else []), csv_fields(column)]
    return _bytes(pc.binary_join_element_wise(*parts, "\n", ""))


def _bytes(lines: pa.StringArray) -> memoryview:
    _, offsets, data = lines.buffers()
    ends = np.frombuffer(offsets, np.int32)[lines.offset : lines.offset + len(lines) + 1]
    return memoryview(data)[ends[0] : ends[-1]]


def _constant(text: str, count: int) -> pa.StringArray:
    return pa.repeat(pa.scalar(text, pa.string()), count)


def _or_null(text: pa.StringArray, array: pa.Array) -> pa.StringArray:
    return pc.if_else(array.is_valid(), text, "null")


def _plain(array: pa.Array) -> pa.StringArray:
    """Return values as text; nulls stay."""
    types, kind = pa.types, array.type
    if types.is_dictionary(kind):
        return _plain(array.cast(kind.value_type))
    if types.is_timestamp(kind):
        naive = (
            array.cast(pa.timestamp("us", kind.tz), safe=kind.unit != "ns").cast(pa.int64()).cast(pa.timestamp("us"))
        )
        text = pc.binary_replace_slice(naive.cast(pa.string()), _DATE_END, _DATE_END + 1, "T")
        return text if kind.tz is None else pc.binary_join_element_wise(text, "Z", "")
    if types.is_duration(kind):
        return array.cast(pa.int64()).cast(pa.string())
    if types.is_float16(kind):
        return array.cast(pa.float32()).cast(pa.string())
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return pa.array(
            [None if value is None else b64encode(value).decode() for value in array.to_pylist()], pa.string()
        )
    return array.cast(pa.string())


def _quoted(text: pa.StringArray) -> pa.StringArray:
    """Return text as JSON strings; nulls stay."""
    if pc.any(pc.match_substring_regex(text, r'["\\\x00-\x1f]')).as_py():
        for character, escaped in _ESCAPED.items():
            text = pc.replace_substring(text, character, escaped)
        if pc.any(pc.match_substring_regex(text, _CONTROL)).as_py():
            for code in range(0x20):
                text = pc.replace_substring(text, chr(code), f"\\u{code:04x}")
    return pc.binary_join_element_wise('"', text, '"', "")


def _csv_text(text: pa.StringArray) -> pa.StringArray:
    """Quote text that needs it, including empty text and text that looks like null; nulls stay."""
    special = pc.match_substring_regex(text, r'[",\r\n]|\A\z|\A\\N\z')
    if not pc.any(special).as_py():
        return text
    quoted = pc.binary_join_element_wise('"', pc.replace_substring(text, '"', '""'), '"', "")
    return pc.if_else(special, quoted, text)


def _objects(array: pa.StructArray) -> pa.StringArray:
    parts: list[Any] = []
    for field, child in zip(array.type, array.flatten(), strict=True):
        parts += [f"{',' if parts else '{'}{_quoted(pa.array([field.name]))[0].as_py()}:", json_values(child)]
    return pc.binary_join_element_wise(*parts, "}", "") if parts else _constant("{}", len(array))


def _lists(array: pa.Array) -> pa.StringArray:
    """Return lists as JSON arrays; ignore values under null lists."""
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    return _joined(json_values(array.flatten()), lengths, "[", "]")


def _maps(array: pa.MapArray) -> pa.StringArray:
    offsets = array.offsets.to_numpy()
    first, count = int(offsets[0]), int(offsets[-1] - offsets[0])
    keys, items = array.keys.slice(first, count), array.items.slice(first, count)
    pairs = pc.binary_join_element_wise(_quoted(_plain(keys)), json_values(items), ":")
    return _joined(pairs, np.diff(offsets), "{", "}")


def _joined(texts: pa.StringArray, lengths: Any, begin: str, end: str) -> pa.StringArray:
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
    inner = pc.binary_join(pa.ListArray.from_arrays(offsets, texts), ",")
    return pc.binary_join_element_wise(begin, inner, end, "")
