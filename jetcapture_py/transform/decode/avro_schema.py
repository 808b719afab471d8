"""Avro schemas (specification 1.12): their checks, and the columns of their types.

Logical types are taken off a schema before the library reads with it, and put on again as Arrow types: integers stay
integers on the way, so that no value is out of a Python type's range.
"""

from __future__ import annotations

import decimal
import struct
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from jetcapture_py.config.column_types import MAX_DEPTH
from jetcapture_py.transform.decode.common import Build, show
from jetcapture_py.transform.decode.json_values import json_text
from jetcapture_py.transform.decode.shapes import (
    Read,
    Shape,
    list_shape,
    map_shape,
    scalar,
    struct_shape,
    timestamp_shape,
)

Named = Mapping[str, dict[str, Any]]
"""Definitions of records, enums and fixed types by their full name."""

PRIMITIVES = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
NESTED = ("record", "error", "array", "map")
_LOGICAL = ("logicalType", "precision", "scale")
_DAY = 86_400_000_000
_MOST_DIGITS = 38


def without_logical(schema: Any) -> Any:
    """The schema without its logical types."""
    if isinstance(schema, list):
        return [without_logical(branch) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: value for name, value in schema.items() if name not in _LOGICAL}
    for name in ("type", "items", "values"):
        if name in plain:
            plain[name] = without_logical(plain[name])
    if isinstance(plain.get("fields"), list):
        plain["fields"] = [without_logical(field) if isinstance(field, dict) else field for field in plain["fields"]]
    return plain


def strict_enums(schema: Any) -> None:
    """Replace lists of symbols by mappings, because the library reads negative numbers as the last ones of a list."""
    if isinstance(schema, list):
        for branch in schema:
            strict_enums(branch)
    elif isinstance(schema, dict):
        if isinstance(symbols := schema.get("symbols"), list):
            schema["symbols"] = dict(enumerate(symbols))
        for inner in (schema.get(name) for name in ("type", "items", "values")):
            strict_enums(inner)
        for field in schema.get("fields", ()):
            strict_enums(field)


def counted(schema: Any, logical: str) -> Any:
    """Return a parsed schema in which records, arrays and maps have the logical type `logical`."""
    if isinstance(schema, list):
        return [counted(part, logical) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: counted(value, logical) for name, value in schema.items() if name not in ("symbols", "default")}
    return schema | inner | ({"logicalType": logical} if schema.get("type") in NESTED else {})


def shape_of(schema: Any, named: Named) -> Shape:
    """The shape of values of a parsed schema with logical types. Raises ValueError when it cannot be stored."""
    return _Shapes(named).of(schema, ())


def _texts(values: list[Any]) -> pa.Array:
    return pa.array([None if value is None else json_text(value) for value in values], pa.string())


_JSON = Shape(type=pa.string(), build=_texts, text=_texts)


def _item(name: str) -> Read:
    return lambda values: [None if value is None else value[name] for value in values]


class _Shapes:
    def __init__(self, named: Named) -> None:
        self._named = named

    def of(self, schema: Any, path: tuple[str, ...], depth: int = 0) -> Shape:
        """The shape of a type below the records of `path`."""
        if isinstance(schema, list):
            return self._union(schema, path, depth)
        if isinstance(schema, str):
            if schema == "null":
                return _JSON
            if schema in PRIMITIVES:
                return scalar(PRIMITIVES[schema], _texts)
            return _JSON if schema in path else self.of(self._named[schema], path, depth)
        kind = schema["type"]
        if isinstance(kind, list | dict):
            return self.of(kind, path, depth)
        if depth >= MAX_DEPTH and kind in ("record", "error", "array", "map"):
            return _JSON
        if (found := _logical(schema)) is not None:
            return found
        if kind in PRIMITIVES:
            return scalar(PRIMITIVES[kind], _texts)
        if kind == "enum":
            return scalar(pa.string(), _texts)
        if kind == "null":
            return _JSON
        if kind == "fixed":
            return scalar(pa.binary(), _texts)
        return self._nested(schema, path, depth + 1)

    def _nested(self, schema: dict[str, Any], path: tuple[str, ...], depth: int) -> Shape:
        if schema["type"] == "array":
            shape = list_shape(self.of(schema["items"], path, depth))
            return Shape(type=shape.type, build=shape.build, text=_texts)
        if schema["type"] == "map":
            shape = map_shape(scalar(pa.string(), _texts), self.of(schema["values"], path, depth))
            return Shape(type=shape.type, build=shape.build, text=_texts)
        fields = {
            field["name"]: (_item(field["name"]), self.of(field["type"], (*path, schema["name"]), depth))
            for field in schema["fields"]
            if field["type"] not in ("null", {"type": "null"})
        }
        return struct_shape(fields, _texts) if fields else _JSON

    def _union(self, branches: list[Any], path: tuple[str, ...], depth: int) -> Shape:
        """The shape of the one branch beside null, or of the wider one of two numbers; else JSON text."""
        kinds = [branch for branch in branches if branch not in ("null", {"type": "null"})]
        if len(kinds) == 1:
            return self.of(kinds[0], path, depth)
        for pair in ({"int", "long"}, {"float", "double"}):
            if all(isinstance(kind, str) and kind in pair for kind in kinds):
                return scalar(PRIMITIVES["long" if "long" in pair else "double"], _texts)
        return _JSON


