"""Turn received frames into routed rows: assemble, decode, route. CPU-bound, no I/O; runs in a worker thread.

Bad messages fail alone: a message that cannot be read, decoded or routed becomes a row of the quarantine, with the
reason and the raw bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py import plugins
from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Int64s
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.transform.batch import (
    BatchTooWideError,
    Decoded,
    Decoder,
    Failure,
    MessageBatch,
    decode_checked,
)
from jetcapture_py.transform.envelope import assemble
from jetcapture_py.transform.keys import KeyFunction, Run, buckets, group, without_empty

if TYPE_CHECKING:
    from jetcapture_py.transform.event_time import EventTime


LARGE = 2048
"""Bytes per message from which copying messages in the order of their subjects is cheaper than grouping them."""
ENVELOPE_BYTES = 64 << 20
"""Maximum bytes of subjects and headers in messages of several rows, which repeat them in each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Routed rows, and the quarantine's."""

    rows: pa.RecordBatch
    runs: Sequence[Run]
    quarantine: pa.RecordBatch
    quarantine_runs: Sequence[Run]
    messages: int
    """Number of received messages."""
    redelivered: int
    """Number of redelivered messages."""
    strays: int
    """Number of frames that are not messages of the consumer."""
    span: Sequence[tuple[int, int]]
    """Sequence and timestamp, in microseconds, of the first and last message in the stream's order; empty for none."""
    columns: pa.Schema | None
    """All columns of the decoder, if it omits those without a value from `rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparer:
    """Prepares batches of one consumer."""

    stream: str
    consumer: str
    decoder: Decoder
    key: KeyFunction
    interval: int
    """The block interval in seconds."""
    keep_payload: bool
    time: EventTime | None = None
    """Reads the buckets' time; None for the stream's timestamp."""
    bundles: int = 0
    """Number of bundles; if not 0, rows have their key as a column."""
    pinned: bool = False
    """Whether messages come from a pinned consumer, which adds a header."""

    def __call__(self, received: Received) -> Prepared:
        """Decode and route everything in `received`. Raises BatchTooWideError if the batch must be smaller."""
        if self.keep_payload and received.size >= LARGE * len(received):
            received = received.by_subject()
        assembled = assemble(self.stream, self.consumer, received, pinned=self.pinned)
        batch = assembled.batch
        failures = {failure.index: failure for failure in assembled.failures}
        good = pa.array([row for row in range(len(batch)) if row not in failures], pa.int32()) if failures else None
        readable = batch if good is None else _take(batch, good)
        sizes = assembled.sizes if good is None else assembled.sizes[good.to_numpy()]
        decoded = _without_bulk(readable, sizes, decode_checked(self.decoder, readable))
        for failure in decoded.failures:
            index = failure.index if good is None else int(good[failure.index])
            failures[index] = Failure(index=index, stage=failure.stage, error=failure.error)
        messages, fields = decoded.messages, decoded.fields
        first = first_rows(messages)
        rows = readable if messages is None else rows_of(readable, messages, first)
        sources = np.arange(len(readable)) if messages is None else messages.to_numpy()
        sources = sources if good is None else good.to_numpy()[sources]
        keys, wrong = _of_first(self._read_keys, rows, fields, first)
        times, untimed = _of_first(self._read_times, rows, fields, first)
        for stage, errors in (("time", untimed), ("key", wrong)):
            for index, error in errors.items():
                failures[int(sources[index])] = Failure(index=int(sources[index]), stage=stage, error=error)
        if untimed or wrong:
            mask = pa.array(~np.isin(sources, list(failures)))
            rows = MessageBatch(stream=self.stream, rows=rows.rows.filter(mask))
            keys, fields = keys.filter(mask), fields.filter(mask) if fields.num_columns else fields
            first = first_rows(messages.filter(mask)) if messages is not None else None
            times = times.filter(mask)
        columns = self._columns(rows.rows, fields, first, times, keys)
        table, runs = group(columns, keys, buckets(times, self.interval), self.bundles)
        quarantine, quarantine_runs = self._quarantine(batch, failures.values(), assembled.raw_headers)
        delivered = batch.column(layout.DELIVERED)
        return Prepared(
            rows=table,
            runs=runs,
            quarantine=quarantine,
            quarantine_runs=quarantine_runs,
            messages=len(batch),
            redelivered=int(np.count_nonzero(delivered.to_numpy() > 1)),
            strays=assembled.strays,
            span=_span(batch),
            columns=decoded.columns,
        )

    def _columns(
        self,
        rows: pa.RecordBatch,
        fields: pa.RecordBatch,
        first: Int64s | None,
        times: pa.TimestampArray,
        keys: pa.StringArray,
    ) -> pa.RecordBatch:
        """Return envelope, keys if they are a column, and decoded fields as one batch; `first` is from `first_rows`."""
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        if not self.keep_payload:
            del columns[layout.PAYLOAD]
        if first is not None:
            columns[layout.ROW] = pa.array(np.arange(len(first)) - first, pa.int32())
        if self.time is not None:
            columns[layout.TIME] = times
        if self.bundles:
            columns[layout.KEY] = without_empty(keys)
        if fields.num_columns:
            columns.update(zip(fields.schema.names, fields.columns, strict=True))
        return pa.RecordBatch.from_pydict(columns)

    def _read_times(self, rows: MessageBatch, fields: pa.RecordBatch) -> tuple[pa.TimestampArray, dict[int, str]]:
        """Return the time of every row, and the reasons for rows without one."""
        timestamps = rows.column(layout.TIMESTAMP)
        if self.time is None or not len(rows):
            return timestamps, {}
        return _row_by_row(self.time, rows, fields, timestamps)

    def _read_keys(self, rows: MessageBatch, fields: pa.RecordBatch) -> tuple[pa.StringArray, dict[int, str]]:
        """Return the key of every row, and the reasons for rows with an invalid one."""
        nulls = pa.nulls(len(rows), pa.string())
        return _row_by_row(self._checked_keys, rows, fields, nulls) if len(rows) else (nulls, {})

    def _checked_keys(self, rows: MessageBatch, fields: pa.RecordBatch) -> tuple[pa.StringArray, dict[int, str]]:
        keys = self.key(rows, fields)
        if not isinstance(keys, pa.StringArray) or len(keys) != len(rows):
            raise TypeError("the key function did not return a string array with one key per row")
        keys.validate(full=True)  # a key that is not UTF-8 cannot name a directory
        sizes = pc.fill_null(pc.binary_length(keys), 0).to_numpy() * 3
        too_long = {}
        for index in np.flatnonzero(sizes > layout.MAX_KEY_BYTES).tolist():
            size = len(layout.escape_key(keys[index].as_py()).encode())
            if size > layout.MAX_KEY_BYTES:
                too_long[index] = (
                    f"the key is {size} bytes long as a directory name; the limit is {layout.MAX_KEY_BYTES}"
                )
        return keys, too_long

    def _quarantine(
        self, batch: MessageBatch, failures: Iterable[Failure], raw_headers: dict[int, bytes]
    ) -> tuple[pa.RecordBatch, Sequence[Run]]:
        failures = sorted(failures, key=lambda failure: failure.index)
        if not failures:
            return batch.rows.slice(0, 0), ()
        rows = batch.rows.take(pa.array([failure.index for failure in failures], pa.int32()))
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        columns[layout.STAGE] = pa.array([failure.stage for failure in failures], pa.string())
        columns[layout.ERROR] = pa.array([failure.error for failure in failures], pa.string())
        columns[layout.RAW_HEADERS] = pa.array([raw_headers.get(failure.index) for failure in failures], pa.binary())
        starts = buckets(rows.column(layout.TIMESTAMP), self.interval)
        return group(pa.RecordBatch.from_pydict(columns), pa.nulls(len(failures), pa.string()), starts)


Read = Callable[[MessageBatch, pa.RecordBatch], tuple[pa.Array, dict[int, str]]]
"""Returns a value for every row of messages and their fields, and the reasons for rows without one."""


def _of_first(
    read: Read, rows: MessageBatch, fields: pa.RecordBatch, first: Int64s | None
) -> tuple[pa.Array, dict[int, str]]:
    """Read only the first row of every message, because all its rows must be in one block, which acknowledges it."""
    if first is None:
        return read(rows, fields)
    firsts, numbers = np.unique(first, return_inverse=True)
    chosen = pa.array(firsts)
    values, wrong = read(_take(rows, chosen), fields.take(chosen) if fields.num_columns else fields)
    return values.take(pa.array(numbers)), {int(firsts[index]): error for index, error in wrong.items()}


def _row_by_row(
    read: Read, rows: MessageBatch, fields: pa.RecordBatch, otherwise: pa.Array
) -> tuple[pa.Array, dict[int, str]]:
    """Read all rows; if `read` raises, read each alone to find the bad ones, which get the values of `otherwise`."""
    try:
        with plugins.user_code(ValueError):
            return read(rows, fields)
    except ValueError as error:
        if len(rows) == 1:
            return otherwise, {0: str(error)}
    values, wrong = [], {}
    for index in range(len(rows)):
        row = fields.slice(index, 1) if fields.num_columns else fields
        value, errors = _row_by_row(read, rows.slice(index, 1), row, otherwise.slice(index, 1))
        values.append(value)
        if errors:
            wrong[index] = errors[0]
    return pa.concat_arrays(values), wrong


def _without_bulk(batch: MessageBatch, sizes: Int64s, decoded: Decoded) -> Decoded:
    """Fail a message whose envelope of `sizes` bytes, repeated in each of its rows, exceeds `ENVELOPE_BYTES`.

    Raises BatchTooWideError if several messages together exceed it.
    """
    messages = decoded.messages
    if messages is None or len(messages) <= len(batch):
        return decoded
    size = int((np.bincount(messages.to_numpy(), minlength=len(batch)) * sizes).sum())
    if size <= ENVELOPE_BYTES:
        return decoded
    if len(batch) > 1:
        raise BatchTooWideError
    rows = len(messages)
    error = (
        f"its subject and headers, in each of its {rows} rows, would take {size} bytes; the limit is {ENVELOPE_BYTES}"
    )
    failures = (Failure(index=0, stage="decode", error=error),)
    return replace(decoded, fields=decoded.fields.slice(0, 0), messages=messages.slice(0, 0), failures=failures)


def first_rows(messages: pa.Int32Array | None) -> Int64s | None:
    """Return for every row the first row of its message; None if every message has one row."""
    if messages is None:
        return None
    origin = messages.to_numpy()
    return np.searchsorted(origin, origin, side="left") if (np.diff(origin) == 0).any() else None


def _take(batch: MessageBatch, indices: pa.Int32Array) -> MessageBatch:
    return MessageBatch(stream=batch.stream, rows=batch.rows.take(indices))


def rows_of(batch: MessageBatch, messages: pa.Int32Array, first: Int64s | None) -> MessageBatch:
    """Return the envelope of each row; to save memory, only a message's first row has its payload."""
    if first is None:
        return _take(batch, messages)
    later = first != np.arange(len(first))
    at = batch.rows.schema.get_field_index(layout.PAYLOAD)
    payloads = batch.column(layout.PAYLOAD).take(pa.array(messages.to_numpy(), mask=later))
    rows = batch.rows.remove_column(at).take(messages)
    return MessageBatch(stream=batch.stream, rows=rows.add_column(at, layout.PAYLOAD, payloads))


def _span(batch: MessageBatch) -> Sequence[tuple[int, int]]:
    """Return sequence and timestamp of the batch's first and last message in the stream."""
    if not len(batch):
        return ()
    seqs, timestamps = batch.column(layout.SEQ), batch.column(layout.TIMESTAMP)
    order = seqs.to_numpy()
    return [(seqs[at].as_py(), timestamps[at].value) for at in (int(order.argmin()), int(order.argmax()))]
