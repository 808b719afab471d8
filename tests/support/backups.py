"""A reader of the server's backup format, written from its description and not from our writer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import cramjam


class Entry(NamedTuple):
    """An entry of a backup."""

    name: bytes
    nanoseconds: int
    seq: int
    header: bytes
    payload: bytes


def entries(data: bytes) -> Iterator[Entry]:
    """Read entries that are not compressed, without the magic bytes at the beginning."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def text(size: int) -> bytes:
        nonlocal at
        assert at + size <= len(data)
        at += size
        return data[at - size : at]

    while at < len(data):
        name, time, seq, header, payload = (number() for _ in range(5))
        yield Entry(text(name), (time >> 1) ^ -(time & 1), seq, text(header), text(payload))


def inflated(frames: bytes) -> bytes:
    """Decompress Snappy's framing format."""
    return bytes(cramjam.snappy.decompress(frames))
