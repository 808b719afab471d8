"""Read exactly the objects of a plan with Spark's own reader, regardless of later refreshes.

Spark remembers directories and may list them again at any time: on `REFRESH TABLE`, or in Spark Connect after some
other queries. Then messages stored since would be read twice, and compacted ones would be missing. So Spark gets a list
of files in the only form that it accepts: the log that a streaming query writes beside its output. The log is read
once, while the scan is planned, and nothing is ever listed.

Spark Connect, which plans on a server, gets the paths. A refresh leaves out vanished objects, so each query first
counts the objects, and fails with "read it again" unless all exist.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.utils import is_remote

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.overlaps import Range
from jetcapture_py.reading.arrow import PlanReader, log_nulled
from jetcapture_py.reading.plan import ReadPlan
from jetcapture_py.store.archive import AGAIN
from spark_jobs.reading.columns import spark_schema
from spark_jobs.reading.location import ArchiveLocation

_FILE, _RANGES_FILE, _FIRST, _LAST = "_nats_file", "_nats_ranges_file", "_nats_first", "_nats_last"
_BLOCK = "_nats_block"
_MIN_SHIFT = 6
"""A block of sequences has at least 64 of them, as a power of two."""
_BLOCKS = 65_536
"""Rows of a table of ranges; more blocks than these become longer blocks."""
_POSITION = "_nats_row, or 0"
_ROWS_PER_TASK = 250_000
_MIN_TASKS = 16
"""Minimum number of tasks that read with Arrow, if there are as many objects: tasks mostly wait for the store."""
_COUNTED_BY_A_TASK = 4096
"""Local objects whose status one task checks, in some hundredths of a second."""
_STATUS = "path string, modificationTime timestamp, length long, content binary"
_UNRESERVED = "_-!.~'()*,;:$&+=/@"
"""Characters of a path that Java does not escape in a URI."""


@dataclass(frozen=True)
class Scans:
    """Renders `plan` for an archive at `location`.

    Spark's own reader reads objects if `native`; those whose columns drifted are read with Arrow in Python workers.
    """

    spark: SparkSession
    location: ArchiveLocation
    plan: ReadPlan
    native: bool

    def rows(self) -> DataFrame:
        """Return the rows of the plan's objects, each message once."""
        plan = self.plan
        frames = [*self._frames(plan.whole), *self._frames(plan.parts)]
        if plan.shared:
            compared, identity = reduce(DataFrame.union, self._frames(plan.shared)), [*plan.identity]
            if plan.table.several_rows:  # a batch in which all messages have one row leaves the number out
                compared = compared.withColumn(_POSITION, sf.coalesce(layout.ROW, sf.lit(0)))
                identity.append(_POSITION)
            frames.append(compared.dropDuplicates(identity).drop(_POSITION))
        nothing = self.spark.createDataFrame([], spark_schema(plan.table.schema))
        return reduce(DataFrame.union, frames) if frames else nothing

    def _frames(self, names: Iterable[ObjectName]) -> Iterator[DataFrame]:
        """Return DataFrames of these objects, or the plan's parts of them: one per layout and reader."""
        schema_of, keys, drifts = self.plan.schema_of, self.plan.selection.keys, cache(self.plan.table.drifts)
        alike: dict[tuple[bool, bool], list[ObjectName]] = defaultdict(list)
        for name in names:
            alike[bool(name.bundle), self.native and not drifts(schema_of[name])].append(name)
        for (bundled, native), members in alike.items():
            frame = self._natively(members, bundled) if native else self._with_arrow(members)
            if bundled and keys is not None:  # lets Spark skip row groups and pages
                listed = sf.col(layout.KEY).isin([key for key in keys if key is not None])
                frame = frame.where(listed | sf.col(layout.KEY).isNull() if None in keys else listed)
            yield frame

    def _with_arrow(self, names: Sequence[ObjectName]) -> DataFrame:
        largest = sorted(names, key=lambda name: name.rows, reverse=True)
        objects = pa.table(
            {
                "path": pa.array([name.path for name in largest], pa.string()),
                "ranges": pa.array([self.plan.parts.get(name) for name in largest], pa.list_(pa.list_(pa.int64()))),
            }
        )
        tasks = min(len(names), max(_MIN_TASKS, sum(name.rows for name in names) // _ROWS_PER_TASK))
        schema = self.plan.table.schema
        read = partial(_read_objects, PlanReader.of(self.plan, schema.names))
        return self.spark.createDataFrame(objects).repartition(tasks).mapInArrow(read, spark_schema(schema))

    def _natively(self, names: Sequence[ObjectName], bundled: bool) -> DataFrame:
        # objects in bundles have their keys as a column, and the bundle in their paths
        fields = [*self.plan.table.schema, *([pa.field(layout.BUNDLE, pa.string())] if bundled else [])]
        # an explicit schema keeps partition values strings; what the session ignores would be missing without an error
        reader = self._reader(ignoreMissingFiles="false").format("parquet").schema(spark_schema(fields))
        frame = self._from_list(reader, names)
        frame = self._from_paths(reader, names) if frame is None else frame
        parts = {name: self.plan.parts[name] for name in names if name in self.plan.parts}
        return (_within(frame, parts) if parts else frame).drop(layout.BUNDLE)

    def _from_list(self, reader: DataFrameReader, names: Sequence[ObjectName]) -> DataFrame | None:
        """Load a list of files; None if Spark cannot take one."""
        # with "=" in the stream's name, a list of files would have one more partition column
        if is_remote() or "=" in self.plan.directory:
            return None
        try:
            with self._log(names) as url:
                frame = reader.load(url)
            scan: Any = frame
            # fewer or more if Spark is configured to ignore such logs
            return frame if len(scan._jdf.inputFiles()) == len(names) else None
        except Exception:  # or to read them in a way that fails here; py4j raises errors of its own
            return None

    def _from_paths(self, reader: DataFrameReader, names: Sequence[ObjectName]) -> DataFrame:
        paths = [self._in_spark(name.path) for name in names]
        with self.location.explained():
            frame = reader.option("basePath", self._in_spark(self.plan.directory)).load(paths)
            if is_remote():
                _ = frame.schema  # only now does Spark Connect look at it
            return frame.where(self._complete(paths))

    def _complete(self, paths: list[str]) -> Column:
        """Return a condition that is true for each row, and fails the query if an object is gone.

        It uses partition columns, so Spark evaluates it before reading, and not for every row.
        """
        objects = self._reader(ignoreMissingFiles="true").format("binaryFile").schema(_STATUS).load(paths)
        if self.location.files.local:
            objects = objects.coalesce(1 + len(paths) // _COUNTED_BY_A_TASK)
        present = sf.count(sf.lit(1))
        changed = sf.concat(
            sf.lit(f"{self.location.files.shown} has changed: of {len(paths)} objects, Spark finds "),
            present.cast("string"),
            sf.lit(f"; maintenance removed the others: {AGAIN}"),
        )
        passed = sf.when(present == len(paths), "").otherwise(sf.raise_error(changed))
        return sf.col("date") >= objects.select(passed).scalar()

    @contextmanager
    def _log(self, names: Sequence[ObjectName]) -> Iterator[str]:
        """Create a directory that looks to Spark like the output of a streaming query with these objects."""
        as_uri, lines = cache(_as_uri), ["v1"]
        for name in names:
            directory, _, base = name.path.rpartition("/")
            file = self.plan.objects[name]
            lines.append(
                f'{{"path":"{as_uri(self._in_spark(directory))}/{base}","size":{file.size},'
                f'"isDir":false,"modificationTime":{int(1000 * (file.modified or 0))},"blockReplication":1,'
                '"blockSize":134217728,"action":"add"}'
            )
        with tempfile.TemporaryDirectory(prefix="jetcapture-") as output:
            log = Path(output, "_spark_metadata")
            log.mkdir()
            Path(log, "0").write_text("\n".join(lines))
            yield f"file://{output}"

    def _reader(self, **options: str) -> DataFrameReader:
        return self.spark.read.options(**self.location.settings, **options).option("__globPaths__", "false")

    def _in_spark(self, path: str) -> str:
        return f"{self.location.spark_root}/{path}"


def _as_uri(url: str) -> str:
    scheme, separator, path = url.partition("://")
    return f"{scheme}{separator}{quote(path, safe=_UNRESERVED)}"


def _read_objects(reader: PlanReader, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read the rows of the objects named in `batches`. Runs in a worker."""
    for batch in batches:
        for row in batch.to_pylist():
            file = reader.files.at(row["path"])
            if file.name is not None:
                yield from reader.batches(file, file.name, row["ranges"])
    log_nulled(reader.table)


def _within(frame: DataFrame, parts: Mapping[ObjectName, Sequence[Range]]) -> DataFrame:
    """Keep each object's rows within its ranges, by a join with a table of the ranges.

    A filter that lists ranges slows down with each of them. The join's key is a block of sequences, because Spark looks
    up numbers faster than names; few ranges share a block, so few names are compared.
    """
    ranges = [(name.path.rpartition("/")[2], first, last) for name, spans in parts.items() for first, last in spans]
    most, shift = max(_BLOCKS, 2 * len(ranges)), _MIN_SHIFT
    while sum((last >> shift) - (first >> shift) + 1 for _, first, last in ranges) > most:
        shift += 1
    rows = [
        (block, name, first, last)
        for name, first, last in ranges
        for block in range(first >> shift, (last >> shift) + 1)
    ]
    columns = dict(zip((_BLOCK, _RANGES_FILE, _FIRST, _LAST), map(list, zip(*rows, strict=True)), strict=True))
    table = frame.sparkSession.createDataFrame(pa.table(columns))
    located = frame.withColumn(_FILE, frame.metadataColumn("_metadata")["file_name"])
    inside = sf.expr(
        f"shiftright({layout.SEQ}, {shift}) = {_BLOCK} AND {layout.SEQ} BETWEEN {_FIRST} AND {_LAST} "
        f"AND startswith({_FILE}, {_RANGES_FILE})"  # an equality would become part of the key
    )
    return located.join(sf.broadcast(table), inside, "left_semi").drop(_FILE)
