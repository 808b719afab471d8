"""Map a schema's fields to columns: all of them, or declared ones, each by a path through records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.config.column_types import JSON, stored
from jetcapture_py.transform.decode.common import (
    Build,
    Read,
    ReadColumn,
    list_builder,
    map_builder,
    show,
    struct_builder,
)
from jetcapture_py.transform.decode.json_declared import codec, each_declared

if TYPE_CHECKING:
    from jetcapture_py.config.decoding import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Builds a column from values of a schema's type."""

    type: pa.DataType
    build: Build
    fields: Mapping[str, tuple[Read, Shape]] | None = None
    """The fields of a record: their readers and shapes."""


def columns_of(root: Shape, declared: Mapping[str, Column], texts: Build) -> list[ReadColumn]:
    """Return the columns of messages with the shape `root`: the `declared` ones, or all. Raises ValueError with one
    line.

    `texts` builds a column of the JSON texts of any values.
    """
    fields = root.fields or {}

    def column(name: str, given: Column, kind: pa.DataType, path: list[str]) -> ReadColumn:
        reads: list[Read] = []
        shape = Shape(type=pa.null(), build=texts, fields=fields)
        for number, step in enumerate(path, 1):
            if step not in (shape.fields or {}):
                raise ValueError(f"the schema has no field {show('.'.join(path[:number]))}")
            read, shape = (shape.fields or {})[step]
            reads.append(read)
        build = texts if kind == JSON else _conversion(shape, kind, given.unit)
        return ReadColumn(name, stored(kind), build, tuple(reads))

    if declared:
        return each_declared(declared, column)
    names = distinct([layout.field_name(name) for name in fields])
    return [
        ReadColumn(name, shape.type, shape.build, (read,))
        for name, (read, shape) in zip(names, fields.values(), strict=True)
    ]


def distinct(names: Sequence[str]) -> list[str]:
    """Append `_` to names that Spark would confuse with an earlier one."""
    taken: set[str] = set()
    free = []
    for name in names:
        while name.lower() in taken:
            name += "_"
        taken.add(name.lower())
        free.append(name)
    return free


def _conversion(shape: Shape, declared: pa.DataType, unit: str | None) -> Build:
    """Return the builder of a column of type `declared` from values with `shape`. Raises ValueError."""
    types = pa.types
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
    try:
        pa.nulls(1, shape.type).cast(kind)
    except pa.ArrowInvalid as error:  # a decimal with too few digits for some integers
        raise ValueError(f"the schema has {shape.type}, which cannot be {kind}: {error}") from None
    return lambda values: shape.build(values).cast(kind)


def list_shape(item: Shape) -> Shape:
    """Return the shape of lists of `item`."""
    of = pa.list_(item.type)
    return Shape(type=of, build=list_builder(of, item.build))


def map_shape(key: Shape, item: Shape) -> Shape:
    """Return the shape of maps from `key` to `item`; values are mappings."""
    of = pa.map_(key.type, item.type)
    return Shape(type=of, build=map_builder(of, key.build, item.build))


def struct_shape(fields: Mapping[str, tuple[Read, Shape]]) -> Shape:
    """Return the shape of records with `fields`, at least one."""
    names = distinct(list(fields))
    of = pa.struct([pa.field(name, shape.type) for name, (_, shape) in zip(names, fields.values(), strict=True)])
    build = struct_builder(of, [(read, shape.build) for read, shape in fields.values()])
    return Shape(type=of, build=build, fields=fields)


def scalar(of: pa.DataType, convert: Callable[[Any], Any] | None = None) -> Shape:
    """Return the shape of values that Arrow accepts unchanged, or after `convert`, which raises ValueError."""
    if convert is None:
        return Shape(type=of, build=lambda values: pa.array(values, of))
    return Shape(
        type=of,
        build=lambda values: pa.array([None if value is None else convert(value) for value in values], of),
    )
