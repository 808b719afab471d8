"""One stream's objects: found through fsspec, their footers read here, their rows natively by Spark, or by `engine`.

A frame reads exactly the objects of its plan, or fails: Spark keeps directories and may list them again at any time
(`REFRESH TABLE`; Spark Connect after some other queries), when the capture or a compaction has changed them. So

- a pattern of the planned names goes with the directories, and what was stored since is never read;
- before a query reads, it counts the planned objects that are still there (one status request for each, in a subquery
  that partition pruning waits for), and fails with "read it again" unless all of them are.

Explicit paths would be exact, too, but Spark takes 2 ms to plan each, and a refresh drops those that are gone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar
from zlib import crc32

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql import types as st
from pyspark.sql.utils import is_remote

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.text import one_line
from spark_jobs.reading.arrow_engine import ArrowEngine
from spark_jobs.reading.columns import Field
from spark_jobs.reading.footers import SchemaReader, read_footer
from spark_jobs.reading.overlaps import Identities, Range
from spark_jobs.reading.place import Place

_FILE, _RANGES_FILE, _FIRST, _LAST = "_nats_file", "_nats_ranges_file", "_nats_first", "_nats_last"
_THREADS = 32
_LIST_IN_DRIVER = "spark.sql.sources.parallelPartitionDiscovery.threshold"
_COUNTED_BY_A_TASK = 4096
"""Local objects whose status one task looks up, in some hundredths of a second."""
_STATUS = "path string, modificationTime timestamp, length long, content binary"
_QUARANTINE = (
    f"{layout.STREAM} string, {layout.SUBJECT} string, {layout.SEQ} long, {layout.TIMESTAMP} timestamp, "
    f"{layout.DELIVERED} int, {layout.HEADERS} map<string, array<string>>, {layout.PAYLOAD} binary, "
    f"{layout.STAGE} string, {layout.ERROR} string, {layout.RAW_HEADERS} binary, date string, hour string"
)

T = TypeVar("T")


class VanishedError(JetcaptureError):
    """An object that was listed is gone: a compaction has replaced it. List again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The objects that were found, how many bytes each has by path relative to the archive's root, and every directory
    that has a visible file, ours or not. `tops` are the directories that were listed.

    `repeated` are objects whose file's name is that of another one, under another key.
    """

    objects: list[ObjectName]
    sizes: Mapping[str, int]
    directories: Collection[str]
    tops: Collection[str]
    repeated: Collection[ObjectName]


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """Where one stream's archive, or its quarantine, lies, and what reads it: Spark where `native`, or `engine`."""

    spark: SparkSession
    place: Place
    stream: str
    quarantine: bool
    engine: ArrowEngine
    native: bool

    @classmethod
    def open(
        cls,
        spark: SparkSession,
        url: str,
        stream: str,
        quarantine: bool,
        options: Mapping[str, Any],
        engine: ArrowEngine,
        *,
        native: bool,
    ) -> Archive:
        """Find the file system for `url`; `options` are handed to fsspec. Raises JetcaptureError."""
        place = Place.open(url, options)
        if native:
            place.require(spark)
        return cls(spark=spark, place=place, stream=stream, quarantine=quarantine, engine=engine, native=native)

    @property
    def fs(self) -> Any:
        """The file system, fsspec's."""
        return self.place.fs

    @property
    def root(self) -> str:
        """The archive's root in it."""
        return self.place.root

    @property
    def url(self) -> str:
        """The archive's URL, without credentials."""
        return self.place.shown

    @property
    def directory(self) -> str:
        """Where the objects are, relative to the archive's root."""
        return f"{layout.QUARANTINE}/{self.stream}" if self.quarantine else self.stream

    @property
    def local(self) -> bool:
        """Whether it lies in a directory of this machine."""
        return isinstance(self.fs, LocalFileSystem)

    def listing(self, keys: Iterable[str | None] | None = None) -> Listing:
        """The stream's objects, of these keys if any are named."""
        directories = [self.directory]
        if keys is not None:
            if self.quarantine:
                raise JetcaptureError("the quarantine is not divided by key")
            directories = [f"{self.directory}/key={layout.escape_key(key)}" for key in dict.fromkeys(keys)]
        found = {path: info for directory in directories for path, info in self.place.files(directory).items()}
        visible = [path for path in found if path[path.rfind("/") + 1] not in "._"]
        objects = [name for name in map(layout.parse_path, visible) if name is not None]
        return Listing(
            objects=objects,
            sizes={path: int(found[path]["size"]) for path in visible},
            directories=dict.fromkeys(path.rpartition("/")[0] for path in visible),
            tops=directories,
            repeated=_of_one_name(objects),
        )

    def nothing(self) -> DataFrame:
        """An empty quarantine, which is how it should be, for a stream that has an archive; otherwise an error."""
        try:
            entries = [str(path).rsplit("/", 1)[-1] for path in self.fs.ls(self.root, detail=False)]
        except Exception:  # it would only add to a message that says what is wrong already
            entries = []
        if self.quarantine and self.stream in entries:
            return self.spark.createDataFrame([], _QUARANTINE)
        if self.stream in entries:
            raise JetcaptureError(f"the archive of stream {self.stream} under {self.url} holds no objects")
        streams = ", ".join(sorted(entry for entry in entries if not entry.startswith(("_", "."))))
        known = f"; there are: {streams}" if streams else ""
        raise JetcaptureError(f"no archive of stream {self.stream} under {self.url}{known}")

    def frame(
        self,
        names: Sequence[ObjectName],
        listing: Listing,
        schema: st.StructType,
        complete: Column,
        parts: Mapping[ObjectName, Sequence[Range]] | None = None,
    ) -> DataFrame:
        """Exactly these objects, or these parts of them, as Spark reads them natively. `complete` is `complete` of all
        objects of the table. An explicit schema keeps partition values strings."""
        with self._listing_in_driver(), self.place.explained():
            reader = self._reader(names, ignoreMissingFiles="false", basePath=self._in_spark(self.directory))
            frame = reader.schema(schema).parquet(*self._directories(names, listing)).where(complete)
            if is_remote():
                _ = frame.schema  # only now does Spark Connect look at it
        return frame if parts is None else _within(frame, parts)

    def fetched(
        self,
        names: Sequence[ObjectName],
        fields: Sequence[Field],
        partitions: Sequence[str],
        parts: Mapping[ObjectName, Sequence[Range]] | None,
    ) -> DataFrame:
        """Exactly these objects, or these parts of them, as `engine` reads them."""
        return self.engine.frame(self.spark, names, fields, partitions, parts)

    def complete(self, names: Sequence[ObjectName], listing: Listing) -> Column:
        """A condition that holds for all rows of these objects, and fails a query unless each of them is still there.

        It is about partition columns, so Spark evaluates it before it reads, and not for every row.
        """
        with self._listing_in_driver(), self.place.explained():
            reader = self._reader(names, ignoreMissingFiles="true", recursiveFileLookup="true").format("binaryFile")
            found = reader.schema(_STATUS).load(self._directories(names, listing))
        if self.local:
            found = found.coalesce(1 + len(names) // _COUNTED_BY_A_TASK)
        paths = [name.path[len(self.directory) + 1 :] for name in names]
        total = sum(crc32(path.encode()) for path in paths)
        found = found.select(sf.crc32(sf.substring_index("path", "/", -1 - paths[0].count("/"))).alias("crc"))
        count = sf.count(sf.lit(1))
        unchanged = (count == len(names)) & (sf.sum("crc") == total)
        changed = sf.concat(
            sf.lit(f"{self.url} has changed: this was planned from {len(names)} objects, of which it finds "),
            count.cast("string"),
            sf.lit("; the others were compacted or removed since: read it again"),
        )
        guard = sf.col("date") >= found.select(sf.when(unchanged, "").otherwise(sf.raise_error(changed))).scalar()
        return guard if self.quarantine else guard & _has_key(names)

    def _reader(self, names: Iterable[ObjectName], **options: str) -> DataFrameReader:
        reader = self.spark.read.options(**self.place.settings, **options).option("__globPaths__", "false")
        return reader.option("pathGlobFilter", pattern(name.digest for name in names))

    def _directories(self, names: Sequence[ObjectName], listing: Listing) -> list[str]:
        """What Spark has to list to find these objects, and no others of their files' names."""
        repeated = set(listing.repeated)
        strangers = {name.directory for name in repeated.difference(names)} if repeated else set()
        wanted = dict.fromkeys(name.directory for name in names if name.directory not in strangers)
        files = [name.path for name in names if name.directory in strangers]
        return [self._in_spark(path) for path in (*cover(wanted, listing.directories, listing.tops), *files)]

    def _in_spark(self, path: str) -> str:
        return f"{self.place.spark_root}/{path}"

    @contextmanager
    def _listing_in_driver(self) -> Iterator[None]:
        """Spark would start a task for every path, which for a local one takes longer than looking."""
        if not self.local or is_remote():
            yield
            return
        before = str(self.spark.conf.get(_LIST_IN_DRIVER))
        self.spark.conf.set(_LIST_IN_DRIVER, str(1 << 30))
        try:
            yield
        finally:
            self.spark.conf.set(_LIST_IN_DRIVER, before)

    def schemas(self, names: Sequence[ObjectName], listing: Listing) -> tuple[list[pa.Schema], list[int]]:
        """The distinct schemas of the objects, from their footers, and the index of each object's among them."""

        def footer(name: ObjectName) -> bytes:
            path = f"{self.root}/{name.path}"
            if self.local:
                return _local_footer(path)

            def read(start: int, end: int) -> bytes:
                return bytes(self.fs.cat_file(path, start=start, end=end))

            size = listing.sizes[name.path]
            try:
                return read_footer(read, size)
            except pa.ArrowInvalid:  # a redelivery may have written the same messages again, in another number of bytes
                self.fs.invalidate_cache()
                now = int(self.fs.info(path)["size"])
                if now == size:
                    raise
                return read_footer(read, now)

        reader = SchemaReader()
        numbers = []
        for name, data in zip(names, self._each(names, footer), strict=True):
            try:
                numbers.append(reader.number(data))
            except pa.ArrowException as error:
                raise self._unreadable(name, error) from error
        return reader.schemas, numbers

    def identities(self, names: Sequence[ObjectName]) -> list[Identities]:
        """Each object's sequences and timestamps."""
        fs = pa.fs.LocalFileSystem() if self.local else self.fs

        def read(name: ObjectName) -> Identities:
            with pq.ParquetFile(f"{self.root}/{name.path}", filesystem=fs) as file:
                table = file.read([layout.SEQ, layout.TIMESTAMP], use_threads=False)
            return table[layout.SEQ].to_numpy(), table[layout.TIMESTAMP].cast(pa.int64()).to_numpy()

        return list(self._each(names, read))

    def _each(self, names: Sequence[ObjectName], read: Callable[[ObjectName], T]) -> Iterator[T]:
        def one(name: ObjectName) -> T:
            try:
                return read(name)
            except FileNotFoundError as error:
                raise VanishedError(f"{self.url}/{name.path} is gone: read it again") from error
            except (OSError, pa.ArrowException) as error:
                raise self._unreadable(name, error) from error

        if self.local:  # a footer is read faster than it is handed to a thread
            yield from map(one, names)
            return
        with ThreadPoolExecutor(_THREADS) as threads:
            yield from threads.map(one, names)

    def _unreadable(self, name: ObjectName, error: Exception) -> JetcaptureError:
        return JetcaptureError(f"cannot read {self.url}/{name.path}: {one_line(str(error))}")


def _has_key(names: Iterable[ObjectName]) -> Column:
    """Whether a row's key is one of these objects': one of their names may be stored under another key later.

    In hexadecimal digits, since no setting changes what they mean in SQL, and as SQL, which is one call to Spark.
    """
    keys = dict.fromkeys(name.key for name in names)
    known = ", ".join(f"'{key.encode().hex().upper()}'" for key in keys if key is not None)
    conditions = [f"hex(key) IN ({known})"] if known else []
    return sf.expr(" OR ".join([*conditions, *(["key IS NULL"] if None in keys else [])]))


def _local_footer(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return read_footer(lambda start, end: os.pread(file, end - start, start), os.fstat(file).st_size)
    finally:
        os.close(file)


def _of_one_name(objects: Sequence[ObjectName]) -> list[ObjectName]:
    count = Counter((name.digest, name.bucket) for name in objects)
    if len(count) == len(objects):
        return []
    return [name for name in objects if count[name.digest, name.bucket] > 1]


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
    """The rows of `frame` that are of the part of their object that is to be read. As a join with a table of the parts:
    looking them up takes as long among many as among a few, where a filter that lists them takes longer with each."""
    rows = [(name.path.rpartition("/")[2], first, last) for name, ranges in parts.items() for first, last in ranges]
    columns = dict(zip((_RANGES_FILE, _FIRST, _LAST), map(list, zip(*rows, strict=True)), strict=True))
    ranges = frame.sparkSession.createDataFrame(pa.table(columns))
    located = frame.withColumn(_FILE, frame.metadataColumn("_metadata")["file_name"])
    inside = sf.expr(f"{_FILE} = {_RANGES_FILE} AND {layout.SEQ} BETWEEN {_FIRST} AND {_LAST}")
    return located.join(sf.broadcast(ranges), inside, "left_semi").drop(_FILE)
