"""Choose the columns of an object when decoders leave out columns without values.

Readers that apply one object's schema to all need every column in every object. But empty columns can cost a small
object more than its rows, so they are written only while all of them together are cheap.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from jetcapture_py.archive.encodings import leaves
from jetcapture_py.archive.schema import conform, shared_nulls

MAX_BYTES = 16 << 10
"""Maximum bytes of an object's footer for columns without values."""
LEAF_BYTES = 110
"""Bytes of the footer for a leaf without values, in addition to its path (measured: 105 to 110 per row group)."""


@dataclass(frozen=True, slots=True)
class ColumnSet:
    """All columns of a decoder."""

    schema: pa.Schema
    names: frozenset[str] = field(init=False)
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(name.lower() for name in self.schema.names))
        object.__setattr__(self, "bytes", _footer_bytes(self.schema))

    def with_values(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return `batch` without known columns that have no value, if they are many."""
        if self.bytes <= MAX_BYTES:
            return batch
        rows, names = len(batch), batch.schema.names
        keep = [
            position
            for position, column in enumerate(batch.columns)
            if column.null_count < rows or names[position].lower() not in self.names
        ]
        return batch.select(keep)

    def complete(self, table: pa.Table) -> pa.Table:
        """Add missing known columns as nulls; if that is too expensive, keep only columns with values.

        Other columns stay as they are.
        """
        schema = self._with_values(table) if self.bytes > MAX_BYTES else table.schema
        known_fields = pa.schema([field for field in schema if field.name.lower() in self.names])
        if self.bytes - _footer_bytes(known_fields) <= MAX_BYTES:
            schema = _filled(table.schema, self.schema)
        if schema.equals(table.schema):
            return table
        nulls = shared_nulls()
        return pa.Table.from_batches([conform(batch, schema, nulls) for batch in table.to_batches()], schema)

    def _with_values(self, table: pa.Table) -> pa.Schema:
        """Drop known columns without values, at any depth."""
        fields = []
        for stored, column in zip(table.schema, table.columns, strict=True):
            of = _type_with_values(column) if stored.name.lower() in self.names else stored.type
            if of is not None:
                fields.append(pa.field(stored.name, of))
        return pa.schema(fields)


def _filled(schema: pa.Schema, known: pa.Schema) -> pa.Schema:
    """Return the columns that are not `known`, then the known ones in their order, with the types of `schema`."""
    folded = {name.lower() for name in known.names}
    stored = {field.name.lower(): field for field in schema}
    first = [field for name, field in stored.items() if name not in folded]
    return pa.schema(first + [_filled_field(stored.get(field.name.lower()), field) for field in known])


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
    """Return a column's type without fields that have no value; None if no field has one."""
    if column.null_count == len(column):
        return None
    of = column.type
    if pa.types.is_list(of):
        items = pa.chunked_array([chunk.flatten() for chunk in column.chunks], of.value_type)
        return pa.list_(_type_with_values(items) or _smallest(of.value_type))
    if pa.types.is_struct(of):
        children = ((field.name, _type_with_values(child)) for field, child in zip(of, column.flatten(), strict=True))
        return pa.struct([(name, kept) for name, kept in children if kept is not None] or list(_smallest(of)))
    return of


def _smallest(of: pa.DataType) -> pa.DataType:
    """Keep one field of every struct: Parquet has no empty groups."""
    if pa.types.is_list(of):
        return pa.list_(_smallest(of.value_type))
    if pa.types.is_struct(of):
        return pa.struct([pa.field(of[0].name, _smallest(of[0].type))])
    return of


def _footer_bytes(schema: pa.Schema) -> int:
    return sum(LEAF_BYTES + 2 * len(path.encode()) for field in schema for path in leaves(field))
