"""Parse and build ack subjects, one or a column at a time, and acknowledge in bulk.

$JS.ACK.[domain.account.]stream.consumer.delivered.sseq.cseq.timestamp.pending[.token]
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

import nats.errors
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive.arrays import Bytes, Int64s, Nanos, Seqs
from jetcapture_py.archive.arrow_bytes import between, joined, text_of
from jetcapture_py.errors import DeniedError
from jetcapture_py.jetstream.wire.client import Connection
from jetcapture_py.log import event

_PACKED = 16
"""Bytes of a packed sequence and timestamp."""
_SHORT, _LONG = 9, 11
"""Number of tokens: nine, or at least eleven with domain and account hash before the stream (ADR-15)."""


class AckPosition(NamedTuple):
    """A message's stream sequence, its consumer sequence (delivery number), and the consumer's pending messages.

    `pending` is -1 if it is not a valid number.
    """

    seq: int
    delivery: int
    pending: int


def _tokens(reply: bytes, stream: bytes, consumer: bytes) -> tuple[list[bytes], int]:
    """Split an ack subject; return its tokens and the index of the stream's name, 0 if it is not the consumer's."""
    tokens = reply.split(b".")
    base = 2 if len(tokens) == _SHORT else 4
    long_enough = len(tokens) == _SHORT or len(tokens) >= _LONG
    of_consumer = tokens[:2] == [b"$JS", b"ACK"] and tokens[base : base + 2] == [stream, consumer]
    return tokens, base if long_enough and of_consumer else 0


def position(reply: bytes, stream: str, consumer: str) -> AckPosition | None:
    """Parse an ack subject; None if it is not one of the consumer's."""
    tokens, base = _tokens(reply, stream.encode(), consumer.encode())
    if not base:
        return None
    seq, delivery, pending = (_number(tokens[base + index]) for index in (3, 4, 6))
    return None if seq < 0 or delivery < 0 else AckPosition(seq, delivery, pending)


def _number(token: bytes) -> int:
    return int(token) if token.isdigit() and len(token) < 20 else -1


def subjects_like(reply: bytes, seqs: Seqs | list[int], delivery: int) -> pa.BinaryArray:
    """Build ack subjects for the messages `seqs`, all with the delivery number `delivery`.

    `reply` is a real ack subject of the consumer, because only the server knows the tokens before the stream's name.
    """
    tokens = reply.split(b".")
    base = 2 if len(tokens) == _SHORT else 4
    head = b".".join([*tokens[: base + 2], b"1", b""])
    tail = b".".join([b"", str(delivery).encode(), *tokens[base + 5 :]])
    numbers = pa.array(seqs, pa.int64()).cast(pa.string()).cast(pa.binary())
    return pc.binary_join_element_wise(head, numbers, tail, b"")


def first_delivery(stream: str, consumer: str, seq: int, time: int) -> bytes:
    """Build the ack subject of a message's first delivery; `time` is in nanoseconds since the epoch."""
    return f"$JS.ACK.{stream}.{consumer}.1.{seq}.{seq}.{time}.0".encode()


def positions(stream: str, consumer: str, replies: pa.BinaryArray) -> tuple[Seqs, Nanos]:
    """Return stream sequences and timestamps in nanoseconds as int64 arrays; drop messages not of the consumer."""
    (_, seqs, nanoseconds), _ = ack_numbers(replies, stream, consumer)
    return seqs, nanoseconds


def sequences(stream: str, consumer: str, replies: pa.BinaryArray) -> Seqs:
    """Return stream sequences as an int64 array; -1 for messages not of the consumer."""
    (_, seqs, _), keep = ack_numbers(replies, stream, consumer)
    if keep is None:
        return seqs
    result = np.full(len(replies), -1)
    result[keep] = seqs
    return result


Numbers = tuple[Int64s, ...]
COUNT, SEQ, DELIVERY, TIME = 2, 3, 4, 5
"""Tokens after the stream's name: how often the message was delivered, its stream sequence, the number of this
delivery, and the message's timestamp in nanoseconds."""


def ack_numbers(
    replies: pa.BinaryArray, stream: str, consumer: str, tokens: tuple[int, ...] = (COUNT, SEQ, TIME)
) -> tuple[Numbers, list[int] | None]:
    """Return these tokens as int64 arrays, and the indexes of the consumer's ack subjects, None if all are."""
    numbers = None
    with contextlib.suppress(pa.ArrowInvalid):
        numbers = _alike(replies, stream, consumer, tokens) if len(replies) else None
    if numbers:
        return numbers, None
    return _checked_numbers(replies.to_pylist(), stream.encode(), consumer.encode(), tokens)


