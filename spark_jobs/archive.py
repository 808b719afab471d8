"""Reads an archive in Spark: every message once, as one table, through Spark's own Parquet reader.

Object names say which objects may share messages (see `layout`). Others are read as they are; those that may share
messages are compared by sequence (see `overlaps`), or go through `dropDuplicates`. Objects whose column types differ
still form one table.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any, Literal

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import DataType

from jetcapture_py.archive import layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.archive.layout import LONGEST_INTERVAL, ObjectName
from jetcapture_py.archive.overlaps import Range, resolve
from jetcapture_py.config import buckets
from jetcapture_py.config.units import microseconds_of
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store.archive import retried
from jetcapture_py.store.remote import with_secrets
from jetcapture_py.text import plural
from spark_jobs.reading import bucket as kv
from spark_jobs.reading.arrow_engine import ArrowEngine
from spark_jobs.reading.columns import Columns, Reads, Table, quoted
from spark_jobs.reading.location import ArchiveLocation
from spark_jobs.reading.objects import Archive, Listing, ObjectFacts
from spark_jobs.reading.part import Keys, Moment, Part
from spark_jobs.reading.scan import Scans

Dedupe = Literal["auto", "full", "none"]
Engine = Literal["spark", "arrow"]

MAX_SCANS = 16
"""Native reads of objects that have to be read in different ways. Each takes time to plan, and a drift of several
columns has hundreds of combinations; the objects with the fewest rows are then read with Arrow."""
_FEW_SCANS = 4
_ROWS_OF_A_SCAN = 100_000
"""Rows that a scan needs when there are more than a few: Arrow reads fewer in less time than a scan takes to plan."""

_POSITION = "_nats_row, or 0"
_TIME_TYPE = "spark.sql.timeType.enabled"


def read_archive(
    spark: SparkSession,
    url: str,
    stream: str,
    *,
    start: Moment | None = None,
    end: Moment | None = None,
    event_start: Moment | None = None,
    event_end: Moment | None = None,
    keys: Keys | None = None,
    columns: Columns | None = None,
    dedupe: Dedupe = "auto",
    quarantine: bool = False,
    parquet_only: bool = False,
    options: Mapping[str, Any] | None = None,
    engine: Engine = "spark",
) -> DataFrame:
    """Return the archive of `stream` under `url` as a DataFrame, with `key`, `date` and `hour` as string columns.

    `start` (inclusive) and `end` (exclusive) filter by `_nats_timestamp`; `event_start` and `event_end` filter by the
    time of the buckets: `_nats_time`, or `_nats_timestamp` in objects without that column. Each is a datetime with a
    time zone, a date (its beginning in UTC), or RFC 3339 text, by default in UTC. Only objects whose buckets overlap
    the range are opened. With `start` and `end` and buckets of another time (`block.time`), footers are read instead,
    of all objects that `event_start` and `event_end` allow.

    `keys` filters by key; None stands for messages without one. `columns` lists the wanted columns, or is a predicate
    on names; the result of a predicate may also contain the columns that identify a message.

    `dedupe`: `auto` drops copies where object names allow any: under one key and bucket, in one bundle and bucket, or
    in a bucket with several layouts. `full` compares all messages and returns any one copy, for archives whose key
    rule, `block.interval` or decoding changed while copies were in flight. `none` returns all rows.

    Objects in formats other than Parquet (`block.format`) cannot be read: if there are any in the range, that is an
    error, unless `parquet_only` leaves them out.

    A column that is an integer in some objects and a float in others becomes double; other differing types become
    string, structs and lists as JSON.

    `options` are the capture's `store.options`: fsspec lists the objects with them, and Spark gets the endpoint and
    credentials. `engine`: `spark` is Spark's own reader; `arrow` reads with fsspec and fetches only `columns`: slower,
    but Spark needs no file system for the store.
    """
    if engine not in ("spark", "arrow"):
        raise JetcaptureError(f"engine={engine!r}: expected spark or arrow")
    if dedupe not in ("auto", "full", "none"):
        raise JetcaptureError(f"dedupe={dedupe!r}: expected auto, full or none")
    part = Part.of(start, end, keys, event_start, event_end)
    options = with_secrets(options or {})
    location = ArchiveLocation.open(url, options)
    if engine == "spark":
        location.require(spark)
    own = ArrowEngine(files=location.files, start=part.start, end=part.end, keys=part.keys)
    archive = Archive(
        spark=spark, location=location, stream=stream, quarantine=quarantine, engine=own, native=engine == "spark"
    )
    columns = [columns] if isinstance(columns, str) else columns
    needed = _with_time(columns) if part.by_event else columns
    frame = retried(lambda: _plan(archive, part, needed, dedupe, parquet_only=parquet_only))
    frame = _between(frame, sf.col(layout.TIMESTAMP), part.start, part.end)
    if part.by_event:
        times = [name for name in (layout.TIME, layout.TIMESTAMP) if name in frame.columns]
        frame = _between(frame, sf.coalesce(*map(sf.col, times)), part.event_start, part.event_end)
    return frame if columns is None or callable(columns) else frame.select(*(_column(frame, name) for name in columns))


def _with_time(columns: Columns | None) -> Columns | None:
    """Return the columns to read for a condition on the messages' time."""
    if callable(columns):
        return lambda name: name == layout.TIME or columns(name)
    return None if columns is None else [*columns, layout.TIME]


