"""JSON with declared columns: decode one object per message directly into the declared types.

Types are never coerced. A missing field is null; undeclared fields are skipped, but must be well-formed; the last of
duplicate fields wins. A message that does not match is a `Failure`. msgspec checks types and integer ranges while it
decodes. Checks it does not have (a decimal's scale, a timestamp's zone) are made here for a whole column at once; the
caller then finds the messages that failed.
"""

from __future__ import annotations

import decimal
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.nested import flatten, offsets_of, struct_array
from jetcapture_py.config.column_types import JSON, TIMESTAMP, parse_declared, stored
from jetcapture_py.config.units import DAY_PATTERN, RFC3339_PATTERN
from jetcapture_py.text import is_text
from jetcapture_py.transform.batch import Decoded, Failure, MessageBatch
from jetcapture_py.transform.decode import bounds
from jetcapture_py.transform.decode.common import (
    Build,
    MisfitError,
    Values,
    assemble,
    decode_each,
    owners_of,
    show,
    texts_of,
    unique_names,
)

if TYPE_CHECKING:
    from jetcapture_py.config.decoding import Column

Reader = Callable[[list[Any]], list[Any]]
UNITS = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": 1}
"""Units of epoch timestamps, with the microseconds in one (a nanosecond is divided instead)."""

MAX_FLOAT32 = 3.4028234663852886e38
_MAX_UINT64 = 2**64 - 1
_NUMBER = re.compile(rb'"?(-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"?')
_DATE = rf"\A{DAY_PATTERN}\z"
_MOMENT = rf"\A{RFC3339_PATTERN}\z"
_LONGER = r"(\.[0-9]{6})[0-9]+"
_LONGEST_UTC = len("2026-01-31T12:00:00.123456Z")
_YEARS = "a timestamp between the years 1 and 9999"
_YEAR_1, _YEAR_10000 = -62_135_596_800_000_000, 253_402_300_800_000_000


@dataclass(frozen=True, slots=True)
class Codec:
    """`accepts` is the msgspec type of a value or null; `build` makes the column of such values."""

    accepts: Any
    build: Build


Special = Callable[[pa.DataType], Codec | None]


def codec(declared: pa.DataType, unit: str | None = None, special: Special = lambda _: None) -> Codec:
    """Return the codec of a column of the type `declared` (from `column_types.parse_declared`).

    With `unit` (s, ms, us, ns; timestamps only) a timestamp is a number of these units since 1970, else RFC 3339 text.
    `special` returns the codec of a type that a format other than JSON reads differently, else None. Raises ValueError.
    """
    if unit is not None and (declared != TIMESTAMP or unit not in UNITS):
        raise ValueError(f"unit: {show(unit)}: only a timestamp has a unit: s, ms, us or ns")
    types = pa.types
    if unit is None and (found := special(declared)) is not None:
        return found
    if declared == JSON:
        return Codec(msgspec.Raw, _json_texts)
    if types.is_decimal(declared):
        return Codec(msgspec.Raw, _decimals(declared))
    if types.is_timestamp(declared):
        if unit is None:
            return Codec(str | None, timestamps)
        return Codec(int | float | None if unit in ("s", "ms") else int | None, _epochs(unit))
    if types.is_date(declared):
        return Codec(str | None, _dates)
    if types.is_list(declared):
        return _list(declared, special)
    if types.is_map(declared):
        return _map(declared, special)
    if types.is_struct(declared):
        return _struct(declared, special)
    if declared == pa.uint64():  # msgspec knows no bound beyond int64
        return Codec(Annotated[int, msgspec.Meta(ge=0)] | None, _uint64s)
    return Codec(_plain(declared) | None, lambda values: pa.array(values, declared))


def json_text(value: object) -> str:
    """Return `value` as compact JSON: bytes as base64, MessagePack extensions as an object. Raises ValueError."""
    try:
        return msgspec.json.encode(value, enc_hook=_extension).decode()
    except TypeError as error:
        raise ValueError(f"not possible in JSON: {error}") from None


def _extension(value: object) -> dict[str, Any]:
    if isinstance(value, msgspec.msgpack.Ext):
        return {"code": value.code, "data": value.data}
    raise TypeError(f"a value of type {type(value).__name__}")


def struct_type(fields: list[tuple[str, Any]]) -> type[msgspec.Struct]:
    """Make a msgspec type for objects with `fields` (name in JSON, msgspec type); its attributes are f0, f1, …"""
    try:
        return msgspec.defstruct(
            "Object",
            [(f"f{i}", accepts, msgspec.field(name=name, default=None)) for i, (name, accepts) in enumerate(fields)],
            gc=False,
        )
    except ValueError as error:
        raise ValueError(
            f"a JSON field name cannot contain quotes, backslashes or control characters: {error}"
        ) from None


