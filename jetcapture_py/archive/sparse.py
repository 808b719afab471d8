"""Which columns an object is written with, when decoders leave out what has no value.

Readers that take one object's schema for all of them want every object to have every column. A column without values
costs a small object more than its rows, so it is there only while all such columns together are cheap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from jetcapture_py.archive.schema import conform, shared_nulls

MOST_BYTES = 16 << 10
"""Bytes of an object's footer that columns without values may take."""
LEAF_BYTES = 110
"""Bytes that a leaf without values takes there beside its path (measured: 105 to 110 for each row group)."""


@dataclass(frozen=True, slots=True)
class Known:
    """All columns that a decoder knows of."""

    schema: pa.Schema
    names: frozenset[str] = field(init=False)
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(name.lower() for name in self.schema.names))
        object.__setattr__(self, "bytes", _footer_bytes(self.schema))

    def with_values(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """`batch` without the columns of ours that have no value, if there are so many that they matter."""
        if self.bytes <= MOST_BYTES:
            return batch
        rows, names = len(batch), batch.schema.names
        keep = [
            position
            for position, column in enumerate(batch.columns)
            if column.null_count < rows or names[position].lower() not in self.names
        ]
        return batch.select(keep)

    def complete(self, table: pa.Table) -> pa.Table:
        """`table` with the columns of ours it lacks, as nulls; where that costs too much, with those that have values.

        Other columns stay as they are.
        """
        schema = self._with_values(table) if self.bytes > MOST_BYTES else table.schema
        own = pa.schema([each for each in schema if each.name.lower() in self.names])
        if self.bytes - _footer_bytes(own) <= MOST_BYTES:
            schema = _filled(table.schema, self.schema)
        if schema.equals(table.schema):
            return table
        nulls = shared_nulls()
        return pa.Table.from_batches([conform(batch, schema, nulls) for batch in table.to_batches()], schema)

    def _with_values(self, table: pa.Table) -> pa.Schema:
        """The columns of `table` without those of ours that have no value, at any depth."""
        fields = []
        for each, column in zip(table.schema, table.columns, strict=True):
            of = _type_with_values(column) if each.name.lower() in self.names else each.type
            if of is not None:
                fields.append(pa.field(each.name, of))
        return pa.schema(fields)


def _filled(schema: pa.Schema, known: pa.Schema) -> pa.Schema:
    """The columns that are not `known`, and then the known ones in their order, with the types that `schema` has."""
    folded = {name.lower() for name in known.names}
    there = {field.name.lower(): field for field in schema}
    first = [field for name, field in there.items() if name not in folded]
    return pa.schema(first + [_filled_field(there.get(field.name.lower()), field) for field in known])


def _filled_field(field: pa.Field | None, known: pa.Field) -> pa.Field:
    return known if field is None else pa.field(field.name, _filled_type(field.type, known.type))


def _filled_type(of: pa.DataType, known: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_list(of) and types.is_list(known):
        return pa.list_(_filled_type(of.value_type, known.value_type))
    if types.is_struct(of) and types.is_struct(known):
        return pa.struct(list(_filled(pa.schema(list(of)), pa.schema(list(known)))))
    return of


def _type_with_values(column: pa.ChunkedArray) -> pa.DataType | None:
    """A column's type without the fields that have no value in it; None when it has none."""
    if column.null_count == len(column):
        return None
    of = column.type
    if pa.types.is_list(of):
        items = pa.chunked_array([chunk.flatten() for chunk in column.chunks], of.value_type)
        return pa.list_(_type_with_values(items) or _smallest(of.value_type))
    if pa.types.is_struct(of):
        found = ((field.name, _type_with_values(child)) for field, child in zip(of, column.flatten(), strict=True))
        return pa.struct([(name, kept) for name, kept in found if kept is not None] or list(_smallest(of)))
    return of


def _smallest(of: pa.DataType) -> pa.DataType:
    """The type with one field in every struct, which is the fewest that Parquet stores."""
    if pa.types.is_list(of):
        return pa.list_(_smallest(of.value_type))
    if pa.types.is_struct(of):
        return pa.struct([pa.field(of[0].name, _smallest(of[0].type))])
    return of


def _footer_bytes(schema: pa.Schema) -> int:
    return sum(LEAF_BYTES + 2 * len(path.encode()) for path in _leaves(list(schema)))


def _leaves(fields: list[pa.Field], path: str = "") -> Iterator[str]:
    for each in fields:
        here, of = f"{path}.{each.name}", each.type
        while pa.types.is_list(of):
            here, of = f"{here}.list.element", of.value_type
        if pa.types.is_struct(of):
            yield from _leaves(list(of), here)
        else:
            yield here
