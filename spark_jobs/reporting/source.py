"""Read the report's data, cheapest first: the listing with the names, then footers, then rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from jetcapture_py.archive import layout
from jetcapture_py.archive.footer import bounds, entries
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.watermark import Watermark
from jetcapture_py.config.units import microseconds_of
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store.archive import ArchiveFiles, File
from spark_jobs.reading.location import ArchiveLocation

UNKNOWN_INTERVAL = 3600
"""Assumed length of a bucket in seconds if the footer lacks it: directories are hourly."""

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
    """One object, as described by its name, the listing and its footer."""

    name: ObjectName
    size: int
    """Bytes."""
    modified: float | None
    """Seconds since the epoch; None if the store does not tell."""
    messages: int
    created: str
    """The stream's creation time as sent by the server; "" if unknown."""
    interval: int
    """Length of its bucket in seconds."""
    sealed_by: str
    """Why its block was sealed."""
    oldest: int | None
    """Earliest `_nats_timestamp` in microseconds; None without statistics."""
    newest: int | None
    """Latest `_nats_timestamp` in microseconds; None without statistics."""
    redelivered: bool
    """Whether messages in it may have been delivered more than once."""
    bundles: int | None = None
    """Number of bundles, if the object is in one."""

    @property
    def end(self) -> int:
        """The end of the bucket, in seconds since the epoch."""
        return self.name.bucket + self.interval


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSource:
    """The listing of one stream's archive and quarantine."""

    spark: SparkSession
    files: ArchiveFiles
    listed: Mapping[ObjectName, File]
    others: int
    """Number of objects in other formats than Parquet."""
    mark: Watermark | None

    @classmethod
    def open(cls, spark: SparkSession, url: str, stream: str, options: Mapping[str, Any]) -> ReportSource:
        """List the archive. Raises JetcaptureError if that fails or there is none."""
        files = ArchiveLocation.open(url, options).files
        mark = files.watermark(stream)  # before the listing, which then includes all objects that it promises
        found = {file.name: file for file in files.files(stream) if file.name is not None}
        listed = {name: file for name, file in found.items() if name.parquet}
        others = len(found) - len(listed)
        if others and all(name.quarantine for name in listed):
            raise JetcaptureError(
                f"the archive of stream {stream} under {files.shown} is not in Parquet, and reports are about Parquet"
            )
        if not listed:
            raise JetcaptureError(f"no archive of stream {stream} under {files.shown}{files.known_streams()}")
        return cls(spark=spark, files=files, listed=listed, others=others, mark=mark)

    def objects(self) -> list[Stored]:
        """Read the footers of all objects, quarantine included; return them by first sequence. Raises VanishedError."""
        stored = self.files.map(lambda item: _stored(self.files, *item), self.listed.items())
        return sorted(stored, key=lambda each: (each.name.first_seq, each.name.last_seq, each.name.path))

    def rows(self, parts: Mapping[int, Iterable[Stored]], columns: Sequence[str]) -> DataFrame:
        """Read `columns` of the objects in `parts`, and the object's key in `parts` as the column `part`.

        Arrow reads them in Spark's workers, so Spark needs no file system for the store.
        """
        asked = [(stored.name, part) for part, objects in parts.items() for stored in objects]
        asked.sort(key=lambda each: each[0].rows, reverse=True)
        tasks = min(len(asked), max(_MIN_TASKS, sum(name.rows for name, _ in asked) // _ROWS_PER_TASK))
        table = pa.table({"path": [name.path for name, _ in asked], "part": [part for _, part in asked]})
        read = partial(_read, self.files, list(columns))
        schema = ", ".join(["part long", *(f"{column} {_COLUMNS[column][1]}" for column in columns)])
        return self.spark.createDataFrame(table).repartition(tasks).mapInArrow(read, schema)


def _read(files: ArchiveFiles, columns: Sequence[str], batches: Batches) -> Batches:
    """Read the rows of the objects that `batches` name. Runs in a worker."""
    for batch in batches:
        for path, part in zip(batch["path"].to_pylist(), batch["part"].to_pylist(), strict=True):
            with files.parquet(files.at(path)) as parquet:
                names = parquet.schema_arrow.names
                wanted = [_COLUMNS[column][0] for column in columns if _COLUMNS[column][0] in names]
                table = parquet.read(wanted, use_threads=False)
            arrays = {"part": pa.repeat(part, table.num_rows)}
            for column in columns:
                stored, _, kind = _COLUMNS[column]
                arrays[column] = table[stored].cast(kind) if stored in wanted else pa.nulls(table.num_rows, kind)
            yield from pa.table(arrays).to_batches(max_chunksize=_BATCH)


def _stored(files: ArchiveFiles, name: ObjectName, file: File) -> Stored:
    with files.parquet(file) as parquet:
        footer = parquet.metadata
    said = entries(footer.metadata)
    times, delivered = bounds(footer, layout.TIMESTAMP), bounds(footer, layout.DELIVERED)
    return Stored(
        name=name,
        size=file.size,
        modified=file.modified,
        messages=int(said.get("messages", name.rows)),
        created=said.get("stream_created", ""),
        interval=int(said.get("interval", UNKNOWN_INTERVAL)),
        sealed_by=said.get("sealed_by", ""),
        oldest=None if times is None else microseconds_of(times[0]),
        newest=None if times is None else microseconds_of(times[1]),
        redelivered=delivered is None or delivered[1] > 1,
        bundles=int(said[layout.BUNDLES]) if name.bundle and layout.BUNDLES in said else None,
    )
