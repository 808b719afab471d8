"""Reads an archive in Spark: every message once, as one table, through Spark's own Parquet reader.

Renders a plan (see `jetcapture_py.reading.plan`) as a DataFrame.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial, reduce
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf

from jetcapture_py.archive import layout
from jetcapture_py.archive.incarnations import Bounds
from jetcapture_py.archive.schema import ENVELOPE, REPLY, STREAM_FIELD, with_key_column
from jetcapture_py.config import buckets
from jetcapture_py.config.buckets import SUBJECTS
from jetcapture_py.config.column_types import parse_type
from jetcapture_py.config.model import Config, load
from jetcapture_py.config.units import microseconds_of
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.reading.arrow import PlanReader
from jetcapture_py.reading.bucket import (
    NEEDED,
    QUARANTINED,
    BucketIncarnation,
    EntryReader,
    check_name,
    entry_types,
    incarnations,
    start_of,
)
from jetcapture_py.reading.columns import Columns, outputs
from jetcapture_py.reading.plan import Dedupe, ReadPlan, ReadRequest, list_objects
from jetcapture_py.reading.selection import Keys, Latest, Moment, Selection
from jetcapture_py.store.credentials import with_secrets
from spark_jobs.datasource.boundary import Boundary, BoundaryFinder, OwnMessages
from spark_jobs.datasource.options import ReadOptions
from spark_jobs.datasource.routed import StreamRows, live_parts, live_rows, reading_options
from spark_jobs.datasource.session import Session
from spark_jobs.reading.columns import named_in, quoted, spark_schema
from spark_jobs.reading.latest import newest
from spark_jobs.reading.location import ArchiveLocation
from spark_jobs.reading.scan import Scans

Engine = Literal["spark", "arrow"]

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
    types: Mapping[str, pa.DataType | str] | None = None,
    options: Mapping[str, Any] | None = None,
    engine: Engine = "spark",
) -> DataFrame:
    """Return the archive of `stream` under `url` as a DataFrame, with `key`, `date` and `hour` as string columns.

    Rows and arguments are those of `jetcapture_py.read_archive`; the result of a predicate on `columns` may also have
    the columns that identify a message, and `_nats_time`. Where a column has another type than in `types`, Python
    workers read it with Arrow, and each logs how many values are null.

    `engine`: `spark` is Spark's own reader, which gets the endpoint and credentials of `options`; `arrow` reads with
    the store's driver in Python workers and fetches only `columns`: slower, but Spark needs no file system for it.
    """
    selection = Selection.of(start, end, keys, event_start, event_end)
    location = _open(spark, url, options, engine)
    request = ReadRequest(
        files=location.files,
        stream=stream,
        selection=selection,
        columns=columns,
        dedupe=dedupe,
        quarantine=quarantine,
        parquet_only=parquet_only,
        types=types,
    )
    plan = request.plan()
    frame = _rows(spark, location, plan, engine)
    return frame if columns is None or callable(columns) else _select(frame, plan.outputs)


def read_latest(
    spark: SparkSession,
    url: str,
    stream: str,
    *,
    by: str | Sequence[str],
    order: str = layout.SEQ,
    deleted: str | None = None,
    start: Moment | None = None,
    end: Moment | None = None,
    event_start: Moment | None = None,
    event_end: Moment | None = None,
    keys: Keys | None = None,
    columns: Columns | None = None,
    dedupe: Dedupe = "auto",
    quarantine: bool = False,
    parquet_only: bool = False,
    types: Mapping[str, pa.DataType | str] | None = None,
    options: Mapping[str, Any] | None = None,
    engine: Engine = "spark",
) -> DataFrame:
    """Return the newest row of each key in the archive of `stream` as a DataFrame.

    `by`, `order` and `deleted` are those of `jetcapture_py.read_latest`, in Spark's SQL, and may use columns that are
    not in `columns`. The other arguments are those of `read_archive`, and choose the rows among which the newest is
    found. Raises JetcaptureError.
    """
    latest = Latest(by=by, order=order, deleted=deleted)
    location = _open(spark, url, options, engine)
    request = ReadRequest(
        files=location.files,
        stream=stream,
        selection=Selection.of(start, end, keys, event_start, event_end),
        columns=columns,
        dedupe=dedupe,
        quarantine=quarantine,
        parquet_only=parquet_only,
        types=types,
        needed=named_in(*latest.by, order, deleted or ""),
    )
    plan = request.plan()
    frame = newest(_rows(spark, location, plan, engine), latest, latest.lives(location.files, stream))
    return frame if columns is None or callable(columns) else _select(frame, plan.outputs)


def _open(spark: SparkSession, url: str, options: Mapping[str, Any] | None, engine: Engine) -> ArchiveLocation:
    if engine not in ("spark", "arrow"):
        raise JetcaptureError(f"engine={engine!r}: expected spark or arrow")
    location = ArchiveLocation.open(url, with_secrets(options or {}))
    if engine == "spark":
        location.require(spark)
    return location


def _rows(spark: SparkSession, location: ArchiveLocation, plan: ReadPlan, engine: Engine) -> DataFrame:
    """Return the rows of a plan, with the columns of its table."""
    if plan.table.times and spark.conf.get(_TIME_TYPE, "false") != "true":
        times = plan.table.times[0]
        raise JetcaptureError(
            f"column {times} is a time of day: set {_TIME_TYPE}=true, or name the columns you need instead"
        )
    # a case-sensitive session reads a column with another case in objects as null
    native = engine == "spark" and spark.conf.get("spark.sql.caseSensitive") != "true"
    frame = Scans(spark, location, plan, native=native).rows()
    for names, first, last in plan.bounds:
        time = sf.coalesce(*map(sf.col, names))
        frame = frame if first is None else frame.where(time >= sf.lit(first))
        frame = frame if last is None else frame.where(time < sf.lit(last))
    if plan.selection.seqs is not None:
        frame = frame.where(sf.col(layout.SEQ).between(*plan.selection.seqs))
    return frame


def _select(frame: DataFrame, outputs: Iterable[tuple[str, str]]) -> DataFrame:
    return frame.select(*(sf.col(quoted(column)).alias(name) for name, column in outputs))


def read_stream(
    spark: SparkSession,
    config: str | os.PathLike[str] | Config,
    *,
    start: Moment | None = None,
    end: Moment | None = None,
    event_start: Moment | None = None,
    event_end: Moment | None = None,
    keys: Keys | None = None,
    columns: Columns | None = None,
    engine: Engine = "spark",
    fail_on_data_loss: bool = True,
    timeout: str = "60s",
) -> DataFrame:
    """Return a stream as a DataFrame: archived messages from its archive, and later ones from the stream.

    It has each message once, up to the stream's current last one. The columns are those of the archive. `config`, a
    file or a `Config`, is the capture's: it locates archive, stream and servers, and configures decoding and keys of
    the stream's messages. The other arguments are those of `read_archive`.

    A recreated stream has only its current messages, and those that it was restored with. Messages in neither the
    archive nor the stream are an error that names them, unless `fail_on_data_loss` is False. Streams that delete
    acknowledged messages (retention workqueue and interest) are an error, too. `timeout` limits how long NATS may be
    unavailable.

    Raises JetcaptureError.
    """
    selection = Selection.of(start, end, keys, event_start, event_end)
    capture = config if isinstance(config, Config) else load(config)
    stream = capture.source.stream
    location = _open(spark, capture.store.url, capture.store.options, engine)
    files = location.files
    reading = reading_options(capture.nats, stream, watched=fail_on_data_loss, timeout=timeout)
    with Session(reading, f"jetcapture spark {stream}") as session:
        finder = BoundaryFinder(files, stream, capture.source.filter_subjects)
        boundary = finder.find(session)
    first = boundary.first_live(1, watched=fail_on_data_loss)
    archived_selection = replace(selection, seqs=(1, boundary.archived))
    request = ReadRequest(files=files, stream=stream, selection=archived_selection, columns=columns)
    objects = list_objects(files, stream, selection)  # read after the boundary, so that it includes it
    plan = request.plan(objects, before=_first_columns(capture))
    archived = _rows(spark, location, plan, engine)
    for since, restored in boundary.own.links:
        archived = archived.where((sf.unix_micros(layout.TIMESTAMP) >= since) | (sf.col(layout.SEQ) <= restored))
    live = replace(plan, selection=selection, keep=OwnMessages(erased=boundary.own.erased) or None)
    rows = StreamRows(config=capture, reader=PlanReader.of(live, plan.table.schema.names))
    frame = archived.union(_live(spark, rows, reading, boundary, first))
    return frame if columns is None or callable(columns) else _select(frame, plan.outputs)


def _first_columns(capture: Config) -> pa.Schema:
    """Return the columns known before the first object: the envelope, the key, and declared ones."""
    left_out = {REPLY, *(() if capture.decode.keep_payload else (layout.PAYLOAD,))}
    own = [STREAM_FIELD, *(field for field in ENVELOPE if field.name not in left_out)]
    if capture.block.time != layout.STREAM_TIME:
        own.append(pa.field(layout.TIME, pa.timestamp("us", "UTC")))
    if capture.decode.conflict == "rescue":
        own.append(pa.field(layout.RESCUED, pa.string()))
    declared = ((layout.field_name(name), column.type) for name, column in capture.decode.columns.items())
    return with_key_column(pa.schema([*own, *(pa.field(name, parse_type(type_)) for name, type_ in declared)]))


def _live(spark: SparkSession, rows: StreamRows, reading: ReadOptions, boundary: Boundary, first: int) -> DataFrame:
    """Return the stream's messages from `first` on, up to the last one when the boundary was found."""
    parts = live_parts(boundary, first, boundary.state.last + 1, None)
    schema = spark_schema(rows.reader.table.schema)
    if not parts:
        return spark.createDataFrame([], schema)
    frame = spark.createDataFrame([(pickle.dumps(part),) for part in parts], "part binary").repartition(len(parts))
    return frame.mapInArrow(partial(_read_live, rows, reading), schema)


