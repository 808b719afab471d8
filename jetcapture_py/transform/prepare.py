"""Turn received frames into routed rows: assemble, decode, route. CPU-bound, no I/O; runs in a worker thread.

Bad messages fail alone: a message that cannot be read, decoded or routed becomes a row of the quarantine, with the
reason and the raw bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.schema import REPLY
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.text import one_line
from jetcapture_py.transform.batch import BatchTooWideError, Decoded, Decoder, Failure, MessageBatch, decode_checked
from jetcapture_py.transform.envelope import assemble
from jetcapture_py.transform.keys import KeyFunction, Run, buckets, group, without_empty

if TYPE_CHECKING:
    from jetcapture_py.transform.event_time import EventTime


ENVELOPE_BYTES = 64 << 20
"""Bytes of subjects and headers at once in messages of several rows, which have them in each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Routed rows, and the quarantine's; `messages` counts what came in, `redelivered` and `strays` are among them.

    `columns` are those that the decoder knows of, if it leaves columns without a value out of `rows`.

    `span` has the sequences and the timestamps, in microseconds, of the first and the last message in the stream's
    order; it is empty when none came.
    """

    rows: pa.RecordBatch
    runs: Sequence[Run]
    quarantine: pa.RecordBatch
    quarantine_runs: Sequence[Run]
    messages: int
    redelivered: int
    strays: int
    span: Sequence[tuple[int, int]]
    columns: pa.Schema | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparer:
    """Prepares batches of one consumer; `interval` is the block interval in seconds.

    `time` finds the time that buckets are made of; None: the stream's timestamp. With `bundles`, rows have their key as
    a column, and are routed to that many bundles.
    """

    stream: str
    consumer: str
    decoder: Decoder
    key: KeyFunction
    interval: int
    keep_payload: bool
    time: EventTime | None = None
    bundles: int = 0

    def __call__(self, received: Received) -> Prepared:
        """Decode and route everything in `received`; raises BatchTooWideError when the batch must be smaller."""
        assembled = assemble(self.stream, self.consumer, received)
        batch = assembled.batch
        failures = {failure.index: failure for failure in assembled.failures}
        good = _without(len(batch), failures)
        readable = batch if good is None else _take(batch, good)
        decoded = _without_bulk(readable, decode_checked(self.decoder, readable))
        for failure in decoded.failures:
            index = failure.index if good is None else int(good[failure.index])
            failures[index] = Failure(index=index, stage=failure.stage, error=failure.error)
        messages, fields = decoded.messages, decoded.fields
        first = first_rows(messages)
        rows = readable if messages is None else rows_of(readable, messages, first)
        sources = np.arange(len(readable)) if messages is None else messages.to_numpy()
        sources = sources if good is None else good.to_numpy()[sources]
        keys, wrong = _of_first(self._keys, rows, fields, first)
        times, untimed = _of_first(self._times, rows, fields, first)
        for stage, errors in (("time", untimed), ("key", wrong)):
            for index, error in errors.items():
                failures[int(sources[index])] = Failure(index=int(sources[index]), stage=stage, error=error)
        if untimed or wrong:
            mask = pa.array(~np.isin(sources, list(failures)))
            rows = MessageBatch(stream=self.stream, rows=rows.rows.filter(mask))
            keys, fields = keys.filter(mask), fields.filter(mask) if fields.num_columns else fields
            messages = messages.filter(mask) if messages is not None else None
            times = times.filter(mask)
        columns = self._columns(rows.rows, fields, messages, times, keys)
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
        messages: pa.Int32Array | None,
        times: pa.TimestampArray,
        keys: pa.StringArray,
    ) -> pa.RecordBatch:
        """Return envelope, keys if they are a column, and decoded fields as one batch."""
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        if not self.keep_payload:
            del columns[layout.PAYLOAD]
        if (first := first_rows(messages)) is not None:
            columns[layout.ROW] = pa.array(np.arange(len(first)) - first, pa.int32())
        if self.time is not None:
            columns[layout.TIME] = times
        if self.bundles:
            columns[layout.KEY] = without_empty(keys)
        if fields.num_columns:
            columns.update(zip(fields.schema.names, fields.columns, strict=True))
        return pa.RecordBatch.from_pydict(columns)

    def _times(self, rows: MessageBatch, fields: pa.RecordBatch) -> tuple[pa.TimestampArray, dict[int, str]]:
        """Return the time of every row, and by row why there is none."""
        if self.time is None or not len(rows):
            return rows.column(layout.TIMESTAMP), {}
        return _read_times(self.time, rows, fields)

    def _keys(self, rows: MessageBatch, fields: pa.RecordBatch) -> tuple[pa.StringArray, dict[int, str]]:
        """Return the key of every row, and by row why it is invalid."""
        if not len(rows):
            return pa.nulls(0, pa.string()), {}
        try:
            keys = self.key(rows, fields)
            if not isinstance(keys, pa.StringArray) or len(keys) != len(rows):
                raise TypeError("the key function did not return a string array with one key per row")
            keys.validate(full=True)  # a key that is not UTF-8 cannot name a directory
        except BaseException as error:  # also sys.exit, which must not end the process
            if len(rows) == 1:
                return pa.nulls(1, pa.string()), {0: one_line(error)}
            wrong: dict[int, str] = {}
            parts = []
            for index in range(len(rows)):
                key, errors = self._keys(rows.slice(index, 1), fields.slice(index, 1) if fields.num_columns else fields)
                parts.append(key)
                wrong.update(dict.fromkeys([index], next(iter(errors.values()))) if errors else {})
            return pa.concat_arrays(parts), wrong
        sizes = pc.binary_length(keys)
        if (pc.max(sizes).as_py() or 0) * 3 <= layout.MAX_KEY_BYTES:
            return keys, {}
        too_long = {}
        for index in np.flatnonzero(pc.fill_null(sizes, 0).to_numpy() * 3 > layout.MAX_KEY_BYTES).tolist():
            size = len(layout.escape_key(keys[index].as_py()).encode())
            if size > layout.MAX_KEY_BYTES:
                too_long[index] = (
                    f"the key is {size} bytes long as a directory name; the limit is {layout.MAX_KEY_BYTES}"
                )
        return keys, too_long

    def _quarantine(
        self, batch: MessageBatch, failures: Iterable[Failure], raw_headers: dict[int, bytes]
    ) -> tuple[pa.RecordBatch, Sequence[Run]]:
        found = sorted(failures, key=lambda failure: failure.index)
        if not found:
            return batch.rows.slice(0, 0), ()
        rows = batch.rows.take(pa.array([failure.index for failure in found], pa.int32()))
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        columns[layout.STAGE] = pa.array([failure.stage for failure in found], pa.string())
        columns[layout.ERROR] = pa.array([failure.error for failure in found], pa.string())
        columns[layout.RAW_HEADERS] = pa.array([raw_headers.get(failure.index) for failure in found], pa.binary())
        starts = buckets(rows.column(layout.TIMESTAMP), self.interval)
        return group(pa.RecordBatch.from_pydict(columns), pa.nulls(len(found), pa.string()), starts)


def _of_first(find: Callable[..., Any], rows: MessageBatch, fields: pa.RecordBatch, first: Any) -> Any:
    """Call `find` for the first row of every message, because all its rows go to one block, which acknowledges it.

    Return what it found for every row, and by row why it found nothing.
    """
    if first is None:
        return find(rows, fields)
    firsts, places = np.unique(first, return_inverse=True)
    chosen = pa.array(firsts)
    found, wrong = find(_take(rows, chosen), fields.take(chosen) if fields.num_columns else fields)
    return found.take(pa.array(places)), {int(firsts[index]): error for index, error in wrong.items()}


def _without_bulk(batch: MessageBatch, decoded: Decoded) -> Decoded:
    """Fail messages whose headers, repeated in each of their rows, would take more than `ENVELOPE_BYTES`.

    Raises BatchTooWideError when several messages together would.
    """
    messages, fields = decoded.messages, decoded.fields
    if messages is None or len(messages) <= len(batch):
        return decoded
    counts = np.bincount(messages.to_numpy(), minlength=len(batch))
    sizes = counts * _envelope_sizes(batch)
    bulky = np.flatnonzero((sizes > ENVELOPE_BYTES) & (counts > 1))
    if sizes.sum() - sizes[bulky].sum() > ENVELOPE_BYTES and len(batch) > 1:
        raise BatchTooWideError
    if not len(bulky):
        return decoded
    kept = pa.array(~np.isin(messages.to_numpy(), bulky))
    failures = [
        Failure(
            index=int(index),
            stage="decode",
            error=f"its subject and headers, in each of its {counts[index]} rows, would take {sizes[index]} bytes; "
            f"the limit is {ENVELOPE_BYTES}",
        )
        for index in bulky
    ]
    return replace(
        decoded,
        fields=fields.filter(kept) if fields.num_columns else fields,
        messages=messages.filter(kept),
        failures=(*decoded.failures, *failures),
    )


def _envelope_sizes(batch: MessageBatch) -> Any:
    """Return the bytes of each message's subject, ack subject and headers."""
    headers = batch.column(layout.HEADERS)
    names, values = headers.keys, headers.items
    of_names, of_values = _up_to(names), _up_to(values.values)[values.offsets.to_numpy()]
    ends = headers.offsets.to_numpy()
    sizes = np.diff(of_names[ends]) + np.diff(of_values[ends])
    return sizes + sum(pc.binary_length(batch.rows.column(name)).to_numpy() for name in (layout.SUBJECT, REPLY))


