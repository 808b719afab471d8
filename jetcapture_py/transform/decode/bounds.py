"""Bound the memory that decoding takes, from the bytes of payloads, before anything is built from them.

A value takes about 16 bytes. A record in a list or a map takes as much as `RECORD` values, besides its fields, of which
those that are missing take space in columns as well: a few bytes of a payload may become thousands. Several messages
above the bound are decoded in smaller batches; a single one is quarantined.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Bytes
from jetcapture_py.archive.arrow_bytes import joined
from jetcapture_py.transform.batch import BatchTooWideError, Failure, MessageBatch
from jetcapture_py.transform.decode.common import owners_of, payloads_of, texts_of, views_of

MAX_VALUES = 1 << 23
"""Values that a batch may have; payloads of more than half as many bytes may have two for each byte."""
RECORD = 16
MAX_ROWS = 250_000
"""Maximum rows of one message, and of a batch of several messages."""
BYTES_AT_ONCE = 64 << 20
"""Maximum decompressed bytes of a batch of several messages."""
TOO_MANY = f"the payload expands to more than {MAX_VALUES:,} values"


def max_values(size: int) -> int:
    """Return how many values payloads of `size` bytes may have."""
    return max(MAX_VALUES, 2 * size)


def check_values(count: int, size: int) -> None:
    """Raise BatchTooWideError if payloads of `size` bytes may not have `count` values."""
    if count > max_values(size):
        raise BatchTooWideError(TOO_MANY)


def check_count(count: int) -> None:
    """Raise ValueError if a message cannot have so many rows."""
    if not count:
        raise ValueError("the payload has no rows")
    if count > MAX_ROWS:
        raise ValueError(f"more than {MAX_ROWS} rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFormat:
    """JSON or MessagePack."""

    decoder: Callable[[Any], Any]
    """Returns msgspec's decoder for a type."""
    payloads: Callable[[MessageBatch], tuple[list[Any], dict[int, Failure]]]
    """Returns all payloads, and failures for those that cannot be decoded at all."""
    containers: Callable[[Bytes], tuple[int, int]]
    """Counts the objects (or maps), and the lists, that an array of bytes begins at most."""
    skeleton: Callable[[bytes], bytes | bytearray]
    """Returns a payload without what its containers are not counted in."""
    text: Callable[[bytes, bool], str | None]
    """Returns the text of a value, also of a timestamp if asked for times; None for one that has none."""

    def check(self, batch: MessageBatch, limit: int, *, objects: int, lists: int, reason: str = TOO_MANY) -> None:
        """Raise BatchTooWideError if payloads may have more than `limit` values, with so many in a container.

        Containers are counted more closely in a single message, which cannot be split.
        """

        def at_most(data: Bytes) -> int:
            counts = self.containers(data)
            return objects * counts[0] + lists * counts[1]

        if at_most(joined(batch.column(layout.PAYLOAD))) <= limit:
            return
        owners = owners_of(batch)
        several = len(batch) > 1 if owners is None else owners[0] != owners[-1]
        skeletons = (np.frombuffer(self.skeleton(payload), np.uint8) for payload in payloads_of(batch))
        if several or sum(map(at_most, skeletons)) > limit:
            raise BatchTooWideError(reason)


def json_containers(data: Bytes) -> tuple[int, int]:
    """Return how many objects and lists an array of bytes begins at most, if it is JSON."""
    return int(np.count_nonzero(data == ord("{"))), int(np.count_nonzero(data == ord("[")))


def msgpack_containers(data: Bytes) -> tuple[int, int]:
    """Return how many maps and lists an array of bytes begins at most, if it is MessagePack."""
    objects = np.count_nonzero((data & 0xF0 == 0x80) | (data & 0xFE == 0xDE))
    lists = np.count_nonzero((data & 0xF0 == 0x90) | (data & 0xFE == 0xDC))
    return int(objects), int(lists)


def json_skeleton(payload: bytes) -> bytes | bytearray:
    """Return a payload without its strings."""
    return _STRINGS.sub(b"", payload)


def msgpack_skeleton(payload: bytes) -> bytes | bytearray:
    """Return the first byte of each map and list of a payload, which may be damaged."""
    firsts = bytearray()
    for start, end in _msgpack_values(payload):
        first = payload[start]
        if first in _CONTAINERS:
            firsts += payload[start:end] if first < _LONG else payload[start : start + 1]
    return firsts


