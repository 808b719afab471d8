"""Decide which messages a cumulative ack may cover, in `source.mode: ordered`.

Guarantee: no ack covers a message that did not arrive here and is not stored.

The server numbers a consumer's deliveries. `CONSUMER.RESET` starts again at 1, with the first message above the ack
floor. From there on, deliveries without a gap in their numbers are all messages in their order: a *run*. Anything else
ends the run: a new pin, a gap, a message out of order, a lost connection, another leader. Then nothing is acknowledged
until a RESET has begun another run.

Another replica that believes to be active may RESET at any time, and the numbers may happen to fit. Therefore the
consumer's ack floor, a pair of delivery number and sequence, is looked up after the messages arrived and before they
are acknowledged. It must lie on this run, because the pair shows which message a delivery number stands for.

Pure: no clock, no I/O, and no Python object per message. Arrays are int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from jetcapture_py.archive.arrays import Int64s, Mask, Nanos, Seqs


class Phase(Enum):
    """A replica's state, which decides the messages to receive and acknowledge."""

    STANDBY = auto()
    """Another replica or no replica is pinned."""
    INTERRUPTED = auto()
    """Pinned; a RESET is needed, and messages are dropped until then."""
    RESET = auto()
    """The RESET was confirmed; the first delivery has not arrived."""
    RUNNING = auto()
    """Messages are received, and acknowledged once stored."""


class Position(NamedTuple):
    """A delivery's number since the RESET, and its sequence in the stream."""

    delivery: int
    seq: int


class Ack(NamedTuple):
    """Acknowledges everything up to `position` in the run with this number, by two acks sent together.

    The first ack has the same sequence and the floor's number, `before`. The server ignores it unless a RESET followed
    the look-up of the floor. Then the floor gets that number, which the next look-up detects. While the floor's number
    is 0, only the first delivery is acknowledged.
    """

    run: int
    before: int
    position: Position


class Mark(NamedTuple):
    """The state of arrivals at one moment: the number of the run, and of its last delivery."""

    run: int
    delivery: int


def _no_numbers() -> Int64s:
    return np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class _Rows:
    """Messages in the order of their sequences."""

    seqs: Seqs = field(default_factory=_no_numbers)
    times: Nanos = field(default_factory=_no_numbers)
    """Nanoseconds, because a restored stream reuses sequences for other messages."""
    stored: Mask = field(default_factory=lambda: np.empty(0, bool))

    def __len__(self) -> int:
        return len(self.seqs)

    def where(self, mask: Mask | Int64s | slice) -> _Rows:
        """Select rows by a mask, indexes or a slice."""
        return _Rows(self.seqs[mask], self.times[mask], self.stored[mask])

    def find(self, seqs: Seqs, times: Nanos) -> tuple[Mask, Int64s]:
        """Return a mask of the messages that are in the rows, and their indexes."""
        if not len(self):
            return np.zeros(len(seqs), bool), np.empty(0, np.int64)
        first, last = self.seqs[0], self.seqs[-1]
        if last - first == len(self) - 1:  # the usual case: no sequence is missing
            index = np.clip(seqs - first, 0, len(self) - 1)
        else:
            index = np.minimum(np.searchsorted(self.seqs, seqs), len(self) - 1)
        same = (self.seqs[index] == seqs) & (self.times[index] == times)
        return same, index[same]

    def mark(self, seqs: Seqs, times: Nanos) -> None:
        self.stored[self.find(seqs, times)[1]] = True


def _joined(parts: Sequence[_Rows]) -> _Rows:
    columns = zip(*((rows.seqs, rows.times, rows.stored) for rows in parts), strict=True)
    return _Rows(*map(np.concatenate, columns))


