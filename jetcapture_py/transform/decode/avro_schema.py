"""Avro schemas (specification 1.12): checks, columns of their types, and container files.

Logical types are removed from a schema before the library reads with it, and restored as Arrow types. Integers stay
integers in between, so that no value exceeds a Python type's range. The library is not used for container files,
because it decompresses blocks of any size.
"""

from __future__ import annotations

import decimal
import struct
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from jetcapture_py.archive.varint import varint
from jetcapture_py.config.column_types import MAX_DEPTH
from jetcapture_py.transform.decode.common import MisfitError, Read, json_texts, show
from jetcapture_py.transform.decode.compression import inflate_raw, inflate_zstd, snappy_block
from jetcapture_py.transform.decode.json_declared import YEAR_1, YEAR_10000
from jetcapture_py.transform.decode.shapes import (
    Shape,
    list_shape,
    map_shape,
    scalar,
    struct_shape,
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
_LOGICAL = ("logicalType", "precision", "scale")
_NAMED = "__named_schemas"
"""Key of the named types in a parsed schema."""
_DAY = 86_400_000_000
_MAX_DIGITS = 38


def changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Apply `change` to every type and field of a schema, inner ones first."""
    if isinstance(schema, list):
        return [changed(part, change) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: changed(schema[name], change) for name in ("type", "items", "values", "fields") if name in schema}
    if named := schema.get(_NAMED):
        inner[_NAMED] = {name: changed(type_, change) for name, type_ in named.items()}
    return change(schema | inner)


def without_logical(type_: dict[str, Any]) -> dict[str, Any]:
    """Return a type without its logical type."""
    return {name: value for name, value in type_.items() if name not in _LOGICAL}


def with_strict_enum(type_: dict[str, Any]) -> dict[str, Any]:
    """Return an enum with its symbols by number: in a list, the library reads negative numbers as the last symbols."""
    symbols = type_.get("symbols")
    return type_ | {"symbols": dict(enumerate(symbols))} if isinstance(symbols, list) else type_


def shape_of(schema: Any, named: Named) -> Shape:
    """Return the shape of a parsed schema with logical types. Raises ValueError if it cannot be stored."""
    return _Shapes(named).of(schema)


_JSON = Shape(type=pa.string(), build=json_texts)


def _item(name: str) -> Read:
    return lambda values: [None if value is None else value[name] for value in values]


class _Shapes:
    def __init__(self, named: Named) -> None:
        self._named = named

    def of(self, schema: Any) -> Shape:
        """Return the shape of a type."""
        if isinstance(schema, list):
            return self._union(schema)
        if isinstance(schema, str):
            if schema == "null":
                return _JSON
            if schema in PRIMITIVES:
                return scalar(PRIMITIVES[schema])
            return self.of(self._named[schema])
        kind = schema["type"]
        if isinstance(kind, list | dict):
            return self.of(kind)
        if (shape := _logical(schema)) is not None:
            return shape
        if kind in PRIMITIVES:
            return scalar(PRIMITIVES[kind])
        if kind == "enum":
            return scalar(pa.string())
        if kind == "null":
            return _JSON
        if kind == "fixed":
            return scalar(pa.binary())
        return self._nested(schema)

    def _nested(self, schema: dict[str, Any]) -> Shape:
        if schema["type"] == "array":
            return list_shape(self.of(schema["items"]))
        if schema["type"] == "map":
            return map_shape(scalar(pa.string()), self.of(schema["values"]))
        fields = {
            field["name"]: (_item(field["name"]), self.of(field["type"]))
            for field in schema["fields"]
            if field["type"] not in ("null", {"type": "null"})
        }
        return struct_shape(fields) if fields else _JSON

    def _union(self, branches: list[Any]) -> Shape:
        """Return the shape of the one branch besides null, or of the wider of two numbers; else JSON text."""
        kinds = [branch for branch in branches if branch not in ("null", {"type": "null"})]
        if len(kinds) == 1:
            return self.of(kinds[0])
        for pair in ({"int", "long"}, {"float", "double"}):
            if all(isinstance(kind, str) and kind in pair for kind in kinds):
                return scalar(PRIMITIVES["long" if "long" in pair else "double"])
        return _JSON


def _logical(schema: dict[str, Any]) -> Shape | None:
    """Return the shape of a logical type; None for types to ignore by the specification."""
    kind, logical = schema["type"], schema.get("logicalType")
    if logical == "decimal" and kind in ("bytes", "fixed"):
        return _decimal(schema)
    if logical == "uuid" and kind == "fixed" and schema["size"] == 16:
        return scalar(pa.string(), lambda value: str(uuid.UUID(bytes=value)))
    if logical == "duration" and kind == "fixed" and schema["size"] == 12:
        names = ("months", "days", "milliseconds")
        return scalar(
            pa.struct([(name, pa.int64()) for name in names]),
            lambda value: dict(zip(names, struct.unpack("<III", value), strict=True)),
        )
    return _SHAPES.get((kind, logical)) if isinstance(logical, str) else None


def _decimal(schema: dict[str, Any]) -> Shape | None:
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if not isinstance(precision, int) or not isinstance(scale, int) or not 0 <= scale <= precision or precision < 1:
        return None
    if precision > _MAX_DIGITS:
        raise ValueError(f"a decimal of {precision} digits; the archive holds up to {_MAX_DIGITS}")
    context, limit = decimal.Context(prec=_MAX_DIGITS), 10**precision

    def convert(value: bytes) -> decimal.Decimal:
        unscaled = int.from_bytes(value, "big", signed=True)
        if not -limit < unscaled < limit:
            raise ValueError(f"a decimal of more than {precision} digits")
        return decimal.Decimal(unscaled).scaleb(-scale, context)

    return scalar(pa.decimal128(precision, scale), convert)


def _numbers(of: pa.DataType, low: int, high: int, expected: str, multiply: int = 1, divide: int = 1) -> Shape:
    """Return the shape of numbers from `low` to below `high`, converted by `multiply` / `divide`, rounded down."""
    storage = pa.int32() if pa.types.is_date32(of) else pa.int64()

    def build(values: list[Any]) -> pa.Array:
        bad = [row for row, value in enumerate(values) if value is not None and not low <= value < high]
        if bad:
            raise MisfitError({row: f"expected {expected}, got {values[row]}" for row in bad})
        if multiply != divide:
            values = [None if value is None else value * multiply // divide for value in values]
        return pa.array(values, storage).cast(of)

    return Shape(type=of, build=build)


def _timestamp(multiply: int, divide: int = 1, zone: str | None = "UTC") -> Shape:
    low, high = (-(-bound * divide // multiply) for bound in (YEAR_1, YEAR_10000))
    of, expected = pa.timestamp("us", zone), "a timestamp between the years 1 and 9999"
    return _numbers(of, low, high, expected, multiply, divide)


def _uuid_text(value: str) -> str:
    if str(uuid.UUID(value)) != value.lower():
        raise ValueError(f"expected a UUID, got {show(value)}")
    return value


_TIME = pa.time64("us")
_SHAPES: Mapping[tuple[str, str], Shape] = {
    ("int", "date"): _numbers(pa.date32(), -719_162, 2_932_897, "a date between the years 1 and 9999, as a day"),
    ("int", "time-millis"): _numbers(_TIME, 0, _DAY // 1000, "a time of day", 1000),
    ("long", "time-micros"): _numbers(_TIME, 0, _DAY, "a time of day"),
    ("long", "timestamp-millis"): _timestamp(1000),
    ("long", "timestamp-micros"): _timestamp(1),
    ("long", "timestamp-nanos"): _timestamp(1, 1000),
    ("long", "local-timestamp-millis"): _timestamp(1000, zone=None),
    ("long", "local-timestamp-micros"): _timestamp(1, zone=None),
    ("long", "local-timestamp-nanos"): _timestamp(1, 1000, zone=None),
    ("string", "uuid"): scalar(pa.string(), _uuid_text),
}


# ------------------------------------------------------------------ limits


_MAX_PARTS = 20_000
"""Maximum JSON values, such as names and types, in a schema from messages: about 4,000 fields."""
_MAX_EMPTY = 10
"""Maximum parts of a value without bytes, such as nulls outside of unions."""


def check_size(schema: Any) -> None:
    """Raise ValueError for a parsed JSON schema from messages that is too large."""
    count, left = 0, [schema]
    while left:
        of = left.pop()
        count += 1
        if isinstance(of, dict):
            left.extend(of.values())
        elif isinstance(of, list):
            left.extend(of)
        if count > _MAX_PARTS:
            raise ValueError(f"the schema has more than {_MAX_PARTS} names, types and other values")


def check_types(schema: Any, named: Named) -> None:
    """Raise ValueError for a parsed schema whose data can exhaust the stack or memory with a few bytes."""
    extent = _extent(schema, named, {})
    if extent.levels > MAX_DEPTH:  # the library's compiled reader makes one nested call per level
        raise ValueError(f"the schema nests deeper than {MAX_DEPTH} levels")
    if extent.empty > _MAX_EMPTY:
        raise ValueError(f"the schema has values of more than {_MAX_EMPTY} parts without bytes")


class _Extent(NamedTuple):
    levels: int
    """Nesting levels of records, arrays and maps."""
    empty: int
    """Values without bytes in one value, itself included."""
    bare: bool
    """Whether the value itself has no bytes."""


def _extent(of: Any, named: Named, known: dict[str, _Extent | None]) -> _Extent:
    """Return the extent of a type's values; `known` has the visited records, with None for those in progress."""
    if isinstance(of, list):
        branches = [_extent(branch, named, known) for branch in of]
        levels = max((branch.levels for branch in branches), default=0)
        return _Extent(levels, max((branch.empty - branch.bare for branch in branches), default=0), bare=False)
    of = named.get(of, of) if isinstance(of, str) else of
    kind = of["type"] if isinstance(of, dict) else of
    if isinstance(kind, list | dict):
        return _extent(kind, named, known)
    if kind in ("record", "error"):
        name = of["name"]
        if name not in known:
            known[name] = None
            fields = [_extent(field["type"], named, known) for field in of["fields"]]
            bare = all(field.bare for field in fields)
            levels = 1 + max((field.levels for field in fields), default=0)
            known[name] = _Extent(levels, sum(field.empty for field in fields) + bare, bare)
        if (extent := known[name]) is None:
            raise ValueError(f"the record {show(name)} contains itself: recursive schemas are not supported")
        return extent
    if kind in ("array", "map"):
        item = _extent(of["items" if kind == "array" else "values"], named, known)
        if item.bare and kind == "array":
            raise ValueError("an array whose items have no bytes")
        return _Extent(item.levels + 1, item.empty - item.bare, bare=False)
    bare = kind == "null" or (kind == "fixed" and not of["size"])
    return _Extent(0, int(bare), bare)


# ------------------------------------------------------------------ container files


_MAGIC = b"Obj\x01"
_SYNC = 16


class Header:
    """The header of the file `payload`. Raises ValueError without one."""

    def __init__(self, payload: bytes) -> None:
        self._payload, self._at = payload, len(_MAGIC)
        if not payload.startswith(_MAGIC):
            raise ValueError("not an object container file")
        meta: dict[bytes, bytes] = {}
        while count := self._long():
            if count < 0:
                count, _ = -count, self._long()
            if count > len(payload):
                raise ValueError("the header is truncated")
            for _ in range(count):
                name = self._bytes(self._long())
                meta[name] = self._bytes(self._long())
        self._sync = self._bytes(_SYNC)
        self.schema = meta.get(b"avro.schema", b"")
        """The writer's schema, as JSON."""
        codec = meta.get(b"avro.codec", b"null")
        if codec not in _CODECS:
            raise ValueError(f"the codec {show(codec)[1:]} is not supported: null, deflate, snappy or zstandard")
        self._inflate = _CODECS[codec]

    def blocks(self, limit: int) -> Iterator[tuple[int, bytes]]:
        """Yield the row count and the data of each block, at most `limit` bytes in total. Raises ValueError."""
        while self._at < len(self._payload):
            count, size = self._long(), self._long()
            data = self._inflate(self._bytes(size), limit)
            if self._bytes(_SYNC) != self._sync:
                raise ValueError("a block does not end with the file's marker")
            if count < 0:
                raise ValueError(f"a block announces {count} rows")
            limit -= len(data)
            yield count, data

    def _bytes(self, size: int) -> bytes:
        data = self._payload[self._at : self._at + size] if size >= 0 else b""
        if len(data) != size:
            raise ValueError("the file is truncated")
        self._at += size
        return data

    def _long(self) -> int:
        """Read a zig-zag varint of up to 64 bits."""
        value, self._at = varint(self._payload, self._at)
        return value >> 1 ^ -(value & 1)


def _plain(data: bytes, limit: int) -> bytes:
    if len(data) > limit:
        raise ValueError("the blocks are larger than decode.max_inflated")
    return data


def _snappy(data: bytes, limit: int) -> bytes:
    content = snappy_block(data[:-4], limit)
    if zlib.crc32(content) != int.from_bytes(data[-4:], "big"):
        raise ValueError("the snappy data is damaged: its checksum differs")
    return content


_CODECS: Mapping[bytes, Callable[[bytes, int], bytes]] = {
    b"null": _plain,
    b"deflate": inflate_raw,
    b"snappy": _snappy,
    b"zstandard": inflate_zstd,
}
