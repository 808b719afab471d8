"""Reads an archive in Spark: every message once, as one table, at the speed of native Parquet.

The names of the objects say which of them can share a message (see `layout`). Objects that cannot are read as they
are; only the others go through `dropDuplicates`. Objects whose columns differ in type still make one table.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql import types as st

from jetcapture_py import layout
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.layout import ObjectName

Dedupe = Literal["auto", "full", "none"]

LONGEST_INTERVAL = timedelta(days=1)
"""A name gives the bucket's start only; an object that starts up to this much before `start` may reach into it."""

_HADOOP_SCHEMES = {"s3": "s3a", "az": "abfs", "gcs": "gs"}
_FOOTER_THREADS = 32
_QUARANTINE = (
    f"{layout.STREAM} string, {layout.SUBJECT} string, {layout.SEQ} long, {layout.TIMESTAMP} timestamp, "
    f"{layout.DELIVERED} int, {layout.HEADERS} map<string, array<string>>, {layout.PAYLOAD} binary, "
    f"{layout.STAGE} string, {layout.ERROR} string, {layout.RAW_HEADERS} binary, date string, hour string"
)


def session(app_name: str) -> SparkSession:
    """The active Spark session, or a quiet new one: local unless spark-submit chose a master; UTC."""
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    builder = SparkSession.builder.appName(app_name)
    settings = {
        "spark.sql.session.timeZone": "UTC",
        # workers import this package from where the driver did, installed or not
        "spark.executorEnv.PYTHONPATH": str(Path(layout.__file__).resolve().parents[1]),
    }
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # else spark-submit has started the JVM, and decided on these
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings |= {
            "spark.master": "local[*]",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
            "spark.sql.warehouse.dir": tempfile.gettempdir(),  # else one is made wherever this is run
        }
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def read_archive(
    spark: SparkSession,
    url: str,
    stream: str,
    *,
    start: datetime | None = None,
    end: datetime | None = None,
    keys: Iterable[str | None] | None = None,
    columns: Sequence[str] | None = None,
    dedupe: Dedupe = "auto",
    quarantine: bool = False,
    options: Mapping[str, Any] | None = None,
) -> DataFrame:
    """The archive of `stream` under `url` as a DataFrame, with `key`, `date` and `hour` as string columns.

    `start` (inclusive) and `end` (exclusive) choose messages by `_nats_timestamp`, and by the buckets in the names
    which objects are opened at all. An archive with another `block.time` has buckets in that time: filter it with SQL.
    `keys` chooses keys, None among them for messages without one. `columns` names the columns wanted.

    `dedupe`: `auto` drops second copies where the names allow any; `full` compares all messages, for archives whose
    key rule or decoding changed while copies were in flight; `none` returns what is stored.

    A column that some objects have as integer and others as float becomes double; types that do not go together at
    all become string, structs and lists as JSON. `options` are handed to fsspec, which lists the objects.
    """
    if dedupe not in ("auto", "full", "none"):
        raise JetcaptureError(f"dedupe={dedupe!r}: expected auto, full or none")
    for name, moment in (("start", start), ("end", end)):
        if moment is not None and moment.tzinfo is None:
            raise JetcaptureError(f"{name}={moment.isoformat()} has no time zone")
    archive = _Archive.open(spark, url, stream, quarantine, options or {})
    names = archive.objects(keys)
    chosen = [name for name in names if _may_hold(name, start, end)]
    if chosen:
        frame = _read(archive, chosen, columns, dedupe)
    elif known := names or archive.objects(None):  # no rows, with the columns that the stream's last object has
        frame = _read(archive, [max(known, key=lambda name: name.bucket)], columns, "none").where(sf.expr("false"))
    else:
        frame = archive.nothing()
    if start is not None:
        frame = frame.where(sf.col(layout.TIMESTAMP) >= sf.lit(start))
    if end is not None:
        frame = frame.where(sf.col(layout.TIMESTAMP) < sf.lit(end))
    return frame if columns is None else frame.select(*(_column(frame, name) for name in columns))