def whole_microseconds(payload: bytes) -> bytes:
    """Cut off the nanoseconds of a MessagePack payload's timestamps, which msgspec would round to microseconds."""
    if not any(stamp in payload for stamp in _STAMPS):
        return payload
    whole = bytearray(payload)
    for start, end in _msgpack_values(payload):
        for stamp, (size, shift) in _STAMPS.items():
            if end <= len(payload) and payload.startswith(stamp, start):
                at = slice(start + len(stamp), start + len(stamp) + size)
                number = int.from_bytes(payload[at], "big")
                whole[at] = (number - ((number >> shift) % 1_000 << shift)).to_bytes(size, "big")
    return bytes(whole)


def _msgpack_values(payload: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each value of a payload, which may be damaged.

    Of a map or list, the end is that of its head. Values of one byte come in runs, those of short maps and lists apart.
    """
    offset = 0
    while offset < len(payload):
        start, first = offset, payload[offset]
        if (run := _RUNS.match(payload, offset)) is not None:
            offset = run.end()
        else:
            digits, code = _LENGTHS.get(first, 0), 0xC7 <= first <= 0xC9  # an extension's code follows its length
            offset += 1 + _SIZES.get(first, 0) + digits + code
            offset += int.from_bytes(payload[offset - digits - code : offset - code], "big")
        yield start, offset


_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_RUNS = re.compile(rb"[\x80-\x9f]++|[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]++")
"""Values of one byte, and maps and lists of up to 15 items."""
_CONTAINERS = {*range(0x80, 0xA0), *range(0xDC, 0xE0)}
_LONG = 0xDC
"""The first byte from which containers have a length of their own."""
_STAMPS = {b"\xd7\xff": (8, 34), b"\xc7\x0c\xff": (4, 0)}
"""Beginnings of timestamps with nanoseconds: bytes of the number that has these, and the bits below them."""
_SIZES = {0xA0 + size: size for size in range(32)} | {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_SIZES |= zip(range(0xCA, 0xD9), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 3, 5, 9, 17), strict=True)
"""Bytes after the first one of a text, number or extension whose length is not sent, and of a container."""
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes of the length that follows the first byte of other texts, bytes and extensions."""


_string = msgspec.json.Decoder(str).decode


def _json_text(value: bytes, _times: bool) -> str | None:
    if value.startswith(b'"'):
        return _string(value)
    return None if value.startswith((b"{", b"[", b"null")) else value.decode()


def _msgpack_text(data: bytes, times: bool) -> str | None:
    value = msgspec.msgpack.decode(whole_microseconds(data) if times else data)
    if times and isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int | float) else None


def _json_payloads(batch: MessageBatch) -> tuple[list[Any], dict[int, Failure]]:
    texts, failures = texts_of(batch)
    return views_of(texts), failures


JSON_FORMAT = ObjectFormat(
    decoder=msgspec.json.Decoder,
    payloads=_json_payloads,
    containers=json_containers,
    skeleton=json_skeleton,
    text=_json_text,
)
MSGPACK_FORMAT = ObjectFormat(
    decoder=msgspec.msgpack.Decoder,
    payloads=lambda batch: ([whole_microseconds(payload) for payload in payloads_of(batch)], {}),
    containers=msgpack_containers,
    skeleton=msgpack_skeleton,
    text=_msgpack_text,
)


# ------------------------------------------------------------------ declared types


def width(of: pa.DataType) -> int:
    """Return how many values a column of the type has for each row; a list or a map is one."""
    return sum(width(field.type) for field in of) if pa.types.is_struct(of) else 1


def heaviest(of: pa.DataType) -> int:
    """Return the most that a record, list or map in lists and maps of the type takes; 0 if it has none."""
    if pa.types.is_struct(of):
        return max((heaviest(field.type) for field in of), default=0)
    if not pa.types.is_list(of) and not pa.types.is_map(of):
        return 0
    item = of.item_type if pa.types.is_map(of) else of.value_type
    return max(RECORD + width(item) if pa.types.is_nested(item) else 0, heaviest(item))
