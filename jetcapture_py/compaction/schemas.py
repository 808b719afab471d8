"""Decide which objects' schemas may be merged: `read_archive` must return the same values and types before and after.

A column may be missing or all null, an integer may become wider, a struct may gain fields. Objects with other
differences, such as integers and floats, are not merged: the reader resolves these from all objects that it reads. If
other objects' types make a column text, structs that gained fields show them as null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.schema import unify


def without_keys(schema: pa.Schema) -> pa.Schema:
    """Return the schema of an object without its column of keys."""
    return pa.schema([field for field in schema if field.name != layout.KEY])


def with_key_column(schema: pa.Schema) -> pa.Schema:
    """Return the schema with the column of keys where the capture has it: after the envelope."""
    own = (*layout.ENVELOPE, *layout.OPTIONAL)
    before = [field for field in schema if field.name in own]
    after = [field for field in schema if field.name not in own]
    return pa.schema([*before, pa.field(layout.KEY, pa.string()), *after])


def classes(schemas: Sequence[pa.Schema]) -> list[tuple[pa.Schema, list[int]]]:
    """Divide schemas into mergeable classes; return each class's unified schema and the indexes of its members."""
    found: list[tuple[pa.Schema, list[int]]] = []
    for index, schema in enumerate(schemas):
        for number, (known, members) in enumerate(found):
            if known.equals(schema):
                members.append(index)
                break
            if _fields_fit(known, schema, top=True):
                found[number] = (unify([known, schema]), [*members, index])
                break
        else:
            found.append((schema, [index]))
    return found


def _fields_fit(left: Any, right: Any, *, top: bool) -> bool:
    known = {field.name.lower(): field for field in left}
    for field_ in right:
        other = known.get(field_.name.lower())
        if other is not None and (other.name != field_.name or not _fits(other.type, field_.type, top=top)):
            return False
    return True


def _fits(left: pa.DataType, right: pa.DataType, *, top: bool) -> bool:
    types = pa.types
    if left == right or types.is_null(left) or types.is_null(right):
        return True
    if types.is_struct(left) and types.is_struct(right):
        return _fields_fit(left, right, top=False)
    if types.is_list(left) and types.is_list(right):
        return _fits(left.value_type, right.value_type, top=False)
    return top and bool(types.is_signed_integer(left) and types.is_signed_integer(right))
