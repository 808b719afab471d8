"""Received messages as columns, one row per message without a Python object each, and their decoders.

A message that a decoder cannot handle fails alone.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py import plugins
from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Mask
from jetcapture_py.archive.schema import REPLY, conform, unify_batches
from jetcapture_py.text import one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageBatch:
    """Messages of one stream, one row each; `rows` has the schema `ENVELOPE`.

    Messages of a subject are in the order of arrival.
    """

    stream: str
    rows: pa.RecordBatch

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def column(self, name: str) -> pa.Array:
        """Return a column of the envelope, by its name in `layout`."""
        return self.rows.column(name)

    def slice(self, start: int, length: int) -> MessageBatch:
        """Return `length` rows from `start` on, without a copy."""
        return MessageBatch(stream=self.stream, rows=self.rows.slice(start, length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A message without a row. Texts are sanitized before storing: short printable lines without credentials."""

    index: int
    """The message's row in the batch."""
    stage: str
    """The stage that failed: "decode", or a short word chosen by the decoder."""
    error: str
    """The reason in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The result of decoding a batch.

    Every message of the batch is in `messages` or in `failures`; the capture checks this, and quarantines missing ones
    rather than lose them.
    """

    fields: pa.RecordBatch
    """The decoded columns, and no more rows than needed."""
    messages: pa.Int32Array | None = None
    """The message of each row: int32, ascending, repeated where one message gives several rows.

    None means that row `i` is message `i` for the whole batch."""
    failures: tuple[Failure, ...] = ()
    """The messages without a row, each once."""
    columns: pa.Schema | None = None
    """All known columns, if the decoder omits those without a value from `fields`.

    Objects get the others as nulls while that is cheap."""


class BatchTooWideError(Exception):
    """The columns of this batch would be too large; the caller passes it in smaller parts."""


class Decoder(Protocol):
    """Turns payloads into columns.

    Obligations: a message is decoded from its own row alone, independent of its neighbors; a message that cannot be
    decoded is a `Failure`, not an exception; column names are unique (case-insensitive) and already passed through
    `layout.field_name`. A column used in a key template has the same type and value for a message regardless of other
    messages, or copies of the message end up under several keys. Called from a worker thread, one call at a time.

    If it raises anything, including `SystemExit`, or does not return a `Decoded` of the batch, it is called again for
    each message alone, and failing messages go to the quarantine. It may refuse a batch of several messages
    with `BatchTooWideError`; its messages are passed again in smaller batches.
    """

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message of `batch`."""
        ...


def header_values(headers: pa.MapArray, name: str) -> pa.StringArray:
    """Return the first value of a header; names are case-sensitive, as in NATS."""
    if headers.null_count == len(headers):
        return pa.nulls(len(headers), pa.string())
    lists = pc.map_lookup(headers, name, "first")
    not_empty = pc.greater(pc.list_value_length(lists), 0)
    return pc.list_element(pc.if_else(not_empty, lists, pa.scalar(None, lists.type)), 0)


# ------------------------------------------------------------------ calling decoders


_TAKEN = {*layout.ENVELOPE, *layout.OPTIONAL, REPLY, *layout.RESERVED}
"""Column names reserved for the archive."""
_OURS = ("jetcapture_py.transform.decode", "jetcapture_py.transform.kv")
_MAX_STAGE = 40
_NOTHING = pa.RecordBatch.from_arrays([], names=[])


def decode_checked(decoder: Decoder, batch: MessageBatch) -> Decoded:
    """Decode a batch. If the decoder raises or breaks its contract, decode each message alone to find the bad ones.

    Raises only BatchTooWideError, for several messages. Any other error of the decoder, even `sys.exit`, fails one
    message.
    """
    if not len(batch):
        return Decoded(fields=_NOTHING)
    try:
        with plugins.user_code(ValueError, BatchTooWideError):
            return _checked(decoder.decode(batch), len(batch), ours=_is_ours(decoder))
    except BatchTooWideError as error:
        if len(batch) > 1:
            raise
        return _failed(str(error) or "the decoder refused its columns as too large")
    except ValueError as error:
        if len(batch) == 1:
            return _failed(str(error))
    return _together([decode_checked(decoder, batch.slice(index, 1)) for index in range(len(batch))])


def decode_some(decoder: Decoder, batch: MessageBatch, chosen: Mask) -> Decoded:
    """Decode the messages in the mask `chosen`; the others are rows without values. Raises BatchTooWideError."""
    if chosen.all():
        return decoder.decode(batch)
    rows, others = np.flatnonzero(chosen), np.flatnonzero(~chosen)
    part = MessageBatch(stream=batch.stream, rows=batch.rows.take(pa.array(rows)))
    only_columns = not len(rows) and _is_ours(decoder)  # no rows, but all declared columns
    decoded = decoder.decode(part) if only_columns else decode_checked(decoder, part)
    failures = tuple(replace(failure, index=int(rows[failure.index])) for failure in decoded.failures)
    rows = rows if decoded.messages is None else rows[decoded.messages.to_numpy()]
    sources = np.concatenate([rows, others])
    order = np.argsort(sources, kind="stable")
    fields = decoded.fields
    if fields.num_columns:
        fields = fields.take(pa.array(order, mask=order >= len(rows)))
    messages = pa.array(sources[order], pa.int32())
    return Decoded(fields=fields, messages=messages, failures=failures, columns=decoded.columns)


def _is_ours(decoder: Decoder) -> bool:
    """Whether the decoder's columns need no validation."""
    inner = getattr(decoder, "decoder", None)
    return type(decoder).__module__.startswith(_OURS) and (inner is None or _is_ours(inner))


