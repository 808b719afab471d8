"""List one stream's objects through fsspec and read their footers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from pyspark.sql import DataFrame, SparkSession

from jetcapture_py.archive import layout
from jetcapture_py.archive.footer import MAGIC, bounds
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.errors import JetcaptureError, VanishedError
from jetcapture_py.store.reader import open_parquet
from jetcapture_py.text import one_line
from spark_jobs.reading.arrow_engine import ArrowEngine
from spark_jobs.reading.columns import Field
from spark_jobs.reading.footers import SchemaReader, bundles_in, read_footer
from spark_jobs.reading.overlaps import Identities, Range
from spark_jobs.reading.place import Place, modified

_THREADS = 32
_QUARANTINE = (
    f"{layout.STREAM} string, {layout.SUBJECT} string, {layout.SEQ} long, {layout.TIMESTAMP} timestamp, "
    f"{layout.NANOS} smallint, {layout.DELIVERED} int, {layout.HEADERS} map<string, array<string>>, "
    f"{layout.PAYLOAD} binary, {layout.STAGE} string, {layout.ERROR} string, {layout.RAW_HEADERS} binary, "
    "date string, hour string"
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The objects found, and every directory with a visible file of any kind. `tops` are the listed directories.
    `others` are objects in other formats than Parquet.

    `sizes` (bytes) and `modified` (milliseconds since the epoch, 0 if the store does not tell) are keyed by path
    relative to the archive's root. `repeated` are objects with the same file name as an object under another key.
    """

    objects: list[ObjectName]
    others: list[ObjectName]
    sizes: Mapping[str, int]
    modified: Mapping[str, int]
    directories: Collection[str]
    tops: Collection[str]
    repeated: Collection[ObjectName]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFacts:
    """What footers say: distinct `schemas` and the index of each object's schema, the number of bundles of objects in
    bundles, and `times`, the first and last `_nats_timestamp` of some objects, None without statistics."""

    schemas: Sequence[pa.Schema]
    schema_of: Mapping[ObjectName, int]
    bundles: Mapping[ObjectName, int]
    times: Mapping[ObjectName, tuple[datetime, datetime] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """Location of one stream's archive or quarantine, and its reader: Spark if `native`, else `engine`."""

    spark: SparkSession
    place: Place
    stream: str
    quarantine: bool
    engine: ArrowEngine
    native: bool

    @property
    def fs(self) -> Any:
        """The fsspec file system."""
        return self.place.fs

    @property
    def root(self) -> str:
        """The archive's root in the file system."""
        return self.place.root

    @property
    def url(self) -> str:
        """The archive's URL, without credentials."""
        return self.place.shown

    @property
    def directory(self) -> str:
        """The objects' directory, relative to the archive's root."""
        return f"{layout.QUARANTINE}/{self.stream}" if self.quarantine else self.stream

    @property
    def local(self) -> bool:
        """Whether it is in a local directory."""
        return isinstance(self.fs, LocalFileSystem)

    def listing(self, keys: Iterable[str | None] | None = None) -> Listing:
        """List the stream's objects, or only those of `keys` and those in bundles."""
        directories = [self.directory]
        if keys is not None:
            if self.quarantine:
                raise JetcaptureError("the quarantine is not divided by key")
            directories = self.place.of_keys(self.directory, keys)
        found = {path: info for directory in directories for path, info in self.place.files(directory).items()}
        visible = [path for path in found if path[path.rfind("/") + 1] not in "._"]
        names = [name for name in map(layout.parse_path, visible) if name is not None]
        objects = [name for name in names if name.parquet]
        return Listing(
            objects=objects,
            others=[name for name in names if not name.parquet],
            sizes={path: int(found[path]["size"]) for path in visible},
            modified={path: int(1000 * (modified(found[path]) or 0)) for path in visible},
            directories=dict.fromkeys(path.rpartition("/")[0] for path in visible),
            tops=directories,
            repeated=_with_equal_names(objects),
        )

    def nothing(self) -> DataFrame:
        """Return an empty quarantine if the stream has an archive; raise JetcaptureError otherwise."""
        entries = self.place.entries()
        if self.quarantine and self.stream in entries:
            return self.spark.createDataFrame([], _QUARANTINE)
        if not self.quarantine and any(map(layout.parse_path, self.place.files(f"{layout.QUARANTINE}/{self.stream}"))):
            raise JetcaptureError(
                f"the archive of stream {self.stream} under {self.url} has only a quarantine, of messages that could "
                "not be decoded: select FROM quarantine, or read it with quarantine=True"
            )
        if self.stream in entries:
            raise JetcaptureError(f"the archive of stream {self.stream} under {self.url} has no objects")
        raise JetcaptureError(f"no archive of stream {self.stream} under {self.url}{self.place.known_streams()}")

    def fetched(
        self,
        names: Sequence[ObjectName],
        fields: Sequence[Field],
        partitions: Sequence[str],
        parts: Mapping[ObjectName, Sequence[Range]] | None,
    ) -> DataFrame:
        """Read exactly these objects, or these parts of them, with `engine`."""
        return self.engine.frame(self.spark, names, fields, partitions, parts)

    def facts(self, names: Sequence[ObjectName], listing: Listing, *, timed: bool = False) -> ObjectFacts:
        """Read the objects' footers, once; with `timed`, also the timestamps of objects with event time."""
        reader = SchemaReader()
        schema_of: dict[ObjectName, int] = {}
        bundles: dict[ObjectName, int] = {}
        times: dict[ObjectName, tuple[datetime, datetime] | None] = {}
        for name, data in zip(names, self._footers(names, listing), strict=True):
            try:
                schema_of[name] = reader.number(data)
                if name.bundle and (number := bundles_in(data)) is not None:
                    bundles[name] = number
                if timed and name.event_time:
                    file = b"".join((MAGIC, data, len(data).to_bytes(4, "little"), MAGIC))
                    times[name] = bounds(pq.read_metadata(pa.BufferReader(file)), layout.TIMESTAMP)
            except pa.ArrowException as error:
                raise self._unreadable(name, error) from error
        return ObjectFacts(schemas=reader.schemas, schema_of=schema_of, bundles=bundles, times=times)

    def _footers(self, names: Sequence[ObjectName], listing: Listing) -> Iterator[bytes]:
        """Read the objects' footers."""

        def footer(name: ObjectName) -> bytes:
            path = f"{self.root}/{name.path}"
            size = listing.sizes[name.path]
            if self.local:
                with _opened(path) as file:
                    if os.fstat(file).st_size != size:
                        raise self._rewritten(name)
                    return read_footer(lambda start, end: os.pread(file, end - start, start), size)

            def read(start: int, end: int) -> bytes:
                return bytes(self.fs.cat_file(path, start=start, end=end))

            try:
                return read_footer(read, size)
            except pa.ArrowInvalid:
                self.fs.invalidate_cache()
                if int(self.fs.info(path)["size"]) == size:
                    raise
                raise self._rewritten(name) from None

        return self._each(names, footer)

    def identities(self, names: Sequence[ObjectName]) -> list[Identities]:
        """Read each object's sequences and timestamps."""
        fs = pa.fs.LocalFileSystem() if self.local else self.fs

        def read(name: ObjectName) -> Identities:
            with open_parquet(f"{self.root}/{name.path}", filesystem=fs) as file:
                table = file.read([layout.SEQ, layout.TIMESTAMP], use_threads=False)
            return table[layout.SEQ].to_numpy(), table[layout.TIMESTAMP].cast(pa.int64()).to_numpy()

        return list(self._each(names, read))

    def _each(self, names: Sequence[ObjectName], read: Callable[[ObjectName], T]) -> Iterator[T]:
        def one(name: ObjectName) -> T:
            with self.place.reading(name.path):
                return read(name)

        if self.local:  # reading a footer is faster than handing it to a thread
            yield from map(one, names)
            return
        with ThreadPoolExecutor(_THREADS) as threads:
            yield from threads.map(one, names)

    def _rewritten(self, name: ObjectName) -> VanishedError:
        """Return the error for an object whose size differs from the listing: a redelivery has rewritten it. Spark must
        not get the old size, because it would not find the footer."""
        return VanishedError(f"{self.url}/{name.path} was stored again: read it again")

    def _unreadable(self, name: ObjectName, error: Exception) -> JetcaptureError:
        return JetcaptureError(f"cannot read {self.url}/{name.path}: {one_line(str(error))}")


@contextmanager
def _opened(path: str) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


def _with_equal_names(objects: Sequence[ObjectName]) -> list[ObjectName]:
    count = Counter((name.digest, name.bucket) for name in objects)
    if len(count) == len(objects):
        return []
    return [name for name in objects if count[name.digest, name.bucket] > 1]
