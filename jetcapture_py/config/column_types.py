"""Column types as users write them: `int64`, `decimal(18, 2)`, `list<struct<sku: string, price: double>>`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

import pyarrow as pa

MAX_DEPTH = 32
"""Maximum nesting of types, also for inferred columns."""

TIMESTAMP = pa.timestamp("us", "UTC")
JSON = pa.json_(pa.string())
"""Stands for `json` in a declared type, so that a decoder can distinguish it from a string; see `stored`."""

_SCALARS: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": TIMESTAMP,
    "json": JSON,
}
_ALIASES = {
    "boolean": "bool",
    "int": "int64",
    "long": "int64",
    "bigint": "int64",
    "float": "float64",
    "double": "float64",
    "str": "string",
    "utf8": "string",
    "bytes": "binary",
    "date32": "date",
}
_NAMES = [*_SCALARS, "decimal(p, s)", "list<T>", "struct<a: T>", "map<string, T>"]
_TIMESTAMP_TEXT = re.compile(r"timestamp\s*\[\s*us\s*,\s*(tz\s*=\s*)?utc\s*\]", re.IGNORECASE)
_DECIMAL_TEXT = re.compile(r"decimal(128)?\s*\(\s*([0-9]{1,9})\s*(,\s*([0-9]{1,9})\s*)?\)", re.IGNORECASE)
_NESTED_TEXT = re.compile(r"(list|array|struct|map)\s*<(.*)>", re.IGNORECASE | re.DOTALL)


def parse_type(text: str) -> pa.DataType:
    """Return the Arrow type declared by `text`; `json` is a string. Raises ValueError with one line."""
    return stored(parse_declared(text))


def parse_declared(text: str) -> pa.DataType:
    """Like `parse_type`, but with `JSON` for `json`."""
    return _parse(text.strip(), 1)


def stored(declared: pa.DataType) -> pa.DataType:
    """Return the stored type of a declared one: strings in place of `JSON`."""
    return rebuilt(declared, lambda of: pa.string() if of == JSON else of)


def rebuilt(of: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Apply `change` to the types inside a list, map or struct, or to any other type itself."""
    if pa.types.is_list(of):
        return pa.list_(rebuilt(of.value_type, change))
    if pa.types.is_map(of):
        return pa.map_(rebuilt(of.key_type, change), rebuilt(of.item_type, change))
    if pa.types.is_struct(of):
        return pa.struct([pa.field(field.name, rebuilt(field.type, change)) for field in of])
    return change(of)


def _parse(text: str, depth: int) -> pa.DataType:
    name = text.lower()
    if (scalar := _SCALARS.get(_ALIASES.get(name, name))) is not None:
        return scalar
    if depth > MAX_DEPTH:
        raise ValueError(f"types nest at most {MAX_DEPTH} deep")
    if _TIMESTAMP_TEXT.fullmatch(text):
        return TIMESTAMP
    if match := _DECIMAL_TEXT.fullmatch(text):
        precision, scale = int(match[2]), int(match[4] or 0)
        if not 1 <= precision <= 38 or scale > precision:
            raise ValueError(f"{_show(text)}: decimal(precision, scale) allows 1 to 38 digits and no larger scale")
        return pa.decimal128(precision, scale)
    if match := _NESTED_TEXT.fullmatch(text):
        parts = _split(match[2], text)
        match match[1].lower():
            case "struct":
                return _struct(parts, text, depth)
            case "map":
                if len(parts) != 2 or _ALIASES.get(parts[0].lower(), parts[0].lower()) != "string":
                    raise ValueError(f"{_show(text)}: a map goes from string to one type, as in map<string, int64>")
                return pa.map_(pa.string(), _parse(parts[1], depth + 1))
            case _:
                if len(parts) != 1:
                    raise ValueError(f"{_show(text)}: a list has one item type, as in list<string>")
                return pa.list_(_parse(parts[0], depth + 1))
    raise _unknown(text)


def _struct(parts: list[str], text: str, depth: int) -> pa.DataType:
    fields: list[pa.Field] = []
    taken: set[str] = set()
    for part in parts:
        name, colon, inner = part.partition(":")
        name = name.strip()
        if not colon or not name:
            raise ValueError(f"{_show(text)}: a struct lists its fields, as in struct<id: int64, name: string>")
        if name.lower() in taken:
            raise ValueError(f"{_show(text)}: duplicate field {_show(name)} (case-insensitive)")
        taken.add(name.lower())
        fields.append(pa.field(name, _parse(inner.strip(), depth + 1)))
    return pa.struct(fields)


def _split(inner: str, text: str) -> list[str]:
    """Split `inner` at commas outside of brackets."""
    parts = [""]
    open_brackets = 0
    for char in inner:
        open_brackets += (char in "<([") - (char in ">)]")
        if open_brackets < 0:
            raise ValueError(f"{_show(text)}: unbalanced brackets")
        if char == "," and not open_brackets:
            parts.append("")
        else:
            parts[-1] += char
    if open_brackets:
        raise ValueError(f"{_show(text)}: unbalanced brackets")
    return [part.strip() for part in parts]


def _unknown(text: str) -> ValueError:
    head = re.split(r"[<(\[]", text.lower(), maxsplit=1)[0].strip()
    names = [*_SCALARS, *_ALIASES, "decimal", "list", "struct", "map"]
    if head in ("decimal", "list", "struct", "map"):
        example = next(name for name in _NAMES if name.startswith(head))
        return ValueError(f"{_show(text)} is not a complete type: write {example}")
    if head == "timestamp":
        return ValueError(f"{_show(text)}: timestamps are stored in microseconds, UTC: write timestamp")
    close = difflib.get_close_matches(head, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(_NAMES)}"
    return ValueError(f"unknown type {_show(text)}: {hint}")


def _show(text: str) -> str:
    return ascii(text if len(text) <= 80 else f"{text[:77]}...")
