"""Find a common type for columns whose types differ, and convert them: for captures, compaction and readers.

Nulls take any type. Integers widen, integers and floats become double, and structs, lists and maps are merged
recursively. Field names match in any case. Decimals, and unsigned beside signed integers, become the narrowest type
that holds both exactly; only declared schemas have these. All other combinations become text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa
import pyarrow.compute as pc

Nulls = Callable[[int, pa.DataType], pa.Array]
"""Creates a column with this number of nulls."""

EXACT = 2**53
"""Integers up to this one, and down to its negative, are exact as a double."""
_SIGNED = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}
_MAX_DIGITS = 38


def common(types: Iterable[pa.DataType], *, lossless: bool) -> pa.DataType | None:
    """Return the narrowest type for the values of all `types` (at least one).

    Nulls take any type, and structs, lists and maps are merged recursively. Other types that differ are converted, in
    the end to text. With `lossless`, return None instead of converting.
    """
    result, *others = types
    for other in others:
        result = _merge(result, other, lossless=lossless)
        if result is None:
            return None
    return result


def _merge(a: pa.DataType, b: pa.DataType, *, lossless: bool) -> pa.DataType | None:
    """Return the type of `common` for two types."""
    types = pa.types
    if a == b or types.is_null(b):
        return a
    if types.is_null(a):
        return b
    if types.is_struct(a) and types.is_struct(b):
        fields = {field.name.lower(): field for field in a}
        for field in b:
            folded = field.name.lower()
            other = fields.setdefault(folded, field)
            if other.type != field.type:
                type_ = _merge(other.type, field.type, lossless=lossless)
                if type_ is None:
                    return None
                fields[folded] = pa.field(other.name, type_)
        return pa.struct(list(fields.values()))
    if types.is_list(a) and types.is_list(b):
        element = _merge(a.value_type, b.value_type, lossless=lossless)
        return None if element is None else pa.list_(element)
    if types.is_map(a) and types.is_map(b):
        key = _merge(a.key_type, b.key_type, lossless=lossless)
        value = _merge(a.item_type, b.item_type, lossless=lossless)
        return None if key is None or value is None else pa.map_(key, value)
    if lossless:
        return None
    if (exact := _exact(a, b)) is not None:
        return exact
    return pa.float64() if _is_number(a) and _is_number(b) else pa.string()


def _exact(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """Return the narrowest type for integers and decimals of both, or None."""
    types = pa.types
    if types.is_integer(a) and types.is_integer(b):
        if types.is_signed_integer(a) == types.is_signed_integer(b):
            return max(a, b, key=lambda type_: type_.bit_width)
        unsigned, signed = (b, a) if types.is_signed_integer(a) else (a, b)
        exact = _SIGNED.get(max(2 * unsigned.bit_width, signed.bit_width))
        if exact is not None:
            return exact
    one, other = _digits(a), _digits(b)
    if one is None or other is None:
        return None
    scale = max(one[1], other[1])
    precision = scale + max(one[0], other[0])
    return pa.decimal128(precision, scale) if precision <= _MAX_DIGITS else None


def _digits(type_: pa.DataType) -> tuple[int, int] | None:
    """Return the maximum digits before and after the decimal point; None unless it is an integer or a decimal."""
    if pa.types.is_decimal(type_):
        return type_.precision - type_.scale, type_.scale
    if pa.types.is_integer(type_):
        return len(str(2 ** (type_.bit_width - pa.types.is_signed_integer(type_)))), 0
    return None


def _is_number(type_: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type_) or pa.types.is_floating(type_))


def converted(
    array: pa.Array, to: pa.DataType, scalars: Callable[[pa.Array, pa.DataType], pa.Array], nulls: Nulls = pa.nulls
) -> pa.Array:
    """Convert a column to another type. Recurse into structs, lists and maps; `scalars` converts everything else.

    Struct fields match by name in any case; missing ones are null.
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
        return pa.StructArray.from_arrays(children, fields=list(to), mask=array.is_null())
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
    """Whether `type_` is any kind of list."""
    types = pa.types
    return bool(types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_))


def plain_list(array: pa.Array) -> pa.ListArray:
    """Return any kind of lists as the usual kind."""
    return array if pa.types.is_list(array.type) else array.cast(pa.list_(array.type.value_type))


def without_slack(array: pa.Array, *children: pa.Array) -> tuple[pa.Array, ...]:
    """Return the offsets and the children of lists or maps, without the values outside a slice."""
    offsets = array.offsets
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    return pc.subtract(offsets, first), *(child.slice(first, last - first) for child in children)
