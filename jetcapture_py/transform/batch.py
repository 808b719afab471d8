"""What was received, as columns. After reception a message is a row here, never a Python object of its own."""

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
    """A message that gives no row: `index` is its row in the batch, `error` one line that says why.

    `stage` says where it failed: a decoder says "decode", or a short word of its own. Before they are stored, both are
    made short printable lines without credentials, whatever a decoder put there.
    """

    index: int
    stage: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What a decoder made of a batch.

    `fields` has the decoded columns and no more rows than needed; row `i` comes from message `messages[i]`
    (int32, ascending; repeated where one message gives several rows). `messages` None means that row `i` is message
    `i` for the whole batch. `failures` names the messages that gave no row, each once. Every message of the batch is
    in `messages` or in `failures`: the capture counts, and quarantines the batch's strays rather than lose them.

    A decoder may leave columns without a value out of `fields` and name all that it knows of in `columns`: objects
    get them, as nulls, while that is cheap.
    """

    fields: pa.RecordBatch
    messages: pa.Int32Array | None = None
    failures: tuple[Failure, ...] = ()
    columns: pa.Schema | None = None


class BatchTooWideError(Exception):
    """Raised by a decoder whose columns for a batch would be too large: hand it over in smaller parts."""


class Decoder(Protocol):
    """Turns payloads into columns.

    Obligations: a message is decoded from its own row alone, whatever its neighbours hold; a message that cannot be
    decoded is a `Failure` and not an exception; column names are unique (case does not count), and already passed
    through `layout.field_name`. A column that a key template names has the same type and value for a message whatever
    came before it or beside it, or copies of the message lie under several keys. Called from a worker thread, one
    call at a time.

    When it raises anything, `SystemExit` included, or gives what is not a `Decoded` of the batch, it is called again
    for each message alone, and those that it fails for go to the quarantine. A batch of several messages may be refused
    with `BatchTooWideError`; its messages come again, fewer at a time.
    """

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message of `batch`."""
        ...
