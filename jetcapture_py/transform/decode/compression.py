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


def inflater(compression: str, most: int) -> Inflate:
    """Return the decompressor for payloads of at most `most` bytes; `compression` is gzip, zstd, snappy or auto."""
    inflate = {"gzip": _gzip, "zstd": _zstd, "snappy": _snappy, "auto": _auto}[compression]
    return lambda payload: inflate(payload, most)


def _auto(payload: bytes, most: int) -> bytes:
    if payload.startswith(_GZIP):
        return _gzip(payload, most)
    if payload.startswith(_ZSTD):
        return _zstd(payload, most)
    return _snappy(payload, most) if payload.startswith(_SNAPPY_STREAM) else payload


def _too_large(most: int) -> ValueError:
    return ValueError(f"the payload inflates to more than {format_size(most)} (decode.max_inflated)")


def _gzip(payload: bytes, most: int) -> bytes:
    parts: list[bytes] = []
    room = most
    for _ in range(_MAX_MEMBERS):
        member = zlib.decompressobj(wbits=31)
        try:
            part = member.decompress(payload, room + 1)
        except zlib.error as error:
            raise ValueError(f"not gzip: {error}") from None
        room -= len(part)
        if room < 0:
            raise _too_large(most)
        if not member.eof:
            raise ValueError("the gzip data is truncated")
        parts.append(part)
        payload = member.unused_data
        if not payload:
            return b"".join(parts)
    raise ValueError(f"more than {_MAX_MEMBERS} gzip members")


def inflate_raw(data: bytes, most: int) -> bytes:
    """Inflate raw deflate data (RFC 1951) to at most `most` bytes; a checksum may follow it. Raises ValueError."""
    stream = zlib.decompressobj(wbits=-15)
    try:
        found = stream.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(f"not deflate: {error}") from None
    if len(found) > most:
        raise _too_large(most)
    if not stream.eof or len(stream.unused_data) > _CHECKSUM:
        raise ValueError("the deflate data is truncated, or something follows it")
    return found


def _zstd(payload: bytes, most: int) -> bytes:
    size = _zstd_size(payload, most)
    if size is not None:
        try:
            return bytes(pa.Codec("zstd").decompress(payload, decompressed_size=size, asbytes=True))
        except OSError:
            pass  # several frames, or no zstd at all
    try:
        stream = pa.CompressedInputStream(pa.BufferReader(payload), "zstd")
        found = bytes(stream.read(most + 1))
    except OSError as error:
        raise ValueError(f"not zstd: {error}") from None
    if len(found) > most:
        raise _too_large(most)
    return found


inflate_zstd = _zstd


def _zstd_size(payload: bytes, most: int) -> int | None:
    """Return the content's size that the first frame declares, None if it does not (RFC 8878, section 3.1.1.1)."""
    if not payload.startswith(_ZSTD) or len(payload) < 6:
        raise ValueError("not zstd: a frame starts with 28b52ffd")
    descriptor = payload[4]
    single = bool(descriptor & 0x20)
    if not single:
        exponent, mantissa = payload[5] >> 3, payload[5] & 7
        base = 1 << 10 + exponent
        if base + base // 8 * mantissa > max(most, 8 << 20):
            raise _too_large(most)  # the window alone
    length, plus = _ZSTD_SIZES[descriptor >> 6]
    length = length or int(single)
    start = 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]
    if not length or len(payload) < start + length:
        return None
    size = int.from_bytes(payload[start : start + length], "little") + plus
    if size > most:
        raise _too_large(most)
    return size


def _snappy(payload: bytes, most: int) -> bytes:
    return _snappy_stream(payload, most) if payload.startswith(_SNAPPY_STREAM) else snappy_block(payload, most)


def snappy_block(payload: bytes, most: int) -> bytes:
    """Inflate Snappy's block format, which declares its size, to at most `most` bytes. Raises ValueError."""
    try:
        size, _ = varint(payload)
    except ValueError as error:
        raise ValueError(f"not snappy: {error}") from None
    if size > most:
        raise _too_large(most)
    try:
        return bytes(pa.Codec("snappy").decompress(payload, decompressed_size=size, asbytes=True))
    except (OSError, ValueError) as error:
        raise ValueError(f"not snappy: {error}") from None


def _snappy_stream(payload: bytes, most: int) -> bytes:
    """Decompress Snappy's framing format: chunks of a type, a length of three bytes and data."""
    parts: list[bytes] = []
    room, at = most, 0
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
                raise _too_large(most)
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
