"""List one stream's objects and read their footers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from jetcapture_py.archive import layout
from jetcapture_py.archive.footer import MAGIC, bounds
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.overlaps import Identities, Range
from jetcapture_py.errors import JetcaptureError, VanishedError
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.text import one_line
from spark_jobs.reading.arrow_engine import ArrowEngine
from spark_jobs.reading.columns import Field
from spark_jobs.reading.footers import SchemaReader, bundles_in, read_footer
from spark_jobs.reading.location import ArchiveLocation

_QUARANTINE = (
    f"{layout.STREAM} string, {layout.SUBJECT} string, {layout.SEQ} long, {layout.TIMESTAMP} timestamp, "
    f"{layout.NANOS} smallint, {layout.DELIVERED} int, {layout.HEADERS} map<string, array<string>>, "
    f"{layout.PAYLOAD} binary, {layout.STAGE} string, {layout.ERROR} string, {layout.RAW_HEADERS} binary, "
    "date string, hour string"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The objects of a stream or its quarantine."""

    objects: list[ObjectName]
    others: list[ObjectName]
    """Objects in other formats than Parquet."""
    files: Mapping[ObjectName, File]
    directories: Collection[str]
    """Every directory with a visible file of any kind."""
    tops: Collection[str]
    """The directories that were listed."""
    repeated: Collection[ObjectName]
    """Objects with the same file name as an object under another key."""


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
    location: ArchiveLocation
    stream: str
    quarantine: bool
    engine: ArrowEngine
    native: bool

    @property
    def files(self) -> ArchiveFiles:
        """The archive's files."""
        return self.location.files

    @property
    def url(self) -> str:
        """The archive's URL, without credentials."""
        return self.files.shown

    @property
    def directory(self) -> str:
        """The objects' directory, relative to the archive's root."""
        return f"{layout.QUARANTINE}/{self.stream}" if self.quarantine else self.stream

    def listing(self, keys: Iterable[str | None] | None = None) -> Listing:
        """List the stream's objects, or only those of `keys` and those in bundles."""
        directories = [self.directory]
        if keys is not None:
            if self.quarantine:
                raise JetcaptureError("the quarantine is not divided by key")
            directories = self.files.directories(self.directory, keys)
        files = sorted(self.files.below(*directories), key=lambda file: file.path)
        visible = [file for file in files if file.path[file.path.rfind("/") + 1] not in "._"]
        named = {file.name: file for file in visible if file.name is not None}
        objects = [name for name in named if name.parquet]
        return Listing(
            objects=objects,
            others=[name for name in named if not name.parquet],
            files=named,
            directories=dict.fromkeys(file.path.rpartition("/")[0] for file in visible),
            tops=directories,
            repeated=_with_equal_names(objects),
        )

    def nothing(self) -> DataFrame:
        """Return an empty quarantine if the stream has an archive; raise JetcaptureError otherwise."""
        entries = self.files.names()
        if self.quarantine and self.stream in entries:
            return self.spark.createDataFrame([], _QUARANTINE)
        quarantined = self.files.below(f"{layout.QUARANTINE}/{self.stream}")
        if not self.quarantine and any(file.name is not None for file in quarantined):
            raise JetcaptureError(
                f"the archive of stream {self.stream} under {self.url} has only a quarantine, of messages that could "
                "not be decoded: select FROM quarantine, or read it with quarantine=True"
            )
        if self.stream in entries:
            raise JetcaptureError(f"the archive of stream {self.stream} under {self.url} has no objects")
        raise JetcaptureError(f"no archive of stream {self.stream} under {self.url}{self.files.known_streams()}")

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
            file = listing.files[name]
            try:
                return read_footer(partial(self.files.read, file), file.size)
            except pa.ArrowInvalid as error:
                if self.files.again(file).size == file.size:
                    raise self._unreadable(name, error) from error
                # a redelivery has rewritten it: with the old size, Spark would not find the footer
                raise VanishedError(f"{self.url}/{name.path} was stored again: read it again") from None

        return self.files.each(footer, names)

    def identities(self, names: Sequence[ObjectName], listing: Listing) -> list[Identities]:
        """Read each object's sequences and timestamps."""

        def read(name: ObjectName) -> Identities:
            with self.files.parquet(listing.files[name]) as parquet:
                table = parquet.read([layout.SEQ, layout.TIMESTAMP], use_threads=False)
            return table[layout.SEQ].to_numpy(), table[layout.TIMESTAMP].cast(pa.int64()).to_numpy()

        return list(self.files.each(read, names))

    def _unreadable(self, name: ObjectName, error: Exception) -> JetcaptureError:
        return JetcaptureError(f"cannot read {self.url}/{name.path}: {one_line(str(error))}")


def _with_equal_names(objects: Sequence[ObjectName]) -> list[ObjectName]:
    count = Counter((name.digest, name.bucket) for name in objects)
    if len(count) == len(objects):
        return []
    return [name for name in objects if count[name.digest, name.bucket] > 1]
