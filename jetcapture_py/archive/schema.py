"""The archive's columns: their order and field ids, and one schema for batches with different columns.

Batches differ that were decoded at different times or by different replicas. `common_type` unites their types by the
rules of `decode/json_inferred.py`; values that become text are JSON, unless they were text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.common_type import EXACT, Nulls, common, converted

REPLY = "_nats_reply"
"""Column of each message's ack subject. It is only in memory, never in the archive."""

HEADERS_TYPE = pa.map_(pa.string(), pa.list_(pa.string()))
ENVELOPE = pa.schema(
    [
        pa.field(layout.SUBJECT, pa.string()),
        pa.field(layout.SEQ, pa.int64()),
        pa.field(layout.TIMESTAMP, pa.timestamp("us", "UTC")),
        pa.field(layout.NANOS, pa.int16()),
        pa.field(layout.DELIVERED, pa.int32()),
        pa.field(layout.HEADERS, HEADERS_TYPE),
        pa.field(layout.PAYLOAD, pa.binary()),
        pa.field(REPLY, pa.binary()),
    ]
)
"""Columns of a `MessageBatch`: the archive's envelope without the stream's name, and the ack subject."""

STREAM_FIELD = pa.field(layout.STREAM, pa.string())
KEY_FIELD = pa.field(layout.KEY, pa.string())

_OWN = frozenset((*layout.ENVELOPE, *layout.OPTIONAL))
_FIELD_ID = b"PARQUET:field_id"
_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16())
_FAMILIES: dict[pa.DataType, str] = {
    **dict.fromkeys(_INTEGERS, "long"),
    **dict.fromkeys((pa.float32(), pa.float64()), "double"),
    **dict.fromkeys((pa.string(), pa.large_string()), "string"),
    **dict.fromkeys((pa.binary(), pa.large_binary()), "binary"),
    **dict.fromkeys((pa.date32(), pa.date64()), "date"),
    pa.bool_(): "boolean",
    pa.time64("us"): "time",
}
"""Families with several types, or with another name in tables."""


def with_key_column(schema: pa.Schema) -> pa.Schema:
    """Return the schema with the envelope first, then the key, then decoded fields."""
    envelope = [field for field in schema if field.name in _OWN]
    decoded = [field for field in schema if field.name not in (*_OWN, layout.KEY)]
    return pa.schema([*envelope, KEY_FIELD, *decoded])


def key_position(schema: pa.Schema) -> int:
    """Return the key's position: after the envelope's columns."""
    return sum(name in _OWN for name in schema.names)


def with_field_ids(schema: pa.Schema, *, quarantine: bool = False) -> pa.Schema:
    """Return the schema with the field ids of the format (`layout.field_ids`), at any depth."""
    ids = layout.field_ids({path: family(field.type) for path, field in fields_in(schema)}, quarantine=quarantine)
    return pa.schema([_numbered(_part(field.name), field, ids) for field in schema])


def family(type_: pa.DataType) -> str:
    """Return the family of a type: one column of a table can hold all types of a family.

    A table can widen integers, floats, and decimals of one scale. Fields of a struct are columns of their own, but
    lists and maps of other families are another family.
    """
    types = pa.types
    if types.is_dictionary(type_):
        return family(type_.value_type)
    if types.is_struct(type_):
        return "struct"
    if types.is_map(type_):
        return f"map<{family(type_.key_type)},{family(type_.item_type)}>"
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        return f"list<{family(type_.value_type)}>"
    if types.is_decimal(type_):
        return f"decimal({type_.scale})"
    if types.is_timestamp(type_):
        return ("timestamptz" if type_.tz else "timestamp") + ("_ns" if type_.unit == "ns" else "")
    return _FAMILIES.get(type_, str(type_))


def field_id(field: pa.Field) -> int:
    """Return the id of a field, as in a file; -1 without one."""
    return int((field.metadata or {}).get(_FIELD_ID, -1))


def fields_in(schema: pa.Schema) -> Iterator[tuple[str, pa.Field]]:
    """Yield the columns and all fields inside them, with their paths: names, with NUL between them."""
    for field in schema:
        yield from _paths(_part(field.name), field)


def _part(name: str) -> str:
    """Return a field's name as a part of a path, in which NUL separates names."""
    return name.replace("\\", "\\\\").replace("\0", "\\0")


def _paths(path: str, field: pa.Field) -> Iterator[tuple[str, pa.Field]]:
    """Yield a field and those inside it, each with its path."""
    yield path, field
    if field.type.num_fields:
        for name, inner in _inner(field.type):
            yield from _paths(f"{path}\0{_part(name)}", inner)


