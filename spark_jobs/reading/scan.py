"""Spark's own reader on exactly the objects of a plan, however long a DataFrame is kept and whatever is refreshed.

Spark remembers directories, and lists them again at any time: `REFRESH TABLE`, or Spark Connect after some other
queries. What was stored since would be read twice, and what was compacted would be missing. So

- Spark is given a list of files, in the one form in which it takes one: the log that a streaming query writes beside
  its output. It is read once, while the scan is planned, and nothing is ever listed.
- Spark Connect, which plans on a server, gets directories and a pattern of the planned names. Each query counts the
  objects first, and fails with "read it again" unless all of them are there.

Without the count, a query of objects that are gone fails with Spark's own advice to refresh. So scans of a list count
as well once they are older than `TRUSTED`. Objects are rarely removed sooner after planning, and Spark removes the
condition from younger queries before they start.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote
from zlib import crc32

import pyarrow as pa
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql import types as st
from pyspark.sql.utils import is_remote

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.overlaps import Range
from jetcapture_py.reading.plan import ReadPlan
from jetcapture_py.store.archive import AGAIN
from spark_jobs.reading.location import ArchiveLocation

TRUSTED = timedelta(seconds=10)
"""Age of a plan from which a scan of a list counts its objects."""

_FILE, _RANGES_FILE, _FIRST, _LAST = "_nats_file", "_nats_ranges_file", "_nats_first", "_nats_last"
_BLOCK = "_nats_block"
_MIN_SHIFT = 6
"""A block of sequences has at least 64 of them, as a power of two."""
_BLOCKS = 65_536
"""Rows of a table of ranges; more blocks than these become longer blocks."""
_COUNTED_BY_A_TASK = 4096
"""Local objects whose status one task looks up, in some hundredths of a second."""
_STATUS = "path string, modificationTime timestamp, length long, content binary"
_UNRESERVED = "_-!.~'()*,;:$&+=/@"
"""Characters of a path that Java does not escape in a URI."""


@dataclass(frozen=True)
class Scans:
    """Scans of the objects of `plan`, at `location`."""

    spark: SparkSession
    location: ArchiveLocation
    plan: ReadPlan

    def frame(
        self, names: Sequence[ObjectName], schema: st.StructType, parts: Mapping[ObjectName, Sequence[Range]] | None
    ) -> DataFrame:
        """Exactly these objects, or these parts of them: all under keys, or all in bundles. An explicit schema keeps
        partition values strings."""
        # what the session ignores would be missing without an error
        frame = self._load(self._reader(ignoreMissingFiles="false").format("parquet").schema(schema), names)
        frame = frame.where(self._complete)
        if self._list is None and not names[0].quarantine:
            frame = frame.where(_in_place(names))
        return frame if parts is None else _within(frame, parts)

    @cached_property
    def _list(self) -> DataFrame | None:
        """The plan's objects as Spark's list of files, for the count. None where Spark cannot be given such a list."""
        # in the path of a stream with "=", a list of files would show one more partition column
        if is_remote() or "=" in self.plan.directory:
            return None
        try:
            with self._log(self._names) as url:
                found = self._status_reader.load(url)
            taken: Any = found
            # fewer or more if Spark is configured to ignore such logs
            return found if len(taken._jdf.inputFiles()) == len(self._names) else None
        except Exception:  # or to read them in a way that fails here; py4j raises errors of its own
            return None

    @cached_property
    def _complete(self) -> Column:
        """A condition that holds for all rows, and fails a query unless each of the plan's objects is still there.

        It is about partition columns, so Spark evaluates it before it reads, and not for every row.
        """
        planned = datetime.now(UTC)
        listed = self._list
        found = self._load_directories(self._status_reader, self._names) if listed is None else listed
        if self.location.files.local:
            found = found.coalesce(1 + len(self._names) // _COUNTED_BY_A_TASK)
        paths = [path[len(self.plan.directory) + 1 :] for path in self._paths]
        total = sum(crc32(path.encode()) for path in paths)
        found = found.select(sf.crc32(sf.substring_index("path", "/", -1 - paths[0].count("/"))).alias("crc"))
        present = sf.count(sf.lit(1))
        unchanged = (present == len(paths)) & (sf.sum("crc") == total)
        url = self.location.files.shown
        changed = sf.concat(
            sf.lit(f"{url} has changed: this was planned from {len(paths)} objects, of which it finds "),
            present.cast("string"),
            sf.lit(f"; maintenance removed the others: {AGAIN}"),
        )
        complete = sf.col("date") >= found.select(sf.when(unchanged, "").otherwise(sf.raise_error(changed))).scalar()
        if listed is not None:
            return (sf.current_timestamp() < sf.lit(planned + TRUSTED)) | complete
        return complete

    def _load(self, reader: DataFrameReader, names: Sequence[ObjectName]) -> DataFrame:
        if self._list is None:
            return self._load_directories(reader, names)
        with self._log(names) as url:
            return reader.load(url)

    def _load_directories(self, reader: DataFrameReader, names: Sequence[ObjectName]) -> DataFrame:
        planned = pattern(name.digest for name in names)
        reader = reader.options(pathGlobFilter=planned, basePath=self._in_spark(self.plan.directory))
        with self.location.explained():
            frame = reader.load(self._directories(names))
            if is_remote():
                _ = frame.schema  # only now does Spark Connect look at it
            return frame

    @contextmanager
    def _log(self, names: Sequence[ObjectName]) -> Iterator[str]:
        """Make a directory that Spark takes for the output of a streaming query that wrote these objects."""
        with tempfile.TemporaryDirectory(prefix="jetcapture-") as output:
            log = Path(output, "_spark_metadata")
            log.mkdir()
            Path(log, "0").write_text("\n".join(["v1", *(self._entries[name] for name in names)]))
            yield f"file://{output}"

    @cached_property
    def _entries(self) -> Mapping[ObjectName, str]:
        """The line of each of the plan's objects in such a log."""
        as_uri = cache(_as_uri)
        entries = {}
        for name, path in zip(self._names, self._paths, strict=True):
            directory, _, base = path.rpartition("/")
            file = self.plan.listing.files[name]
            entries[name] = (
                f'{{"path":"{as_uri(self._in_spark(directory))}/{base}","size":{file.size},'
                f'"isDir":false,"modificationTime":{int(1000 * (file.modified or 0))},"blockReplication":1,'
                '"blockSize":134217728,"action":"add"}'
            )
        return entries

    @cached_property
    def _names(self) -> Sequence[ObjectName]:
        return self.plan.names

    @cached_property
    def _paths(self) -> Sequence[str]:
        return [name.path for name in self._names]

    @cached_property
    def _repeated(self) -> Collection[ObjectName]:
        """Objects with the same file name as an object under another key."""
        objects = self.plan.listing.objects
        count = Counter((name.digest, name.bucket) for name in objects)
        return [name for name in objects if count[name.digest, name.bucket] > 1] if len(count) < len(objects) else []

    @property
    def _status_reader(self) -> DataFrameReader:
        reader = self._reader(ignoreMissingFiles="true", recursiveFileLookup="true")
        return reader.format("binaryFile").schema(_STATUS)

    def _reader(self, **options: str) -> DataFrameReader:
        return self.spark.read.options(**self.location.settings, **options).option("__globPaths__", "false")

    def _directories(self, names: Sequence[ObjectName]) -> list[str]:
        """Return the paths to list to find these objects, and no others of their files' names."""
        shared = {name.directory for name in set(self._repeated).difference(names)} if self._repeated else set()
        wanted = dict.fromkeys(name.directory for name in names if name.directory not in shared)
        files = [name.path for name in names if name.directory in shared]
        covered = cover(wanted, self.plan.listing.directories, self.plan.listing.tops)
        return [self._in_spark(path) for path in (*covered, *files)]

    def _in_spark(self, path: str) -> str:
        return f"{self.location.spark_root}/{path}"


