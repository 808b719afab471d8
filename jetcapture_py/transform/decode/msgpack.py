"""MessagePack: one map per message, with declared or inferred columns; the rules are those of JSON.

Strict as JSON is. The bytes of strings in fields that are not declared are not looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.config.column_types import JSON, TIMESTAMP
from jetcapture_py.transform.batch import Failure, MessageBatch
from jetcapture_py.transform.decode import bounds
from jetcapture_py.transform.decode.common import MisfitError, payloads_of, show
from jetcapture_py.transform.decode.json_declared import (
    MAX_FLOAT32,
    UNITS,
    Codec,
    ObjectDecoder,
    codec,
    exact_decimal,
    in_years,
    json_text,
    timestamps,
)
from jetcapture_py.transform.decode.json_inferred import InferringJsonDecoder

if TYPE_CHECKING:
    from jetcapture_py.config.decoding import Column

_TIMESTAMP_CODE = -1
_STAMPS = {4: ">I", 8: ">Q", 12: ">Iq"}
"""Encodings of the timestamp extension by length: seconds; nanoseconds and seconds in one number; both separately."""


class MsgpackDecoder(ObjectDecoder):
    """Decodes declared columns of maps; ValueError, one line, when a declaration is wrong."""

    _containers = staticmethod(bounds.msgpack_containers)
    _skeleton = staticmethod(bounds.msgpack_skeleton)

    def __init__(self, columns: Mapping[str, Column]) -> None:
        super().__init__(columns, lambda accepts: msgspec.msgpack.Decoder(accepts).decode, _codec)

    def _payloads(self, batch: MessageBatch) -> tuple[list[bytes], dict[int, Failure]]:
        return payloads_of(batch), {}


class InferringMsgpackDecoder(InferringJsonDecoder):
    """Decodes all fields of messages; `bin` and timestamps have their own column types."""

    _containers = staticmethod(bounds.msgpack_containers)
    _skeleton = staticmethod(bounds.msgpack_skeleton)

    def _make(self, accepts: Any) -> Callable[[bytes], Any]:
        return msgspec.msgpack.Decoder(accepts).decode

    def _payloads(self, batch: MessageBatch) -> tuple[list[bytes], dict[int, Failure]]:
        return payloads_of(batch), {}


def _codec(declared: pa.DataType, unit: str | None) -> Codec:
    return codec(declared, unit, _special)


def _special(declared: pa.DataType) -> Codec | None:
    if declared == JSON:
        return Codec(Any, _json_texts)
    if pa.types.is_decimal(declared):
        exact = exact_decimal(declared)
        return Codec(int | float | str | None, lambda values: pa.array([_decimal(v, exact) for v in values], declared))
    if declared == TIMESTAMP:
        return Codec(msgspec.msgpack.Ext | str | None, _timestamps)
    if pa.types.is_float32(declared):
        return Codec(float | None, _float32s)
    return None


def _json_texts(values: list[Any]) -> pa.Array:
    return pa.array([None if value is None else json_text(value) for value in values], pa.string())


def _decimal(value: float | str | None, exact: Any) -> Any:
    return None if value is None else exact(str(value).encode())


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
