"""Variable-length integers (LEB128), as in Avro, Protocol Buffers, Snappy and Thrift."""

from __future__ import annotations

_MAX_BYTES = 10


def varint(data: bytes, offset: int = 0) -> tuple[int, int]:
    """Return the unsigned number at `offset`, of up to 64 bits, and where it ends. Raises ValueError."""
    value = shift = 0
    for end in range(offset, min(offset + _MAX_BYTES, len(data))):
        byte = data[end]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, end + 1
        shift += 7
    raise ValueError("a number is truncated, or has more than 64 bits")