def _as_uri(url: str) -> str:
    scheme, separator, path = url.partition("://")
    return f"{scheme}{separator}{quote(path, safe=_UNRESERVED)}"


def _in_place(names: Sequence[ObjectName]) -> Column:
    """Whether a row's key or bundle is one of these objects': one of their names may be stored under another one later.

    In hexadecimal digits, since no setting changes what they mean in SQL, and as SQL, which is one call to Spark.
    """
    if names[0].bundle:
        return sf.expr(f"bundle IN ({', '.join(sorted({repr(name.bundle) for name in names}))})")
    keys = dict.fromkeys(name.key for name in names)
    known = ", ".join(f"'{key.encode().hex().upper()}'" for key in keys if key is not None)
    conditions = [f"hex(key) IN ({known})"] if known else []
    return sf.expr(" OR ".join([*conditions, *(["key IS NULL"] if None in keys else [])]))


def cover(wanted: Collection[str], paths: Iterable[str], tops: Collection[str] = ()) -> list[str]:
    """The fewest paths that hold the wanted ones of all `paths` and no others: parents of which all is wanted. None is
    above those in `tops`, beyond which not all paths are known."""
    counts: Counter[str] = Counter()
    ours: Counter[str] = Counter()
    for counter, each in ((counts, paths), (ours, wanted)):
        for path in each:
            directory = path
            while directory:
                counter[directory] += 1
                directory = directory.rpartition("/")[0]
    chosen: dict[str, None] = {}
    for path in wanted:
        best, directory = path, path.rpartition("/")[0]
        while best not in tops and directory not in ("", layout.QUARANTINE) and counts[directory] == ours[directory]:
            best, directory = directory, directory.rpartition("/")[0]
        chosen[best] = None
    return list(chosen)


def pattern(digests: Iterable[str]) -> str:
    """A Hadoop pattern that the names of the objects with these digests match, and no others.

    Common beginnings are written once, so that matching a name takes as long among thousands as among a few.
    """
    return f"*-{_alternatives(sorted(set(digests)))}{layout.SUFFIX}"


def _alternatives(texts: list[str]) -> str:
    if len(texts) == 1:
        return texts[0]
    parts = [
        first + _alternatives([text[1:] for text in group]) for first, group in groupby(texts, lambda text: text[0])
    ]
    return parts[0] if len(parts) == 1 else "{" + ",".join(parts) + "}"


def _within(frame: DataFrame, parts: Mapping[ObjectName, Sequence[Range]]) -> DataFrame:
    """Keep the rows of each object that lie in its ranges, by a join with a table of the ranges.

    A filter that lists ranges takes longer with each of them. The join's key is a block of sequences, because Spark
    looks up a number faster than a name; few ranges share a block, so few names are compared.
    """
    ranges = [(name.path.rpartition("/")[2], first, last) for name, each in parts.items() for first, last in each]
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