def _alike(replies: pa.BinaryArray, stream: str, consumer: str, which: tuple[int, ...]) -> Numbers | None:
    """Parse all at once if they have the same prefix and number of tokens as the first; None otherwise."""
    tokens, base = _tokens(replies[0].as_py(), stream.encode(), consumer.encode())
    if not base:
        return None
    head, dots = b".".join(tokens[: base + 2]) + b".", len(tokens) - 1
    if not pc.all(pc.starts_with(replies, head)).as_py():
        return None
    edges, text = text_of(replies)
    if base == 2 and all(tokens) and (np.diff(edges) == edges[1] - edges[0]).all():
        aligned = _aligned(text[edges[0] : edges[-1]].reshape(len(replies), -1), tokens, which)
        if aligned is not None:
            return aligned
    dot_offsets = np.flatnonzero(text[edges[0] : edges[-1]] == ord(".")) + edges[0]
    if len(dot_offsets) != dots * len(replies):
        return None
    ends = dot_offsets.reshape(-1, dots)
    if (ends[:, 0] < edges[:-1]).any() or (ends[:, -1] >= edges[1:]).any():
        return None
    numbers = []
    for token in (base + index for index in which):
        texts = between(text, ends[:, token - 1] + 1, ends[:, token]).cast(pa.string())
        if not pc.all(pc.ascii_is_decimal(texts)).as_py():  # Arrow's cast would accept signs and hexadecimal digits
            return None
        numbers.append(texts.cast(pa.int64()).to_numpy())
    return tuple(numbers)


def _aligned(lines: Bytes, tokens: list[bytes], which: tuple[int, ...]) -> Numbers | None:
    """Like `_alike`, if every token has the same length as the first subject's; `lines` has one subject per row."""
    ends = np.cumsum([len(token) + 1 for token in tokens]) - 1
    start = ends[3] + 1
    dots = ends[4:-1] - start
    tail = lines[:, start:]
    digits = tail - np.uint8(ord("0")) < 10
    where = np.ones(tail.shape[1], bool)
    where[dots] = False
    if not (digits == where).all() or (tail[:, dots] != ord(".")).any():
        return None
    return tuple(_integers(lines[:, ends[token + 1] + 1 : ends[token + 2]]) for token in which)


def _integers(digits: Bytes) -> Int64s:
    """Parse rows of digits as integers."""
    count, width = digits.shape
    if width == 1:
        return digits[:, 0].astype(np.int64) - ord("0")
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(digits))]
    numbers: Int64s = pa.Array.from_buffers(pa.string(), count, buffers).cast(pa.int64()).to_numpy()
    return numbers


def _checked_numbers(
    replies: list[bytes], stream: bytes, consumer: bytes, which: tuple[int, ...]
) -> tuple[Numbers, list[int]]:
    """Parse one by one, leaving out invalid subjects and those of other consumers."""
    rows: list[list[int]] = []
    keep: list[int] = []
    for index, reply in enumerate(replies):
        tokens, base = _tokens(reply, stream, consumer)
        if not base:
            continue
        numbers = [tokens[base + index] for index in which]
        if all(number.isdigit() and len(number) < 20 and int(number) < 1 << 63 for number in numbers):
            rows.append(list(map(int, numbers)))
            keep.append(index)
    return tuple(np.array(rows, np.int64).reshape(len(rows), len(which)).T), keep


def packed(seqs: Seqs, times: Nanos) -> pa.BinaryArray:
    """Return sequences and timestamps in nanoseconds as one value per message, where no ack subjects are needed."""
    values = np.stack([seqs, times], axis=1).astype(np.int64)
    offsets = np.arange(0, values.nbytes + 1, _PACKED, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(values)])


def unpacked(array: pa.BinaryArray) -> tuple[Seqs, Nanos]:
    """Return the sequences and timestamps that were `packed`."""
    values = np.frombuffer(joined(array), np.int64).reshape(-1, 2)
    return values[:, 0], values[:, 1]


log = logging.getLogger("jetcapture.source")

CONFIRM_TIMEOUT_S = 5.0


class AckResult(Enum):
    """Result of acknowledging."""

    CONFIRMED = auto()
    UNCONFIRMED = auto()
    """The server did not answer in time."""
    UNREACHABLE = auto()
    """The connection broke, or the consumer has no leader at the moment."""
    REFUSED = auto()
    """The server will never accept them."""


async def acknowledge(connection: Connection, replies: pa.BinaryArray, reconnects: Callable[[], int]) -> AckResult:
    """Acknowledge messages by their ack subjects; the server confirms the last one.

    Acks on one connection are processed in order, so its confirmation covers all. `reconnects` is the connection's
    count of reconnects, to detect a change of connection.
    """
    before = reconnects()
    await publish(connection, replies[:-1], b"+ACK")
    try:
        await connection.ask(replies[-1].as_py().decode(), b"+ACK", CONFIRM_TIMEOUT_S)
    except DeniedError:
        return AckResult.REFUSED
    except (nats.errors.Error, OSError, TimeoutError) as error:
        event(log, logging.WARNING, "ack.unconfirmed", messages=len(replies), error=error)
        if isinstance(error, nats.errors.NoRespondersError) or not connection.is_connected or reconnects() != before:
            return AckResult.UNREACHABLE
        return AckResult.UNCONFIRMED
    return AckResult.CONFIRMED if reconnects() == before else AckResult.UNREACHABLE


async def publish(connection: Connection, replies: pa.BinaryArray, body: bytes) -> None:
    """Publish a four-byte body to every ack subject; do nothing without a connection."""
    if len(replies) and connection.is_connected:
        commands = pc.binary_join_element_wise(b"PUB ", replies, b" 4\r\n" + body + b"\r\n", b"")
        with contextlib.suppress(OSError):
            await connection.write(bytes(joined(commands)))