def _between(frame: DataFrame, time: Column, start: datetime | None, end: datetime | None) -> DataFrame:
    if start is not None:
        frame = frame.where(time >= sf.lit(start))
    return frame if end is None else frame.where(time < sf.lit(end))


def archive_view(spark: SparkSession, url: str, stream: str, name: str | None = None, **read: Any) -> DataFrame:
    """Register the archive as a temporary view, for SQL. `read` are arguments of `read_archive`.

    The default name is the stream's, with `_` for every character but ASCII letters, digits and `_`, and before a
    leading digit: `orders-eu` is `orders_eu`, `1e5` is `_1e5`. Other names are kept; quote them with backticks in SQL.
    """
    frame = read_archive(spark, url, stream, **read)
    frame.createOrReplaceTempView(quoted(_plain_name(stream) if name is None else name))
    return frame


def read_bucket(
    spark: SparkSession,
    url: str,
    bucket: str,
    *,
    as_of: Moment | int | None = None,
    history: bool = False,
    max_age: str | float | timedelta | None = None,
    max_msgs_per_subject: int | None = None,
    columns: Sequence[str] | None = None,
    dedupe: Dedupe = "auto",
    parquet_only: bool = False,
    options: Mapping[str, Any] | None = None,
    engine: Engine = "spark",
) -> DataFrame:
    """Return the KV bucket `bucket` at a moment: the entry of each key that clients could get then.

    `as_of` is a time as for `read_archive`, inclusive, or a revision, for the moment when it was stored; by default
    now, as far as the archive goes. Keys deleted, purged or expired by then are left out, even if the archive has no
    marker for it. `history` returns all entries up to that moment instead, including deletions and expired entries:
    more than the bucket itself keeps.

    Columns: `key_name`, `operation` (put, delete, purge, expire), `revision`, `_nats_expires` (null: never), the
    envelope, with the value in `_nats_payload`, and the decoded columns, which are null if a value could not be
    decoded. `columns` lists the wanted columns.

    TTLs and limits are those that the capture recorded; `max_age` (a duration, 0 for no limit) and
    `max_msgs_per_subject` override them. If the bucket was recreated, a revision is one of the newest bucket. The other
    arguments are those of `read_archive`.
    """
    kv.check_name(bucket)
    stream, moment = f"{buckets.PREFIXES['bucket']}{bucket}", buckets.moment(as_of)
    until = moment if isinstance(moment, datetime) else None
    known = kv.incarnations(ArchiveLocation.open(url, options or {}).files, stream, max_age, max_msgs_per_subject)
    read: dict[str, Any] = {
        "end": None if until is None else until + timedelta(microseconds=1),
        "columns": None if columns is None else {*kv.NEEDED, *columns}.__contains__,
        "dedupe": dedupe,
        "parquet_only": parquet_only,
        "options": options,
        "engine": engine,
    }
    good = read_archive(spark, url, stream, **read)
    bad = read_archive(spark, url, stream, quarantine=True, **read)
    life, found = kv.current(kv.entries(good, bad), known, until)
    time = microseconds_of(datetime.now(UTC) if until is None else until)
    if isinstance(moment, int):
        time = kv.time_of(found, moment) or time
        found = found.where(sf.col(layout.SEQ) <= moment)
    found = kv.described(found, life.limits)
    found = kv.whole_history(found) if history else kv.at(found, life.limits, time)
    return found if columns is None else found.select(*(_column(found, name) for name in columns))


