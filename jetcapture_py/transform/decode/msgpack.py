"""MessagePack: one map per message, with declared or inferred columns; the rules are those of JSON.

As strict as JSON, except that strings in undeclared fields are not checked for UTF-8.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive.arrays import Bytes
from jetcapture_py.config.column_types import JSON, TIMESTAMP
from jetcapture_py.transform.batch import Decoder
from jetcapture_py.transform.decode.bounds import MAX_ROWS, ObjectFormat
from jetcapture_py.transform.decode.common import MisfitError, json_texts, payloads_of, show
from jetcapture_py.transform.decode.json_declared import (
    MAX_FLOAT32,
    UNITS,
    Codec,
    ObjectDecoder,
    exact_decimal,
    in_years,
    timestamps,
)
from jetcapture_py.transform.decode.json_inferred import InferringDecoder

if TYPE_CHECKING:
    from jetcapture_py.config.decoding import DecodeConfig

_TIMESTAMP_CODE = -1
_STAMPS = {4: ">I", 8: ">Q", 12: ">Iq"}
"""Encodings of the timestamp extension by length: seconds; nanoseconds and seconds in one number; both separately."""


def _special(declared: pa.DataType) -> Codec | None:
    if declared == JSON:
        return Codec(Any, json_texts)
    if pa.types.is_decimal(declared):
        exact = exact_decimal(declared)
        return Codec(
            int | float | str | None,
            lambda values: pa.array([None if v is None else exact(str(v).encode()) for v in values], declared),
        )
    if declared == TIMESTAMP:
        return Codec(msgspec.msgpack.Ext | str | None, _timestamps)
    if pa.types.is_float32(declared):
        return Codec(float | None, _float32s)
    return None


def _float32s(values: list[float | None]) -> pa.Array:
    bad = [row for row, value in enumerate(values) if value is not None and MAX_FLOAT32 < abs(value) < float("inf")]
    if bad:
        raise MisfitError(dict.fromkeys(bad, f"expected a number of at most {MAX_FLOAT32}"))
    return pa.array(values, pa.float32())


def _timestamps(values: list[Any]) -> pa.Array:
    """Convert extension timestamps and RFC 3339 texts; truncate to microseconds."""
    if all(value is None or isinstance(value, str) for value in values):
        return timestamps(values)
    texts = [value if isinstance(value, str) else None for value in values]
    micros = [_micros(value) if isinstance(value, msgspec.msgpack.Ext) else None for value in values]
    try:
        stamps = in_years(pa.array(micros, pa.int64()).cast(TIMESTAMP), micros)
    except OverflowError:
        raise ValueError("expected a timestamp between the years 1 and 9999") from None
    return stamps if not any(text is not None for text in texts) else pc.coalesce(stamps, timestamps(texts))


def _micros(value: msgspec.msgpack.Ext) -> int:
    data = bytes(value.data)
    numbers = _STAMPS.get(len(data))
    if value.code != _TIMESTAMP_CODE or numbers is None:
        raise ValueError(f"expected a timestamp, got an extension of code {value.code} and {len(data)} bytes")
    first, *rest = struct.unpack(numbers, data)
    nanos, seconds = 0, first
    if len(data) == 8:
        nanos, seconds = first >> 34, first & (1 << 34) - 1
    elif rest:
        nanos, seconds = first, rest[0]
    if nanos >= UNITS["s"] * 1_000:
        raise ValueError(f"expected a timestamp with less than a second of nanoseconds, got {show(nanos)}")
    return int(seconds * UNITS["s"] + nanos // 1_000)


_items = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def _elements(payload: bytes) -> Sequence[bytes]:
    """Split a MessagePack array, which starts with its length, into its elements."""
    announced = int.from_bytes(payload[1:5], "big") if payload.startswith(b"\xdd") else 0
    if announced > MAX_ROWS:
        raise ValueError(f"more than {MAX_ROWS} elements")
    return [bytes(item) for item in _items(payload)]


SPLITS = {"array": _elements}


# ------------------------------------------------------------------ reading objects


def _containers(data: Bytes) -> tuple[int, int]:
    """Return the maximum numbers of maps and lists in MessagePack bytes."""
    objects = np.count_nonzero((data & 0xF0 == 0x80) | (data & 0xFE == 0xDE))
    lists = np.count_nonzero((data & 0xF0 == 0x90) | (data & 0xFE == 0xDC))
    return int(objects), int(lists)


def _skeleton(payload: bytes) -> bytes | bytearray:
    """Return the first byte of each map and list of a payload, which may be damaged."""
    firsts = bytearray()
    for start, end in _values(payload):
        first = payload[start]
        if first in _CONTAINERS:
            firsts += payload[start:end] if first < _LONG else payload[start : start + 1]
    return firsts


def whole_microseconds(payload: bytes) -> bytes:
    """Truncate a MessagePack payload's timestamps to microseconds, because msgspec would round them."""
    if not any(stamp in payload for stamp in _NANOSECONDS):
        return payload
    whole = bytearray(payload)
    for start, end in _values(payload):
        for stamp, (size, shift) in _NANOSECONDS.items():
            if end <= len(payload) and payload.startswith(stamp, start):
                at = slice(start + len(stamp), start + len(stamp) + size)
                number = int.from_bytes(payload[at], "big")
                whole[at] = (number - ((number >> shift) % 1_000 << shift)).to_bytes(size, "big")
    return bytes(whole)


def _values(payload: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each value of a payload, which may be damaged.

    A map or list ends after its head. Values of one byte come in runs, with separate runs for short maps and lists.
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


_RUNS = re.compile(rb"[\x80-\x9f]++|[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]++")
"""Values of one byte, and maps and lists of up to 15 items."""
_CONTAINERS = {*range(0x80, 0xA0), *range(0xDC, 0xE0)}
_LONG = 0xDC
"""The first byte from which containers have a separate length."""
_NANOSECONDS = {b"\xd7\xff": (8, 34), b"\xc7\x0c\xff": (4, 0)}
"""Heads of timestamps with nanoseconds: bytes of the number with the nanoseconds, and the bits below them."""
_SIZES = {0xA0 + size: size for size in range(32)} | {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_SIZES |= zip(range(0xCA, 0xD9), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 3, 5, 9, 17), strict=True)
"""Bytes after the first one of a text, number or extension of implicit length, and of a container."""
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes of the explicit length after the first byte of other texts, bytes and extensions."""


def _text(data: bytes, times: bool) -> str | None:
    value = msgspec.msgpack.decode(whole_microseconds(data) if times else data)
    if times and isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int | float) else None


OBJECT_FORMAT = ObjectFormat(
    decoder=msgspec.msgpack.Decoder,
    payloads=lambda batch: ([whole_microseconds(payload) for payload in payloads_of(batch)], {}),
    containers=_containers,
    skeleton=_skeleton,
    text=_text,
)


def make(config: DecodeConfig) -> Decoder:
    """Return the configured decoder. Raises ValueError with one line."""
    if config.columns:
        return ObjectDecoder(config.columns, OBJECT_FORMAT, _special)
    return InferringDecoder(OBJECT_FORMAT, config.conflict)
