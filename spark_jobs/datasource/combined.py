"""The `jetcapture` data source: a stream from its archive and then live, in pure Python.

    spark.readStream.format("jetcapture").option("config", "config.yaml").load()

A streaming query reads in the order of sequences from batch to batch. Its offset is the next sequence, with the
incarnation, stream and archive that it belongs to. Messages up to the watermark are read from objects, and the rest
from the stream. The place is decided when a batch is read, because messages may leave the stream after it was planned.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types as st
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
)

from jetcapture_py.archive import layout
from jetcapture_py.archive.incarnations import Origin
from jetcapture_py.config.model import load
from jetcapture_py.errors import ConfigError, MissingStreamError, SourceError
from jetcapture_py.reading.arrow import PlanReader
from jetcapture_py.reading.columns import Table
from jetcapture_py.reading.plan import ReadRequest
from jetcapture_py.reading.selection import Selection
from jetcapture_py.store.archive import open_archive
from spark_jobs.datasource.archived import ArchivedMessages, ArchivedPartition
from spark_jobs.datasource.boundary import Boundary, BoundaryFinder, OwnMessages, first_archived, is_same
from spark_jobs.datasource.offsets import Positions, StreamPartition, check_same, check_there, origin_of
from spark_jobs.datasource.one_line import one_line_errors
from spark_jobs.datasource.options import CombinedOptions, parse
from spark_jobs.datasource.read import Offset, StreamingRead
from spark_jobs.datasource.routed import StreamRows, live_parts, live_rows, reading_options
from spark_jobs.datasource.session import Session
from spark_jobs.reading.columns import spark_schema

log = logging.getLogger("jetcapture.spark")
_NONE = "none"


class CombinedSource:
    """An archive and its stream, by options. Opened on the driver; it can be pickled. Raises JetcaptureError."""

    def __init__(self, given: Mapping[str, str]) -> None:
        if not any(name.lower() == "config" for name in given):
            raise ConfigError("config: name the capture's configuration, which says how its messages are decoded")
        options = self.options = parse(CombinedOptions, given)
        self.config = load(options.config)
        self.stream = self.config.source.stream
        self.files = open_archive(self.config.store.url, self.config.store.options)
        keys = None if options.keys is None else [key.strip() or None for key in options.keys.split(",")]
        self.selection = Selection.of(options.start, options.end, keys)
        self.reading = reading_options(
            self.config.nats, self.stream, watched=options.fail_on_data_loss, timeout=f"{options.timeout:g}s"
        )

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of a checkpoint: the options that select messages."""
        chosen = {name: value for name in ("keys", "start", "end") if (value := getattr(self.options, name))}
        return {"url": self.files.shown, "stream": self.stream, **chosen}

    def schema(self) -> st.StructType:
        """Return the archive's current columns."""
        request = ReadRequest(files=self.files, stream=self.stream, selection=self.selection)
        return spark_schema(request.plan().table.schema)

    def opened(self, schema: st.StructType) -> None:
        stored = {
            layout.STREAM: pa.string(),
            layout.SEQ: pa.int64(),
            layout.TIMESTAMP: pa.timestamp("us", "UTC"),
        }
        if self.config.decode.rows != "one" or ":" in self.config.decode.format:
            stored[layout.ROW] = pa.int32()
        stored |= {field.name: to_arrow_type(field.dataType, timezone="UTC") for field in schema}
        fields = [(name, type_) for name, type_ in stored.items() if name not in layout.PARTITIONS]
        self.table = Table([pa.schema(fields)], False, None)  # noqa: FBT003
        self.columns = schema.fieldNames()
        self.types = pa.schema([(field.name, to_arrow_type(field.dataType, timezone="UTC")) for field in schema])
        self.archived = ArchivedMessages(
            files=self.files, stream=self.stream, table=self.table, columns=self.columns, selection=self.selection
        )
        self.finder = BoundaryFinder(self.files, self.stream, self.config.source.filter_subjects)

    def partitions(self, boundary: Boundary, first: int, end: int) -> list[InputPartition]:
        """Divide the messages from `first` to `end` (exclusive) among tasks."""
        partitions: list[InputPartition] = []
        until = min(end - 1, boundary.archived)
        if first <= until:
            self._tell_removed(boundary, first, until)
            parts = self.options.min_partitions or 2 * (os.cpu_count() or 1)
            partitions += self.archived.partitions(first, until, boundary.own or None, parts)
        if end - 1 > boundary.archived:
            live = boundary.first_live(first, watched=self.options.fail_on_data_loss)
            partitions += live_parts(boundary, live, end, self.options.min_partitions)
        return partitions

    def read(self, part: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a part. Raises JetcaptureError."""
        if isinstance(part, ArchivedPartition):
            first, last = part.plan.selection.seqs or (1, 0)
            task = TaskContext.get()
            failed = task is not None and task.attemptNumber() > 0  # perhaps because objects of its plan have vanished
            rows = self.archived.read(first, last, part.plan.keep, None if failed else part.plan)
        else:
            rows = self._live(cast("StreamPartition", part))
        for batch in rows:
            yield (
                pa.RecordBatch.from_arrays([batch.column(name) for name in self.columns], schema=self.types)
                if batch.schema != self.types
                else batch
            )

    def _live(self, part: StreamPartition) -> Iterator[pa.RecordBatch]:
        """Read a part from the stream, and messages that have left the stream since from the archive."""
        plan = self.archived.planned(1, 0, OwnMessages(erased=self.files.erased(self.stream)) or None)
        reader = replace(PlanReader.of(plan, self.table.schema.names), seqs=None)
        rows, first = StreamRows(config=self.config, reader=reader), part.first
        options = self.reading.model_copy(update={"fail_on_data_loss": True})  # detect removed messages
        while first < part.end:
            try:
                for after, some in live_rows(rows, options, replace(part, first=first)):
                    yield from some
                    first = after
                return
            except SourceError:
                boundary = self._after_loss(part.origin)
                last = 0 if boundary is None else min(part.end - 1, boundary.archived)
                if boundary is not None and last >= first:
                    yield from self.archived.read(first, last, boundary.own or None)
                    first = last + 1
                elif options is self.reading or self.options.fail_on_data_loss:
                    raise
                else:
                    options = self.reading  # the rest of the part, or nothing

    def _after_loss(self, origin: Origin) -> Boundary | None:
        """Find the boundary after messages have left the stream; None without the stream, or for another one."""
        with suppress(MissingStreamError), Session(self.reading, f"jetcapture spark {self.stream}") as session:
            boundary = self.finder.find(session)
            return boundary if is_same(self.files, session, boundary, origin) else None
        return None

    def _tell_removed(self, boundary: Boundary, first: int, last: int) -> None:
        """Log which of these messages were removed from the archive on purpose."""
        expired = self.files.expired(self.stream)
        for low, high in () if expired is None else expired.ranges(boundary.created):
            if low <= last and high >= first:
                log.warning("messages %d to %d of stream %s have expired, or some of them: skipped",
                            max(low, first), min(high, last), self.stream)  # fmt: skip
                break
        if boundary.own.erased.near(first, last):
            log.warning("some messages from %d to %d of stream %s are erased: skipped", first, last, self.stream)


@one_line_errors
class JetcaptureDataSource(DataSource):
    """The entry point for Spark."""

    @classmethod
    def name(cls) -> str:
        return "jetcapture"

    def schema(self) -> st.StructType:
        """Return the columns of a read without a schema: the archive's current ones."""
        return CombinedSource(self.options).schema()

    def reader(self, schema: st.StructType) -> DataSourceReader:
        """For `spark.read`, and SQL."""
        return CombinedBatchReader(CombinedSource(self.options), schema)

    def streamReader(self, schema: st.StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        """For `spark.readStream`."""
        return CombinedStreamReader(CombinedSource(self.options), schema)


@one_line_errors
class CombinedBatchReader(DataSourceReader):
    """A read of everything up to the stream's current last message."""

    def __init__(self, source: CombinedSource, schema: st.StructType) -> None:
        source.opened(schema)
        self._source = source

    def partitions(self) -> list[InputPartition]:
        source = self._source
        with Session(source.reading, f"jetcapture spark {source.stream}") as session:
            boundary = source.finder.find(session)
        boundary.first_live(1, watched=source.options.fail_on_data_loss)
        nothing = StreamPartition(1, 1, boundary.origin)
        return source.partitions(boundary, 1, boundary.end) or [nothing]  # Spark requires at least one

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition."""
        return self._source.read(partition)


@one_line_errors
class CombinedStreamReader(StreamingRead):
    """A streaming read, first of the archive and then of the stream."""

    def __init__(self, source: CombinedSource, schema: st.StructType) -> None:
        super().__init__(source.reading)
        source.opened(schema)
        self._source = source
        self._boundary: Boundary | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_boundary": None}

    def initialOffset(self) -> Offset:  # noqa: N802  Spark's name
        """Return the start of a new query; the same on every call."""
        if self._initial is None:
            boundary = self._find()
            self._initial = {**self._offset(boundary, self._start(boundary)), "initial": True}
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  Spark's name
        """Return `maxOffsetsPerTrigger` or `maxBytesPerTrigger`; batches obey both."""
        options = self._source.options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        size = options.max_bytes_per_trigger
        return ReadAllAvailable() if size is None else ReadMaxBytes(int(size))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  Spark's name
        """Read only up to the current end."""
        self._until = self._find().end

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802  Spark's name
        """Return the end of the next batch; `start` itself without new messages."""
        self._check(start)
        boundary, first = self._find(), int(start["seq"])
        self._check_same(start, boundary)
        if self._source.options.fail_on_data_loss and first > boundary.state.last + 1:
            check_there(self._source.stream, first, boundary.state)
        self._latest = self._offset(boundary, boundary.end)
        end = min(self._end(boundary, first, limit), boundary.end if self._until is None else self._until)
        if end <= first:
            return start
        offset = self._offset(boundary, end)
        return {**offset, "began": start} if start.get("initial") else offset

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        start = end.get("began", start)
        self._check(start)
        self._check(end)
        boundary = self._find() if self._boundary is None else self._boundary
        if boundary.archived < int(end["seq"]) - 1:
            boundary = self._find()
        self._check_same(end, boundary)
        return self._source.partitions(boundary, int(start["seq"]), int(end["seq"]))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition."""
        return self._source.read(partition)

    def _find(self) -> Boundary:
        self._pause()
        boundary = self._boundary = self._source.finder.find(self._session)
        self._asked = time.monotonic()
        return boundary

    def _start(self, boundary: Boundary) -> int:
        """Return the start of a new query."""
        options = self._source.options
        if (moment := options.starting_timestamp) is not None:
            files, stream = self._source.files, self._source.stream
            selection = Selection(start=moment, keys=self._source.selection.keys)
            archived = first_archived(files, stream, selection, boundary.archived)
            if archived is not None:
                return archived
            return max(boundary.archived + 1, self._session.run(self._session.reads.first_at(stream, moment)))
        if options.starting_offsets == "latest":
            return boundary.end
        return 1 if options.starting_offsets == "earliest" else int(options.starting_offsets)

    def _end(self, boundary: Boundary, first: int, limit: ReadLimit) -> int:
        """Return the end of a batch in the archive or the stream."""
        options = self._source.options
        messages = size = None
        if not isinstance(limit, ReadAllAvailable):
            messages, size = options.max_offsets_per_trigger, options.max_bytes_per_trigger
        if first <= boundary.archived:
            return self._source.archived.end(first, boundary.archived, messages, None if size is None else int(size))
        state = boundary.state
        if size is not None and state.messages:
            few = max(1, int(size) * state.messages // max(1, state.bytes))
            messages = few if messages is None else min(messages, few)
        live = boundary.first_live(first, watched=options.fail_on_data_loss)
        for low, until, subjects in boundary.segments(live, boundary.end):
            positions = Positions(self._session, self._reading.model_copy(update={"subjects": subjects}))
            end = self._ends.end(positions, low, until, state, messages)
            if end > low:
                return end
        return first

    def _offset(self, boundary: Boundary, seq: int) -> Offset:
        return {**self._source.identity, **Positions(self._session, self._reading).offset(boundary.state, seq)}

    def _check_same(self, offset: Offset, boundary: Boundary) -> None:
        """Raise SourceError if the stream is not that of an offset."""
        origin = origin_of(offset)
        if not is_same(self._source.files, self._session, boundary, origin):
            check_same(self._source.stream, origin.created, boundary.state.created)

    def _check(self, offset: Offset) -> None:
        """Raise SourceError for an offset of a query with other options."""
        own = self._source.identity
        for name in dict.fromkeys((*own, "keys", "start", "end")):
            if offset.get(name) != own.get(name):
                was, now = (offsets.get(name, _NONE) for offsets in (offset, own))
                raise SourceError(
                    f"the checkpoint is one of {name} {was}, not of {now}: give every query a checkpointLocation of "
                    f"its own, or set the option {name} back"
                )
