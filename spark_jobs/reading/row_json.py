"""Encode rows and nested values as JSON, with the same result in every job and in the data source's writer.

The rules are those of `jetcapture_py.reading.convert`; besides, a Variant is its JSON, and an interval is its SQL
literal.

`json_of` and `row_of` return Spark columns. A data source's writer gets Arrow batches and cannot use Spark's
expressions: `encode_rows` does the same there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from decimal import localcontext
from math import isfinite, isnan
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, VariantVal
from pyspark.sql import functions as sf
from pyspark.sql import types as st

from jetcapture_py.reading.convert import encode_json, plain_values
from jetcapture_py.reading.output import check_names

_OPTIONS = {
    "ignoreNullFields": "false",
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
_NESTED = (st.StructType, st.ArrayType, st.MapType, st.VariantType)
_TEXT = (st.StringType, st.VarcharType, st.CharType)
_MAX_SHOWN = 300
_VARIANT_DIGITS = 60
"""More digits than a Variant's decimal has."""
_INTERVAL = (("DAY", 86_400_000_000), ("HOUR", 3_600_000_000), ("MINUTE", 60_000_000), ("SECOND", 1_000_000))


def is_nested(kind: st.DataType) -> bool:
    """Whether the text of a value of this type is its JSON."""
    return isinstance(kind, _NESTED)


def row_of(fields: Sequence[tuple[str, Column, st.DataType]]) -> Column:
    """Return a JSON object of these fields: name, value and the value's type.

    Raises JetcaptureError if two fields have the same name.
    """
    check_names((name for name, _, _ in fields), "columns")
    for name, _, kind in fields:
        _check_fields(name, kind)
    return sf.to_json(sf.struct(*(_with_text_keys(value, kind).alias(name) for name, value, kind in fields)), _OPTIONS)


def json_of(value: Column, kind: st.DataType) -> Column:
    """Return a value as JSON; requires `is_nested(kind)`. Null stays null."""
    _check_fields("", kind)
    return sf.to_json(_with_text_keys(value, kind), _OPTIONS)


def text_of(value: Column, kind: st.DataType) -> Column:
    """Return a value as text: a string unchanged, other values as in JSON, without quotes."""
    if isinstance(kind, _TEXT):
        return value
    if is_nested(kind):
        return json_of(value, kind)
    text = sf.to_json(sf.array(value), _OPTIONS)
    return sf.when(value.isNotNull(), sf.regexp_replace(text, r'^\["?|"?\]$', ""))


def _check_fields(name: str, kind: st.DataType) -> None:
    if isinstance(kind, st.StructType):
        check_names(kind.fieldNames(), f"fields of {name}" if name else "fields of a struct")
    for inner in inner_types(kind):
        _check_fields(name, inner)


def inner_types(kind: st.DataType) -> list[st.DataType]:
    """Return the types directly inside a struct, list or map."""
    if isinstance(kind, st.StructType):
        return [field.dataType for field in kind]
    if isinstance(kind, st.MapType):
        return [kind.keyType, kind.valueType]
    return [kind.elementType] if isinstance(kind, st.ArrayType) else []


def _with_text_keys(value: Column, kind: st.DataType) -> Column:
    """Convert the keys of maps to text: Spark would print their internal values, such as days or even addresses."""
    if not _has_other_keys(kind):
        return value
    if isinstance(kind, st.MapType):
        values = sf.transform_values(value, lambda _, each: _with_text_keys(each, kind.valueType))
        return sf.transform_keys(values, lambda key, _: text_of(key, kind.keyType))
    if isinstance(kind, st.StructType):
        fields = (_with_text_keys(value.getField(each.name), each.dataType).alias(each.name) for each in kind)
        return sf.when(value.isNotNull(), sf.struct(*fields))
    if isinstance(kind, st.ArrayType):
        return sf.transform(value, lambda each: _with_text_keys(each, kind.elementType))
    return value


def _has_other_keys(kind: st.DataType) -> bool:
    if isinstance(kind, st.MapType) and not isinstance(kind.keyType, _TEXT):
        return True
    return any(map(_has_other_keys, inner_types(kind)))


def encode_rows(
    columns: Sequence[pa.Array], schema: st.StructType, encode: Callable[[Any], bytes] = encode_json
) -> pa.BinaryArray:
    """Encode each row as a JSON object, or as another format's with the same values.

    `columns` are Spark's Arrow columns of `schema`, all of the same length.
    """
    names = schema.fieldNames()
    java = encode is encode_json
    values = [_values(column, field.dataType, java=java) for column, field in zip(columns, schema, strict=True)]
    return pa.array([encode(dict(zip(names, row, strict=True))) for row in zip(*values, strict=True)], pa.binary())


def shorten(row: str | bytes) -> str:
    """Shorten a row's JSON for an error message."""
    text = row if isinstance(row, str) else row.decode()
    return f"{text[:_MAX_SHOWN]}{'…' if len(text) > _MAX_SHOWN else ''}"


def _values(array: pa.Array, kind: st.DataType, *, java: bool) -> list[Any]:
    """Convert to Python values that `encode_json` encodes, also Spark's own types."""
    if isinstance(kind, st.VariantType):
        parts = (array.field(name).to_pylist() for name in ("value", "metadata"))
        return [None if value is None else _variant(value, metadata) for value, metadata in zip(*parts, strict=True)]
    if isinstance(kind, st.DayTimeIntervalType):
        micros = array.cast(pa.int64()).to_pylist()
        return [None if value is None else _interval(value, kind) for value in micros]
    kinds = inner_types(kind)
    return plain_values(array, java=java, inner=lambda child, number: _values(child, kinds[number], java=java))


def _variant(value: bytes, metadata: bytes) -> Any:
    """Decode a Variant. PySpark's `toJson` truncates long decimals and prints NaN, which is invalid JSON."""
    with localcontext(prec=_VARIANT_DIGITS):
        return _printable(VariantVal(value, metadata).toPython())


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _printable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_printable(each) for each in value]
    if isinstance(value, float):
        return value if isfinite(value) else "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, datetime):
        text = value.replace(tzinfo=None).isoformat(" ")
        return f"{text.rstrip('0') if value.microsecond else text}{'+00:00' if value.tzinfo else ''}"
    return value


def _interval(micros: int, kind: st.DayTimeIntervalType) -> str:
    """Format an interval as Spark does: INTERVAL '1 02:03:04.5' DAY TO SECOND."""
    text, rest = "", abs(micros)
    for field in range(kind.startField, kind.endField + 1):
        name, size = _INTERVAL[field]
        amount, rest = divmod(rest, size)
        separator = "" if field == kind.startField else " " if field == 1 else ":"
        text += f"{separator}{amount:0{1 if name == 'DAY' else 2}}"
    if kind.endField == len(_INTERVAL) - 1 and rest:
        text += f".{rest:06}".rstrip("0")
    first, last = _INTERVAL[kind.startField][0], _INTERVAL[kind.endField][0]
    return f"INTERVAL '{'-' if micros < 0 else ''}{text}' {first if first == last else f'{first} TO {last}'}"