def archive_view(spark: SparkSession, url: str, stream: str, name: str | None = None, **read: Any) -> DataFrame:
    """Register the archive as temporary view `name`, by default the stream's name with `_` for what SQL would not
    read as a name, so that plain SQL finds it. `read` is what `read_archive` takes."""
    frame = read_archive(spark, url, stream, **read)
    frame.createOrReplaceTempView(name or re.sub(r"\W", "_", stream))
    return frame


def _may_hold(name: ObjectName, start: datetime | None, end: datetime | None) -> bool:
    if start is not None and name.bucket + LONGEST_INTERVAL.total_seconds() <= start.timestamp():
        return False
    return end is None or name.bucket < end.timestamp()


def _column(frame: DataFrame, name: str) -> Column:
    if name.casefold() not in (column.casefold() for column in frame.columns):
        raise JetcaptureError(f"the archive has no column {name}; it has {', '.join(frame.columns)}")
    return sf.col(_quoted(name))


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Archive:
    """One stream's objects: listed through fsspec, read by Spark under `prefix`."""

    spark: SparkSession
    fs: Any
    root: str
    prefix: str
    url: str
    stream: str
    quarantine: bool

    @classmethod
    def open(cls, spark: SparkSession, url: str, stream: str, quarantine: bool, options: Mapping[str, Any]) -> _Archive:
        shown = re.sub(r"//[^/@]*@", "//", url)
        try:
            fs, root = fsspec.url_to_fs(url, **options)
        except (ValueError, ImportError) as error:
            raise JetcaptureError(f"cannot open {shown}: {error}") from error
        scheme = "file" if isinstance(fs, LocalFileSystem) else url.partition("://")[0]
        return cls(
            spark=spark,
            fs=fs,
            root=str(root).rstrip("/"),
            prefix=f"{_hadoop_scheme(spark, scheme)}://",
            url=shown,
            stream=stream,
            quarantine=quarantine,
        )

    @property
    def directory(self) -> str:
        return f"{layout.QUARANTINE}/{self.stream}" if self.quarantine else self.stream

    def objects(self, keys: Iterable[str | None] | None) -> list[ObjectName]:
        """The stream's objects, of these keys if any are named."""
        directories = [self.directory]
        if keys is not None:
            if self.quarantine:
                raise JetcaptureError("the quarantine is not divided by key")
            wanted = [keys] if isinstance(keys, str) else keys
            directories = [f"{self.directory}/key={layout.escape_key(key)}" for key in dict.fromkeys(wanted)]
        cut = len(self.root) + 1
        found = (path[cut:] for directory in directories for path in self._find(directory))
        return [name for name in map(layout.parse_path, found) if name is not None]

    def _find(self, directory: str) -> list[str]:
        try:
            paths: list[str] = self.fs.find(f"{self.root}/{directory}")
        except FileNotFoundError:
            return []
        except Exception as error:  # each fsspec backend has errors of its own
            raise JetcaptureError(f"cannot list {self.url}: {error}") from error
        return paths

    def nothing(self) -> DataFrame:
        """An empty quarantine, which is how it should be, for a stream that has an archive; otherwise an error."""
        try:
            entries = [str(path).rsplit("/", 1)[-1] for path in self.fs.ls(self.root, detail=False)]
        except Exception:  # it would only add to a message that says what is wrong already
            entries = []
        if self.quarantine and self.stream in entries:
            return self.spark.createDataFrame([], _QUARANTINE)
        streams = ", ".join(sorted(entry for entry in entries if not entry.startswith(("_", "."))))
        known = f"; there are: {streams}" if streams else ""
        raise JetcaptureError(f"no archive of stream {self.stream} under {self.url}{known}")

    def frame(self, names: Iterable[ObjectName], schema: st.StructType) -> DataFrame:
        """What Spark reads natively. An explicit schema keeps partition values strings; no path is a pattern."""
        paths = [f"{self.prefix}{self.root}/{name.path}" for name in names]
        reader = self.spark.read.schema(schema).option("__globPaths__", "false")
        return reader.option("basePath", f"{self.prefix}{self.root}/{self.directory}").parquet(*paths)

    def footers(self, names: Sequence[ObjectName]) -> list[pa.Schema]:
        """Each object's schema, from its footer."""

        def footer(name: ObjectName) -> pa.Schema:
            try:
                return pq.read_schema(f"{self.root}/{name.path}", filesystem=self.fs).remove_metadata()
            except (OSError, pa.ArrowException) as error:
                raise JetcaptureError(f"cannot read {self.url}/{name.path}: {error}") from error

        with ThreadPoolExecutor(_FOOTER_THREADS) as threads:
            return list(threads.map(footer, names))