def _up_to(texts: pa.StringArray) -> Any:
    """Return the total bytes of the texts before each of them, and of all."""
    sizes = pc.fill_null(pc.binary_length(texts), 0).to_numpy()
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _read_times(
    time: EventTime, rows: MessageBatch, fields: pa.RecordBatch
) -> tuple[pa.TimestampArray, dict[int, str]]:
    """Return what `time` finds; if it raises, ask it about each message alone to find the bad ones."""
    try:
        return time(rows, fields)
    except Exception as error:
        if len(rows) == 1:
            return rows.column(layout.TIMESTAMP).cast(pa.timestamp("us", "UTC")), {0: one_line(error)}
    wrong: dict[int, str] = {}
    parts = []
    for index in range(len(rows)):
        alone = fields.slice(index, 1) if fields.num_columns else fields
        found, errors = _read_times(time, rows.slice(index, 1), alone)
        parts.append(found)
        if errors:
            wrong[index] = errors[0]
    return pa.concat_arrays(parts), wrong


def first_rows(messages: pa.Int32Array | None) -> Any:
    """Return for every row the first row of its message; None when every message has one row."""
    if messages is None:
        return None
    origin = messages.to_numpy()
    return np.searchsorted(origin, origin, side="left") if (np.diff(origin) == 0).any() else None