class OrderedAcks:
    """The state of one replica.

    Attributes:
        phase: The current phase.
        pin: The pin id to pull with; "" without one.
        reason: Why the last run ended.
        run: Number of the run; a new one with each interruption.
        resets: Confirmed RESETs.
    """

    def __init__(self) -> None:
        self.phase = Phase.STANDBY
        self.pin = self.reason = ""
        self.run = self.resets = 0
        self._lost_pin = ""
        self._leader = ""
        self._acked = Position(0, 0)
        self._rows = _Rows()  # all deliveries of this run after `_acked`
        self._new: list[_Rows] = []  # to be appended to them
        self._held = _Rows()  # unacknowledged messages of earlier runs, stored or being stored
        self._last = Position(0, 0)

    @property
    def active(self) -> bool:
        """Whether the server delivers to this replica, as far as known."""
        return self.phase is not Phase.STANDBY

    @property
    def unacknowledged(self) -> int:
        """Number of unacknowledged messages that arrived here."""
        return len(self._arrived()) + len(self._held)

    def abandoned(self, pinned: str, unacked: int) -> bool:
        """Whether unacknowledged messages belong to a dead replica and nobody is `pinned`.

        The server pins a replica only when it has a message to deliver. A RESET makes it redeliver them.
        """
        return not self.active and not pinned and unacked > 0

    # ------------------------------------------------------------------ receiving

    def received(self, deliveries: Int64s, seqs: Seqs, times: Nanos, pin: str) -> Mask:
        """Record messages in order of arrival; return a mask of those to capture. `pin` is the last one's pin id.

        The others must not be acknowledged, or are held already.
        """
        keep = np.zeros(len(seqs), bool)
        if not len(seqs) or pin == self._lost_pin:  # in flight when the pin was lost
            return keep
        if pin != self.pin:
            self.pin = pin
            self._interrupt("pinned")
        start = 0
        if self.phase is Phase.RESET:
            first = np.flatnonzero((deliveries == 1) & (seqs > self._acked.seq))  # others were sent before the RESET
            if len(first):
                start, self.phase = int(first[-1]), Phase.RUNNING
        if self.phase is not Phase.RUNNING:
            return keep
        previous = np.concatenate([[self._last.seq], seqs[start:-1]])
        fits = deliveries[start:] == np.arange(self._last.delivery + 1, self._last.delivery + 1 + len(seqs) - start)
        fits &= seqs[start:] > previous
        stop = start + (len(fits) if fits.all() else int(np.argmin(fits)))
        if stop > start:
            keep[start:stop] = self._admit(seqs[start:stop], times[start:stop])
            self._last = Position(int(deliveries[stop - 1]), int(seqs[stop - 1]))
        if stop < len(seqs):
            self._interrupt(f"delivery {deliveries[stop]} came after {self._last.delivery}")
        return keep

    def _admit(self, seqs: Seqs, times: Nanos) -> Mask:
        """Add messages to the run; return a mask of those that are not held from an earlier one."""
        held, index = self._held.find(seqs, times)
        stored = np.zeros(len(seqs), bool)
        stored[held] = self._held.stored[index]
        self._new.append(_Rows(seqs, times, stored))
        return ~held

    def _arrived(self) -> _Rows:
        """Return the run's unacknowledged messages."""
        if self._new:
            self._rows, self._new = _joined([self._rows, *self._new]), []
        return self._rows

    @property
    def last_seq(self) -> int:
        """The sequence of the run's last message."""
        return self._last.seq

    @property
    def has_news(self) -> bool:
        """Whether a message is stored that could be acknowledged."""
        return self.phase is Phase.RUNNING and bool(self._arrived().stored[:1].all()) and len(self._rows) > 0

    def mark(self) -> Mark:
        """Return the current state of arrivals."""
        return Mark(self.run, self._last.delivery)

    def arrived_before(self, count: int) -> int | None:
        """Return the sequence of the message `count` deliveries before the last, if it is not acknowledged."""
        if len(self._rows) + sum(map(len, self._new)) <= count:
            return None
        return int(self._arrived().seqs[-count - 1])

    def forget(self) -> None:
        """Record that messages of earlier runs were dropped, except stored ones, so that they are captured again."""
        self._held = self._held.where(self._held.stored)

    # ------------------------------------------------------------------ interruptions

    def interrupt(self, reason: str) -> None:
        """End the run, for example after a lost connection."""
        if self.active:
            self._interrupt(reason)

    def unpinned(self, pin: str) -> None:
        """Record that the server does not deliver to this pin id any more."""
        if self.active and pin == self.pin:
            self._interrupt("unpinned")
            self.phase, self._lost_pin, self.pin = Phase.STANDBY, pin, ""

    def _interrupt(self, reason: str) -> None:
        """End the run; its messages stay held."""
        rows = _joined([self._held, self._arrived()])
        order = np.argsort(rows.seqs, kind="stable")
        newest = np.append(np.diff(rows.seqs[order]) > 0, True)[: len(order)]
        self._held, self._rows = rows.where(order[newest]), _Rows()
        self.phase, self.reason = Phase.INTERRUPTED, reason
        self.run += 1

    def reset(self, run: int, first: int, leader: str) -> None:
        """Record a confirmed RESET, requested in this run: later deliveries have sequences from `first` on."""
        if run == self.run and self.phase is Phase.INTERRUPTED:
            self.phase, self._leader = Phase.RESET, leader
            self._acked = self._last = Position(0, first - 1)
            self._held = self._held.where(self._held.seqs >= first)
            self.resets += 1

    # ------------------------------------------------------------------ acknowledging

    def stored(self, seqs: Seqs, times: Nanos) -> None:
        """Record messages whose object is stored."""
        self._arrived().mark(seqs, times)
        self._held.mark(seqs, times)

    def next_ack(self, mark: Mark, floor: Position, leader: str) -> Ack | None:
        """Return the next ack; None without a new message, or while a RESET is needed.

        `floor` is the consumer's ack floor and `leader` its leader, both requested after `mark` was taken.
        """
        if self.phase is not Phase.RUNNING or mark.run != self.run:
            return None
        rows = self._arrived()
        known = floor.delivery - self._acked.delivery  # more than 0 when the server gave up on expired messages
        before = int(rows.seqs[known - 1]) if 0 < known <= len(rows) else self._acked.seq
        fits = 0 <= known <= len(rows) and before <= floor.seq
        if not fits or (known < len(rows) and floor.seq >= rows.seqs[known]) or leader != self._leader:
            self._interrupt("another leader" if fits and leader != self._leader else "the ack floor is of another run")
            return None
        safe = rows.stored[: max(0, mark.delivery - self._acked.delivery)]
        count = len(safe) if safe.all() else int(np.argmin(safe))
        if count <= known:
            return None
        if not floor.delivery:  # after another RESET this one is below the floor, and has no effect
            count = 1
        position = Position(self._acked.delivery + count, int(rows.seqs[count - 1]))
        return Ack(self.run, floor.delivery, position)

    def acked(self, ack: Ack) -> int:
        """Record a confirmed ack; return the number of messages that it acknowledged."""
        if ack.run != self.run:
            return 0
        count = ack.position.delivery - self._acked.delivery
        self._rows, self._acked = self._arrived().where(slice(count, None)), ack.position
        self._held = self._held.where(self._held.seqs > ack.position.seq)
        return count

    def unconfirmed(self, ack: Ack) -> None:
        """Record an unconfirmed ack, which may have had an effect."""
        if ack.run == self.run:
            self.interrupt("an ack was not confirmed")

    def idle(self, mark: Mark, delivered: int) -> None:
        """Record the number of the consumer's last delivery, requested some time after the last one of `mark`."""
        waiting = self.phase in (Phase.RESET, Phase.RUNNING)
        if waiting and mark == self.mark() and delivered != mark.delivery:
            self._interrupt(f"{mark.delivery} deliveries arrived of {delivered}")