def _hadoop_scheme(spark: SparkSession, scheme: str) -> str:
    """The name by which Spark has a file system for `scheme`; raises when it has none."""
    hadoop: Any = spark._jvm
    configuration: Any = spark._jsc
    for candidate in dict.fromkeys((scheme, _HADOOP_SCHEMES.get(scheme, scheme))):
        try:
            hadoop.org.apache.hadoop.fs.FileSystem.getFileSystemClass(candidate, configuration.hadoopConfiguration())
        except Exception:  # noqa: S112 - py4j wraps whatever the class loader threw; it has no such file system
            continue
        return candidate
    raise JetcaptureError(f"Spark cannot read {scheme}:// URLs: it has no file system for them on its class path")


def _read(archive: _Archive, names: Sequence[ObjectName], columns: Sequence[str] | None, dedupe: Dedupe) -> DataFrame:
    """The objects as one table, deduplicated."""
    if dedupe == "auto":
        alone, shared = layout.split_overlapping(names)
    else:
        alone, shared = ([], list(names)) if dedupe == "full" else (list(names), [])
    sensitive = archive.spark.conf.get("spark.sql.caseSensitive") == "true"
    table = _Table(archive.footers(names), archive.quarantine, columns, sensitive)
    schema_of = dict(zip(names, table.schemas, strict=True))
    parts = []
    if alone:
        parts.append(_union(archive, table, alone, schema_of))
    if shared:
        frame = _union(archive, table, shared, schema_of)
        identity = [*layout.IDENTITY, *(name for name in (layout.ROW,) if name in frame.columns)]
        if dedupe == "auto":  # copies share key and bucket, and a filter on these can then pass the deduplication
            identity += table.partitions
        parts.append(frame.dropDuplicates(identity))
    return reduce(partial(DataFrame.unionByName, allowMissingColumns=True), parts)


def _union(
    archive: _Archive, table: _Table, names: Sequence[ObjectName], schema_of: Mapping[ObjectName, int]
) -> DataFrame:
    """The objects as one table with the columns of `table`: one native read for objects of the same types."""
    alike: dict[tuple[st.DataType | None, ...], list[ObjectName]] = defaultdict(list)
    for name in names:
        alike[table.drift(schema_of[name])].append(name)
    frames = []
    for group in alike.values():
        schema = schema_of[group[0]]
        frame = archive.frame(group, table.read_schema(schema))
        frames.append(frame.select(*table.select(schema)))
    return reduce(partial(DataFrame.unionByName, allowMissingColumns=True), frames)


