"""Read the report's data, cheapest first: the listing with the names, then footers, then rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from jetcapture_py.archive import layout, watermark
from jetcapture_py.archive.footer import bounds, entries
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.watermark import Watermark
from jetcapture_py.config.units import microseconds_of
from jetcapture_py.errors import JetcaptureError
from spark_jobs.reading.place import Place, modified

UNKNOWN_INTERVAL = 3600
"""Assumed length of a bucket in seconds if the footer lacks it: directories are hourly."""

_FOOTER_THREADS = 32
_COLUMNS: dict[str, tuple[str, str, pa.DataType]] = {
    "seq": (layout.SEQ, "long", pa.int64()),
    "at": (layout.TIMESTAMP, "long", pa.int64()),
    "delivered": (layout.DELIVERED, "int", pa.int32()),
    "subject": (layout.SUBJECT, "string", pa.string()),
    "stage": (layout.STAGE, "string", pa.string()),
    "error": (layout.ERROR, "string", pa.string()),
}
"""Columns of `rows`: name in the archive, Spark type, Arrow type; `at` is in microseconds."""
_MIN_TASKS = 4
_ROWS_PER_TASK = 1_000_000
_BATCH = 1 << 16

Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One object, as described by its name, the listing and its footer.

    `size` is in bytes; `modified` in seconds since the epoch, None if the store does not tell; `interval` is the length
    of its bucket in seconds; `oldest` and `newest` are the range of `_nats_timestamp` in microseconds, None without
    statistics. `created` is the stream's creation time as sent by the server, "" if unknown. `redelivered`: messages in
    it may have been delivered more than once. `bundles` is the number of bundles of an object in a bundle.
    """

    name: ObjectName
    size: int
    modified: float | None
    messages: int
    created: str
    interval: int
    sealed_by: str
    oldest: int | None
    newest: int | None
    redelivered: bool
    bundles: int | None = None

    @property
    def end(self) -> int:
        """The end of the bucket, in seconds since the epoch."""
        return self.name.bucket + self.interval


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSource:
    """The listing of one stream's archive and quarantine, and the watermark if there is one.

    `entries` has fsspec's listing entry of each object. `others` counts objects in other formats than Parquet.
    """

    spark: SparkSession
    place: Place
    options: Mapping[str, Any] = field(repr=False)
    entries: Mapping[ObjectName, Mapping[str, Any]]
    others: int
    mark: Watermark | None

    @classmethod
    def open(cls, spark: SparkSession, url: str, stream: str, options: Mapping[str, Any]) -> ReportSource:
        """List the archive. Raises JetcaptureError if that fails or there is none."""
        place = Place.open(url, options)
        # before the listing, which then includes all objects that the watermark promises
        mark = watermark.read(place.fs, place.root, stream)
        found = {**_listed(place, stream), **_listed(place, f"{layout.QUARANTINE}/{stream}")}
        entries = {name: entry for name, entry in found.items() if name.parquet}
        others = len(found) - len(entries)
        if others and all(name.quarantine for name in entries):
            raise JetcaptureError(
                f"the archive of stream {stream} under {place.shown} is not in Parquet, and reports are about Parquet"
            )
        if not entries:
            raise JetcaptureError(f"no archive of stream {stream} under {place.shown}{place.known_streams()}")
        return cls(spark=spark, place=place, options=options, entries=entries, others=others, mark=mark)

    def objects(self) -> list[Stored]:
        """Read the footers of all objects, quarantine included; return them by first sequence. Raises VanishedError."""
        with ThreadPoolExecutor(_FOOTER_THREADS) as threads:
            stored = threads.map(lambda entry: _stored(self.place, *entry), self.entries.items())
            return sorted(stored, key=lambda each: (each.name.first_seq, each.name.last_seq, each.name.path))

    def rows(self, parts: Mapping[int, Iterable[Stored]], columns: Sequence[str]) -> DataFrame:
        """Read `columns` of the objects in `parts`, and the object's key in `parts` as the column `part`.

        Arrow reads them in Spark's workers, so Spark needs no file system for the store.
        """
        asked = [(stored.name, part) for part, objects in parts.items() for stored in objects]
        asked.sort(key=lambda each: each[0].rows, reverse=True)
        tasks = min(len(asked), max(_MIN_TASKS, sum(name.rows for name, _ in asked) // _ROWS_PER_TASK))
        table = pa.table({"path": [name.path for name, _ in asked], "part": [part for _, part in asked]})
        read = partial(_read, self.place.url, dict(self.options), list(columns))
        schema = ", ".join(["part long", *(f"{column} {_COLUMNS[column][1]}" for column in columns)])
        return self.spark.createDataFrame(table).repartition(tasks).mapInArrow(read, schema)


def _listed(place: Place, directory: str) -> dict[ObjectName, Mapping[str, Any]]:
    names = ((layout.parse_path(path), entry) for path, entry in place.files(directory).items())
    return {name: entry for name, entry in names if name is not None}


def _read(url: str, options: Mapping[str, Any], columns: Sequence[str], batches: Batches) -> Batches:
    """Read the rows of the objects that `batches` name. Runs in a worker."""
    place = Place.open(url, options)
    for batch in batches:
        for path, part in zip(batch["path"].to_pylist(), batch["part"].to_pylist(), strict=True):
            with place.reading(path), pq.ParquetFile(f"{place.root}/{path}", filesystem=place.fs) as file:
                wanted = [_COLUMNS[column][0] for column in columns if _COLUMNS[column][0] in file.schema_arrow.names]
                table = file.read(wanted, use_threads=False)
            arrays = {"part": pa.repeat(part, table.num_rows)}
            for column in columns:
                stored, _, kind = _COLUMNS[column]
                arrays[column] = table[stored].cast(kind) if stored in wanted else pa.nulls(table.num_rows, kind)
            yield from pa.table(arrays).to_batches(max_chunksize=_BATCH)


def _stored(place: Place, name: ObjectName, entry: Mapping[str, Any]) -> Stored:
    with place.reading(name.path):
        return _described(name, entry, pq.read_metadata(f"{place.root}/{name.path}", filesystem=place.fs))


def _described(name: ObjectName, entry: Mapping[str, Any], footer: pq.FileMetaData) -> Stored:
    said = entries(footer.metadata)
    times, delivered = bounds(footer, layout.TIMESTAMP), bounds(footer, layout.DELIVERED)
    return Stored(
        name=name,
        size=int(entry["size"]),
        modified=modified(entry),
        messages=int(said.get("messages", name.rows)),
        created=said.get("stream_created", ""),
        interval=int(said.get("interval", UNKNOWN_INTERVAL)),
        sealed_by=said.get("sealed_by", ""),
        oldest=None if times is None else microseconds_of(times[0]),
        newest=None if times is None else microseconds_of(times[1]),
        redelivered=delivered is None or delivered[1] > 1,
        bundles=int(said[layout.BUNDLES]) if name.bundle and layout.BUNDLES in said else None,
    )
