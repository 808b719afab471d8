"""Sets of stream sequences in bounded memory.

A set is divided into chunks of `CHUNK` sequences: a sorted array for few sequences, else a bitmap, and a constant for
full chunks. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from jetcapture_py.archive.arrays import Mask, Seqs

CHUNK = 1 << 20
FEW = 1 << 14
"""Maximum sequences of a chunk stored as an array, half the size of a bitmap."""
_WIDE = 256
"""Ranges from this length on are added separately."""

_Offsets = npt.NDArray[np.uint32]
_BITS = CHUNK.bit_length() - 1
_NONE = np.zeros(0, np.int64)
_FULL = np.zeros(0, np.bool_)
"""Represents a full chunk."""


class Sequences:
    """A set of sequences from 0 on."""

    def __init__(self) -> None:
        self._chunks: dict[int, Any] = {}

    @classmethod
    def union(cls, *parts: Sequences) -> Sequences:
        """Return the union of sets: a new set, or the only non-empty part."""
        filled = [part for part in parts if part._chunks]
        if len(filled) == 1:
            return filled[0]
        every = cls()
        for part in filled:
            every.update(part)
        return every

    def add(self, seqs: Seqs) -> Seqs:
        """Add an int64 array in any order; return the sequences already in the set, sorted."""
        if not (seqs[1:] > seqs[:-1]).all():
            seqs = np.unique(seqs)
        again = [self._put(chunk, part) + (chunk << _BITS) for chunk, part, _ in _divided(seqs)]
        return np.concatenate([_NONE, *again])

    def add_range(self, first: int, last: int) -> Seqs:
        """Add every sequence from `first` to `last` (inclusive); return those already in the set, sorted."""
        again = [_NONE]
        for chunk in range(first >> _BITS, (last >> _BITS) + 1):
            start = max(first - (chunk << _BITS), 0)
            end = min(last - (chunk << _BITS), CHUNK - 1) + 1
            if end - start == CHUNK:
                content, self._chunks[chunk] = self._chunks.get(chunk), _FULL
                before = _NONE if content is None else np.flatnonzero(_flags(content))
            else:
                before = self._put(chunk, np.arange(start, end, dtype=np.uint32))
            again.append(before + (chunk << _BITS))
        return np.concatenate(again)

    def add_ranges(self, firsts: Seqs, lasts: Seqs) -> None:
        """Add ranges (inclusive), given as int64 arrays; they are disjoint and in order."""
        wide = lasts - firsts >= _WIDE
        for first, last in zip(firsts[wide].tolist(), lasts[wide].tolist(), strict=True):
            self.add_range(first, last)
        firsts, counts = firsts[~wide], (lasts - firsts)[~wide] + 1
        for start in range(0, len(firsts), FEW):
            some, sizes = firsts[start : start + FEW], counts[start : start + FEW]
            self.add(np.repeat(some - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum()))

    def update(self, other: Sequences) -> None:
        """Add all sequences of another set."""
        for chunk, content in other._chunks.items():
            if content is _FULL:
                self._chunks[chunk] = _FULL
            else:
                self._put(chunk, np.flatnonzero(_flags(content)).astype(np.uint32))

    def _put(self, chunk: int, offsets: _Offsets) -> Seqs:
        """Add sorted, distinct offsets to a chunk; return those already in it, as int64."""
        content = self._chunks.get(chunk)
        if content is _FULL:
            return offsets.astype(np.int64)
        again: Seqs = _NONE
        if content is None or content.dtype == np.uint32:
            few = offsets if content is None else np.sort(np.concatenate([content, offsets]), kind="stable")  # a merge
            once = np.concatenate([[True], few[1:] != few[:-1]])
            few, again = few[once], few[~once].astype(np.int64)
            if len(few) <= FEW:
                self._chunks[chunk] = few
                return again
            offsets, content = few, np.zeros(CHUNK // 8, np.uint8)
        low, high = int(offsets[0]) >> 3, (int(offsets[-1]) >> 3) + 1
        flags = np.zeros((high - low) * 8, np.bool_)
        flags[offsets - np.uint32(low * 8)] = True
        bits = np.packbits(flags, bitorder="little")
        if (common := content[low:high] & bits).any():
            again = np.flatnonzero(np.unpackbits(common, bitorder="little")) + low * 8
        content[low:high] |= bits
        self._chunks[chunk] = _FULL if (content == 0xFF).all() else content
        return again

    def contains(self, seqs: Seqs) -> Mask:
        """Return a mask of the members in `seqs`, a sorted int64 array."""
        mask = np.zeros(len(seqs), np.bool_)
        for chunk, offsets, part in _divided(seqs):
            content = self._chunks.get(chunk)
            if content is None:
                continue
            if content is _FULL:
                mask[part] = True
            elif content.dtype == np.uint32:
                mask[part] = np.isin(offsets, content)
            else:
                mask[part] = (content[offsets >> 3] >> (offsets & 7).astype(np.uint8)) & 1
        return mask

    def within(self, first: int, last: int) -> Seqs:
        """Return the sequences from `first` to `last` (inclusive), sorted."""
        parts = [_NONE]
        for chunk in sorted(chunk for chunk in self._chunks if first >> _BITS <= chunk <= last >> _BITS):
            seqs = np.flatnonzero(_flags(self._chunks[chunk])) + (chunk << _BITS)
            parts.append(seqs[np.searchsorted(seqs, first) : np.searchsorted(seqs, last, "right")])
        return np.concatenate(parts)

    def all(self) -> Seqs:
        """Return all sequences, sorted."""
        return self.within(self.first or 0, self.last or 0)

    def near(self, first: int, last: int) -> bool:
        """Whether the set may have a sequence from `first` to `last`; False is exact."""
        for chunk, content in self._chunks.items():
            if not first >> _BITS <= chunk <= last >> _BITS:
                continue
            start = max(first - (chunk << _BITS), 0)
            end = min(last - (chunk << _BITS), CHUNK - 1)
            if content is _FULL:
                return True
            if content.dtype == np.uint32:
                if np.searchsorted(content, start) < np.searchsorted(content, end, "right"):
                    return True
            elif content[start >> 3 : (end >> 3) + 1].any():
                return True
        return False

    def windows(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of non-empty chunks, in order."""
        for chunk in sorted(self._chunks):
            yield chunk << _BITS, ((chunk + 1) << _BITS) - 1

    def __len__(self) -> int:
        return sum(_count(content) for content in self._chunks.values())

    def count(self, first: int, last: int) -> int:
        """Count the sequences from `first` to `last` (inclusive)."""
        total = 0
        for chunk, content in self._chunks.items():
            start, end = first - (chunk << _BITS), last - (chunk << _BITS)
            if start <= 0 and end >= CHUNK - 1:
                total += _count(content)
            elif start < CHUNK and end >= 0 and end >= start:
                total += int(_flags(content)[max(start, 0) : end + 1].sum())
        return total

    @property
    def first(self) -> int | None:
        """The lowest sequence; None if empty."""
        if not self._chunks:
            return None
        chunk = min(self._chunks)
        return (chunk << _BITS) + int(np.argmax(_flags(self._chunks[chunk])))

    @property
    def last(self) -> int | None:
        """The highest sequence; None if empty."""
        if not self._chunks:
            return None
        chunk = max(self._chunks)
        return ((chunk + 1) << _BITS) - 1 - int(np.argmax(_flags(self._chunks[chunk])[::-1]))

    def gaps(self, first: int, last: int) -> Iterator[tuple[Seqs, Seqs]]:
        """Yield the missing ranges from `first` to `last` (inclusive), in order, as arrays of starts and ends."""
        position, chunks = first, sorted(self._chunks)
        pending: tuple[int, int] | None = None
        for chunk in [*(number for number in chunks if first >> _BITS <= number <= last >> _BITS), None]:
            base = last + 1 if chunk is None else max(chunk << _BITS, first)
            starts, ends = np.array([position][: base - position]), np.array([base - 1][: base - position])
            if chunk is not None:
                end = min(last + 1, (chunk + 1) << _BITS)
                inside = _holes(_flags(self._chunks[chunk])[base - (chunk << _BITS) : end - (chunk << _BITS)])
                starts, ends = np.concatenate([starts, inside[0] + base]), np.concatenate([ends, inside[1] + base])
                position = end
            if not len(starts):
                continue
            starts, ends = _joined(pending, starts.astype(np.int64), ends.astype(np.int64))
            pending = int(starts[-1]), int(ends[-1])
            if len(starts) > 1:
                yield starts[:-1], ends[:-1]
        if pending is not None:
            yield np.array([pending[0]]), np.array([pending[1]])

    def stretches(self, first: int, last: int, close: int) -> Iterator[tuple[int, int]]:
        """Yield the gaps from `first` to `last`; join those at most `close` sequences apart."""
        current: tuple[int, int] | None = None
        for starts, ends in self.gaps(first, last):
            breaks = np.flatnonzero(starts[1:] - ends[:-1] > close) + 1
            for group_starts, group_ends in zip(np.split(starts, breaks), np.split(ends, breaks), strict=True):
                start, end = int(group_starts[0]), int(group_ends[-1])
                if current is not None and start - current[1] > close:
                    yield current
                    current = None
                current = (current[0] if current else start, end)
        if current is not None:
            yield current