class _Table:
    """The columns that a set of objects has together, and how each object's columns become them.

    `schemas` numbers the distinct schemas, one number for each object. A column whose types go together is read as
    their common type, which Parquet allows for structs that have more or fewer fields; any other is read as it is
    stored, object by object, and then converted.
    """

    def __init__(
        self, footers: Sequence[pa.Schema], quarantine: bool, columns: Sequence[str] | None, case_sensitive: bool
    ) -> None:
        self.partitions = list(layout.PARTITIONS[1:] if quarantine else layout.PARTITIONS)
        self._fold = str if case_sensitive else str.casefold
        wanted = None
        if columns is not None:
            wanted = {self._fold(name) for name in (*columns, *layout.IDENTITY, layout.ROW)}
        numbers: dict[pa.Schema, int] = {}
        self.schemas = [numbers.setdefault(schema, len(numbers)) for schema in footers]
        self._stored = [self._columns(schema, wanted) for schema in numbers]
        self._names: dict[str, str] = {}
        types: dict[str, dict[st.DataType, None]] = defaultdict(dict)
        for stored in self._stored:
            for folded, (name, kind) in stored.items():
                self._names.setdefault(folded, name)
                types[folded][kind] = None
        first = {name: position for position, name in enumerate((*layout.ENVELOPE, layout.ROW))}
        ordered = sorted(types, key=lambda folded: first.get(folded, len(first)))
        self._target = {folded: _target(list(types[folded])) for folded in ordered}
        self._drifted = [
            folded for folded in ordered if any(not _readable(kind, self._target[folded]) for kind in types[folded])
        ]

    def _columns(self, schema: pa.Schema, wanted: set[str] | None) -> dict[str, tuple[str, st.DataType]]:
        stored: dict[str, tuple[str, st.DataType]] = {}
        for field in schema:
            folded = self._fold(field.name)
            if wanted is not None and folded not in wanted:
                continue
            if folded in stored:
                raise JetcaptureError(
                    f"columns {stored[folded][0]} and {field.name} differ in case only: "
                    "set spark.sql.caseSensitive=true"
                )
            stored[folded] = field.name, _spark_type(field.name, field.type)
        return stored

    def drift(self, schema: int) -> tuple[st.DataType | None, ...]:
        """Objects for which this is equal can be read at once."""
        stored = self._stored[schema]
        return tuple(stored[folded][1] if folded in stored else None for folded in self._drifted)

    def read_schema(self, schema: int) -> st.StructType:
        """What Spark is told that the objects hold."""
        stored = self._stored[schema]
        read = st.StructType()
        for folded, target in self._target.items():
            if folded not in self._drifted:
                read.add(self._names[folded], target)
            elif folded in stored and not isinstance(stored[folded][1], st.NullType):
                read.add(self._names[folded], _without_null(stored[folded][1], st.IntegerType()))
        for name in self.partitions:
            read.add(name, st.StringType())
        return read

    def select(self, schema: int) -> list[Column]:
        """The table's columns, from what was read."""
        stored = self._stored[schema]
        chosen = []
        for folded, target in self._target.items():
            name = self._names[folded]
            column = sf.col(_quoted(name))
            if folded in self._drifted:
                kind = stored[folded][1] if folded in stored else st.NullType()
                column = _converted(column, kind, target).alias(name)
            chosen.append(column)
        return [*chosen, *(sf.col(name) for name in self.partitions)]


_INTEGRAL = (st.ByteType, st.ShortType, st.IntegerType, st.LongType)
_NESTED = (st.StructType, st.ArrayType, st.MapType)


def _target(types: Sequence[st.DataType]) -> st.DataType:
    """The type of a column that objects store as `types`."""
    merged: st.DataType | None = types[0]
    for kind in types[1:]:
        merged = None if merged is None else _merge(merged, kind)
    if merged is not None:
        return _without_null(merged, st.StringType())
    known = [kind for kind in types if not isinstance(kind, st.NullType)]
    if all(isinstance(kind, _INTEGRAL) for kind in known):
        return st.LongType()
    if all(isinstance(kind, (*_INTEGRAL, st.FloatType, st.DoubleType)) for kind in known):
        return st.DoubleType()
    return st.StringType()


def _merge(left: st.DataType, right: st.DataType) -> st.DataType | None:
    """The type that Parquet can read both as, null types aside; None when there is none."""
    if left == right or isinstance(right, st.NullType):
        return left
    if isinstance(left, st.NullType):
        return right
    if isinstance(left, st.ArrayType) and isinstance(right, st.ArrayType):
        element = _merge(left.elementType, right.elementType)
        return None if element is None else st.ArrayType(element)
    if isinstance(left, st.MapType) and isinstance(right, st.MapType):
        key, value = _merge(left.keyType, right.keyType), _merge(left.valueType, right.valueType)
        return None if key is None or value is None else st.MapType(key, value)
    if isinstance(left, st.StructType) and isinstance(right, st.StructType):
        fields = {field.name: field.dataType for field in left}
        for field in right:
            merged = _merge(fields.get(field.name, field.dataType), field.dataType)
            if merged is None:
                return None
            fields[field.name] = merged
        return st.StructType([st.StructField(name, kind) for name, kind in fields.items()])
    return None


