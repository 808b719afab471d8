"""One stream's objects: found through fsspec, their footers read here, their rows natively by Spark, or by `engine`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.text import one_line
from spark_jobs.reading.arrow_engine import ArrowEngine
from spark_jobs.reading.overlaps import Identities, Range
from spark_jobs.reading.place import Place

_FILE = "_nats_file"
_THREADS = 32
_LIST_IN_DRIVER = "spark.sql.sources.parallelPartitionDiscovery.threshold"
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
    """The objects that were found, and every visible file, ours or not, by path relative to the archive's root."""

    objects: list[ObjectName]
    files: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """Where one stream's archive, or its quarantine, lies, and what reads it: None for Spark's own reader."""

    spark: SparkSession
    place: Place
    stream: str
    quarantine: bool
    engine: ArrowEngine | None

    @classmethod
    def open(
        cls,
        spark: SparkSession,
        url: str,
        stream: str,
        quarantine: bool,
        options: Mapping[str, Any],
        engine: ArrowEngine | None = None,
    ) -> Archive:
        """Find the file system for `url`; `options` are handed to fsspec. Raises JetcaptureError."""
        place = Place.open(url, options)
        if engine is None:
            place.require(spark)
        return cls(spark=spark, place=place, stream=stream, quarantine=quarantine, engine=engine)

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
        found = [path for directory in directories for path in self.place.files(directory)]
        visible = [path for path in found if path[path.rfind("/") + 1] not in "._"]
        return Listing(
            objects=[name for name in map(layout.parse_path, visible) if name is not None],
            files=visible,
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
        files: Iterable[str],
        schema: st.StructType,
        parts: Mapping[ObjectName, Sequence[Range]] | None = None,
    ) -> DataFrame:
        """Exactly these objects, of all `files` that were listed, or these parts of them.

        Spark lists what it is given, at some cost for each path, so it is given directories where everything in them
        is wanted, and is then asked what it found. An explicit schema keeps partition values strings.
        """
        if self.engine is not None:
            return self.engine.frame(self.spark, names, schema, parts)
        wanted = [name.path for name in names]
        with self._listing_in_driver(), self.place.explained():
            frame = self._read(cover(wanted, files), schema)
            if Counter(_base_names(frame)) != Counter(path.rpartition("/")[2] for path in wanted):
                frame = self._read(wanted, schema)
        return frame if parts is None else _within(frame, parts)

    def _read(self, paths: Iterable[str], schema: st.StructType) -> DataFrame:
        root = self.place.spark_root
        reader = self.spark.read.schema(schema).options(**self.place.settings).option("__globPaths__", "false")
        return reader.option("basePath", f"{root}/{self.directory}").parquet(*(f"{root}/{path}" for path in paths))

    @contextmanager
    def _listing_in_driver(self) -> Iterator[None]:
        """Spark would start a task for every path, which for a local one takes longer than looking."""
        if not self.local:
            yield
            return
        before = str(self.spark.conf.get(_LIST_IN_DRIVER))
        self.spark.conf.set(_LIST_IN_DRIVER, str(1 << 30))
        try:
            yield
        finally:
            self.spark.conf.set(_LIST_IN_DRIVER, before)

    def footers(self, names: Sequence[ObjectName]) -> Iterator[pa.Schema]:
        """Each object's schema, from its footer. One at a time: objects are many, and their schemas are few."""
        return self._each(names, lambda path, fs: pq.read_schema(path, filesystem=fs).remove_metadata())

    def identities(self, names: Sequence[ObjectName]) -> list[Identities]:
        """Each object's sequences and timestamps."""

        def read(path: str, fs: Any) -> Identities:
            with pq.ParquetFile(path, filesystem=fs) as file:
                table = file.read([layout.SEQ, layout.TIMESTAMP], use_threads=False)
            return table[layout.SEQ].to_numpy(), table[layout.TIMESTAMP].cast(pa.int64()).to_numpy()

        return list(self._each(names, read))

    def _each(self, names: Sequence[ObjectName], read: Callable[[str, Any], T]) -> Iterator[T]:
        fs = pa.fs.LocalFileSystem() if self.local else self.fs

        def one(name: ObjectName) -> T:
            try:
                return read(f"{self.root}/{name.path}", fs)
            except FileNotFoundError as error:
                raise VanishedError(f"{self.url}/{name.path} is gone") from error
            except (OSError, pa.ArrowException) as error:
                raise JetcaptureError(f"cannot read {self.url}/{name.path}: {one_line(str(error))}") from error

        if self.local:  # a footer is read faster than it is handed to a thread
            yield from map(one, names)
            return
        with ThreadPoolExecutor(_THREADS) as threads:
            yield from threads.map(one, names)


def cover(wanted: Sequence[str], files: Iterable[str]) -> list[str]:
    """The fewest paths that hold the wanted files and no other: directories where all is wanted, files elsewhere."""
    counts: Counter[str] = Counter()
    ours: Counter[str] = Counter()
    for counter, paths in ((counts, files), (ours, wanted)):
        for path in paths:
            directory = path.rpartition("/")[0]
            while directory:
                counter[directory] += 1
                directory = directory.rpartition("/")[0]
    chosen: dict[str, None] = {}
    for path in wanted:
        best, directory = path, path.rpartition("/")[0]
        while directory not in ("", layout.QUARANTINE) and counts[directory] == ours[directory]:
            best, directory = directory, directory.rpartition("/")[0]
        chosen[best] = None
    return list(chosen)


def _base_names(frame: DataFrame) -> list[str]:
    """Names of the files that `frame` reads. The archive's are not changed by the escaping of a URL."""
    plan = getattr(frame, "_jdf", None)
    if plan is None:
        paths = frame.inputFiles()
    else:  # one call to the JVM, where fetching an array takes one for each element
        jvm: Any = frame.sparkSession._jvm
        paths = jvm.org.apache.hadoop.util.StringUtils.join("\n", plan.inputFiles()).split("\n")
    return [path.rpartition("/")[2] for path in paths]


def _within(frame: DataFrame, parts: Mapping[ObjectName, Sequence[Range]]) -> DataFrame:
    """The rows of `frame` that are of the part of their object that is to be read. As SQL, which is one call to Spark
    where columns would be hundreds; the names of objects have no character that means anything in it."""
    inside = [
        f"{_FILE} = '{name.path.rpartition('/')[2]}' AND ("
        + " OR ".join(f"{layout.SEQ} BETWEEN {first} AND {last}" for first, last in ranges)
        + ")"
        for name, ranges in parts.items()
    ]
    located = frame.withColumn(_FILE, frame.metadataColumn("_metadata")["file_name"])
    return located.where(" OR ".join(f"({each})" for each in inside))
