"""Hash a column of byte strings into 64 bits each, without an object per value.

The hash is a polynomial modulo 2^64 with an odd base, so a changed bit and two exchanged bytes always change it. It
detects accidents, not attacks.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa

from jetcapture_py.jetstream.wire.inbox import text_of

PIECE = 1 << 16
"""Bytes hashed at once; longer values are hashed one at a time."""
_BASE = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64


def _powers(base: int) -> Any:
    factors = np.full(PIECE, base, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


_POWERS: list[Any] = []


def hashes(column: pa.BinaryArray) -> Any:
    """Return a uint64 array with the hash of each value; null counts as empty."""
    if not _POWERS:
        _POWERS.extend((_powers(_BASE), _powers(pow(_BASE, -1, _MODULUS))))
    edges, text = text_of(column)
    lengths = np.diff(edges)
    if column.null_count:
        lengths = np.where(column.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
    found = lengths.astype(np.uint64)
    long = lengths > PIECE
    for row in np.flatnonzero(long).tolist():
        value = text[edges[row] : edges[row + 1]]
        found[row] = int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "little")
    rows = np.flatnonzero((lengths > 0) & ~long)
    begins, ends = edges[rows], edges[rows + 1]
    start = 0
    while start < len(rows):
        first = begins[start]
        end = int(np.searchsorted(ends, first + PIECE, "right"))
        starts, borders = begins[start:end] - first, ends[start:end] - first
        weighted = text[first : ends[end - 1]].astype(np.uint64)
        weighted += np.uint64(1)
        weighted *= _POWERS[0][: len(weighted)]
        sums = np.add.reduceat(weighted, np.stack([starts, borders], 1).ravel()[:-1])[::2]
        found[rows[start:end]] += sums * _POWERS[1][starts]
        start = end
    return found
