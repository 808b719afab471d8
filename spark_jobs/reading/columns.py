"""Render a plan's columns in Spark: their types, what Spark's Parquet reader is asked for, and the conversions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as sf
from pyspark.sql import types as st
from pyspark.sql.pandas.types import from_arrow_type

from jetcapture_py.archive import layout
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.reading.columns import Fold, Reads, Table, without_null
from spark_jobs.reading.row_json import text_of


def quoted(name: str) -> str:
    """Quote a column's name for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def find(name: str, names: Sequence[str], *, case_sensitive: bool) -> str | None:
    """Return the name in `names` that Spark resolves `name` to, an exact match first; None if there is none.

    Raises JetcaptureError when it may be either of two.
    """
    if name in names or case_sensitive:
        return name if name in names else None
    matches = [other for other in names if other.lower() == name.lower()]
    if len(matches) > 1:
        raise JetcaptureError(f"columns {matches[0]} and {matches[1]} differ in case only: rename one with AS")
    return matches[0] if matches else None


def header(name: str) -> Column:
    """The first value of a message's header; null without it."""
    return sf.get(sf.col(layout.HEADERS)[name], sf.lit(0))


def read_schema(table: Table, reads: Reads, *, bundles: bool = False) -> st.StructType:
    """Return the schema passed to Spark's Parquet reader for objects that are read as `reads`.

    Objects in bundles have their keys as a column, and the bundle in their paths.
    """
    schema = st.StructType()
    for folded, column in table.columns.items():
        type_ = reads.get(folded, pa.null()) if column.drifted else column.type
        if bundles and folded == layout.BUNDLE:
            continue  # a column of objects under keys that were stored before the name was the archive's
        if type_ != pa.null():
            schema.add(column.name, from_arrow_type(without_null(type_, pa.int32())))
    for name in (*((layout.BUNDLE,) if bundles else ()), *table.partitions):
        schema.add(name, st.StringType())
    return schema


def select(table: Table, reads: Reads, *, bundles: bool = False) -> list[Column]:
    """Return the table's columns, from what was read so; none if that is what they are."""
    if not (bundles or any(column.drifted for column in table.columns.values())):
        return []
    selected = []
    for folded, column in table.columns.items():
        value = sf.col(quoted(column.name))
        if bundles and folded == layout.BUNDLE:
            value = _null(column.type)
        elif column.drifted:
            value = _converted(value, reads.get(folded, pa.null()), column.type, table.fold)
        selected.append(value.alias(column.name))
    return [*selected, *(sf.col(name) for name in table.partitions)]


def _null(type_: pa.DataType) -> Column:
    return sf.lit(None).cast(from_arrow_type(type_))


def _converted(column: Column, stored: pa.DataType, target: pa.DataType, fold: Fold) -> Column:
    if stored == target:
        return column
    if stored == pa.null():
        return _null(target)
    if target == pa.string() and (pa.types.is_nested(stored) or pa.types.is_timestamp(stored)):
        # Spark has no text, or one that depends on the session's time zone
        return text_of(column, from_arrow_type(stored))
    if pa.types.is_list(stored) and pa.types.is_list(target):
        if stored.value_type == pa.null():
            return _nulls(column, target.value_type)
        return sf.transform(column, lambda value: _converted(value, stored.value_type, target.value_type, fold))
    if pa.types.is_map(stored) and pa.types.is_map(target):
        if stored.item_type == pa.null():
            return sf.map_from_arrays(sf.map_keys(column), _nulls(column, target.item_type))
        return sf.transform_values(column, lambda _, value: _converted(value, stored.item_type, target.item_type, fold))
    if pa.types.is_struct(stored) and pa.types.is_struct(target):
        known = {fold(field.name): field.type for field in stored}
        fields = (
            _converted(column.getField(field.name), known.get(fold(field.name), pa.null()), field.type, fold)
            for field in target
        )
        named = (value.alias(field.name) for value, field in zip(fields, target, strict=True))
        return sf.when(column.isNotNull(), sf.struct(*named))
    return column.cast(from_arrow_type(target))


def _nulls(collection: Column, type_: pa.DataType) -> Column:
    """As many nulls as an array or a map has. Looking at its own would fail: Parquet says that they are integers of a
    dictionary, and Spark's `transform` looks them up there before it asks whether they are null."""
    return sf.when(collection.isNotNull(), sf.array_repeat(_null(type_), sf.size(collection)))


def spark_schema(fields: Iterable[pa.Field]) -> st.StructType:
    """Return the schema of these fields of a plan's table."""
    return st.StructType([st.StructField(field.name, from_arrow_type(field.type)) for field in fields])
