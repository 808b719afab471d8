"""Decompress payloads in bounded memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import cramjam
import numpy as np

from jetcapture_py.config.units import format_size

Inflate = Callable[[bytes], bytes]
"""Returns the content of one compressed payload. Raises ValueError."""

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_SNAPPY_STREAM = b"\xff\x06\x00\x00sNaPpY"
_MAX_MEMBERS = 1000
"""Maximum members of a gzip payload, because the rest of it is copied for each member."""
_CHECKSUM = 4
"""Length of zlib's checksum, which some Avro writers append to their data."""
_USUAL = 32
"""Usual expansion; Snappy never exceeds it."""
_FULL = "write whole buffer"
"""Part of cramjam's error if the buffer is too small."""


def inflater(compression: str, limit: int) -> Inflate:
    """Return the decompressor for payloads of at most `limit` bytes; `compression` is gzip, zstd, snappy or auto."""
    inflate = {"gzip": _gzip, "zstd": inflate_zstd, "snappy": _snappy, "auto": _auto}[compression]
    return lambda payload: inflate(payload, limit)


def _auto(payload: bytes, limit: int) -> bytes:
    if payload.startswith(_GZIP):
        return _gzip(payload, limit)
    if payload.startswith(_ZSTD):
        return inflate_zstd(payload, limit)
    return _snappy(payload, limit) if payload.startswith(_SNAPPY_STREAM) else payload


def _too_large(limit: int) -> ValueError:
    return ValueError(f"the payload inflates to more than {format_size(limit)} (decode.max_inflated)")


def _gzip(payload: bytes, limit: int) -> bytes:
    parts: list[bytes] = []
    room = limit
    for _ in range(_MAX_MEMBERS):
        part, payload = _inflated(payload, room, limit, 31, "gzip")
        room -= len(part)
        parts.append(part)
        if not payload:
            return b"".join(parts)
    raise ValueError(f"more than {_MAX_MEMBERS} gzip members")


def inflate_raw(data: bytes, limit: int) -> bytes:
    """Inflate raw deflate data (RFC 1951) to at most `limit` bytes; a checksum may follow it. Raises ValueError."""
    content, rest = _inflated(data, limit, limit, -15, "deflate")
    if len(rest) > _CHECKSUM:
        raise ValueError("something follows the deflate data")
    return content


def _inflated(data: bytes, room: int, limit: int, wbits: int, name: str) -> tuple[bytes, bytes]:
    """Return the content, and the bytes after the data; `room` is the rest of `limit`."""
    stream = zlib.decompressobj(wbits)
    try:
        content = stream.decompress(data, room + 1)
    except zlib.error as error:
        raise ValueError(f"not {name}: {error}") from None
    if len(content) > room:
        raise _too_large(limit)
    if not stream.eof:
        raise ValueError(f"the {name} data is truncated")
    return content, stream.unused_data


def inflate_zstd(payload: bytes, limit: int) -> bytes:
    """Inflate zstd frames to at most `limit` bytes. Raises ValueError."""
    return _decompressed(cramjam.zstd.decompress_into, payload, limit, "zstd")


def _snappy(payload: bytes, limit: int) -> bytes:
    if not payload.startswith(_SNAPPY_STREAM):
        return snappy_block(payload, limit)
    if content := _decompressed(cramjam.snappy.decompress_into, payload, limit, "snappy"):
        return content
    raise ValueError("the snappy data is truncated")


def snappy_block(payload: bytes, limit: int) -> bytes:
    """Inflate Snappy's block format, which declares its size, to at most `limit` bytes. Raises ValueError."""
    try:
        if cramjam.snappy.decompress_raw_len(payload) > limit:
            raise _too_large(limit)
        return bytes(cramjam.snappy.decompress_raw(payload))
    except cramjam.DecompressionError as error:
        raise ValueError(f"not snappy: {error}") from None


def _decompressed(into: Callable[[bytes, Any], int], payload: bytes, limit: int, name: str) -> bytes:
    """Decompress into a buffer of the usual size, then into one of the largest allowed size."""
    for size in (min(limit, _USUAL * len(payload)), limit):
        buffer = np.empty(size, np.uint8)
        try:
            return buffer[: into(payload, buffer)].tobytes()
        except cramjam.DecompressionError as error:
            if _FULL not in str(error):
                raise ValueError(f"not {name}: {error}") from None
    raise _too_large(limit)
