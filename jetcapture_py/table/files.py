"""Describe an archive's objects as files of a table: partition, rows, and the bounds of their columns.

Bounds come from the statistics in an object's footer, so a query opens only objects that may have matching rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.schema import Schema, index_by_id
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BooleanType,
    DateType,
    DecimalType,
    IntegerType,
    LongType,
    PrimitiveType,
    TimestampType,
    TimestamptzType,
    TimeType,
)
from pyiceberg.utils.truncate import truncate_upper_bound_text_string

from jetcapture_py.archive.schema import field_id

WHOLE, DAILY = 0, 1
"""The partition specs of every table: none, and the day of its time column."""
_DAY = 86_400_000_000
_LENGTH = 16
"""Characters of a text in its bounds."""


class Leaf(NamedTuple):
    """A column of an object with bounds, not inside a list or map."""

    position: int
    """Its position among the columns of the file."""
    field: int
    """Its field id."""
    type: PrimitiveType
    pack: Callable[[int], bytes] | None
    """Encodes its bounds; None for texts and decimals."""


_PACKED: dict[type[PrimitiveType], Callable[[int], bytes]] = {
    BooleanType: Struct("<?").pack,
    **dict.fromkeys((IntegerType, DateType), Struct("<i").pack),
    **dict.fromkeys((LongType, TimeType, TimestampType, TimestamptzType), Struct("<q").pack),
}


def leaves(schema: pa.Schema, table: Schema) -> list[Leaf]:
    """Return the columns of this schema whose bounds a table can have."""
    types = {number: field.field_type for number, field in index_by_id(table).items()}
    columns, index = list[Leaf](), 0

    def visit(field: pa.Field, *, single: bool) -> None:
        nonlocal index
        for child in _children(field.type):
            visit(child, single=single and pa.types.is_struct(field.type))
        if not field.type.num_fields:
            type_ = types.get(field_id(field)) if single else None
            if isinstance(type_, PrimitiveType) and _has_bounds(field.type):
                columns.append(Leaf(index, field_id(field), type_, _PACKED.get(type(type_))))
            index += 1

    for field in schema:
        visit(field, single=True)
    return columns


def _children(type_: pa.DataType) -> Iterator[pa.Field]:
    if pa.types.is_map(type_):
        yield from (type_.key_field, type_.item_field)
    else:
        yield from (type_.field(number) for number in range(type_.num_fields))


def _has_bounds(type_: pa.DataType) -> bool:
    """Whether statistics of a type can be a column's bounds: engines disagree on NaN, and long bytes are useless."""
    types = pa.types
    if types.is_timestamp(type_):
        return bool(type_.unit == "us")
    signed = types.is_integer(type_) and not types.is_uint32(type_)  # its statistics in Parquet are signed
    text = types.is_string(type_) or types.is_large_string(type_)
    return (
        signed
        or text
        or any(test(type_) for test in (types.is_boolean, types.is_date32, types.is_time64, types.is_decimal))
    )


def data_file(place: str, size: int, metadata: pq.FileMetaData, columns: Sequence[Leaf], time_column: int) -> DataFile:
    """Describe an object by its decoded footer. `time_column` is the field id of the table's time column."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    lower, upper, empty = dict[int, bytes](), dict[int, bytes](), dict[int, int]()
    day: tuple[int | None, ...] = () if any(leaf.field == time_column for leaf in columns) else (None,)
    for leaf in columns:
        limits, nulls = _limits(groups, leaf)
        if limits is None:
            if nulls == metadata.num_rows:
                empty[leaf.field] = nulls
            continue
        low, high = limits
        if leaf.field == time_column and not nulls and low // _DAY == high // _DAY:
            day = (low // _DAY,)
        for bounds, value in ((lower, low), (upper, high)):
            bound = leaf.pack(value) if leaf.pack else _bound(leaf.type, value, upper=bounds is upper)
            if bound is not None:
                bounds[leaf.field] = bound
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=place,
        file_format=FileFormat.PARQUET,
        partition=Record(*day),
        record_count=metadata.num_rows,
        file_size_in_bytes=size,
        value_counts=empty,
        null_value_counts=empty,
        lower_bounds=lower,
        upper_bounds=upper,
    )
    file.spec_id = DAILY if day else WHOLE
    return file


def _limits(groups: Sequence[Any], leaf: Leaf) -> tuple[tuple[Any, Any] | None, int]:
    """Return a column's minimum and maximum, None if unknown, and its number of nulls, -1 if unknown."""
    lows, highs, nulls = [], [], 0
    for group in groups:
        statistics = group.column(leaf.position).statistics
        if statistics is None or not statistics.has_null_count:
            return None, -1
        nulls += statistics.null_count
        if statistics.has_min_max:
            lows.append(statistics.min_raw)
            highs.append(statistics.max_raw)
        elif statistics.num_values:
            return None, -1
    if not lows:
        return None, nulls
    if isinstance(leaf.type, DecimalType):
        lows, highs = ([_unscaled(value) for value in values] for values in (lows, highs))
    return (min(lows), max(highs)), nulls


def _unscaled(value: Any) -> int:
    return int.from_bytes(value, "big", signed=True) if isinstance(value, bytes) else int(value)


def _bound(type_: PrimitiveType, value: Any, *, upper: bool) -> bytes | None:
    """Return a bound of decimals or texts in the form of manifests; None if impossible, as above some texts."""
    if isinstance(type_, DecimalType):
        return bytes(value.to_bytes((value.bit_length() + 8) // 8, "big", signed=True))
    text = value.decode()
    if len(text) > _LENGTH:
        text = truncate_upper_bound_text_string(text, _LENGTH) if upper else text[:_LENGTH]
    try:
        return None if text is None else text.encode()
    except UnicodeEncodeError:  # the text after the last one before the surrogates
        return None
