"""Reads an archive in Spark: every message once, as one table, at the speed of native Parquet.

The names of the objects say which of them can share a message (see `layout`). Objects that cannot are read as they
are; only the others go through `dropDuplicates`. Objects whose columns differ in type still make one table.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial, reduce
from typing import Any, Literal

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql import types as st

from jetcapture_py import layout
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.layout import ObjectName
from spark_jobs.columns import Table, quoted

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
    return sf.col(quoted(name))


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
    table = Table(archive.footers(names), archive.quarantine, columns, sensitive)
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
    archive: _Archive, table: Table, names: Sequence[ObjectName], schema_of: Mapping[ObjectName, int]
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
