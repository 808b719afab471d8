"""Find messages that the server sent but that never arrived because the connection broke.

The server numbers every delivery of the consumer, and each message's ack subject has its number. As long as the numbers
received here have no gap and nobody else pulls, this process is the only receiver, and the gap after a lost connection
is what was lost. With other replicas only an estimate is possible: their deliveries look the same.

Pure: no clock, no I/O. Times are seconds of the caller's monotonic clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from jetcapture_py.jetstream.acks import position, positions, subjects_like
from jetcapture_py.jetstream.consumer import ConsumerState

ALONE_AFTER = 5.0
"""Seconds without gaps and without others' pulls after which this process counts as the only receiver."""
MAX_SEQUENCES = 100_000
"""Maximum sequences to have redelivered, about 10 MB of acks: a consumer that filters a large stream may skip any
number between two messages."""
_SAMPLES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Messages lost with a connection: their approximate number, and the ack subjects to NAK in `replies`.

    These are for messages that are not held here. Some may not be pending at all; the server ignores those.
    """

    messages: int
    replies: pa.BinaryArray


_NO_REPLIES = pa.nulls(0, pa.binary())


class Deliveries:
    """Tracks the deliveries of one consumer. `state` is its state before the first pull."""

    def __init__(self, stream: str, consumer: str, state: ConsumerState) -> None:
        self._stream, self._consumer = stream, consumer
        self._offset = state.deliveries
        """Deliveries that went elsewhere; constant while this process is the only receiver."""
        nobody_else = state.unacked == 0 and state.waiting_pulls == 0
        self._alone_since: float | None = float("-inf") if nobody_else else None
        self._last_reply = f"$JS.ACK.{stream}.{consumer}.1.0.0.0.0".encode()  # a form that all servers accept
        self._last_delivery, self._last_seq = state.deliveries, state.delivered
        self._accounted = 0  # deliveries up to this number are accounted for
        self._lost: list[tuple[int, int]] = []  # ranges of sequences, inclusive
        self._elsewhere: deque[int] = deque([state.unacked], _SAMPLES)

    def received(self, total: int, reply: bytes, now: float) -> None:
        """Record that `total` messages have been received; `reply` is the ack subject of the last one."""
        ack = position(reply, self._stream, self._consumer)
        if ack is None or ack.delivery <= self._accounted:
            return
        self._last_reply, self._last_delivery = reply, ack.delivery
        self._last_seq = max(self._last_seq, ack.seq)
        if ack.delivery - total != self._offset or self._alone_since is None:
            self._offset, self._alone_since = ack.delivery - total, now
            self._lost.clear()

    def record_state(self, state: ConsumerState, *, held: int, pulls: int, now: float) -> None:
        """Record the consumer's state while this process held `held` messages and had `pulls` open pulls."""
        self._elsewhere.append(max(0, state.unacked - held))  # held by other replicas, or in flight
        if state.waiting_pulls > pulls:
            self._alone_since = now

    def after_reconnect(self, state: ConsumerState, held: pa.BinaryArray, now: float) -> Lost:
        """Compare the consumer's state after a reconnect, before the first pull, with the ack subjects `held`."""
        sent = state.deliveries - self._last_delivery
        alone = self._alone_since is not None and now - self._alone_since >= ALONE_AFTER
        held_seqs = np.unique(positions(self._stream, self._consumer, held)[0])
        first, last = self._last_seq + 1, state.delivered
        self._offset += sent
        self._last_delivery = self._accounted = state.deliveries
        self._last_seq = max(self._last_seq, last)
        if not alone or sent < 0 or state.waiting_pulls:  # others pull, or a killed server lost its count
            self._alone_since = now
            self._lost.clear()
            elsewhere = state.unacked - len(held_seqs) - min(self._elsewhere)
            return Lost(messages=max(0, min(sent, elsewhere)), replies=_NO_REPLIES)
        if sent:
            self._lost.append((first, last))
        seqs = self._sequences(state.ack_floor)  # also those lost before: their NAKs may have failed
        missing = seqs[~np.isin(seqs, held_seqs)]
        return Lost(messages=sent, replies=subjects_like(self._last_reply, missing, state.deliveries))

    def _sequences(self, floor: int) -> Any:
        """Return all sequences above `floor` in the lost ranges; if too many, only those of the latest ranges."""
        ranges: list[tuple[int, int]] = []
        size = 0
        for first, last in reversed([(max(first, floor + 1), last) for first, last in self._lost]):
            size += max(0, last - first + 1)
            if first <= last and size <= MAX_SEQUENCES:
                ranges.append((first, last))
        self._lost = ranges[::-1]
        return np.concatenate([np.arange(0), *(np.arange(first, last + 1) for first, last in self._lost)])
