"""Avro schemas (specification 1.12): checks, columns of their types, the cost of reading, and container files.

Logical types are taken off a schema before the library reads with it, and put on again as Arrow types: integers stay
integers on the way, so that no value is out of a Python type's range. The library does not read container files,
because it decompresses blocks of any size.
"""

from __future__ import annotations

import decimal
import struct
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from jetcapture_py.archive.varint import varint
from jetcapture_py.config.column_types import MAX_DEPTH
from jetcapture_py.transform.decode.bounds import RECORD
from jetcapture_py.transform.decode.common import Build, show
from jetcapture_py.transform.decode.compression import inflate_raw, inflate_zstd, snappy_block
from jetcapture_py.transform.decode.json_declared import json_text
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
_MAX_DIGITS = 38


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
    if precision > _MAX_DIGITS:
        raise ValueError(f"a decimal of {precision} digits; the archive holds up to {_MAX_DIGITS}")
    context, limit = decimal.Context(prec=_MAX_DIGITS), 10**precision

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


# ------------------------------------------------------------------ costs


MAX_PARTS = 20_000
"""Most JSON values, such as names and types, in a schema that comes with messages: about 4,000 fields."""
_MAX_LEVELS = 300
"""Of records, arrays and maps: the library's compiled reader has one call on the stack for each."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of reading values of a schema."""

    recursive: bool
    """Whether values can nest without bound."""
    empty: int
    """Most values without bytes that one value holds, or a part of it that has bytes."""
    nested: int
    """Records, arrays and maps in the schema."""
    named: int
    """Its named types."""
    leaves: int
    """Values in one datum, without those in arrays and maps."""
    dense: float
    """Most values in arrays and maps for each byte."""
    heaviest: int
    """Most values that an item of an array or map takes."""


def check_size(schema: Any) -> None:
    """Raise ValueError for a schema, as from JSON, that is too large to come with messages."""
    count, left = 0, [schema]
    while left:
        of = left.pop()
        count += 1
        if isinstance(of, dict):
            left.extend(of.values())
        elif isinstance(of, list):
            left.extend(of)
        if count > MAX_PARTS:
            raise ValueError(f"the schema has more than {MAX_PARTS} names, types and other values")


def survey(schema: Any, named: Named, extra: int = 0) -> Costs:
    """Check a parsed schema; return what its values can cost, with `extra` for each item of an array or map.

    Raises ValueError for a schema of which a value without bytes can be endless: hostile data would take all memory.
    """
    _refuse_endless(schema, named)
    visit = _Visit(named, extra)
    cost = visit.type(schema)
    if cost.depth > _MAX_LEVELS:
        raise ValueError(f"the schema nests deeper than {_MAX_LEVELS} levels")
    return Costs(bool(visit.recursive), cost.empty, visit.nested, len(named), cost.leaves, visit.dense, visit.heaviest)


class _TypeCost(NamedTuple):
    """The cost of values of a type."""

    least: int
    """Bytes of the shortest one; numbers count as one."""
    depth: int
    """Levels of records, arrays and maps."""
    empty: int
    """Most values without bytes in one."""
    leaves: int
    """Values in one, without those in arrays and maps."""
    nested: bool
    """Whether it takes more than its leaves."""


