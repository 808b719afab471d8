"""Read JetStream: a bounded range, or a streaming query whose only state is Spark's checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from jetcapture_py.jetstream.range_reader import RangeReader, StreamRange
from jetcapture_py.jetstream.read_session import StreamState
from jetcapture_py.jetstream.wire.inbox import Received
from spark_jobs.datasource.columns import MessageColumns
from spark_jobs.datasource.offsets import (
    LAST_PER_SUBJECT,
    BatchEnds,
    Positions,
    StreamPartition,
    check_same,
    check_stream,
    check_there,
    origin_of,
    split,
)
from spark_jobs.datasource.one_line import one_line_errors
from spark_jobs.datasource.options import ReadOptions
from spark_jobs.datasource.session import Session

POLL = 0.05
"""Minimum seconds between requests for a stream's state: Spark asks about a hundred times a second."""

Offset = dict[str, Any]


def fetch(
    session: Session, options: ReadOptions, part: StreamPartition, *, bare: bool
) -> Iterator[tuple[str, Received]]:
    """Yield the messages of `part` in chunks: pairs of consumer name and messages.

    `bare` omits payloads and headers. Raises SourceError if required messages are gone, or if expected messages do not
    arrive for `options.timeout` seconds.
    """
    wanted = StreamRange(
        stream=options.stream,
        first=part.first,
        end=part.end,
        subjects=options.subjects,
        per_subject=part.per_subject,
        headers_only=bare,
    )

    def check(state: StreamState, first: int | None) -> None:
        check_same(options.stream, part.origin.created, state.created)
        if first is not None:
            check_there(options.stream, first, state)
        check_there(options.stream, max(part.end, state.first), state)

    watching = check if options.fail_on_data_loss else None
    messages = RangeReader(session.reads, wanted, origin=part.origin, check=watching).messages()

    async def following() -> tuple[str, Received] | None:
        return await anext(messages, None)

    try:
        while (chunk := session.run(following())) is not None:
            yield chunk
    finally:
        session.run(messages.aclose())


def read(options: ReadOptions, schema: StructType, part: StreamPartition) -> Iterator[pa.RecordBatch]:
    """Yield the messages of one task's range."""
    if part.first < part.end:
        columns = MessageColumns(options, schema)
        with Session(options, f"jetcapture spark {options.stream}") as session:
            yield from columns.batches(fetch(session, options, part, bare=columns.bare), part)


@one_line_errors
class BatchReader(DataSourceReader):
    """A bounded read. Raises ConfigError for columns that cannot be read."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        MessageColumns(options, schema)
        self._options, self._schema = options, schema

    def partitions(self) -> list[StreamPartition]:
        options = self._options
        with Session(options, f"jetcapture spark {options.stream}") as session:
            positions = Positions(session, options)
            state = positions.state()
            first, end = positions.first(state), positions.end(state)
            origin = state.origin
            if options.starting_offsets == LAST_PER_SUBJECT:
                return [StreamPartition(first, end, origin, per_subject=True)]
            first = max(first, state.first)
            if options.subjects:  # other messages before the first match may be removed at any time
                first = positions.next_match(first) or end
            if options.fail_on_data_loss and isinstance(options.starting_offsets, int):
                check_there(options.stream, options.starting_offsets, positions.state())
        parts = split(first, end, origin, options.min_partitions)
        return parts or [StreamPartition(end, end, origin)]  # Spark requires at least one

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of one partition."""
        return read(self._options, self._schema, cast("StreamPartition", partition))


class StreamingRead(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Base of streaming reads: a connection, on the driver only, and the state reported to Spark."""

    def __init__(self, reading: ReadOptions) -> None:
        self._reading = reading
        self._connection: Session | None = None
        self._initial: Offset | None = None
        self._latest: Offset | None = None
        self._until: int | None = None
        self._asked = 0.0
        self._ends = BatchEnds()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None}

    @property
    def _session(self) -> Session:
        if self._connection is None:
            self._connection = Session(self._reading, f"jetcapture spark {self._reading.stream}")
        return self._connection

    def _pause(self) -> None:
        """Wait until the stream may be asked again."""
        time.sleep(max(0.0, self._asked + POLL - time.monotonic()))

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802  Spark's name
        """Return the stream's end, for Spark's progress reports."""
        return self._latest

    def stop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


@one_line_errors
class StreamReader(StreamingRead):
    """A streaming read.

    Spark's checkpoint has the end of each batch, but not the start of the first one: after a restart Spark asks again,
    and `latest` has moved. So the end of the first batch includes its start.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options)
        MessageColumns(options, schema)
        self._options, self._schema = options, schema
        self._created = ""  # the creation time when last requested

    def initialOffset(self) -> Offset:  # noqa: N802  Spark's name
        """Return the start of a new query; the same on every call."""
        if self._initial is None:
            state = self._state()
            self._initial = {**self._positions.offset(state, self._positions.first(state)), "initial": True}
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  Spark's name
        """Return `maxOffsetsPerTrigger`."""
        limit = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  Spark's name
        """Read only the stream's current messages."""
        self._until = self._state().last

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802  Spark's name
        """Return the end of the next batch; `start` itself when there is nothing new."""
        state = self._state_of(start)
        first = self._first(start, state)
        end = state.last + 1 if self._until is None else min(state.last, self._until) + 1
        snapshot = start.get("initial") and self._options.starting_offsets == LAST_PER_SUBJECT
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) and not snapshot else None
        end = self._ends.end(self._positions, first, max(first, end), state, rows)
        self._latest = self._positions.offset(state, state.last + 1)
        if start.get("initial"):
            return {**self._positions.offset(state, end), "start": start}
        return start if end == start["seq"] else self._positions.offset(state, end)

    def partitions(self, start: Offset, end: Offset) -> list[StreamPartition]:
        start = end.get("start", start)
        if self._created != end["created"]:
            self._state_of(end)
        first, origin = start["seq"], origin_of(end)
        if start.get("initial") and self._options.starting_offsets == LAST_PER_SUBJECT:
            return [StreamPartition(1, end["seq"], origin, per_subject=True)]
        return split(first, end["seq"], origin, self._options.min_partitions)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of one partition."""
        return read(self._options, self._schema, cast("StreamPartition", partition))

    @property
    def _positions(self) -> Positions:
        return Positions(self._session, self._options)

    def _state(self) -> StreamState:
        self._pause()
        state = self._positions.state()
        self._asked, self._created = time.monotonic(), state.created
        return state

    def _state_of(self, offset: Offset) -> StreamState:
        """Return the state of an offset's stream. Raises SourceError if the stream is another one."""
        stream = self._options.stream
        check_stream(stream, offset)
        self._positions.know(origin_of(offset))
        state = self._state()
        check_same(stream, offset["created"], state.created)
        return state

    def _first(self, start: Offset, state: StreamState) -> int:
        """Return the next sequence to read. With `failOnDataLoss`, raise SourceError if it is gone."""
        snapshot = self._options.starting_offsets == LAST_PER_SUBJECT and start.get("initial")
        if self._options.fail_on_data_loss and not snapshot:
            check_there(self._options.stream, start["seq"], state)
        return min(max(int(start["seq"]), state.first), state.last + 1)