def _logical(schema: dict[str, Any]) -> Shape | None:
    """The shape of a logical type; None for those that the specification says to ignore."""
    kind, logical = schema["type"], schema.get("logicalType")
    if logical == "decimal" and kind in ("bytes", "fixed"):
        return _decimal(schema)
    make = _SHAPES.get((kind, logical)) if isinstance(logical, str) else None
    if logical == "uuid" and kind == "fixed" and schema["size"] == 16:
        return scalar(pa.string(), _texts, lambda value: str(uuid.UUID(bytes=value)))
    if logical == "duration" and kind == "fixed" and schema["size"] == 12:
        names = ("months", "days", "milliseconds")
        return scalar(
            pa.struct([(name, pa.int64()) for name in names]),
            _texts,
            lambda value: dict(zip(names, struct.unpack("<III", value), strict=True)),
        )
    return make() if make is not None else None


def _decimal(schema: dict[str, Any]) -> Shape | None:
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if not isinstance(precision, int) or not isinstance(scale, int) or not 0 <= scale <= precision or precision < 1:
        return None
    if precision > _MOST_DIGITS:
        raise ValueError(f"a decimal of {precision} digits; the archive holds up to {_MOST_DIGITS}")
    context, limit = decimal.Context(prec=_MOST_DIGITS), 10**precision

    def convert(value: bytes) -> decimal.Decimal:
        unscaled = int.from_bytes(value, "big", signed=True)
        if not -limit < unscaled < limit:
            raise ValueError(f"a decimal of more than {precision} digits")
        return decimal.Decimal(unscaled).scaleb(-scale, context)

    return scalar(pa.decimal128(precision, scale), _texts, convert)


def _time(multiply: int) -> Shape:
    def convert(value: int) -> int:
        if not 0 <= value * multiply < _DAY:
            raise ValueError(f"expected a time of day, got {value}")
        return value * multiply

    build: Build = scalar(pa.int64(), _texts, convert).build
    return Shape(type=pa.time64("us"), build=lambda values: build(values).cast(pa.time64("us")), text=_texts)


def _date() -> Shape:
    def convert(value: int) -> int:
        if not -719_162 <= value < 2_932_897:
            raise ValueError(f"expected a date between the years 1 and 9999, got day {value}")
        return value

    build: Build = scalar(pa.int32(), _texts, convert).build
    return Shape(type=pa.date32(), build=lambda values: build(values).cast(pa.date32()), text=_texts)


def _uuid_text() -> Shape:
    def convert(value: str) -> str:
        found = str(uuid.UUID(value))
        if found != value.lower():
            raise ValueError(f"expected a UUID, got {show(value)}")
        return value

    return scalar(pa.string(), _texts, convert)


_SHAPES: Mapping[tuple[str, str], Callable[[], Shape]] = {
    ("int", "date"): _date,
    ("int", "time-millis"): lambda: _time(1000),
    ("long", "time-micros"): lambda: _time(1),
    ("long", "timestamp-millis"): lambda: timestamp_shape(_texts, 1000),
    ("long", "timestamp-micros"): lambda: timestamp_shape(_texts, 1),
    ("long", "timestamp-nanos"): lambda: timestamp_shape(_texts, 1, 1000),
    ("long", "local-timestamp-millis"): lambda: timestamp_shape(_texts, 1000, zone=None),
    ("long", "local-timestamp-micros"): lambda: timestamp_shape(_texts, 1, zone=None),
    ("long", "local-timestamp-nanos"): lambda: timestamp_shape(_texts, 1, 1000, zone=None),
    ("string", "uuid"): _uuid_text,
}
