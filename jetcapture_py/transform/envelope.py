"""From received frames to a `MessageBatch`, without a Python object per message where it can be helped."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.jetstream.wire.inbox import Received, between, text_of
from jetcapture_py.transform.batch import ENVELOPE, HEADERS_TYPE, Failure, MessageBatch

_VERSION = b"NATS/1.0\r\n"
_MOST_DELIVERED = (1 << 31) - 1
_SHORT, _LONG = 9, 11
"""Tokens of an ack subject: nine, or eleven and more with domain and account hash in front of the stream (ADR-15)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A batch, and the messages in it whose envelope cannot be represented.

    `raw_headers` holds, by row, the header block of a message whose headers are not valid; `strays` counts frames
    that did not come from the consumer (somebody published to our inbox) and are not in the batch.
    """

    batch: MessageBatch
    failures: tuple[Failure, ...]
    raw_headers: dict[int, bytes]
    strays: int


def assemble(stream: str, consumer: str, received: Received, *, headers: bool = True) -> Assembled:
    """Make columns of `received`. Never raises for the content of a message. The headers are null if not wanted."""
    subjects, replies, blocks, payloads = received.columns()
    (delivered, seq, nanoseconds), keep = _ack_numbers(replies, stream, consumer)
    if keep is not None:
        real = pa.array(keep, pa.int32())
        subjects, replies, blocks, payloads = (each.take(real) for each in (subjects, replies, blocks, payloads))
    texts, subject_failures = _subjects(subjects)
    found, raw_headers, header_failures = _headers(blocks if headers else blocks.slice(0, 0), len(blocks))
    columns = [
        texts,
        pa.array(seq, pa.int64()),
        pa.array(nanoseconds // 1000, pa.timestamp("us", "UTC")),
        pa.array(np.minimum(delivered, _MOST_DELIVERED).astype(np.int32), pa.int32()),
        found,
        payloads,
        replies,
    ]
    batch = MessageBatch(stream=stream, rows=pa.RecordBatch.from_arrays(columns, schema=ENVELOPE))
    failures = {failure.index: failure for failure in (*header_failures, *subject_failures)}
    return Assembled(
        batch=batch, failures=tuple(failures.values()), raw_headers=raw_headers, strays=len(received) - len(batch)
    )


def positions(stream: str, consumer: str, replies: pa.BinaryArray) -> tuple[Any, Any]:
    """Stream sequence and timestamp in nanoseconds, as int64 arrays, of what came from the consumer, no strays."""
    (_, seqs, nanoseconds), _ = _ack_numbers(replies, stream, consumer)
    return seqs, nanoseconds


def sequences(stream: str, consumer: str, replies: pa.BinaryArray) -> Any:
    """Stream sequences, as an int64 array; -1 for what did not come from the consumer."""
    (_, seqs, _), keep = _ack_numbers(replies, stream, consumer)
    if keep is None:
        return seqs
    found = np.full(len(replies), -1)
    found[keep] = seqs
    return found


Numbers = tuple[Any, Any, Any]


def _ack_numbers(replies: pa.BinaryArray, stream: str, consumer: str) -> tuple[Numbers, list[int] | None]:
    """Delivery count, stream sequence and timestamp in nanoseconds, as int64 arrays; which rows are real, if not all.

    `$JS.ACK.[domain.account.]stream.consumer.delivered.sseq.cseq.timestamp.pending[.token]`
    """
    numbers = None
    with contextlib.suppress(pa.ArrowInvalid):
        numbers = _alike(replies, stream, consumer) if len(replies) else None
    return (numbers, None) if numbers else _checked_numbers(replies.to_pylist(), stream.encode(), consumer.encode())


def _alike(replies: pa.BinaryArray, stream: str, consumer: str) -> Numbers | None:
    """The numbers, if all begin like the first, which is right, and have as many tokens; else nothing is known."""
    tokens = replies[0].as_py().split(b".")
    base = 2 if len(tokens) == _SHORT else 4
    if len(tokens) != _SHORT and len(tokens) < _LONG:
        return None
    if tokens[:2] != [b"$JS", b"ACK"] or tokens[base : base + 2] != [stream.encode(), consumer.encode()]:
        return None
    head, dots = b".".join(tokens[: base + 2]) + b".", len(tokens) - 1
    if not pc.all(pc.starts_with(replies, head)).as_py():
        return None
    edges, text = text_of(replies)
    if base == 2 and all(tokens) and (np.diff(edges) == edges[1] - edges[0]).all():
        aligned = _aligned(text[edges[0] : edges[-1]].reshape(len(replies), -1), tokens)
        if aligned is not None:
            return aligned
    found = np.flatnonzero(text[edges[0] : edges[-1]] == ord(".")) + edges[0]
    if len(found) != dots * len(replies):
        return None
    ends = found.reshape(-1, dots)
    if (ends[:, 0] < edges[:-1]).any() or (ends[:, -1] >= edges[1:]).any():
        return None
    numbers = []
    for token in (base + 2, base + 3, base + 5):
        texts = between(text, ends[:, token - 1] + 1, ends[:, token]).cast(pa.string())
        if not pc.all(pc.ascii_is_decimal(texts)).as_py():  # signs and hexadecimal digits are not the server's
            return None
        numbers.append(texts.cast(pa.int64()).to_numpy())
    return numbers[0], numbers[1], numbers[2]


def _aligned(lines: Any, tokens: list[bytes]) -> Numbers | None:
    """The same, of subjects, one a line of the text, of which every token has as many bytes as the first one's."""
    ends = np.cumsum([len(token) + 1 for token in tokens]) - 1
    start = ends[3] + 1
    dots = ends[4:-1] - start
    tail = lines[:, start:]
    digits = tail - np.uint8(ord("0")) < 10
    where = np.ones(tail.shape[1], bool)
    where[dots] = False
    if not (digits == where).all() or (tail[:, dots] != ord(".")).any():
        return None
    return tuple(_integers(lines[:, ends[token - 1] + 1 : ends[token]]) for token in (4, 5, 7))


