"""JSON with declared columns: decode one object per message directly into the declared types.

Types are never coerced. A missing field is null; undeclared fields are skipped, but must be well-formed; the last of
duplicate fields wins. A message that does not match is a `Failure`. msgspec checks types and integer ranges while it
decodes. Checks it does not have (a decimal's scale, a timestamp's zone) are made here for a whole column at once; the
caller then finds the messages that failed.
"""

from __future__ import annotations

import decimal
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.config.column_types import JSON, TIMESTAMP, parse_declared, stored
from jetcapture_py.config.units import DAY_PATTERN, RFC3339_PATTERN
from jetcapture_py.text import is_text
from jetcapture_py.transform.batch import Decoded, Decoder, MessageBatch
from jetcapture_py.transform.decode.bounds import (
    JSON_FORMAT,
    MAX_ROWS,
    RECORD,
    ObjectFormat,
    heaviest,
    max_values,
    width,
)
from jetcapture_py.transform.decode.common import (
    BYTE_ORDER_MARK,
    Build,
    MisfitError,
    Read,
    ReadColumn,
    assemble,
    decode_each,
    list_builder,
    map_builder,
    owners_of,
    require,
    show,
    struct_builder,
)

if TYPE_CHECKING:
    from jetcapture_py.config.decoding import Column, DecodeConfig

UNITS = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": 1}
"""Units of epoch timestamps, with the microseconds in one (a nanosecond is divided instead)."""

MAX_FLOAT32 = 3.4028234663852886e38
_MAX_UINT64 = 2**64 - 1
_NUMBER = re.compile(rb'"?(-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"?')
_DATE = rf"\A{DAY_PATTERN}\z"
_MOMENT = rf"\A{RFC3339_PATTERN}\z"
_LONGER = r"(\.[0-9]{6})[0-9]+"
_MAX_UTC = len("2026-01-31T12:00:00.123456Z")
_YEARS = "a timestamp between the years 1 and 9999"
YEAR_1, YEAR_10000 = -62_135_596_800_000_000, 253_402_300_800_000_000


@dataclass(frozen=True, slots=True)
class Codec:
    """Reads the values of a declared type."""

    accepts: Any
    """The msgspec type of a value or null."""
    build: Build
    """Builds the column from such values."""


Special = Callable[[pa.DataType], Codec | None]
Made = TypeVar("Made")


def codec(declared: pa.DataType, unit: str | None = None, special: Special = lambda _: None) -> Codec:
    """Return the codec of a column of the type `declared` (from `column_types.parse_declared`).

    With `unit` (s, ms, us, ns; timestamps only) a timestamp is a number of these units since 1970, else RFC 3339 text.
    `special` returns the codec of a type that a format other than JSON reads differently, else None. Raises ValueError.
    """
    if unit is not None and (declared != TIMESTAMP or unit not in UNITS):
        raise ValueError(f"unit: {show(unit)}: only a timestamp has a unit: s, ms, us or ns")
    types = pa.types
    if unit is None and (special_codec := special(declared)) is not None:
        return special_codec
    if declared == JSON:
        return Codec(msgspec.Raw, _json_texts)
    if types.is_decimal(declared):
        exact = exact_decimal(declared)
        return Codec(
            msgspec.Raw,
            lambda values: pa.array([None if text is None else exact(text) for text in _texts(values)], declared),
        )
    if types.is_timestamp(declared):
        if unit is None:
            return Codec(str | None, timestamps)
        return Codec(int | float | None if unit in ("s", "ms") else int | None, _epochs(unit))
    if types.is_date(declared):
        return Codec(str | None, _dates)
    if types.is_list(declared):
        item = codec(declared.value_type, special=special)
        return Codec(list[item.accepts] | None, list_builder(stored(declared), item.build))  # type: ignore[name-defined]
    if types.is_map(declared):
        item = codec(declared.item_type, special=special)
        build = map_builder(stored(declared), lambda names: pa.array(names, pa.string()), item.build)
        return Codec(dict[str, item.accepts] | None, build)  # type: ignore[name-defined]
    if types.is_struct(declared):
        return _struct(declared, special)
    if declared == pa.uint64():  # msgspec knows no bound beyond int64
        return Codec(Annotated[int, msgspec.Meta(ge=0)] | None, _uint64s)
    return Codec(_plain(declared) | None, lambda values: pa.array(values, declared))


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