def _plain_name(stream: str) -> str:
    """Return a name that SQL accepts without backticks."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", stream)
    return f"_{name}" if name[0].isdigit() else name


def _plan(
    archive: Archive, part: Part, columns: Columns | None, dedupe: Dedupe, *, parquet_only: bool = False
) -> DataFrame:
    """Return the objects that may match, as of now. Raises VanishedError when they have just changed."""
    listing = archive.listing(part.keys)
    if not parquet_only:
        _refuse_others(archive, listing, part)
    chosen, facts = _chosen(archive, listing, part)
    if chosen:
        return _read(archive, listing, facts, chosen, columns, dedupe, part.keys)
    if not listing.objects:
        listing = archive.listing()
    if not listing.objects:
        _refuse_others(archive, listing, Part(None, None, None))
        return archive.nothing()
    last = max(listing.objects, key=lambda name: name.bucket)  # no rows, with the columns that the last object has
    facts = archive.facts([last], listing)
    return _read(archive, listing, facts, [last], columns, "none").where(sf.expr("false"))


def _refuse_others(archive: Archive, listing: Listing, part: Part) -> None:
    """Raise if objects in other formats may hold messages of the part."""
    found = [name for name in listing.others if _reaches(name, part.event_start, part.event_end)]
    found = [name for name in found if name.event_time or _reaches(name, part.start, part.end)]
    if found:
        formats = ", ".join(sorted({name.suffix.removeprefix(".") for name in found}))
        many = f"{plural(len(found), 'object')} of stream {archive.stream} in {formats}"
        hint = "; --parquet-only or parquet_only=True leaves them out" if listing.objects else ""
        raise JetcaptureError(f"{archive.url} has {many}, and only Parquet can be read{hint}")


def _chosen(archive: Archive, listing: Listing, part: Part) -> tuple[list[ObjectName], ObjectFacts]:
    """Return the objects that may hold messages of the part, and what their footers say: by their names, and by their
    footers where the names do not say it, which is the time of event-time buckets and the number of bundles."""
    found = [name for name in listing.objects if _reaches(name, part.event_start, part.event_end)]
    found = [name for name in found if name.event_time or _reaches(name, part.start, part.end)]
    timed = part.start is not None or part.end is not None
    facts = archive.facts(found, listing, timed=timed)
    if timed:
        found = [name for name in found if _overlaps(facts.times.get(name), part)]
    if part.keys is not None:
        keys = part.keys
        bundles = {number: {bundle_of(key, number) for key in keys} for number in set(facts.bundles.values())}
        found = [name for name in found if name not in facts.bundles or name.bundle in bundles[facts.bundles[name]]]
    return found, facts


def _overlaps(times: tuple[datetime, datetime] | None, part: Part) -> bool:
    """Whether an object with messages of these times, None if unknown, may hold some of the part."""
    if times is None:
        return True
    return (part.start is None or times[1] >= part.start) and (part.end is None or times[0] < part.end)


def _reaches(name: ObjectName, start: datetime | None, end: datetime | None) -> bool:
    """Whether the object's bucket may reach into this time."""
    if start is not None and name.bucket + LONGEST_INTERVAL.total_seconds() <= start.timestamp():
        return False
    return end is None or name.bucket < end.timestamp()


def _column(frame: DataFrame, name: str) -> Column:
    if name.casefold() not in (column.casefold() for column in frame.columns):
        raise JetcaptureError(f"the archive has no column {name}; it has {', '.join(frame.columns)}")
    return sf.col(quoted(name))


def _read(
    archive: Archive,
    listing: Listing,
    facts: ObjectFacts,
    names: Sequence[ObjectName],
    columns: Columns | None,
    dedupe: Dedupe,
    keys: Sequence[str | None] | None = None,
) -> DataFrame:
    """Return the objects, and of those in bundles the rows of `keys`, as one table, deduplicated."""
    if dedupe == "auto":
        whole, shared = layout.split_overlapping(names, facts.bundles)
    else:
        whole, shared = ([], list(names)) if dedupe == "full" else (list(names), [])
    sensitive = archive.spark.conf.get("spark.sql.caseSensitive") == "true"
    used = {schema: at for at, schema in enumerate(dict.fromkeys(facts.schema_of[name] for name in names))}
    table = Table([facts.schemas[schema] for schema in used], archive.quarantine, columns, sensitive)
    if table.times and archive.spark.conf.get(_TIME_TYPE, "false") != "true":
        raise JetcaptureError(
            f"column {table.times[0]} is a time of day: set {_TIME_TYPE}=true, or name the columns you need instead"
        )
    parts: dict[ObjectName, list[Range]] = {}
    if dedupe == "auto" and shared and not table.several_rows:
        resolved = resolve(shared, lambda names: archive.identities(names, listing), facts.bundles)
        if len({name.path.rpartition("/")[2] for name in resolved.parts}) == len(resolved.parts):
            whole, parts, shared = whole + resolved.whole, resolved.parts, resolved.unresolved
    scans = Scans(archive.spark, archive.location, archive.directory, listing, [*whole, *parts, *shared])
    reader = _Reader(archive, scans, table, {name: used[facts.schema_of[name]] for name in names}, keys)
    frames = []
    if whole:
        frames.append(reader.union(whole))
    if parts:
        frames.append(reader.union(list(parts), parts))
    if shared:
        frame = reader.union(shared)
        identity = [*layout.IDENTITY]
        if dedupe == "auto":  # copies share key and bucket, and a filter on these can then pass the deduplication
            identity += table.partitions
        if layout.ROW in frame.columns:  # a batch in which all messages have one row leaves the number out
            numbered = frame.withColumn(_POSITION, sf.coalesce(layout.ROW, sf.lit(0)))
            frames.append(numbered.dropDuplicates([*identity, _POSITION]).drop(_POSITION))
        else:
            frames.append(frame.dropDuplicates(identity))
    return reduce(DataFrame.union, frames)


