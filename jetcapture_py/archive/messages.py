"""Sets of a stream's messages, and the identities of rows.

A message is a sequence and a timestamp: a stream that is created again or rewound gives sequences to other messages.
A row also has its position in the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Hashes, Int64s, Mask, Micros, Seqs

_NONE = np.zeros(0, np.int64)
_MICROSECONDS = pa.timestamp("us", "UTC")


class MessageSet:
    """A sorted set of messages; each takes 16 bytes of memory."""

    seqs: Seqs
    """Their sequences."""
    times: Micros
    """Their timestamps in microseconds."""

    def __init__(self, seqs: Seqs = _NONE, times: Micros = _NONE) -> None:
        """Accept messages in any order, with duplicates."""
        if not _ascending(seqs, times):
            order = np.lexsort((times, seqs))
            seqs, times = seqs[order], times[order]
            first = first_of_each(seqs, times)
            seqs, times = seqs[first], times[first]
        self.seqs, self.times = seqs, times

    @classmethod
    def union(cls, sets: Iterable[MessageSet]) -> MessageSet:
        parts = [part for part in sets if len(part)]
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([_NONE, *(part.seqs for part in parts)]),
            np.concatenate([_NONE, *(part.times for part in parts)]),
        )

    def __len__(self) -> int:
        return len(self.seqs)

    def contains(self, seqs: Seqs, times: Micros) -> Mask:
        """Return a mask of the members."""
        return self.positions(seqs, times) >= 0

    def positions(self, seqs: Seqs, times: Micros) -> Int64s:
        """Return the index of each message in the set; -1 for others."""
        positions = np.full(len(seqs), -1, np.int64)
        at, ends = np.searchsorted(self.seqs, seqs), np.searchsorted(self.seqs, seqs, "right")
        while len(open_ := np.flatnonzero(at < ends)):  # one iteration per message with the same sequence
            equal = open_[self.times[at[open_]] == times[open_]]
            positions[equal] = at[equal]
            at = at + 1
        return positions

    def where(self, mask: Mask) -> MessageSet:
        """Return the messages of a mask."""
        return MessageSet(self.seqs[mask], self.times[mask])

    def without(self, other: MessageSet) -> MessageSet:
        """Return the messages that are not in another set."""
        return self.where(~other.contains(self.seqs, self.times))

    def count(self, first: int, last: int) -> int:
        """Return how many messages have a sequence from `first` to `last`."""
        return int(np.searchsorted(self.seqs, last, "right") - np.searchsorted(self.seqs, first))

    def near(self, first: int, last: int) -> bool:
        """Whether a message has a sequence from `first` to `last`."""
        return self.count(first, last) > 0


def first_of_each(seqs: Seqs, times: Micros) -> Mask:
    """Return a mask of the first row of each message; rows of one message follow one another."""
    first = np.ones(len(seqs), np.bool_)
    first[1:] = (seqs[1:] != seqs[:-1]) | (times[1:] != times[:-1])
    return first


def runs(seqs: Seqs) -> Iterator[tuple[int, int]]:
    """Yield runs of consecutive sequences; a duplicate starts a new run."""
    yield from map(tuple, bounds_of(seqs).tolist())


def bounds_of(seqs: Seqs) -> Int64s:
    """Return the `runs` of sorted sequences as an array with one row per range."""
    starts = np.flatnonzero(np.diff(seqs, prepend=-2) != 1)
    ends = np.append(starts[1:], len(seqs))[: len(starts)] - 1
    return np.stack([seqs[starts], seqs[ends]], axis=1).astype(np.int64)


def _ascending(seqs: Seqs, times: Micros) -> bool:
    """Whether messages are in order, each once."""
    return bool(((seqs[1:] > seqs[:-1]) | ((seqs[1:] == seqs[:-1]) & (times[1:] > times[:-1]))).all())


@dataclass(frozen=True, slots=True)
class RowIds:
    """The identities of rows, in any order: sequence, timestamp in microseconds, position in the message."""

    seqs: Seqs
    times: Micros
    rows: Int64s

    @classmethod
    def of(cls, table: pa.Table | pa.RecordBatch) -> RowIds:
        """Return the identities of a table's rows. Raises ArrowException if a sequence or timestamp is null."""
        rows = np.zeros(table.num_rows, np.int64)
        if layout.ROW in table.schema.names:
            rows = pc.fill_null(table[layout.ROW].cast(pa.int64()), 0).to_numpy()
        if table[layout.SEQ].null_count or table[layout.TIMESTAMP].null_count:
            raise pa.ArrowInvalid("a message has no sequence or no timestamp")
        times = table[layout.TIMESTAMP].cast(_MICROSECONDS).cast(pa.int64()).to_numpy()
        return cls(table[layout.SEQ].cast(pa.int64()).to_numpy(), times, rows)

    @classmethod
    def concat(cls, parts: Sequence[RowIds]) -> RowIds:
        columns = ([part.seqs for part in parts], [part.times for part in parts], [part.rows for part in parts])
        return cls(*(np.concatenate([_NONE, *column]) for column in columns))

    def __len__(self) -> int:
        return len(self.seqs)

    @property
    def messages(self) -> MessageSet:
        """The messages that have these rows."""
        return MessageSet(self.seqs, self.times)

    def take(self, chosen: Int64s | Mask) -> RowIds:
        """Select by indexes or a mask."""
        return RowIds(self.seqs[chosen], self.times[chosen], self.rows[chosen])

    def order(self, sources: Int64s) -> Int64s:
        """Return the indexes that sort the identities, and equal ones by `sources`, the number of each one's object."""
        order = np.argsort(self.seqs, kind="stable")
        seqs = self.seqs[order]
        if (seqs[1:] == seqs[:-1]).any():
            order = np.lexsort((sources, self.rows, self.times, self.seqs))
        return order

    def repeated(self) -> Mask:
        """Return a mask of identities that are equal to the previous one; they must be sorted."""
        again = np.zeros(len(self.seqs), np.bool_)
        again[1:] = (np.diff(self.seqs) == 0) & (np.diff(self.times) == 0) & (np.diff(self.rows) == 0)
        return again

    def hashes(self) -> Hashes:
        """Return a 64-bit hash of each; sums of them compare sets."""
        mixed = _mixed(self.rows.astype(np.uint64))
        return _mixed(self.seqs.astype(np.uint64) ^ _mixed(self.times.astype(np.uint64) ^ mixed))


def _mixed(values: Hashes) -> Hashes:
    """Apply splitmix64's finalizer to each value."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
