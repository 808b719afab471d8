"""Read objects with Arrow in Spark's Python workers, for a Spark without a file system for the store.

Slower than Spark's own reader, but fetches only the columns and row groups that are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial, reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st

from jetcapture_py.archive import layout
from jetcapture_py.archive.footer import group_bounds
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.overlaps import Range
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.transform.decode import conform
from spark_jobs.reading.columns import Field

_ROWS_PER_TASK = 250_000
_MIN_TASKS = 16
"""Minimum number of tasks, if there are as many objects: tasks mostly wait for the store."""
_BATCH_BYTES = 8 << 20
_MAX_ROWS = 1 << 16

Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowEngine:
    """Reads the archive's `files` on the workers. Skips row groups entirely before `start` or at or after `end`, and
    those without any of `keys`; the others may contain messages outside of these."""

    files: ArchiveFiles
    start: datetime | None
    end: datetime | None
    keys: Sequence[str | None] | None = None

    def frame(
        self,
        spark: SparkSession,
        names: Sequence[ObjectName],
        fields: Sequence[Field],
        partitions: Sequence[str],
        parts: Mapping[ObjectName, Sequence[Range]] | None,
    ) -> DataFrame:
        """Read objects, or only the ranges in `parts`, with these columns."""
        largest = sorted(names, key=lambda name: name.rows, reverse=True)
        objects = pa.table(
            {
                "path": pa.array([name.path for name in largest], pa.string()),
                "key": pa.array([name.key for name in largest], pa.string()),
                "bundle": [name.bundle for name in largest],
                "date": [_partition(name, -2) for name in largest],
                "hour": [_partition(name, -1) for name in largest],
                "ranges": pa.array(
                    [None if parts is None else [list(ends) for ends in parts[name]] for name in largest],
                    pa.list_(pa.list_(pa.int64())),
                ),
            }
        )
        tasks = min(len(names), max(_MIN_TASKS, sum(name.rows for name in names) // _ROWS_PER_TASK))
        sensitive = spark.conf.get("spark.sql.caseSensitive") == "true"
        schema = st.StructType([st.StructField(field.name, field.type) for field in fields])
        for name in partitions:
            schema.add(name, st.StringType())
        read = partial(_read, self, tuple(fields), tuple(partitions), str if sensitive else str.casefold)
        return spark.createDataFrame(objects).repartition(tasks).mapInArrow(read, schema)


def _partition(name: ObjectName, position: int) -> str:
    return name.directory.split("/")[position].partition("=")[2]


def _read(
    engine: ArrowEngine,
    fields: Sequence[Field],
    partitions: Sequence[str],
    fold: Callable[[str], str],
    batches: Batches,
) -> Batches:
    """Read the rows of the objects that `batches` name. Runs in a worker."""
    sources = {field.source for field in fields}
    for batch in batches:
        for row in batch.to_pylist():
            values = {name: row[name] for name in partitions if not (row["bundle"] and name == layout.KEY)}
            wanted = sources if len(values) == len(partitions) else {*sources, layout.KEY}
            with engine.files.parquet(engine.files.at(row["path"])) as parquet:
                for rows in rows_of(parquet, engine, wanted, fold, row["ranges"]):
                    yield _shaped(rows, fields, fold, values, partitions)


def rows_of(
    parquet: pq.ParquetFile,
    engine: ArrowEngine,
    sources: Collection[str],
    fold: Callable[[str], str],
    ranges: Sequence[Range] | None,
) -> Batches:
    """Read the columns whose folded names are in `sources`, from the row groups that may have matching rows."""
    columns = [name for name in parquet.schema_arrow.names if fold(name) in sources]
    if ranges is not None and layout.SEQ not in columns:
        columns.append(layout.SEQ)
    groups = [parquet.metadata.row_group(index) for index in range(parquet.metadata.num_row_groups)]
    chosen = [index for index, group in enumerate(groups) if _may_hold(group, engine, ranges)]
    weight = sum(groups[index].total_byte_size for index in chosen)
    rows = sum(groups[index].num_rows for index in chosen)
    size = max(1, min(_MAX_ROWS, _BATCH_BYTES * rows // max(1, weight)))
    for batch in parquet.iter_batches(size, row_groups=chosen, columns=columns, use_threads=False):
        yield batch if ranges is None else batch.filter(_within(batch.column(layout.SEQ), ranges))


def _may_hold(group: Any, engine: ArrowEngine, ranges: Sequence[Range] | None) -> bool:
    if engine.keys is not None and not _may_have_key(group, engine.keys):
        return False
    times, seqs = group_bounds(group, layout.TIMESTAMP), group_bounds(group, layout.SEQ)
    if times is not None:
        if engine.start is not None and times[1] < engine.start:
            return False
        if engine.end is not None and times[0] >= engine.end:
            return False
    if ranges is None or seqs is None:
        return True
    return any(first <= seqs[1] and seqs[0] <= last for first, last in ranges)


def _may_have_key(group: Any, keys: Sequence[str | None]) -> bool:
    """Whether a row group may have rows of one of `keys`, by the statistics of its column of keys, if it has one."""
    columns = (group.column(number) for number in range(group.num_columns))
    known = next((each.statistics for each in columns if each.path_in_schema == layout.KEY), None)
    if known is None or not known.has_null_count:
        return True
    if None in keys and known.null_count:
        return True
    return bool(known.has_min_max) and any(key is not None and known.min <= key <= known.max for key in keys)


def _within(seqs: pa.Array, ranges: Iterable[Range]) -> pa.Array:
    inside = (pc.and_(pc.greater_equal(seqs, first), pc.less_equal(seqs, last)) for first, last in ranges)
    return reduce(pc.or_, inside)


def _shaped(
    batch: pa.RecordBatch,
    fields: Sequence[Field],
    fold: Callable[[str], str],
    values: Mapping[str, str | None],
    partitions: Sequence[str],
) -> pa.RecordBatch:
    """Return the rows with exactly these fields and types; columns that the object lacks are null. Partition columns
    have their `values`, or are columns of the object."""
    stored = {fold(name): batch.column(index) for index, name in enumerate(batch.schema.names)}
    columns = {}
    for each in fields:
        found, wanted = stored.get(each.source), _arrow_type(each.type)
        if found is not None and each.takes(found.type, fold):
            columns[each.name] = _cast(found, wanted, fold)
        else:
            columns[each.name] = pa.nulls(batch.num_rows, wanted)
    for name in partitions:
        value = pa.scalar(values.get(name), pa.string())
        columns[name] = pa.repeat(value, batch.num_rows) if name in values else stored[name]
    return pa.RecordBatch.from_pydict(columns)


def _cast(array: pa.Array, to: pa.DataType, fold: Callable[[str], str]) -> pa.Array:
    if fold is str or not pa.types.is_nested(to):
        return array.cast(to)
    # Arrow casts structs by exact field names: a field in another case would silently become null
    return conform(pa.RecordBatch.from_arrays([array], ["column"]), pa.schema([("column", to)])).column(0)


_SIMPLE: dict[type[st.DataType], pa.DataType] = {
    st.BooleanType: pa.bool_(),
    st.ByteType: pa.int8(),
    st.ShortType: pa.int16(),
    st.IntegerType: pa.int32(),
    st.LongType: pa.int64(),
    st.FloatType: pa.float32(),
    st.DoubleType: pa.float64(),
    st.StringType: pa.string(),
    st.BinaryType: pa.binary(),
    st.DateType: pa.date32(),
    st.TimestampType: pa.timestamp("us", "UTC"),
    st.TimestampNTZType: pa.timestamp("us"),
}


def _arrow_type(kind: st.DataType) -> pa.DataType:
    """Return the Arrow type that Spark expects for a column of type `kind`."""
    if isinstance(kind, st.DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, st.ArrayType):
        return pa.list_(_arrow_type(kind.elementType))
    if isinstance(kind, st.MapType):
        return pa.map_(_arrow_type(kind.keyType), _arrow_type(kind.valueType))
    if isinstance(kind, st.StructType):
        return pa.struct([(field.name, _arrow_type(field.dataType)) for field in kind])
    return _SIMPLE[type(kind)]
