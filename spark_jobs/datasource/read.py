"""Read JetStream: a bounded range, or a streaming query whose only state is Spark's checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, cast

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from jetcapture_py.errors import MissingStreamError
from jetcapture_py.jetstream.read_session import StreamState
from spark_jobs.datasource.columns import MessageColumns
from spark_jobs.datasource.fetch import Fetch
from spark_jobs.datasource.offsets import (
    LAST_PER_SUBJECT,
    Positions,
    StreamPartition,
    check_stream,
    check_there,
    recreated,
    split,
)
from spark_jobs.datasource.options import ReadOptions
from spark_jobs.datasource.session import Session

POLL = 0.05
"""Minimum seconds between requests for a stream's state: Spark asks about a hundred times a second."""

Offset = dict[str, Any]


def read(options: ReadOptions, schema: StructType, part: StreamPartition) -> Iterator[pa.RecordBatch]:
    """Yield the messages of one task's range."""
    if part.first < part.end:
        columns = MessageColumns(options, schema)
        with Session(options, f"jetcapture spark {options.stream}") as session:
            yield from columns.batches(Fetch(session, options, part, bare=columns.bare), part)


class BatchReader(DataSourceReader):
    """A bounded read. Raises ConfigError for columns that cannot be read."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        MessageColumns(options, schema)
        self._options, self._schema = options, schema

    def partitions(self) -> list[StreamPartition]:
        """Divide the range among tasks."""
        options = self._options
        with Session(options, f"jetcapture spark {options.stream}") as session:
            positions = Positions(session, options)
            state = positions.state()
            first, end = positions.first(state), positions.end(state)
            if options.starting_offsets == LAST_PER_SUBJECT:
                return [StreamPartition(first, end, state.created, per_subject=True)]
            first = max(first, state.first)
            if options.subjects:  # other messages before the first match may be removed at any time
                first = positions.next_match(first) or end
            if options.fail_on_data_loss and isinstance(options.starting_offsets, int):
                check_there(options.stream, options.starting_offsets, positions.state())
        parts = split(first, end, state.created, options.min_partitions)
        return parts or [StreamPartition(end, end, state.created)]  # Spark requires at least one

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of one partition."""
        return read(self._options, self._schema, cast("StreamPartition", partition))


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read.

    Spark's checkpoint has the end of each batch, but not the start of the first one: after a restart Spark asks again,
    and `latest` has moved. So the end of the first batch includes its start.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        MessageColumns(options, schema)
        self._options, self._schema = options, schema
        self._session: Session | None = None
        self._initial: Offset | None = None
        self._latest: Offset | None = None
        self._until: StreamState | None = None
        self._asked = 0.0
        self._created = ""  # of the stream, when it was last asked for
        self._match = (0, 0)  # sequences: the last matching message, and the stream's last message at that time

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}

    def initialOffset(self) -> Offset:  # noqa: N802  Spark's name
        """Return the start of a new query; the same on every call."""
        if self._initial is None:
            state = self._state()
            self._initial = {**self._offset(state, self._positions.first(state)), "initial": True}
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  Spark's name
        """Return `maxOffsetsPerTrigger`."""
        most = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  Spark's name
        """Read only what the stream holds now."""
        with contextlib.suppress(MissingStreamError):  # nothing to read
            self._until = self._state()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802  Spark's name
        """Return the end of the next batch; `start` itself when there is nothing new."""
        try:
            state = self._state()
        except MissingStreamError:
            if self._options.fail_on_data_loss:
                raise
            return start  # until the stream is recreated
        check_stream(self._options.stream, start)
        first = self._first(start, state)
        end = self._end(first, state)
        snapshot = start.get("initial") and self._options.starting_offsets == LAST_PER_SUBJECT
        if isinstance(limit, ReadMaxRows) and not snapshot:
            end = self._positions.limited(first, end, limit.max_rows, state)
        self._latest = self._offset(state, state.last + 1)
        found = self._offset(state, end)
        if start["created"] != state.created:
            found["first"] = first
        if start.get("initial"):
            return {**found, "start": start}
        same = (found["created"], found["seq"]) == (start["created"], start["seq"])
        return start if same else found

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802  Spark's name
        """Return the stream's end, for Spark's progress reports."""
        return self._latest

    def partitions(self, start: Offset, end: Offset) -> list[StreamPartition]:
        """Divide the batch among tasks."""
        start = end.get("start", start)
        check_stream(self._options.stream, end)
        first = start["seq"] if start["created"] == end["created"] else end.get("first", 1)
        created = self._continued(end)
        if start.get("initial") and self._options.starting_offsets == LAST_PER_SUBJECT:
            return [StreamPartition(1, end["seq"], created, per_subject=True)]
        return split(first, end["seq"], created, self._options.min_partitions)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of one partition."""
        return read(self._options, self._schema, cast("StreamPartition", partition))

    def stop(self) -> None:
        """Close the connection."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    @property
    def _positions(self) -> Positions:
        if self._session is None:
            self._session = Session(self._options, f"jetcapture spark {self._options.stream}")
        return Positions(self._session, self._options)

    def _state(self) -> StreamState:
        time.sleep(max(0.0, self._asked + POLL - time.monotonic()))
        state = self._positions.state()
        self._asked, self._created = time.monotonic(), state.created
        return state

    def _offset(self, state: StreamState, seq: int) -> Offset:
        return {"stream": self._options.stream, "created": state.created, "seq": seq}

    def _continued(self, end: Offset) -> str:
        """Return when the stream was created that has a batch's messages: it may have been restored since.

        With `failOnDataLoss`, raise SourceError if it does not have them.
        """
        if self._created != end["created"]:
            with contextlib.suppress(MissingStreamError):  # the tasks find out
                state = self._state()
                if self._positions.continues(end, state):
                    return state.created
                if self._options.fail_on_data_loss:
                    raise recreated(end, state, self._positions.restored(state))
        return str(end["created"])

    def _first(self, start: Offset, state: StreamState) -> int:
        """Return the next sequence to read. With `failOnDataLoss`, raise SourceError if it is gone."""
        stream, per_subject = self._options.stream, self._options.starting_offsets == LAST_PER_SUBJECT
        continues = self._positions.continues(start, state)
        if self._options.fail_on_data_loss:
            if not continues:
                raise recreated(start, state, self._positions.restored(state))
            if not (per_subject and start.get("initial")):
                check_there(stream, start["seq"], state)
        if not continues:
            return state.first
        return min(max(int(start["seq"]), state.first), state.last + 1)

    def _end(self, first: int, state: StreamState) -> int:
        """Return the sequence after the last message to read.

        Without matching messages there is no batch, unless the query falls behind by more than half of the stream:
        when the stream then removes old messages, it would look as if unread ones were lost.
        """
        end = state.last + 1
        if self._until is not None and self._until.created == state.created:
            end = min(end, self._until.last + 1)
        if self._match[1] != state.last:
            self._match = self._positions.last_match(state), state.last
        last = self._match[0]
        if last >= first:
            return max(first, min(last + 1, end))
        return max(first, end) if end - first > (state.last + 1 - state.first) / 2 else first