class _Visit:
    """Visits every type of a schema once: named types can refer to each other in exponentially many ways."""

    def __init__(self, named: Named, extra: int) -> None:
        self._named, self._extra = named, extra
        self._known: dict[str, _TypeCost | None] = {}
        self.recursive = set[str]()
        self.nested = self.heaviest = 0
        self.dense = 1.0

    def type(self, of: Any) -> _TypeCost:
        """The cost of a type's values."""
        if isinstance(of, list):
            branches = [self.type(branch) for branch in of]
            return _TypeCost(
                least=1 + min((branch.least for branch in branches), default=0),
                depth=max((branch.depth for branch in branches), default=0),
                empty=max((branch.empty - (not branch.least) for branch in branches), default=0),  # it has a byte
                leaves=max((branch.leaves for branch in branches), default=1),
                nested=any(branch.nested for branch in branches),
            )
        if isinstance(of, str) and of not in PRIMITIVES and of != "null":
            if of not in self._known:
                return self.type(self._named[of])
            if (known := self._known[of]) is None:  # it is being visited
                self.recursive.add(of)
                return _TypeCost(least=1, depth=0, empty=0, leaves=1, nested=True)
            return known
        kind = of["type"] if isinstance(of, dict) else of
        if isinstance(kind, list | dict):
            return self.type(kind)
        if kind in ("record", "error"):
            return self._record(of)
        if kind in ("array", "map"):
            return self._items(of)
        bare = kind == "null" or (kind == "fixed" and not of["size"])
        return _TypeCost(least=1 - bare, depth=0, empty=int(bare), leaves=1, nested=False)

    def _items(self, of: dict[str, Any]) -> _TypeCost:
        self.nested += 1
        item = self.type(of["items" if of["type"] == "array" else "values"])
        if not item.least and of["type"] == "array":
            raise ValueError("an array of items without bytes")
        self._weigh(item, item.least + (of["type"] == "map"))  # a map's value has the bytes of its name
        return _TypeCost(least=1, depth=item.depth + 1, empty=item.empty - (not item.least), leaves=1, nested=True)

    def _record(self, of: dict[str, Any]) -> _TypeCost:
        name = of["name"]
        self._known[name] = None
        self.nested += 1
        fields = [self.type(field["type"]) for field in of["fields"]]
        least = sum(field.least for field in fields)
        cost = self._known[name] = _TypeCost(
            least=least,
            depth=1 + max((field.depth for field in fields), default=0),
            empty=sum(field.empty for field in fields) + (not least),
            leaves=sum(field.leaves for field in fields) or 1,
            nested=True,
        )
        if name in self.recursive:
            self._weigh(cost, least)
        return cost

    def _weigh(self, item: _TypeCost, least: int) -> None:
        weight = RECORD + 3 * item.leaves + self._extra if item.nested else 1  # the library's records are dictionaries
        self.heaviest = max(self.heaviest, weight)
        self.dense = max(self.dense, weight / least)


def _refuse_endless(schema: Any, named: Named) -> None:
    """Raise ValueError if a record contains itself with nothing in between that can end it."""
    done = set[str]()

    def visit(of: Any, path: tuple[str, ...]) -> None:
        if isinstance(of, str):
            if of in path:
                raise ValueError(f"the record {show(of)} always contains itself")
            if of in named and of not in done and named[of]["type"] in ("record", "error"):
                visit(named[of], path)
        elif isinstance(of, dict):
            if of["type"] in ("record", "error"):
                for field in of["fields"]:
                    visit(field["type"], (*path, of["name"]))
                done.add(of["name"])
            elif isinstance(of["type"], dict):
                visit(of["type"], path)

    for start in (schema, *(name for name in named if name not in done)):
        visit(start, ())


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

    def blocks(self, most: int) -> Iterator[tuple[int, bytes]]:
        """Yield the row count and the data of each block, at most `most` bytes in total. Raises ValueError."""
        while self._at < len(self._payload):
            count, size = self._long(), self._long()
            data = self._inflate(self._bytes(size), most)
            if self._bytes(_SYNC) != self._sync:
                raise ValueError("a block does not end with the file's marker")
            if count < 0:
                raise ValueError(f"a block announces {count} rows")
            most -= len(data)
            yield count, data

    def _bytes(self, size: int) -> bytes:
        found = self._payload[self._at : self._at + size] if size >= 0 else b""
        if len(found) != size:
            raise ValueError("the file is truncated")
        self._at += size
        return found

    def _long(self) -> int:
        """Read a zig-zag varint of up to 64 bits."""
        value, self._at = varint(self._payload, self._at)
        return value >> 1 ^ -(value & 1)


def _plain(data: bytes, most: int) -> bytes:
    if len(data) > most:
        raise ValueError("the blocks are larger than decode.max_inflated")
    return data


def _snappy(data: bytes, most: int) -> bytes:
    found = snappy_block(data[:-4], most)
    if zlib.crc32(found) != int.from_bytes(data[-4:], "big"):
        raise ValueError("the snappy data is damaged: its checksum differs")
    return found


_CODECS: Mapping[bytes, Callable[[bytes, int], bytes]] = {
    b"null": _plain,
    b"deflate": inflate_raw,
    b"snappy": _snappy,
    b"zstandard": inflate_zstd,
}
