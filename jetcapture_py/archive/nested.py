"""Lists, maps and structs put together from columns of what they hold, and converted: no Python object per value."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

Nulls = Callable[[int, pa.DataType], pa.Array]
"""Creates a column with this number of nulls."""


def offsets_of(values: Sequence[Sized | None]) -> pa.Array:
    """Where each of `values` starts in the chain of all of them: int32, null for None, with the end appended."""
    offsets: list[int | None] = []
    end = 0
    for value in values:
        if value is None:
            offsets.append(None)
        else:
            offsets.append(end)
            end += len(value)
    offsets.append(end)
    return pa.array(offsets, pa.int32())


def flatten(values: Sequence[Sequence[Any] | None]) -> list[Any]:
    """The items of all lists among `values`, in order."""
    return list(chain.from_iterable(value for value in values if value is not None))


def struct_array(children: Sequence[pa.Array], of: pa.StructType, nulls: pa.Array) -> pa.Array:
    """Structs of the type `of` with the columns `children`; null where `nulls` (boolean) is true."""
    return pa.StructArray.from_arrays(list(children), fields=list(of), mask=nulls)


def converted(
    array: pa.Array, to: pa.DataType, scalars: Callable[[pa.Array, pa.DataType], pa.Array], nulls: Nulls = pa.nulls
) -> pa.Array:
    """Convert a column to another type: within structs, lists and maps, with `scalars` for everything else.

    Fields of structs are matched by name in any case; those that are missing are null.
    """
    types = pa.types
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    stored = array.type
    if stored == to:
        return array
    if types.is_null(stored):
        return nulls(len(array), to)
    if types.is_struct(to) and types.is_struct(stored):
        numbers = {name.lower(): number for number, name in enumerate(stored.names)}
        children = []
        for field in to:
            number = numbers.get(field.name.lower())
            child = pa.nulls(len(array)) if number is None else array.field(number)
            children.append(converted(child, field.type, scalars, nulls))
        return struct_array(children, to, array.is_null())
    mask = array.is_null() if array.null_count else None
    if types.is_map(to) and types.is_map(stored):
        offsets, keys, items = without_slack(array, array.keys, array.items)
        keys, items = converted(keys, to.key_type, scalars, nulls), converted(items, to.item_type, scalars, nulls)
        return pa.MapArray.from_arrays(offsets, keys, items, type=to, mask=mask)
    if types.is_list(to) and is_list(stored):
        array = plain_list(array)
        offsets, items = without_slack(array, array.values)
        return pa.ListArray.from_arrays(offsets, converted(items, to.value_type, scalars, nulls), type=to, mask=mask)
    return scalars(array, to)


def is_list(type_: pa.DataType) -> bool:
    """Whether it is any kind of list."""
    types = pa.types
    return bool(types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_))


def plain_list(array: pa.Array) -> pa.ListArray:
    """Return any kind of lists as the usual kind."""
    return array if pa.types.is_list(array.type) else array.cast(pa.list_(array.type.value_type))


def without_slack(array: pa.Array, *children: pa.Array) -> tuple[pa.Array, ...]:
    """Return where lists or maps start in their `children`, and these, both without what a slice leaves out."""
    offsets = array.offsets
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    return pc.subtract(offsets, first), *(child.slice(first, last - first) for child in children)