def _without(count: int, failures: dict[int, Failure]) -> pa.Int32Array | None:
    if not failures:
        return None
    return pa.array([index for index in range(count) if index not in failures], pa.int32())


def _take(batch: MessageBatch, indices: pa.Int32Array) -> MessageBatch:
    return MessageBatch(stream=batch.stream, rows=batch.rows.take(indices))


def rows_of(batch: MessageBatch, messages: pa.Int32Array, first: Any) -> MessageBatch:
    """Return the envelope of each row; a message's payload is in its first row only, or memory would not suffice."""
    if first is None:
        return _take(batch, messages)
    later = first != np.arange(len(first))
    at = batch.rows.schema.get_field_index(layout.PAYLOAD)
    payloads = batch.column(layout.PAYLOAD).take(pa.array(messages.to_numpy(), mask=later))
    rows = batch.rows.remove_column(at).take(messages)
    return MessageBatch(stream=batch.stream, rows=rows.add_column(at, layout.PAYLOAD, payloads))


def _span(batch: MessageBatch) -> Sequence[tuple[int, int]]:
    """Sequence and timestamp of the batch's first and last message in the stream."""
    if not len(batch):
        return ()
    seqs, timestamps = batch.column(layout.SEQ), batch.column(layout.TIMESTAMP)
    order = seqs.to_numpy()
    return [(seqs[at].as_py(), timestamps[at].value) for at in (int(order.argmin()), int(order.argmax()))]
