"""Convert a stored column to its type in the result, and encode values as text and JSON.

- Timestamps are RFC 3339 in UTC with six fractional digits; timestamps without a zone are written without one.
- Floats are written as JSON numbers, with the shortest digits that read back as the same number.
- NaN and infinities are the strings "NaN", "Infinity" and "-Infinity" in JSON, to distinguish them from null.
- In JSON, nulls are kept, in rows and in structs. Decimals are numbers with all digits, binary is base64.
- A map's key is the value's text without quotes: `{"2026-05-01T12:00:00.123456Z": 1}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from math import isfinite, isnan
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive.common_type import converted, is_list, plain_list, without_slack

Inner = Callable[[pa.Array, int], list[Any]]
"""Converts the numbered child of a struct, map or list like `plain_values`."""

_BEYOND_MICROS = r"(\.\d{6})\d+"
_LONG_YEAR = r"^(\d{5,}-)"

encode_json = msgspec.json.Encoder(decimal_format="number").encode
"""Encodes the result of `plain_values`."""


def convert(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Convert a stored column to its type in a table; missing fields are null.

    Fields of structs are matched by name in any case. Everything becomes text by `text_of`.
    """
    return converted(array, target, _cast)


def forced(array: pa.Array, target: pa.DataType) -> tuple[pa.Array, int]:
    """Convert the values of a column that are one of `target` or its text; return them, and how many others are null.

    Numbers convert to numbers, times to times, and everything else by its text, timestamps by RFC 3339.
    """
    types = pa.types
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_null(array.type) or array.type == target:
        return convert(array, target), 0
    if types.is_decimal(target):  # Arrow refuses integers for what the largest one needs
        alike = types.is_floating(array.type) or types.is_decimal(array.type)
    elif _is_number(target):
        alike = _is_number(array.type)
    else:
        alike = types.is_temporal(target) and types.is_temporal(array.type)
    values = array if alike else text_of(array)
    if types.is_timestamp(target) and not alike:
        values = pc.replace_substring_regex(values, _BEYOND_MICROS, r"\1")
    if not types.is_string(target):
        distinct = values.dictionary_encode()
        values = pa.concat_arrays(_cast_each(distinct.dictionary, target)).take(distinct.indices)
    return values, values.null_count - array.null_count


def _is_number(type_: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_))


def _cast_each(values: pa.Array, target: pa.DataType) -> list[pa.Array]:
    """Cast values, in halves until one that does not cast is alone, and becomes null."""
    try:
        return [_cast(values, target)]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        half = len(values) // 2
        if not half:
            return [pa.nulls(len(values), target)]
        return [*_cast_each(values[:half], target), *_cast_each(values[half:], target)]


def _cast(array: pa.Array, target: pa.DataType) -> pa.Array:
    types, stored = pa.types, array.type
    if types.is_string(target):
        return text_of(array)
    if types.is_decimal(stored) and types.is_floating(target):  # Arrow's own cast does not round correctly
        return array.cast(pa.string()).cast(target)
    return array.cast(target, safe=not types.is_floating(target))


def text_of(array: pa.Array) -> pa.StringArray:
    """Return values as text: strings unchanged, structs, lists and maps as JSON; null stays null.

    Binary values are read as UTF-8; invalid bytes become U+FFFD.
    """
    types, kind = pa.types, array.type
    if types.is_nested(kind) or types.is_floating(kind):
        rows = plain_values(array)
        texts = [row if row is None or isinstance(row, str) else encode_json(row).decode() for row in rows]
        return pa.array(texts, pa.string())
    if types.is_decimal(kind):
        return pa.array([None if value is None else f"{value:f}" for value in array.to_pylist()], pa.string())
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        rows = array.to_pylist()
        return pa.array([None if row is None else row.decode("utf-8", "replace") for row in rows], pa.string())
    return _scalars(array).cast(pa.string())


def rfc3339(timestamps: pa.Array) -> pa.StringArray:
    """Format timestamps with a zone, or microseconds since the epoch, as RFC 3339 in UTC with microseconds."""
    return pc.binary_join_element_wise(_iso(timestamps), "Z", "")


def _iso(timestamps: pa.Array) -> pa.StringArray:
    micros = timestamps if pa.types.is_integer(timestamps.type) else _micros(timestamps)
    texts = pc.replace_substring(micros.cast(pa.timestamp("us")).cast(pa.string()), " ", "T", max_replacements=1)
    return pc.replace_substring_regex(texts, _LONG_YEAR, r"+\1")


def _micros(timestamps: pa.Array) -> pa.Array:
    return timestamps.cast(pa.timestamp("us", timestamps.type.tz)).cast(pa.int64())


def plain_values(array: pa.Array, inner: Inner | None = None) -> list[Any]:
    """Convert to Python values that JSON and MessagePack can encode. `inner` converts children."""
    types = pa.types
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if inner is None:

        def inner(child: pa.Array, _number: int) -> list[Any]:
            return plain_values(child)

    if types.is_struct(kind):
        names = kind.names
        columns = [inner(array.field(number), number) for number in range(len(names))]
        rows = zip(*columns, strict=True) if names else iter([()] * len(array))
        return _unless_null(array, (dict(zip(names, row, strict=True)) for row in rows))
    if types.is_map(kind):
        offsets, keys, values = without_slack(array, array.keys, array.items)
        entries = list(zip(map(_key_text, inner(keys, 0)), inner(values, 1), strict=True))
        return _unless_null(array, (dict(entries[start:stop]) for start, stop in pairwise(offsets.to_pylist())))
    if is_list(kind):
        array = plain_list(array)
        offsets, children = without_slack(array, array.values)
        items = inner(children, 0)
        return _unless_null(array, (items[start:stop] for start, stop in pairwise(offsets.to_pylist())))
    if types.is_floating(kind):
        if not types.is_float64(kind):  # the shortest text of a float, not that of its double
            array = array.cast(pa.string()).cast(pa.float64())
        return [value if value is None or isfinite(value) else _not_finite(value) for value in array.to_pylist()]
    scalars: list[Any] = _scalars(array).to_pylist()
    return scalars


def _not_finite(value: float) -> str:
    return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _scalars(array: pa.Array) -> pa.Array:
    """Convert scalars to JSON types, as far as Arrow can."""
    types, kind = pa.types, array.type
    if types.is_timestamp(kind):
        return rfc3339(array) if kind.tz else _iso(array)
    if types.is_date(kind):
        return pc.replace_substring_regex(array.cast(pa.date32()).cast(pa.string()), _LONG_YEAR, r"+\1")
    if types.is_time(kind):
        return pc.replace_substring_regex(array.cast(pa.time64("ns")).cast(pa.string()), r"\.?0+$", "")
    return array


def _key_text(key: Any) -> str:
    return key if isinstance(key, str) else encode_json(key).decode().strip('"')


def _unless_null(array: pa.Array, values: Iterable[Any]) -> list[Any]:
    if not array.null_count:
        return list(values)
    return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]