@dataclass(frozen=True)
class _Reader:
    """Reads objects of a plan, with the columns of `table`."""

    archive: Archive
    scans: Scans
    table: Table
    schema_of: Mapping[ObjectName, int]
    keys: Sequence[str | None] | None

    def union(self, names: Sequence[ObjectName], parts: Mapping[ObjectName, list[Range]] | None = None) -> DataFrame:
        """The objects, or these parts of them."""
        under_keys = [name for name in names if not name.bundle]
        frames = [self._alike(under_keys, parts)] if under_keys else []
        if len(under_keys) < len(names):
            frame = self._alike([name for name in names if name.bundle], parts)
            frames.append(frame if self.keys is None else frame.where(_has_key(self.keys)))
        return reduce(DataFrame.union, frames)

    def _alike(self, names: Sequence[ObjectName], parts: Mapping[ObjectName, list[Range]] | None) -> DataFrame:
        """Objects of one layout: natively, as long as few ways to read them are enough for all."""
        alike: dict[int, list[ObjectName]] = defaultdict(list)
        for name in names:
            alike[self.schema_of[name]].append(name)
        schemas = sorted(alike, key=lambda schema: -sum(name.rows for name in alike[schema]))
        scans, rest = divide(schemas, self.table.reads, MAX_SCANS if self.archive.native else 0)
        frames: list[DataFrame] = []
        for reads, members in scans:
            chosen_names = [name for each in members for name in alike[each]]
            if len(frames) < _FEW_SCANS or sum(name.rows for name in chosen_names) >= _ROWS_OF_A_SCAN:
                frames.append(self._natively(reads, chosen_names, parts))
            else:
                rest = [*members, *rest]
        if rest:
            fields, columns = self.table.fields(rest)
            others = [name for each in rest for name in alike[each]]
            chosen = None if parts is None else {name: parts[name] for name in others}
            frames.append(self.archive.fetched(others, fields, self.table.partitions, chosen).select(*columns))
        return reduce(DataFrame.union, frames)

    def _natively(
        self, reads: Reads, names: Sequence[ObjectName], parts: Mapping[ObjectName, list[Range]] | None
    ) -> DataFrame:
        chosen = None if parts is None else {name: parts[name] for name in names}
        bundles = bool(names[0].bundle)
        frame = self.scans.frame(names, self.table.read_schema(reads, bundles=bundles), chosen)
        columns = self.table.select(reads, bundles=bundles)
        return frame.select(*columns) if columns else frame


def _has_key(keys: Sequence[str | None]) -> Column:
    """A condition on the column of keys, by which Spark skips row groups and pages."""
    found = sf.col(layout.KEY).isin([key for key in keys if key is not None])
    return found | sf.col(layout.KEY).isNull() if None in keys else found


def divide(
    schemas: Iterable[int], reads: Callable[[int], Reads], most: int
) -> tuple[list[tuple[Reads, list[int]]], list[int]]:
    """Divide schemas into at most this many scans, first ones first, and return the rest."""
    scans: list[tuple[dict[str, DataType], list[int]]] = []
    rest = []
    for schema in schemas:
        wanted = reads(schema)
        for known, members in scans:
            if all(known.get(column, kind) == kind for column, kind in wanted.items()):
                known.update(wanted)
                members.append(schema)
                break
        else:
            if len(scans) < most:
                scans.append((dict(wanted), [schema]))
            else:
                rest.append(schema)
    return list(scans), rest