def _numbered(path: str, field: pa.Field, ids: Mapping[str, int]) -> pa.Field:
    types, kind = pa.types, field.type
    if kind.num_fields:
        inner = [_numbered(f"{path}\0{_part(name)}", child, ids) for name, child in _inner(kind)]
        if types.is_struct(kind):
            kind = pa.struct(inner)
        elif types.is_map(kind):
            kind = pa.map_(*inner, keys_sorted=kind.keys_sorted)
        elif types.is_fixed_size_list(kind):
            kind = pa.list_(*inner, kind.list_size)
        elif inner:
            kind = (pa.large_list if types.is_large_list(kind) else pa.list_)(*inner)
        field = field.with_type(kind)
    return field.with_metadata({_FIELD_ID: b"%d" % ids[path]})


def _inner(kind: pa.DataType) -> list[tuple[str, pa.Field]]:
    """Return the fields in a nested type, with their names in paths."""
    types = pa.types
    if types.is_struct(kind):
        return [(field.name, field) for field in kind]
    if types.is_map(kind):
        return [("key", kind.key_field), ("value", kind.item_field)]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [("element", kind.value_field)]
    return []


def unify(schemas: Sequence[pa.Schema], *, lossless: bool = False) -> pa.Schema:
    """Return a schema with the columns of all `schemas` (at least one), in the order of their first appearance.

    Names that differ in case only are one column, called as it first appears, because Spark takes them for one. None
    if values would have to be converted and this must be `lossless`.
    """
    first = schemas[0]
    if all(schema is first or schema.equals(first) for schema in schemas):
        return first
    united = common((pa.struct(list(schema)) for schema in dict.fromkeys(schemas)), lossless=lossless)
    return None if united is None else pa.schema(list(united))


def unify_batches(batches: Sequence[pa.RecordBatch]) -> pa.Schema:
    """Return the schema of `unify`, but text for columns with an integer that would not be exact in it."""
    unified = unify([batch.schema for batch in batches])
    targets = {field.name.lower(): (position, field) for position, field in enumerate(unified)}
    converted: dict[pa.Schema, list[tuple[int, int, pa.Field]]] = {}
    for schema in dict.fromkeys(batch.schema for batch in batches):
        pairs = [(at, field, *targets[field.name.lower()]) for at, field in enumerate(schema)]
        converted[schema] = [(at, position, to) for at, field, position, to in pairs if field.type != to.type]
    for batch in batches:
        for at, position, to in converted[batch.schema]:
            if not _is_exact(batch.column(at), to.type):
                unified = unified.set(position, to.with_type(pa.string()))
    return unified


def _is_exact(array: pa.Array, to: pa.DataType) -> bool:
    """Whether all integers in a column are exact in a column of type `to`, a result of `unify`."""
    types = pa.types
    if array.type == to:
        return True
    if types.is_integer(array.type) and types.is_floating(to):
        limits = pc.min_max(array)
        return limits["max"].as_py() is None or max(-limits["min"].as_py(), limits["max"].as_py()) <= EXACT
    if types.is_struct(array.type) and types.is_struct(to):
        inner = {field.name.lower(): field.type for field in to}
        fields = zip(array.type, array.flatten(), strict=True)
        return all(_is_exact(child, inner[field.name.lower()]) for field, child in fields)
    if types.is_list(array.type) and types.is_list(to):
        return _is_exact(array.flatten(), to.value_type)
    if types.is_map(array.type) and types.is_map(to):
        return _is_exact(array.keys, to.key_type) and _is_exact(array.items, to.item_type)
    return True


def conform(batch: pa.RecordBatch, schema: pa.Schema, nulls: Nulls = pa.nulls) -> pa.RecordBatch:
    """Convert `batch` to `schema`, a result of `unify` that includes its own schema; missing columns are null.

    Include the envelope: Arrow takes the number of rows from the columns, and counts 0 without any.
    """
    if batch.schema.equals(schema):
        return batch
    columns = dict(zip((name.lower() for name in batch.schema.names), batch.columns, strict=True))
    absent = pa.nulls(batch.num_rows)
    arrays = [converted(columns.get(field.name.lower(), absent), field.type, _scalars, nulls) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def shared_nulls() -> Nulls:
    """Return a factory of null arrays that share one buffer per type."""
    made: dict[pa.DataType, pa.Array] = {}

    def nulls(rows: int, of: pa.DataType) -> pa.Array:
        if of not in made or len(made[of]) < rows:
            made[of] = pa.nulls(rows, of)
        return made[of].slice(0, rows)

    return nulls


def _scalars(array: pa.Array, to: pa.DataType) -> pa.Array:
    """Convert values that are not nested, or become text."""
    if pa.types.is_string(to):
        return pa.array([_text(value) for value in array.to_pylist(maps_as_pydicts="strict")], to)
    return array.cast(to, safe=False)


def _text(value: Any) -> str | None:
    """Return a string unchanged, any other value as JSON text. Nulls in objects are left out: they were not sent."""
    plain = _without_nulls(msgspec.to_builtins(value))
    return plain if plain is None or isinstance(plain, str) else msgspec.json.encode(plain).decode()


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
