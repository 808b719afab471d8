"""Assign keys to bundles by Iceberg's bucket hash, vectorized over distinct keys, and order the rows of a bundle.

Source: https://iceberg.apache.org/spec/#bucket-transform-details, 32-bit hash of strings: murmur3_x86_32 with seed 0 of
the UTF-8 bytes.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive.arrays import Int64s, UInt32s
from jetcapture_py.archive.arrow_bytes import text_of

MIN_ROWS, MAX_ROWS = 1 << 14, 1 << 16
"""Rows of a row group, unless the object has fewer or they are too large. Small row groups let a reader of one key
skip most of an object."""
_GROUPS = 16
"""Row groups per object, unless they would have fewer than `MIN_ROWS`."""

_C1, _C2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)


def bundle_numbers(keys: pa.StringArray, bundles: int) -> Int64s:
    """Return the bundle of each key as int64; null and "" belong to bundle 0."""
    numbers = ((_murmur3(keys) & np.uint32(0x7FFFFFFF)) % np.uint32(bundles)).astype(np.int64)
    if keys.null_count:
        numbers[keys.is_null().to_numpy(zero_copy_only=False)] = 0
    return numbers


def bundle_of(key: str | None, bundles: int) -> str:
    """Return the bundle of one key as the directory name spells it."""
    return bundle_text(int(bundle_numbers(pa.array([key], pa.string()), bundles)[0]), bundles)


def bundle_text(number: int, bundles: int) -> str:
    """Return a bundle's number as the directory name spells it: padded to the digits of the last bundle."""
    return f"{number:0{len(str(bundles - 1))}}"


def key_order(keys: pa.ChunkedArray, order: Int64s | None) -> Int64s:
    """Return the indexes that sort rows by key, nulls first. Equal keys keep the order of `order` (None: row order)."""
    encoded = keys.combine_chunks().dictionary_encode()
    ranks = np.empty(len(encoded.dictionary) + 1, np.int64)
    ranks[pc.sort_indices(encoded.dictionary).to_numpy()] = np.arange(1, len(ranks))
    ranks[-1] = 0  # nulls have the index -1 and sort first
    ranks = ranks.astype(np.min_scalar_type(len(ranks)))
    codes = ranks[encoded.indices.fill_null(-1).to_numpy()]
    if order is None:
        return np.argsort(codes, kind="stable")
    return order[np.argsort(codes[order], kind="stable")]


def row_group_rows(rows: int) -> int:
    """Return the maximum rows per row group of an object with `rows` rows. A group of large rows ends earlier."""
    wanted = min(max(rows // _GROUPS, MIN_ROWS), MAX_ROWS)
    groups = max(1, rows // wanted, -(-rows // MAX_ROWS))
    return -(-rows // groups)


def _murmur3(texts: pa.StringArray) -> UInt32s:
    """Return murmur3_x86_32 with seed 0 of each text's UTF-8 bytes as uint32; of null, any value."""
    count = len(texts)
    ends, text = text_of(texts)
    starts, lengths = ends[:-1], np.diff(ends)
    padded = text[ends[0] : ends[-1]].tobytes() + b"\0\0\0\0"  # so that four bytes can be read at the end
    words = np.ndarray(len(padded) - 3, "<u4", padded, strides=(1,))  # the four bytes from each position on
    starts = starts - ends[0]
    hashes = np.zeros(count, np.uint32)
    whole = lengths // 4
    for block in range(int(whole.max(initial=0))):
        rows = np.flatnonzero(whole > block)
        mixed = hashes[rows] ^ _scrambled(words[starts[rows] + 4 * block])
        hashes[rows] = _rotated(mixed, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    rest = (lengths % 4).astype(np.uint32)
    tail = words[starts + 4 * whole] & ((np.uint32(1) << (rest * np.uint32(8))) - np.uint32(1))
    hashes ^= np.where(rest > 0, _scrambled(tail), np.uint32(0))
    hashes ^= lengths.astype(np.uint32)
    hashes = (hashes ^ (hashes >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    hashes = (hashes ^ (hashes >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return hashes ^ (hashes >> np.uint32(16))


def _scrambled(words: UInt32s) -> UInt32s:
    return _rotated(words * _C1, 15) * _C2


def _rotated(words: UInt32s, bits: int) -> UInt32s:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))
