"""Received messages as columns: a message is a row here, never a separate Python object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageBatch:
    """Messages of one stream, one row each, in the order of arrival; `rows` has the schema `ENVELOPE`."""

    stream: str
    rows: pa.RecordBatch

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def column(self, name: str) -> pa.Array:
        """One column of the envelope, by its name in `layout`."""
        return self.rows.column(name)

    def slice(self, start: int, length: int) -> MessageBatch:
        """Rows `start` to `start + length` without a copy."""
        return MessageBatch(stream=self.stream, rows=self.rows.slice(start, length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A message that yields no row: `index` is its row in the batch, `error` the reason in one line.

    `stage` says where it failed: "decode", or a short word chosen by the decoder. Both are made short printable lines
    without credentials before they are stored.
    """

    index: int
    stage: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The result of decoding a batch.

    `fields` has the decoded columns and no more rows than needed; row `i` comes from message `messages[i]`
    (int32, ascending; repeated where one message gives several rows). `messages` None means that row `i` is message
    `i` for the whole batch. `failures` has the messages without a row, each once. Every message of the batch is in
    `messages` or in `failures`; the capture checks this, and quarantines missing ones rather than lose them.

    A decoder may omit columns without a value from `fields` and list all known ones in `columns`: objects get them as
    nulls while that is cheap.
    """

    fields: pa.RecordBatch
    messages: pa.Int32Array | None = None
    failures: tuple[Failure, ...] = ()
    columns: pa.Schema | None = None


class BatchTooWideError(Exception):
    """The columns for this batch would be too large: the caller passes it in smaller parts."""


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