def _read_live(rows: StreamRows, reading: ReadOptions, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read the parts listed in `batches`. Runs in a worker."""
    for batch in batches:
        for part in batch.column(0).to_pylist():
            for _, some in live_rows(rows, reading, pickle.loads(part)):  # noqa: S301  of our own driver
                yield from some


def archive_view(spark: SparkSession, url: str, stream: str, name: str | None = None, **read: Any) -> DataFrame:
    """Register the archive as a temporary view, for SQL. `read` are arguments of `read_archive`.

    The default name is the stream's, with `_` for every character but ASCII letters, digits and `_`, and before a
    leading digit: `orders-eu` is `orders_eu`, `1e5` is `_1e5`. Other names are kept; quote them with backticks in SQL.
    """
    frame = read_archive(spark, url, stream, **read)
    if name is None:
        name = re.sub(r"[^A-Za-z0-9_]", "_", stream)
        name = f"_{name}" if name[0].isdigit() else name
    frame.createOrReplaceTempView(quoted(name))
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
    """Return the key-value bucket `bucket` at a moment: each key's entry that clients could get then.

    Arguments and columns are those of `jetcapture_py.read_bucket`, which has the rules; `engine` is that of
    `read_archive`. Workers choose the entries, a key at a time, so they need jetcapture. If the bucket was recreated, a
    revision is one of the newest bucket.
    """
    check_name(bucket)
    stream, moment = f"{buckets.PREFIXES['bucket']}{bucket}", buckets.moment(as_of)
    until = moment if isinstance(moment, datetime) else None
    location = _open(spark, url, options, engine)
    known = incarnations(location.files, stream, max_age, max_msgs_per_subject)
    # the quarantine first: entries are archived before they leave the quarantine
    bad_plan, good_plan = (
        ReadRequest(
            files=location.files,
            stream=stream,
            selection=Selection(end=None if until is None else until + timedelta(microseconds=1)),
            columns=None if columns is None else {*NEEDED, *columns}.__contains__,
            dedupe=dedupe,
            quarantine=quarantine,
            parquet_only=parquet_only,
        ).plan()
        for quarantine in (True, False)
    )
    good, bad = (_rows(spark, location, plan, engine) for plan in (good_plan, bad_plan))
    types = entry_types(good_plan.table.schema, bad_plan.table.schema)
    good = good.select(*(sf.col(quoted(name)) for name in good.columns if name.lower() not in layout.PARTITIONS))
    bad = bad.select(*(name for name in bad.columns if name.startswith("_nats_")))
    entries = good.withColumn(QUARANTINED, sf.lit(col=False)).unionByName(
        bad.withColumn(QUARANTINED, sf.lit(col=True)), allowMissingColumns=True
    )
    micros, seq = sf.unix_micros(layout.TIMESTAMP), sf.col(layout.SEQ)
    incarnation, since = start_of(known, None if until is None else microseconds_of(until), _bounds(entries, known))
    entries = entries.where(micros >= since)
    time = microseconds_of(datetime.now(UTC) if until is None else until)
    if isinstance(moment, int):
        entries = entries.where(seq <= moment)
        time = entries.agg(sf.max_by(micros, seq)).collect()[0][0] or time
    chosen = [(name, name) for name in types] if columns is None else outputs(list(types), columns)
    needed = {source: types[source] for _, source in chosen}
    read = partial(_read_entries, EntryReader(bucket=incarnation, moment=time, history=history, types=needed))
    key = sf.regexp_extract(layout.SUBJECT, f"{SUBJECTS}(.+)$", 1)
    by_key = entries.where(key != "").repartition(key)
    by_key = by_key.sortWithinPartitions(key, seq, layout.TIMESTAMP, sf.desc(QUARANTINED))
    rows = by_key.select(sf.struct("*").alias("entry"))  # mapInArrow takes no column with a dot in its name
    return _select(rows.mapInArrow(read, spark_schema(pa.schema(list(needed.items())))), chosen)


def _read_entries(reader: EntryReader, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read the entries in the only column of `batches`. Runs in a worker."""
    return reader.read(pa.RecordBatch.from_struct_array(batch.column(0)) for batch in batches)


def _bounds(entries: DataFrame, known: Sequence[BucketIncarnation]) -> dict[int, Bounds]:
    """Return the first and last sequence of each incarnation with entries; none for a single one."""
    if len(known) == 1:
        return {}
    micros = sf.unix_micros(layout.TIMESTAMP)
    number = reduce(Column.__add__, ((micros >= later.created).cast("int") for later in known[1:]))
    rows = entries.groupBy(number.alias("number")).agg(sf.min(layout.SEQ), sf.max(layout.SEQ)).collect()
    return {known[number].created: (first, last) for number, first, last in rows}