def reader(name: str) -> Read:
    """Return a function that reads the attribute `name` of each value in a list; None stays None.

    It is compiled for that name, because CPython then reads the slot directly, in half the time of `attrgetter`.
    """
    read: Read = eval(f"lambda values: [None if value is None else value.{name} for value in values]")  # noqa: S307
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
    require(pc.match_substring_regex(texts, _DATE), values, "a date as YYYY-MM-DD")
    days = texts.cast(pa.date32())
    require(pc.greater_equal(days.cast(pa.int32()), YEAR_1 // 86_400_000_000), values, "a date from year 1 on")
    return days


def timestamps(values: list[str | None]) -> pa.Array:
    """Build a column from RFC 3339 texts with zones; digits below a microsecond are dropped. Raises MisfitError."""
    texts = pa.array(values, pa.string())
    stamps = moments(texts)
    if stamps.null_count > texts.null_count:
        expected = "an RFC 3339 timestamp with a zone, such as 2026-01-31T12:00:00Z"
        require(pc.or_(stamps.is_valid(), texts.is_null()), values, expected)
    return in_years(stamps, values)


def moments(texts: pa.StringArray) -> pa.TimestampArray:
    """Convert RFC 3339 texts with zones, others to null; digits below a microsecond are dropped."""
    texts = pc.ascii_upper(texts)
    texts = pc.if_else(pc.match_substring_regex(texts, _MOMENT), texts, pa.scalar(None, pa.string()))
    if (pc.max(pc.binary_length(texts)).as_py() or 0) > _MAX_UTC:
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
    """Return `stamps`. Raises MisfitError outside the range of Spark and Python (years 1 to 9999)."""
    numbers = stamps.cast(pa.int64())
    inside = pc.and_(pc.greater_equal(numbers, YEAR_1), pc.less(numbers, YEAR_10000))
    require(inside, values, _YEARS)
    return stamps


def _struct(declared: pa.StructType, special: Special) -> Codec:
    codecs = [codec(field.type, special=special) for field in declared]
    accepts = struct_type([(field.name, inner.accepts) for field, inner in zip(declared, codecs, strict=True)])
    fields = [(reader(f"f{number}"), inner.build) for number, inner in enumerate(codecs)]
    return Codec(accepts | None, struct_builder(stored(declared), fields))


# ------------------------------------------------------------------ objects


@dataclass(slots=True)
class _Object:
    """An object to decode: its fields by name, each a column's codec or another object."""

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
        return struct_type(
            [
                (name, inner.accepts if isinstance(inner, Codec) else inner.accepts() | None)
                for name, inner in self.fields.items()
            ]
        )


class ObjectDecoder:
    """Decodes declared columns of messages that are one object each. Raises ValueError for a wrong declaration."""

    def __init__(
        self, columns: Mapping[str, Column], reading: ObjectFormat = JSON_FORMAT, special: Special = lambda _: None
    ) -> None:
        passes: list[_Object] = []

        def add(name: str, column: Column, declared: pa.DataType, path: list[str]) -> tuple[int, ReadColumn]:
            """Return the number of the column's pass, and the column.

            Columns that need one field in two shapes (`customer` as json, and `customer.id`) need a second pass over
            the payloads.
            """
            leaf = codec(declared, column.unit, special)
            struct_type([(part, None) for part in dict.fromkeys(path)])
            turn = 0
            while True:
                if turn == len(passes):
                    passes.append(_Object())
                if (attributes := passes[turn].add(path, leaf)) is not None:
                    return turn, ReadColumn(name, stored(declared), leaf.build, tuple(map(reader, attributes)))
                turn += 1

        self._format = reading
        self._columns = each_declared(columns, add)
        self._decode = [reading.decoder(object_.accepts()).decode for object_ in passes]
        types = [column.type for _, column in self._columns]
        self._width, self._heaviest = sum(map(width, types)), max(map(heaviest, types), default=0)

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message of `batch`. Raises BatchTooWideError if that would take too much memory."""
        size = batch.column(layout.PAYLOAD).nbytes
        limit = max_values(size) - self._width * len(batch)
        if self._heaviest * size > limit:
            lists = min(self._heaviest, RECORD + 1)
            self._format.check(batch, limit, objects=self._heaviest, lists=lists)
        payloads, failures = self._format.payloads(batch)
        passes = [decode_each(decode, payloads, failures) for decode in self._decode]
        messages = [i for i in range(len(batch)) if i not in failures] if failures else range(len(batch))
        if failures:
            passes = [[rows[i] for i in messages] for rows in passes]
        columns = [column.of(passes[turn]) for turn, column in self._columns]
        return assemble(columns, messages, failures, owners_of(batch))


def each_declared(
    columns: Mapping[str, Column], make: Callable[[str, Column, pa.DataType, list[str]], Made]
) -> list[Made]:
    """Build the declared columns, each from its stored name, declaration, type, and path of names to its value.

    Raises ValueError with one line for a wrong column, or one that Spark cannot distinguish from another.
    """
    made: list[Made] = []
    taken: dict[str, str] = {}
    for name, column in columns.items():
        try:
            if not is_text(name):
                raise ValueError("the name is not valid text: it contains a surrogate")
            declared = parse_declared(column.type)
            path = [name] if column.path is None else column.path.split(".")
            if "" in path and column.path is not None:
                problem = "names separated by one dot, such as customer.address.city"
                raise ValueError(f"path: {show(column.path)}: {problem}")
            made.append(make(layout.field_name(name), column, declared, path))
        except ValueError as error:
            raise ValueError(f"column {show(name)}: {error}") from None
    for name in columns:
        if (other := taken.setdefault(layout.field_name(name).lower(), name)) != name:
            raise ValueError(
                f"columns {show(other)} and {show(name)} are the same column to Spark (case-insensitive, and"
                f" {', '.join(layout.RESERVED)} and _nats_... get _ appended)"
            )
    return made


# ------------------------------------------------------------------ the format


_MAX_COMMAS = 40 * MAX_ROWS
"""Maximum commas in a JSON array: each may begin an element, which takes memory before it is counted."""
_FEW_COMMAS = 4 * MAX_ROWS
"""Commas up to which elements are not counted first."""
_json_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_Empty = msgspec.defstruct("Object", [], gc=False)
_json_objects = msgspec.json.Decoder(list[_Empty]).decode  # type: ignore[valid-type]
"""Decodes an array of objects into minimal memory, to count them."""


def _lines(payload: bytes) -> Sequence[bytes]:
    """Split a payload into lines without blank ones. JSON strings contain no line breaks."""
    if payload.count(b"\n") > MAX_ROWS:
        raise ValueError(f"more than {MAX_ROWS} lines")
    return [line for line in payload.split(b"\n") if line and not line.isspace()]


def _elements(payload: bytes) -> Sequence[bytes]:
    """Split a JSON array into its elements."""
    payload = payload.removeprefix(BYTE_ORDER_MARK)
    commas = payload.count(b",")
    if commas > _MAX_COMMAS:
        raise ValueError(f"more than {_MAX_COMMAS} commas")
    count = len(_json_objects(payload)) if commas > _FEW_COMMAS else 0
    if count > MAX_ROWS or len(items := _json_items(payload)) > MAX_ROWS:
        raise ValueError(f"more than {MAX_ROWS} elements")
    return [bytes(item) for item in items]


SPLITS = {"lines": _lines, "array": _elements}
OBJECT_FORMAT = JSON_FORMAT


def make(config: DecodeConfig) -> Decoder:
    """Return the configured decoder. Raises ValueError with one line."""
    if config.columns:
        return ObjectDecoder(config.columns)
    from jetcapture_py.transform.decode.json_inferred import InferringDecoder

    return InferringDecoder(conflict=config.conflict)