def _integers(digits: Any) -> Any:
    """The numbers in the lines of a text that has nothing but digits."""
    count, width = digits.shape
    if width == 1:
        return digits[:, 0].astype(np.int64) - ord("0")
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(digits))]
    return pa.Array.from_buffers(pa.string(), count, buffers).cast(pa.int64()).to_numpy()


def _checked_numbers(replies: list[bytes], stream: bytes, consumer: bytes) -> tuple[Numbers, list[int]]:
    """The same, reply by reply, leaving out those that no consumer of ours made."""
    rows: list[tuple[int, int, int]] = []
    keep: list[int] = []
    for index, reply in enumerate(replies):
        tokens = reply.split(b".")
        base = 2 if len(tokens) == _SHORT else 4
        if len(tokens) != _SHORT and len(tokens) < _LONG:
            continue
        numbers = (tokens[base + 2], tokens[base + 3], tokens[base + 5])
        if tokens[:2] != [b"$JS", b"ACK"] or tokens[base : base + 2] != [stream, consumer]:
            continue
        if all(number.isdigit() and len(number) < 20 and int(number) < 1 << 63 for number in numbers):
            rows.append((int(numbers[0]), int(numbers[1]), int(numbers[2])))
            keep.append(index)
    columns = np.array(rows, np.int64).reshape(len(rows), 3).T
    return (columns[0], columns[1], columns[2]), keep


def _subjects(values: pa.BinaryArray) -> tuple[pa.StringArray, list[Failure]]:
    try:
        return values.cast(pa.string()), []
    except pa.ArrowInvalid:
        failures = []
        texts = []
        for index, value in enumerate(values.to_pylist()):
            try:
                texts.append(value.decode())
            except UnicodeDecodeError:
                texts.append(value.decode("utf-8", "backslashreplace"))
                failures.append(Failure(index=index, stage="subject", error="the subject is not valid UTF-8"))
        return pa.array(texts, pa.string()), failures


def _headers(column: pa.BinaryArray, count: int) -> tuple[pa.MapArray, dict[int, bytes], list[Failure]]:
    """Header blocks as a map column: null without headers, repeated headers as one key with its values in order."""
    if not pc.max(pc.binary_length(column)).as_py():
        return pa.nulls(count, HEADERS_TYPE), {}, []
    blocks = column.to_pylist()
    names: list[str] = []
    values: list[str] = []
    name_offsets, value_offsets = [0], [0]
    raw: dict[int, bytes] = {}
    failures: list[Failure] = []
    for index, block in enumerate(blocks):
        if block:
            try:
                for name, entries in parse_headers(block).items():
                    names.append(name)
                    values += entries
                    value_offsets.append(len(values))
            except ValueError as error:
                raw[index] = block
                failures.append(Failure(index=index, stage="headers", error=str(error)))
        name_offsets.append(len(names))
    items = pa.ListArray.from_arrays(pa.array(value_offsets, pa.int32()), pa.array(values, pa.string()))
    missing = pa.array([not block or index in raw for index, block in enumerate(blocks)], pa.bool_())
    array = pa.MapArray.from_arrays(
        pa.array(name_offsets, pa.int32()), pa.array(names, pa.string()), items, type=HEADERS_TYPE, mask=missing
    )
    return array, raw, failures


def parse_headers(block: bytes) -> dict[str, list[str]]:
    """Header names and values of a NATS header block (ADR-4), in order; white space before a value is not part of it.

    Raises ValueError, one line, for a block that is not one or whose text is not UTF-8.
    """
    if not block.startswith(_VERSION) or not block.endswith(b"\r\n"):
        raise ValueError("the header block does not start with NATS/1.0 or does not end with a line end")
    headers: dict[str, list[str]] = {}
    try:
        lines = block[len(_VERSION) : -2].decode().split("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError("the headers are not valid UTF-8") from error
    for line in lines:
        if not line:
            continue
        name, colon, value = line.partition(":")
        if not colon or not name:
            raise ValueError("a header line has no name or no colon")
        headers.setdefault(name, []).append(value.lstrip(" \t"))
    return headers
