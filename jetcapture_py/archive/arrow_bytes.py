"""Work on Arrow byte columns without creating a Python object per value."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa

from jetcapture_py.archive.arrays import Bytes, Int32s, Int64s

_INLINE = 12
"""Maximum size of a value that Arrow stores inline in a string view."""


def text_of(array: pa.BinaryArray) -> tuple[Int64s, Bytes]:
    """Return the offsets of an array's values, including the end of the last one, and the data buffer."""
    _, offsets, data = array.buffers()
    edges = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    return edges, np.frombuffer(data or b"", np.uint8)


def joined(array: pa.BinaryArray) -> Bytes:
    """Return the concatenated values as one byte array, without a copy."""
    if not len(array):
        return np.zeros(0, np.uint8)
    edges, text = text_of(array)
    return text[edges[0] : edges[-1]]


def between(text: Bytes, starts: Int64s | Int32s, ends: Int64s | Int32s) -> pa.BinaryArray:
    """Copy the values between `starts` and `ends` of a byte array, which do not overlap.

    Arrow copies values from views in one go. Selecting elements is up to four times slower, because it guesses how many
    bytes they have.
    """
    count, sizes = len(starts), ends - starts
    if not sizes.any():
        return pa.array([b""] * count, pa.binary())
    if sizes.min() > _INLINE:
        views = np.zeros((count, 4), np.int32)  # size, prefix, number of the buffer, offset; the prefix is not read
        views[:, 0], views[:, 3] = sizes, starts
        buffers = [None, pa.py_buffer(views), pa.py_buffer(text)]
        return pa.Array.from_buffers(pa.binary_view(), count, buffers).cast(pa.binary())
    if (starts[1:] < ends[:-1]).any():
        order = np.argsort(starts, kind="stable")
        return between(text, starts[order], ends[order]).take(pa.array(np.argsort(order)))
    offsets = np.empty(2 * count + 1, np.int32)
    offsets[:-1:2], offsets[1::2], offsets[-1:] = starts, ends, ends[-1:]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.binary(), 2 * count, buffers).take(pa.array(np.arange(0, 2 * count, 2)))


def byte_strings(array: pa.BinaryArray) -> list[bytes]:
    """Return the values as byte strings; several times faster than to_pylist."""
    edges, text = text_of(array)
    whole = text.tobytes()
    return [whole[start:end] for start, end in pairwise(edges.tolist())]
