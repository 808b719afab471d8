"""Variable-length integers (LEB128), as in Avro, Protocol Buffers, Snappy and Thrift."""

from __future__ import annotations

_LAST = 63
"""Bits of the first nine bytes; the tenth may add only one."""


def varint(data: bytes, offset: int = 0) -> tuple[int, int]:
    """Return the unsigned number of up to 64 bits at `offset`, and its end. Raises ValueError."""
    value = shift = 0
    try:
        while (byte := data[offset]) >= 0x80 and shift < _LAST:
            value |= (byte & 0x7F) << shift
            offset, shift = offset + 1, shift + 7
    except IndexError:
        byte = 0x80
    if byte >= (0x80 if shift < _LAST else 2):
        raise ValueError("a number is truncated, or has more than 64 bits")
    return value | byte << shift, offset + 1