def _failed(error: object) -> Decoded:
    failure = Failure(index=0, stage="decode", error=one_line(error))
    return Decoded(fields=_NOTHING, messages=pa.array([], pa.int32()), failures=(failure,))


def _together(parts: list[Decoded]) -> Decoded:
    """Join the results of single messages; ones with columns incompatible with the first fail."""
    try:
        return _joined(parts)
    except Exception as error:
        schema = next(part.fields.schema for part in parts if part.fields.num_columns)
        like = [part.fields.schema.equals(schema) or not part.fields.num_columns for part in parts]
        return _joined([part if same else _failed(error) for part, same in zip(parts, like, strict=True)])


def _joined(parts: Sequence[Decoded]) -> Decoded:
    failures = tuple(
        Failure(index=index, stage=failure.stage, error=failure.error)
        for index, part in enumerate(parts)
        for failure in part.failures
    )
    kept = [(index, part) for index, part in enumerate(parts) if not part.failures]
    counts = [1 if part.messages is None else len(part.messages) for _, part in kept]
    messages = pa.array(
        [index for (index, _), count in zip(kept, counts, strict=True) for _ in range(count)], pa.int32()
    )
    columns = [part.fields for _, part in kept]
    column_set = parts[-1].columns
    schema = unify_batches(columns) if columns else _NOTHING.schema
    if not len(schema):
        return Decoded(fields=_NOTHING, messages=messages, failures=failures, columns=column_set)
    batches = [
        conform(fields, schema)
        if fields.num_columns  # Arrow counts no rows without columns
        else pa.RecordBatch.from_arrays([pa.nulls(count, field.type) for field in schema], schema=schema)
        for fields, count in zip(columns, counts, strict=True)
    ]
    table = pa.Table.from_batches(batches, schema).combine_chunks()
    return Decoded(fields=table.to_batches()[0], messages=messages, failures=failures, columns=column_set)