def reader(name: str) -> Reader:
    """Return a function that reads the attribute `name` of each value in a list; None stays None.

    It is compiled for that name, because CPython then reads the slot directly, in half the time of `attrgetter`.
    """
    read: Reader = eval(f"lambda values: [None if value is None else value.{name} for value in values]")  # noqa: S307
    return read


def _plain(declared: pa.DataType) -> Any:
    types = pa.types
    if types.is_boolean(declared):
        return bool
    if types.is_string(declared):
        return str
    if types.is_binary(declared):
        return bytes
    if types.is_float32(declared):
        return Annotated[float, msgspec.Meta(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]
    if types.is_float64(declared):
        return float
    signed = types.is_signed_integer(declared)
    top = 2 ** (declared.bit_width - signed)
    return Annotated[int, msgspec.Meta(ge=-top if signed else 0, le=top - 1)]


def _uint64s(values: list[int | None]) -> pa.Array:
    bad = [row for row, value in enumerate(values) if value is not None and value > _MAX_UINT64]
    if bad:
        raise MisfitError(dict.fromkeys(bad, f"expected at most {_MAX_UINT64}"))
    return pa.array(values, pa.uint64())


def _texts(values: list[msgspec.Raw | None]) -> list[bytes | None]:
    """Return the JSON texts as sent; None for null, which msgspec.Raw does not distinguish."""
    texts = [None if value is None else bytes(value) for value in values]
    return [None if text == b"null" else text for text in texts]


def _json_texts(values: list[msgspec.Raw | None]) -> pa.Array:
    return pa.array(_texts(values), pa.string())


def _decimals(declared: pa.Decimal128Type) -> Build:
    exact = exact_decimal(declared)
    return lambda values: pa.array([None if text is None else exact(text) for text in _texts(values)], declared)


def exact_decimal(declared: pa.Decimal128Type) -> Callable[[bytes], decimal.Decimal]:
    """Return a parser of numbers, quoted or not, as decimals; it raises ValueError if digits do not fit."""
    fitting = fitting_decimal(declared)

    def exact(text: bytes) -> decimal.Decimal:
        match = _NUMBER.fullmatch(text)
        if match is None:
            raise ValueError(f"expected a number or a number in quotes, got {show(text)[1:]}")
        return fitting(match[1].decode())

    return exact


def fitting_decimal(declared: pa.Decimal128Type) -> Callable[[str], decimal.Decimal]:
    """Return a parser of numbers as decimals; it raises ValueError if digits do not fit."""
    context = decimal.Context(prec=declared.precision, traps=[decimal.Inexact, decimal.InvalidOperation])
    step = decimal.Decimal(1).scaleb(-declared.scale)

    def fitting(text: str) -> decimal.Decimal:
        try:
            return context.quantize(decimal.Decimal(text), step)
        except decimal.DecimalException:
            shape = f"decimal({declared.precision}, {declared.scale})"
            raise ValueError(f"{show(text)} does not fit {shape} without rounding") from None

    return fitting


def _dates(values: list[str | None]) -> pa.Array:
    texts = pa.array(values, pa.string())
    _require(pc.match_substring_regex(texts, _DATE), values, "a date as YYYY-MM-DD")
    days = texts.cast(pa.date32())
    _require(pc.greater_equal(days.cast(pa.int32()), _YEAR_1 // 86_400_000_000), values, "a date from year 1 on")
    return days


def timestamps(values: list[str | None]) -> pa.Array:
    """Build a column from RFC 3339 texts with zones; digits below a microsecond are dropped. Raises MisfitError."""
    texts = pa.array(values, pa.string())
    stamps = moments(texts)
    if stamps.null_count > texts.null_count:
        expected = "an RFC 3339 timestamp with a zone, such as 2026-01-31T12:00:00Z"
        _require(pc.or_(stamps.is_valid(), texts.is_null()), values, expected)
    return in_years(stamps, values)


def moments(texts: pa.StringArray) -> pa.TimestampArray:
    """Convert RFC 3339 texts with zones, null for others; digits below a microsecond are dropped."""
    texts = pc.ascii_upper(texts)
    texts = pc.if_else(pc.match_substring_regex(texts, _MOMENT), texts, pa.scalar(None, pa.string()))
    if (pc.max(pc.binary_length(texts)).as_py() or 0) > _LONGEST_UTC:
        texts = pc.replace_substring_regex(texts, _LONGER, r"\1")
    return texts.cast(TIMESTAMP)


def _epochs(unit: str) -> Build:
    scale = UNITS[unit]

    def build(values: list[Any]) -> pa.Array:
        try:
            if unit == "ns":
                numbers = [None if value is None else value // 1_000 for value in values]
            else:
                numbers = [None if value is None else round(value * scale) for value in values]
            return in_years(pa.array(numbers, pa.int64()).cast(TIMESTAMP), values)
        except OverflowError:
            raise ValueError(f"expected {_YEARS}") from None

    return build


def in_years(stamps: pa.Array, values: list[Any]) -> pa.Array:
    """Return `stamps` if they are in the range of Spark and Python (years 1 to 9999). Raises MisfitError otherwise."""
    numbers = stamps.cast(pa.int64())
    inside = pc.and_(pc.greater_equal(numbers, _YEAR_1), pc.less(numbers, _YEAR_10000))
    _require(inside, values, _YEARS)
    return stamps


def _all(conditions: pa.Array) -> bool:
    return pc.all(conditions).as_py() is not False


def _require(conditions: pa.Array, values: list[Any], expected: str) -> None:
    if not _all(conditions):
        bad = np.flatnonzero(~conditions.fill_null(fill_value=True).to_numpy(zero_copy_only=False)).tolist()
        raise MisfitError({row: f"expected {expected}, got {show(values[row])}" for row in bad})


def build_items(build: Build, values: list[Any], items: list[Any]) -> pa.Array:
    """Build the `items` of lists or maps; report errors by the position of the list or map in `values`."""
    try:
        return build(items)
    except MisfitError as error:
        owners = [row for row, value in enumerate(values) if value for _ in value]
        raise MisfitError({owners[at]: reason for at, reason in error.rows.items()}) from None


def _list(declared: pa.ListType, special: Special) -> Codec:
    item = codec(declared.value_type, special=special)
    of = stored(declared)

    def build(values: list[list[Any] | None]) -> pa.Array:
        return pa.ListArray.from_arrays(offsets_of(values), build_items(item.build, values, flatten(values)), type=of)

    return Codec(list[item.accepts] | None, build)  # type: ignore[name-defined]


def _map(declared: pa.MapType, special: Special) -> Codec:
    item = codec(declared.item_type, special=special)
    of = stored(declared)

    def build(values: list[dict[str, Any] | None]) -> pa.Array:
        keys = pa.array([key for value in values if value for key in value], pa.string())
        items = build_items(item.build, values, [found for value in values if value for found in value.values()])
        return pa.MapArray.from_arrays(offsets_of(values), keys, items, type=of)

    return Codec(dict[str, item.accepts] | None, build)  # type: ignore[name-defined]


def _struct(declared: pa.StructType, special: Special) -> Codec:
    codecs = [codec(field.type, special=special) for field in declared]
    readers = [reader(f"f{i}") for i in range(len(codecs))]
    of = stored(declared)
    accepts = struct_type([(field.name, inner.accepts) for field, inner in zip(declared, codecs, strict=True)])

    def build(values: list[Any]) -> pa.Array:
        children = [inner.build(read(values)) for inner, read in zip(codecs, readers, strict=True)]
        return struct_array(children, of, pa.array([value is None for value in values], pa.bool_()))

    return Codec(accepts | None, build)


# ------------------------------------------------------------------ objects


MakeCodec = Callable[[pa.DataType, str | None], Codec]
"""Returns the codec of a declared type and its unit; see `codec`."""


@dataclass(slots=True)
class _Object:
    """An object to decode: its fields by name, each the codec of a column or another object."""

    fields: dict[str, _Object | Codec] = field(default_factory=dict)

    def add(self, path: list[str], leaf: Codec) -> tuple[str, ...] | None:
        """Add a column's codec at `path`; return its attributes in the object, None if `path` has another shape."""
        name, *rest = path
        known = self.fields.get(name)
        if not rest:
            if known is not None:
                return None
            self.fields[name] = leaf
            return (self._attribute(name),)
        inner = known or _Object()
        if isinstance(inner, Codec):
            return None
        below = inner.add(rest, leaf)
        if below is None:
            return None
        self.fields[name] = inner
        return (self._attribute(name), *below)

    def _attribute(self, name: str) -> str:
        return f"f{list(self.fields).index(name)}"

    def accepts(self) -> type[msgspec.Struct]:
        """The msgspec type of the object."""
        return struct_type(
            [
                (name, inner.accepts if isinstance(inner, Codec) else inner.accepts() | None)
                for name, inner in self.fields.items()
            ]
        )


@dataclass(frozen=True, slots=True)
class _Output:
    """A column: the pass that decodes it, and the readers that follow its path into the object."""

    name: str
    type: pa.DataType
    codec: Codec
    turn: int
    readers: tuple[Reader, ...]


class ObjectDecoder:
    """Decodes declared columns of messages that are one object each. Raises ValueError for a wrong declaration.

    `make` returns the function that decodes a payload as a msgspec type, `make_codec` the codec of a declared type.
    """

    _containers = staticmethod(bounds.json_containers)
    _skeleton = staticmethod(bounds.json_skeleton)

    def __init__(
        self,
        columns: Mapping[str, Column],
        make: Callable[[Any], Callable[[bytes], Any]],
        make_codec: MakeCodec,
    ) -> None:
        passes: list[_Object] = []
        self._outputs = [_output(name, column, passes, make_codec) for name, column in columns.items()]
        self._decode = [make(each.accepts()) for each in passes]
        self._width = sum(bounds.width(output.type) for output in self._outputs)
        self._heaviest = max((bounds.heaviest(output.type) for output in self._outputs), default=0)
        unique_names({declared: output.name for declared, output in zip(columns, self._outputs, strict=True)})

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message of `batch`. Raises BatchTooWideError when that would take too much memory."""
        self._check_values(batch)
        payloads, failures = self._payloads(batch)
        passes = [decode_each(decode, payloads, failures) for decode in self._decode]
        messages = [i for i in range(len(batch)) if i not in failures] if failures else range(len(batch))
        if failures:
            passes = [[rows[i] for i in messages] for rows in passes]
        columns = [
            Values(name=out.name, type=out.type, values=_pick(passes[out.turn], out.readers), build=out.codec.build)
            for out in self._outputs
        ]
        return assemble(columns, messages, failures, owners_of(batch))

    def _check_values(self, batch: MessageBatch) -> None:
        """Raise BatchTooWideError if the payloads may have too many values."""
        size = batch.column(layout.PAYLOAD).nbytes
        limit = bounds.max_values(size) - self._width * len(batch)
        if self._heaviest * size > limit:
            bounds.check_bytes(batch, limit, self._values, self._values_of)

    def _values(self, data: Any) -> int:
        """Return how many values in lists and maps an array of bytes has at most."""
        objects, lists = self._containers(data)
        return self._heaviest * objects + min(self._heaviest, bounds.RECORD + 1) * lists

    def _values_of(self, payload: bytes) -> Iterable[int]:
        yield self._values(np.frombuffer(self._skeleton(payload), np.uint8))

    def _payloads(self, batch: MessageBatch) -> tuple[list[bytes], dict[int, Failure]]:
        """Return all payloads, and failures for those that cannot be decoded at all."""
        raise NotImplementedError


class JsonDecoder(ObjectDecoder):
    """Decodes declared columns of JSON objects. Raises ValueError for a wrong declaration."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        super().__init__(columns, lambda accepts: msgspec.json.Decoder(accepts).decode, codec)

    def _payloads(self, batch: MessageBatch) -> tuple[list[bytes], dict[int, Failure]]:
        return texts_of(batch)


def declaration(name: str, column: Column) -> tuple[pa.DataType, list[str]]:
    """Return the declared type of a column, and the names on the path to its value. Raises ValueError."""
    if not is_text(name):
        raise ValueError("the name is not valid text: it contains a surrogate")
    declared = parse_declared(column.type)
    path = [name] if column.path is None else column.path.split(".")
    if "" in path and column.path is not None:
        raise ValueError(f"path: {show(column.path)}: names separated by one dot, such as customer.address.city")
    return declared, path


def _output(name: str, column: Column, passes: list[_Object], make_codec: MakeCodec) -> _Output:
    """Add the column `name` to `passes`.

    Columns that need one field in two shapes (`customer` as json, and `customer.id`) need a second pass over the
    payloads.
    """
    try:
        declared, path = declaration(name, column)
        leaf = make_codec(declared, column.unit)
        struct_type([(part, None) for part in dict.fromkeys(path)])
    except ValueError as error:
        raise ValueError(f"column {show(name)}: {error}") from None
    turn = 0
    while True:
        if turn == len(passes):
            passes.append(_Object())
        if (attributes := passes[turn].add(path, leaf)) is not None:
            return _Output(layout.field_name(name), stored(declared), leaf, turn, tuple(map(reader, attributes)))
        turn += 1


def _pick(values: list[Any], readers: tuple[Reader, ...]) -> list[Any]:
    for read in readers:
        values = read(values)
    return values
