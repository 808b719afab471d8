"""Ack subjects, one at a time: what one says, and subjects for other messages of the same consumer.

$JS.ACK.[domain.account.]stream.consumer.delivered.sseq.cseq.timestamp.pending[.token]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

_SHORT, _LONG = 9, 11
"""Tokens: nine, or eleven and more with domain and account hash in front of the stream (ADR-15)."""


class Position(NamedTuple):
    """A message's sequence in the stream, and the number of its delivery by the consumer."""

    seq: int
    delivery: int


def position(reply: bytes, stream: str, consumer: str) -> Position | None:
    """Where the message with this ack subject stands; None if it is not one of the consumer's."""
    tokens = reply.split(b".")
    base = 2 if len(tokens) == _SHORT else 4
    if len(tokens) != _SHORT and len(tokens) < _LONG:
        return None
    if tokens[:2] != [b"$JS", b"ACK"] or tokens[base : base + 2] != [stream.encode(), consumer.encode()]:
        return None
    numbers = tokens[base + 3 : base + 5]
    if not all(number.isdigit() and len(number) < 20 for number in numbers):
        return None
    return Position(int(numbers[0]), int(numbers[1]))


def subjects_like(reply: bytes, seqs: Any, delivery: int) -> pa.BinaryArray:
    """Ack subjects for the messages `seqs`, an integer array, as if each were delivery number `delivery`.

    `reply` is a real one of the consumer, because only the server knows what stands in front of the stream's name.
    """
    tokens = reply.split(b".")
    base = 2 if len(tokens) == _SHORT else 4
    head = b".".join([*tokens[: base + 2], b"1", b""])
    tail = b".".join([b"", str(delivery).encode(), *tokens[base + 5 :]])
    numbers = pa.array(seqs, pa.int64()).cast(pa.string()).cast(pa.binary())
    return pc.binary_join_element_wise(head, numbers, tail, b"")