def _divided(seqs: Seqs) -> Iterator[tuple[int, _Offsets, slice]]:
    """Divide sorted sequences by chunk: yield its number, the offsets in it, and the slice of `seqs`."""
    chunks = seqs >> _BITS
    bounds = [0, *(np.flatnonzero(chunks[1:] != chunks[:-1]) + 1).tolist(), len(seqs)] if len(seqs) else []
    for start, end in pairwise(bounds):
        yield int(chunks[start]), (seqs[start:end] & (CHUNK - 1)).astype(np.uint32), slice(start, end)


def _flags(content: Any) -> Mask:
    """Return a chunk as a bool array."""
    if content is _FULL:
        return np.ones(CHUNK, np.bool_)
    if content.dtype == np.uint32:
        flags = np.zeros(CHUNK, np.bool_)
        flags[content] = True
        return flags
    return np.unpackbits(content, bitorder="little").view(np.bool_)


def _count(content: Any) -> int:
    if content is _FULL:
        return CHUNK
    return len(content) if content.dtype == np.uint32 else int.from_bytes(content.tobytes(), "little").bit_count()


def _holes(flags: Mask) -> tuple[Seqs, Seqs]:
    """Return starts and ends (inclusive) of the runs of False."""
    edges = np.diff(np.concatenate([[True], flags, [True]]).astype(np.int8))
    return np.flatnonzero(edges == -1), np.flatnonzero(edges == 1) - 1


def _joined(before: tuple[int, int] | None, starts: Seqs, ends: Seqs) -> tuple[Seqs, Seqs]:
    """Prepend the previous range, and join ranges that touch, such as one that spans two chunks."""
    if before is not None:
        starts, ends = np.concatenate([[before[0]], starts]), np.concatenate([[before[1]], ends])
    apart = starts[1:] > ends[:-1] + 1
    return starts[np.concatenate([[True], apart])], ends[np.concatenate([apart, [True]])]
