"""Map the fields of a schema to columns: all of them, or declared ones, each by a path through records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.nested import flatten, offsets_of, struct_array
from jetcapture_py.config.column_types import JSON, TIMESTAMP, stored
from jetcapture_py.transform.decode.common import Build, MisfitError, Values, show, unique_names
from jetcapture_py.transform.decode.json_declared import build_items, codec, declaration

if TYPE_CHECKING:
    from jetcapture_py.config.decoding import Column

Read = Callable[[list[Any]], list[Any]]
"""Reads one field of each of a list's records; None of None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Builds a column from values of a schema's type.

    `text` makes one of their JSON texts. `fields` has those of a record: how each is read, and its shape.
    """

    type: pa.DataType
    build: Build
    text: Build
    fields: Mapping[str, tuple[Read, Shape]] | None = None


@dataclass(frozen=True, slots=True)
class SchemaColumn:
    """A column: `reads` leads from a message to its value, one record after the other."""

    name: str
    type: pa.DataType
    reads: tuple[Read, ...]
    build: Build

    def values(self, rows: list[Any]) -> Values:
        """The column's values of `rows`."""
        for read in self.reads:
            rows = read(rows)
        return Values(name=self.name, type=self.type, values=rows, build=self.build)


def columns_of(root: Shape, declared: Mapping[str, Column]) -> list[SchemaColumn]:
    """The columns of messages with the shape `root`: the `declared` ones, or all. Raises ValueError, one line."""
    fields = root.fields or {}
    if declared:
        chosen = [_declared(name, column, fields) for name, column in declared.items()]
        unique_names({name: column.name for name, column in zip(declared, chosen, strict=True)})
        return chosen
    names = distinct([layout.field_name(name) for name in fields])
    found = zip(names, fields.values(), strict=True)
    return [SchemaColumn(name, shape.type, (read,), shape.build) for name, (read, shape) in found]


def distinct(names: Sequence[str]) -> list[str]:
    """Append `_` to names that Spark would confuse with an earlier one."""
    taken: set[str] = set()
    found = []
    for name in names:
        while name.lower() in taken:
            name += "_"
        taken.add(name.lower())
        found.append(name)
    return found


def _declared(name: str, column: Column, fields: Mapping[str, tuple[Read, Shape]]) -> SchemaColumn:
    try:
        kind, path = declaration(name, column)
        reads: list[Read] = []
        shape: Shape | None = None
        for number, step in enumerate(path):
            if shape is not None:
                fields = shape.fields or {}
            if step not in fields:
                raise ValueError(f"the schema has no field {show('.'.join(path[: number + 1]))}")
            read, shape = fields[step]
            reads.append(read)
        assert shape is not None  # noqa: S101  a path has a step
        return SchemaColumn(layout.field_name(name), stored(kind), tuple(reads), _conversion(shape, kind, column.unit))
    except ValueError as error:
        raise ValueError(f"column {show(name)}: {error}") from None


def _conversion(shape: Shape, declared: pa.DataType, unit: str | None) -> Build:
    """Return the function that builds a column of type `declared` from values with `shape`. Raises ValueError."""
    types = pa.types
    if declared == JSON:
        return shape.text
    kind = stored(declared)
    if unit is not None:
        numbers = codec(declared, unit).build
        if types.is_integer(shape.type) or types.is_floating(shape.type):
            return numbers
        raise ValueError(f"unit: only for numbers; the schema has {shape.type}")
    if kind == shape.type:
        return shape.build
    numeric = (types.is_integer, types.is_floating, types.is_decimal)
    wider = next((at for at, fits in enumerate(numeric) if fits(kind)), None)
    narrow = next((at for at, fits in enumerate(numeric) if fits(shape.type)), None)
    same = wider == narrow or (narrow == 0 and wider is not None)
    if wider is None or narrow is None or not same or (types.is_float32(kind) and types.is_float64(shape.type)):
        raise ValueError(f"the schema has {shape.type}, which cannot be {kind}")
    return lambda values: shape.build(values).cast(kind)


def list_shape(item: Shape) -> Shape:
    """Lists of `item`."""
    of = pa.list_(item.type)

    def build(values: list[Any]) -> pa.Array:
        return pa.ListArray.from_arrays(offsets_of(values), build_items(item.build, values, flatten(values)), type=of)

    return Shape(type=of, build=build, text=item.text)


def map_shape(key: Shape, item: Shape) -> Shape:
    """Maps from `key` to `item`; values are mappings."""
    of = pa.map_(key.type, item.type)

    def build(values: list[Any]) -> pa.Array:
        keys = build_items(key.build, values, [name for value in values if value for name in value])
        found = [value[name] for value in values if value for name in value]
        return pa.MapArray.from_arrays(offsets_of(values), keys, build_items(item.build, values, found), type=of)

    return Shape(type=of, build=build, text=item.text)


def struct_shape(fields: Mapping[str, tuple[Read, Shape]], text: Build) -> Shape:
    """Records with `fields`, of which there is at least one."""
    names = distinct(list(fields))
    of = pa.struct([pa.field(name, shape.type) for name, (_, shape) in zip(names, fields.values(), strict=True)])

    def build(values: list[Any]) -> pa.Array:
        children = [shape.build(read(values)) for read, shape in fields.values()]
        return struct_array(children, of, pa.array([value is None for value in values], pa.bool_()))

    return Shape(type=of, build=build, text=text, fields=fields)


def scalar(of: pa.DataType, text: Build, convert: Callable[[Any], Any] | None = None) -> Shape:
    """Values that Arrow takes as they are, or after `convert`, which raises ValueError for a bad one."""
    if convert is None:
        return Shape(type=of, build=lambda values: pa.array(values, of), text=text)

    def build(values: list[Any]) -> pa.Array:
        return pa.array([None if value is None else convert(value) for value in values], of)

    return Shape(type=of, build=build, text=text)


_YEARS = (-62_135_596_800_000_000, 253_402_300_800_000_000)
"""Microseconds of the years 1 to 9999, the range of Spark and Python."""


def micros_in_years(micros: int) -> int:
    """Return `micros`. Raises ValueError outside of the years 1 to 9999."""
    if not _YEARS[0] <= micros < _YEARS[1]:
        raise ValueError(f"expected a timestamp between the years 1 and 9999, got {micros} microseconds")
    return micros


def timestamp_shape(text: Build, multiply: int, divide: int = 1, zone: str | None = "UTC") -> Shape:
    """Timestamps from integers, which are microseconds times `divide` over `multiply`; the rest is cut off."""
    of = TIMESTAMP if zone else pa.timestamp("us")
    low, high = (-(-bound * divide // multiply) for bound in _YEARS)

    def build(values: list[Any]) -> pa.Array:
        bad = [row for row, value in enumerate(values) if value is not None and not low <= value < high]
        if bad:
            raise MisfitError(dict.fromkeys(bad, "expected a timestamp between the years 1 and 9999"))
        if multiply == divide == 1:
            return pa.array(values, pa.int64()).cast(of)
        numbers = [None if value is None else value * multiply // divide for value in values]
        return pa.array(numbers, pa.int64()).cast(of)

    return Shape(type=of, build=build, text=text)
