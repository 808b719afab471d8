"""Decompress payloads in bounded memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import google_crc32c
import pyarrow as pa

from jetcapture_py.archive.varint import varint
from jetcapture_py.config.units import format_size

Inflate = Callable[[bytes], bytes]
"""Returns the content of one compressed payload. Raises ValueError."""

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_SNAPPY_STREAM = b"\xff\x06\x00\x00sNaPpY"
_MAX_MEMBERS = 1000
"""Maximum members of a gzip payload: the rest of it is copied for each member."""
_ZSTD_SIZES = {0: (0, 0), 1: (2, 256), 2: (4, 0), 3: (8, 0)}
"""Length of the content size in a zstd frame by its flag, and the offset to add (RFC 8878, 3.1.1.1.4)."""
_CHECKSUM = 4
"""Length of zlib's checksum, which some Avro writers append to their data."""
_SNAPPY_CHUNK = 65_536
"""Maximum bytes in a chunk of Snappy's framing format, section 4.2."""


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
    """Return the content, and the bytes that follow the data; `room` is what is left of `limit`."""
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
    size = _zstd_size(payload, limit)
    try:
        if size is not None:
            return bytes(pa.Codec("zstd").decompress(payload, decompressed_size=size, asbytes=True))
    except OSError:
        pass  # several frames, or no zstd at all
    try:
        content = bytes(pa.CompressedInputStream(pa.BufferReader(payload), "zstd").read(limit + 1))
    except OSError as error:
        raise ValueError(f"not zstd: {error}") from None
    if len(content) > limit:
        raise _too_large(limit)
    return content


def _zstd_size(payload: bytes, limit: int) -> int | None:
    """Return the content's size that the first frame declares, None if it does not (RFC 8878, section 3.1.1.1)."""
    if not payload.startswith(_ZSTD) or len(payload) < 6:
        raise ValueError("not zstd: a frame starts with 28b52ffd")
    descriptor = payload[4]
    single = bool(descriptor & 0x20)
    if not single:
        exponent, mantissa = payload[5] >> 3, payload[5] & 7
        base = 1 << 10 + exponent
        if base + base // 8 * mantissa > max(limit, 8 << 20):
            raise _too_large(limit)  # the window alone
    length, plus = _ZSTD_SIZES[descriptor >> 6]
    length = length or int(single)
    start = 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]
    if not length or len(payload) < start + length:
        return None
    size = int.from_bytes(payload[start : start + length], "little") + plus
    if size > limit:
        raise _too_large(limit)
    return size


def _snappy(payload: bytes, limit: int) -> bytes:
    return _snappy_stream(payload, limit) if payload.startswith(_SNAPPY_STREAM) else snappy_block(payload, limit)


def snappy_block(payload: bytes, limit: int) -> bytes:
    """Inflate Snappy's block format, which declares its size, to at most `limit` bytes. Raises ValueError."""
    try:
        size, _ = varint(payload)
    except ValueError as error:
        raise ValueError(f"not snappy: {error}") from None
    if size > limit:
        raise _too_large(limit)
    try:
        return bytes(pa.Codec("snappy").decompress(payload, decompressed_size=size, asbytes=True))
    except (OSError, ValueError) as error:
        raise ValueError(f"not snappy: {error}") from None


def _snappy_stream(payload: bytes, limit: int) -> bytes:
    """Decompress Snappy's framing format: chunks of a type, a length of three bytes and data."""
    parts: list[bytes] = []
    room, at = limit, 0
    while at < len(payload):
        kind = payload[at]
        data = payload[at + 4 : at + 4 + int.from_bytes(payload[at + 1 : at + 4], "little")]
        if len(payload) < at + 4 or len(data) < int.from_bytes(payload[at + 1 : at + 4], "little"):
            raise ValueError("the snappy data is truncated")
        at += 4 + len(data)
        if kind in (0, 1):
            part = data[4:] if kind else snappy_block(data[4:], min(room, _SNAPPY_CHUNK))
            room -= len(part)
            if room < 0:
                raise _too_large(limit)
            if masked_crc(part) != int.from_bytes(data[:4], "little"):
                raise ValueError("the snappy data is damaged: its checksum differs")
            parts.append(part)
        elif kind < 0x80:
            raise ValueError(f"not snappy: a chunk of type {kind}")
    if not parts:
        raise ValueError("the snappy data is truncated")
    return b"".join(parts)


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C, masked as Snappy's framing format says in section 3."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
