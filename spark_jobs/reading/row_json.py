"""Encode rows and nested values as JSON. Nulls stay, timestamps are RFC 3339 in UTC, and binary is base64.

`json_of` and `row_of` return Spark columns, with Spark's text of numbers, Variants and intervals. Published rows are
Arrow batches, without Spark's expressions: there `encode_rows` does the same, with JSON numbers and ISO 8601 intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import localcontext
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, VariantVal
from pyspark.sql import functions as sf
from pyspark.sql import types as st

from jetcapture_py.errors import JetcaptureError
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
_VARIANT_DIGITS = 60
"""More digits than a Variant's decimal has."""


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
    return sf.to_json(sf.struct(*(value.alias(name) for name, value, kind in fields)), _OPTIONS)


def json_of(value: Column, kind: st.DataType) -> Column:
    """Return a value as JSON; requires `is_nested(kind)`. Null stays null."""
    _check_fields("", kind)
    return sf.to_json(value, _OPTIONS)


def _check_fields(name: str, kind: st.DataType) -> None:
    if isinstance(kind, st.StructType):
        check_names(kind.fieldNames(), f"fields of {name}" if name else "fields of a struct")
    if isinstance(kind, st.MapType) and not isinstance(kind.keyType, (*_TEXT, st.NumericType, st.BooleanType)):
        where = f"{name} has " if name else "there are "
        raise JetcaptureError(
            f"{where}maps with keys of type {kind.keyType.simpleString()}, which JSON lacks: cast them to text with "
            "transform_keys"
        )
    for inner in inner_types(kind):
        _check_fields(name, inner)


def inner_types(kind: st.DataType) -> list[st.DataType]:
    """Return the types directly inside a struct, list or map."""
    if isinstance(kind, st.StructType):
        return [field.dataType for field in kind]
    if isinstance(kind, st.MapType):
        return [kind.keyType, kind.valueType]
    return [kind.elementType] if isinstance(kind, st.ArrayType) else []


def encode_rows(
    columns: Sequence[pa.Array], schema: st.StructType, encode: Callable[[Any], bytes] = encode_json
) -> pa.BinaryArray:
    """Encode each row as a JSON object, or as an object of another format with the same values.

    `columns` are Spark's Arrow columns of `schema`, all of the same length.
    """
    names = schema.fieldNames()
    values = [_values(column, field.dataType) for column, field in zip(columns, schema, strict=True)]
    return pa.array([encode(dict(zip(names, row, strict=True))) for row in zip(*values, strict=True)], pa.binary())


def encode_values(column: pa.Array, kind: st.DataType) -> pa.BinaryArray:
    """Encode each value of a column as JSON; null stays null."""
    return pa.array([None if value is None else encode_json(value) for value in _values(column, kind)], pa.binary())


def _values(array: pa.Array, kind: st.DataType) -> list[Any]:
    """Convert to Python values that `encode_json` encodes, including a Variant."""
    if isinstance(kind, st.VariantType):
        parts = (array.field(name).to_pylist() for name in ("value", "metadata"))
        with localcontext(prec=_VARIANT_DIGITS):
            return [None if row[0] is None else VariantVal(*row).toPython() for row in zip(*parts, strict=True)]
    kinds = inner_types(kind)
    return plain_values(array, inner=lambda child, number: _values(child, kinds[number]))