def _readable(stored: st.DataType, target: st.DataType) -> bool:
    """Whether Parquet reads a column that is stored as `stored` as `target`."""
    return not _has_null(stored) and _merge(stored, target) == target


def _has_null(kind: st.DataType) -> bool:
    return _without_null(kind, st.StringType()) != kind


def _without_null(kind: st.DataType, instead: st.DataType) -> st.DataType:
    """`kind` with another type for values of which every one is null. Parquet stores those as int32."""
    if isinstance(kind, st.NullType):
        return instead
    if isinstance(kind, st.ArrayType):
        return st.ArrayType(_without_null(kind.elementType, instead))
    if isinstance(kind, st.MapType):
        return st.MapType(_without_null(kind.keyType, instead), _without_null(kind.valueType, instead))
    if isinstance(kind, st.StructType):
        return st.StructType([st.StructField(f.name, _without_null(f.dataType, instead)) for f in kind])
    return kind


def _converted(column: Column, stored: st.DataType, target: st.DataType) -> Column:
    if isinstance(stored, st.NullType):
        return sf.lit(None).cast(target)
    if not isinstance(stored, _NESTED):
        return column.cast(target)
    text = sf.to_json(column, {"ignoreNullFields": "false"})
    return sf.from_json(text, target) if isinstance(target, _NESTED) else text


_SIMPLE: dict[pa.DataType, st.DataType] = {
    pa.null(): st.NullType(),
    pa.bool_(): st.BooleanType(),
    pa.int8(): st.ByteType(),
    pa.int16(): st.ShortType(),
    pa.int32(): st.IntegerType(),
    pa.int64(): st.LongType(),
    pa.uint8(): st.ShortType(),
    pa.uint16(): st.IntegerType(),
    pa.uint32(): st.LongType(),
    pa.uint64(): st.DecimalType(20, 0),
    pa.float32(): st.FloatType(),
    pa.float64(): st.DoubleType(),
    pa.string(): st.StringType(),
    pa.large_string(): st.StringType(),
    pa.binary(): st.BinaryType(),
    pa.large_binary(): st.BinaryType(),
    pa.date32(): st.DateType(),
    pa.date64(): st.DateType(),
}


def _spark_type(column: str, kind: pa.DataType) -> st.DataType:
    """The type that Spark reads Parquet of this Arrow type as."""
    simple = _SIMPLE.get(kind)
    if simple is not None:
        return simple
    if pa.types.is_dictionary(kind):
        return _spark_type(column, kind.value_type)
    if pa.types.is_timestamp(kind) and kind.unit != "ns":
        return st.TimestampType() if kind.tz else st.TimestampNTZType()
    if pa.types.is_decimal(kind) and kind.precision <= 38:
        return st.DecimalType(kind.precision, kind.scale)
    if pa.types.is_fixed_size_binary(kind):
        return st.BinaryType()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return st.ArrayType(_spark_type(column, kind.value_type))
    if pa.types.is_map(kind):
        return st.MapType(_spark_type(column, kind.key_type), _spark_type(column, kind.item_type))
    if pa.types.is_struct(kind):
        return st.StructType([st.StructField(f.name, _spark_type(column, f.type)) for f in kind])
    raise JetcaptureError(f"column {column} is {kind}, which Spark cannot read: name the columns you need instead")


def one_line(error: Exception) -> str:
    """A Spark error as one clear line for a terminal."""
    text = error.getMessage() if isinstance(error, PySparkException) else str(error)
    return (text or type(error).__name__).strip().split("\n", 1)[0].split(" SQLSTATE:", 1)[0]