def _checked(decoded: Any, count: int, *, ours: bool) -> Decoded:
    """Return the result for `count` messages if it obeys `Decoded` and `Decoder`; raise otherwise."""
    if not hasattr(decoded, "fields"):
        raise TypeError(f"the decoder returned {type(decoded).__name__} instead of Decoded")
    fields, messages = decoded.fields, decoded.messages
    if not isinstance(fields, pa.RecordBatch):
        raise TypeError(f"the decoder returned {type(fields).__name__} instead of a RecordBatch as fields")
    if not (messages is None or isinstance(messages, pa.Array)):
        raise TypeError(f"the decoder returned {type(messages).__name__} instead of an int32 array as messages")
    columns = getattr(decoded, "columns", None)
    if not (columns is None or isinstance(columns, pa.Schema)):
        raise TypeError(f"the decoder returned {type(columns).__name__} instead of a Schema as columns")
    if not ours:
        fields.validate(full=True)
        if messages is not None:
            messages.validate(full=True)
    for schema in (fields.schema,) if columns is None else (fields.schema, columns):
        _check_columns(schema, ours=ours)
    messages = None if messages is None else messages.cast(pa.int32())
    failures = tuple(map(_failure, decoded.failures))
    _check_count(fields.num_rows if fields.num_columns else None, messages, failures, count)
    return Decoded(fields=fields, messages=messages, failures=failures, columns=columns)


def _check_columns(schema: pa.Schema, *, ours: bool) -> None:
    """Raise unless columns of these names and types can be stored."""
    names = [name.lower() for name in schema.names]
    if len(set(names)) < len(names):
        raise ValueError("the decoder returned duplicate columns (case-insensitive)")
    if taken := (_TAKEN - {layout.RESCUED} if ours else _TAKEN).intersection(names):
        raise ValueError(f"the decoder returned a column {min(taken)}, which is reserved for the archive")
    for column in () if ours else schema:
        if (problem := _unstorable(column.type)) is not None:
            raise TypeError(f"the decoder returned a column of type {column.type}, which cannot be stored: {problem}")


def _check_count(rows: int | None, messages: pa.Int32Array | None, failures: Sequence[Failure], count: int) -> None:
    """Raise unless every message gave rows or one failure; `rows` is None without columns."""
    failed = [failure.index for failure in failures]
    if messages is None:
        if failed or rows not in (None, count):
            raise ValueError(f"the decoder returned {rows} rows and {len(failed)} failures for {count} messages")
        return
    origins = messages.to_numpy()
    if rows not in (None, len(origins)):
        raise ValueError(f"the decoder returned {rows} rows and {len(origins)} message numbers")
    if (origins[1:] < origins[:-1]).any():
        raise ValueError("the decoder returned message numbers that are not in order")
    named = [*failed, *origins[:1], *origins[-1:]]
    if wrong := [index for index in named if not 0 <= index < count]:
        raise ValueError(f"the decoder returned message number {wrong[0]}; expected 0 to {count - 1}")
    times = np.bincount(failed, minlength=count) if failed else np.zeros(count, np.int64)
    times[np.unique(origins)] += 1
    if (times != 1).any():
        raise ValueError("the decoder must return either rows or one failure for each message")


def _failure(given: Any) -> Failure:
    """Sanitize a failure for storing: the decoder may have put anything into it."""
    stage = one_line(given.stage, _MAX_STAGE) if isinstance(given.stage, str) else ""
    error = one_line(given.error) or "the decoder returned no reason"
    return Failure(index=operator.index(given.index), stage=stage or "decode", error=error)


@lru_cache(maxsize=1024)
def _unstorable(of: pa.DataType) -> str | None:
    """Return why columns of that type cannot be put into blocks and stored as Parquet; None if they can."""
    table = pa.schema([("column", of)]).empty_table()
    import pyarrow.parquet as pq

    try:
        table = pa.concat_tables([table, table]).combine_chunks().take(pa.array([], pa.int64()))
        pq.write_table(table.filter(pa.array([], pa.bool_())), pa.BufferOutputStream())
    except Exception as error:
        return one_line(error)
    return None
