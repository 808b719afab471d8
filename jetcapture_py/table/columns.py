"""The columns of an Iceberg table, which grow with added files: ids, names and types from the objects.

A table column is a field id of the format, which stands for a name and a family of types. If a name has several
families, the first one gets the plain name, and every other the name with its family: `amount`, `amount_string`. So no
value is ever converted, and none reads as null because another object has another type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import pyarrow as pa
from pyiceberg.schema import Schema, index_by_id, index_by_name
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
)

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import MIN_FIELD_ID
from jetcapture_py.archive.schema import family, field_id

_SIMPLE: dict[str, IcebergType] = {
    "long": LongType(),
    "uint32": LongType(),
    "double": DoubleType(),
    "string": StringType(),
    "binary": BinaryType(),
    "date": DateType(),
    "boolean": BooleanType(),
    "time": TimeType(),
    "timestamp": TimestampType(),
    "timestamptz": TimestamptzType(),
}
"""Types in a table by family. All numbers of a family share one, so that no column ever changes its type."""
_RESERVED = frozenset(
    f"_{name}"
    for name in (
        *("file", "pos", "deleted", "spec_id", "partition", "row_id", "last_updated_sequence_number"),
        *("change_type", "change_ordinal", "commit_snapshot_id"),
    )
)
"""Iceberg's own columns: if another one has such a name, Spark cannot select all columns."""
_MAX_DIGITS = 38
_INTEGER_BITS = 32


def first_columns(time: int) -> Schema:
    """Return the initial columns of a table: the event time if it partitions the files, as not every object has it."""
    return (
        Schema(NestedField(time, layout.TIME, TimestamptzType())) if time == layout.FIELD_IDS[layout.TIME] else Schema()
    )


class TableColumns:
    """The columns of a table; `add` adds those of files."""

    def __init__(self, schema: Schema) -> None:
        self._fields: Sequence[NestedField] = schema.fields
        self._taken = {*_RESERVED, *_names(schema)}
        """Names of the columns and their fields, joined by dots; a name may also contain dots."""
        self.left_out: dict[str, str] = {}
        """Columns that the table cannot have, joined by dots, and their types."""

    def add(self, file: pa.Schema) -> bool:
        """Add the columns of a file; return False if they have no field ids, so that the table cannot have the file."""
        if any(field_id(field) < 0 for field in file):
            return False
        self._fields = self._merged(self._fields, file, "")
        return True

    @property
    def schema(self) -> Schema:
        return Schema(*self._fields)

    @property
    def drifted(self) -> list[str]:
        """Columns with another name than in objects, joined by dots."""
        schema = self.schema
        numbers = (number for number, field in index_by_id(schema).items() if field.doc)
        return sorted(schema.find_column_name(number) or "" for number in numbers)

    def _merged(self, known: Sequence[NestedField], fields: Iterable[pa.Field], path: str) -> tuple[NestedField, ...]:
        """Merge the `known` columns, or fields of a struct, with a file's."""
        merged = {field.field_id: field for field in known}
        for field in fields:
            number = field_id(field)
            before = merged.get(number)
            name_in_parent = before.name if before is not None else _name(field, path, self._taken)
            name = f"{path}{name_in_parent}"
            type_ = self._type(field, None if before is None else before.field_type, name)
            if type_ is None or (before is not None and type(type_) is not type(before.field_type)):
                if not pa.types.is_null(field.type):  # it has no values
                    self.left_out.setdefault(f"{path}{field.name}", str(field.type))
            elif before is not None:
                merged[number] = before.model_copy(update={"field_type": type_})
            else:
                doc = None if name_in_parent == field.name else f"{field.name}, where it is {family(field.type)}"
                merged[number] = NestedField(number, name_in_parent, type_, required=False, doc=doc)
                self._taken.update(f"{path.casefold()}{inner}" for inner in _names(Schema(merged[number])))
        return tuple(merged.values())

    def _type(self, field: pa.Field, before: IcebergType | None, path: str) -> IcebergType | None:
        """Return the common type of a file's `field` and the table's `before`; None without one."""
        types, type_ = pa.types, field.type
        if types.is_dictionary(type_):
            type_ = type_.value_type
        if types.is_struct(type_):
            known = before.fields if isinstance(before, StructType) else ()
            inner = self._merged(known, list(type_), f"{path}.")
            return StructType(*inner) if inner else None
        if types.is_map(type_):
            was_map = before if isinstance(before, MapType) else None
            key = self._type(type_.key_field, was_map and was_map.key_type, f"{path}.key")
            value = self._type(type_.item_field, was_map and was_map.value_type, f"{path}.value")
            if key is None or value is None:
                return None
            return MapType(field_id(type_.key_field), key, field_id(type_.item_field), value, value_required=False)
        if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
            was_list = before if isinstance(before, ListType) else None
            element = self._type(type_.value_field, was_list and was_list.element_type, f"{path}.element")
            number = field_id(type_.value_field)
            return None if element is None else ListType(number, element, element_required=False)
        if types.is_decimal(type_):
            precision = max(type_.precision, before.precision if isinstance(before, DecimalType) else 0)
            return DecimalType(precision, type_.scale) if precision <= _MAX_DIGITS else None
        if types.is_fixed_size_binary(type_):
            return FixedType(type_.byte_width)
        if field_id(field) < MIN_FIELD_ID and types.is_integer(type_) and type_.bit_width <= _INTEGER_BITS:
            return IntegerType()  # a column of the format, whose type never changes
        return _SIMPLE.get(family(type_))


def _name(field: pa.Field, path: str, taken: AbstractSet[str]) -> str:
    """Return the name of a new column: the field's own, or one with its type. Case does not distinguish names."""
    inner = [inside for inside, _ in _inside(field.type)]

    def free(name: str) -> bool:
        return taken.isdisjoint(f"{path}{name}{suffix}".casefold() for suffix in ("", *inner))

    name = str(field.name)
    if not free(name):
        name = f"{name}_{re.sub(r'[^a-z0-9]+', '_', family(field.type)).strip('_')}"
    while not free(name):
        name += "_"
    return name


def _inside(type_: pa.DataType, path: str = "") -> Iterator[tuple[str, pa.DataType]]:
    """Yield the parts of lists and maps, which have fixed names, with their paths and types."""
    types = pa.types
    parts: list[tuple[str, pa.DataType]] = []
    if types.is_map(type_):
        parts = [("key", type_.key_type), ("value", type_.item_type)]
    elif types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        parts = [("element", type_.value_type)]
    for name, part in parts:
        yield f"{path}.{name}", part
        yield from _inside(part, f"{path}.{name}")


def _names(schema: Schema) -> Iterator[str]:
    """Yield the names of columns and their nested fields, in lower case, joined by dots."""
    return map(str.casefold, index_by_name(schema)) if schema.fields else iter(())
