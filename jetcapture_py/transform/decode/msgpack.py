"""MessagePack: one map per message, with declared or inferred columns; the rules are those of JSON.

Strict as JSON is. The bytes of strings in fields that are not declared are not looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.config.column_types import JSON, TIMESTAMP
from jetcapture_py.transform.batch import Decoder
from jetcapture_py.transform.decode.bounds import MAX_ROWS, MSGPACK_FORMAT
from jetcapture_py.transform.decode.common import MisfitError, json_texts, show
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
OBJECT_FORMAT = MSGPACK_FORMAT


def make(config: DecodeConfig) -> Decoder:
    """Return the configured decoder. Raises ValueError with one line."""
    if config.columns:
        return ObjectDecoder(config.columns, MSGPACK_FORMAT, _special)
    return InferringDecoder(MSGPACK_FORMAT)
