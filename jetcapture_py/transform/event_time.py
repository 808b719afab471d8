"""Read the event time of messages, which determines their buckets (`block.time`).

A value is a time if it is

- an Arrow timestamp (one without a zone is UTC) or a date (its beginning, UTC);
- text: RFC 3339 with a zone; digits below a microsecond are cut off;
- with `block.time_unit`: a number of such units since 1970, also as decimal text.

Times from 1970 to 2199 are valid. Others come from a wrong unit or are placeholders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.config.column_types import parse_type
from jetcapture_py.config.units import quoted
from jetcapture_py.text import one_line
from jetcapture_py.transform.batch import MessageBatch, header_values
from jetcapture_py.transform.decode.json_declared import moments
from jetcapture_py.transform.keys import FieldTexts, field_column, payload_texts

if TYPE_CHECKING:
    from jetcapture_py.config.block import BlockConfig
    from jetcapture_py.config.decoding import DecodeConfig

END = 7_258_118_400
"""The year 2200, in seconds since 1970."""
_HEADER = "header."
_IN_A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_MICROSECOND = 10**6

_NUMBER = r"\A[0-9]{1,19}(\.[0-9]+)?\z"
_DIGITS = 9
"""Digits of a fraction: enough for nanoseconds."""


def make_event_time(config: BlockConfig, decode: DecodeConfig | None) -> EventTime | None:
    """Return the reader of `block.time`; None for the stream's timestamp. Raises ValueError with one line.

    `decode` is the configuration of the decoder, None for a decoder passed to `Capture`.
    """
    if config.time == layout.STREAM_TIME:
        return None
    field = not config.time.startswith(_HEADER)
    if field and decode is not None:
        if decode.format == "raw":
            raise ValueError(
                f"decode.format raw has no field {quoted(config.time)}; use header.NAME, or another format"
            )
        if decode.columns:
            _check_declared(config, decode)
    texts = payload_texts(decode, [config.time], times=True) if field else None
    return EventTime(config.time, unit=config.time_unit, fallback=config.time_fallback is not None, texts=texts)


def _check_declared(config: BlockConfig, decode: DecodeConfig) -> None:
    """Raise ValueError unless the field is a declared column of a suitable type."""
    declared = [(layout.field_name(name), parse_type(column.type)) for name, column in decode.columns.items()]
    like = pa.RecordBatch.from_arrays([pa.nulls(0, of) for _, of in declared], names=[name for name, _ in declared])
    column = field_column(like, config.time)
    if column is None:
        raise ValueError(f"decode.columns has no {quoted(config.time)}")
    types, of = pa.types, column.type
    if types.is_timestamp(of) or types.is_date(of) or types.is_string(of):
        return
    if not (types.is_integer(of) or types.is_floating(of) or types.is_decimal(of)):
        raise ValueError(f"{quoted(config.time)} is of type {of}, which is not a time")
    if config.time_unit is None:
        raise ValueError(f"{quoted(config.time)} is a number: set block.time_unit to s, ms, us or ns")


class EventTime:
    """Reads the time of each message from `setting`: a decoded field, by name or path, or `header.NAME`.

    `unit` is the unit of numbers; without one, numbers are not valid. With `fallback`, a message without a valid time
    gets the stream's timestamp. `texts` reads the field from payloads, for decoders whose column types depend on other
    messages.
    """

    def __init__(
        self, setting: str, *, unit: str | None = None, fallback: bool = False, texts: FieldTexts | None = None
    ) -> None:
        self._setting, self._unit, self._fallback = setting, unit, fallback
        self._header = setting.removeprefix(_HEADER) if setting.startswith(_HEADER) else None
        self._texts = texts

    def __call__(self, batch: MessageBatch, fields: pa.RecordBatch) -> tuple[pa.TimestampArray, dict[int, str]]:
        """Return a time for every row, and the reasons for rows without one, which get the stream's timestamp."""
        stamps = batch.column(layout.TIMESTAMP).cast(pa.int64())
        values = self._values(batch, fields)
        times = microseconds(values, self._unit)
        wrong = {}
        if times.null_count and not self._fallback:
            missing = np.flatnonzero(times.is_null().to_numpy(zero_copy_only=False)).tolist()
            wrong = {row: one_line(self._reason(values, row)) for row in missing}
        return pc.coalesce(times, stamps).cast(pa.timestamp("us", "UTC")), wrong

    def _values(self, batch: MessageBatch, fields: pa.RecordBatch) -> pa.Array:
        if self._header is not None:
            return header_values(batch.column(layout.HEADERS), self._header)
        if self._texts is not None:
            return self._texts(batch)[self._setting]
        column = field_column(fields, self._setting)
        return pa.nulls(len(batch)) if column is None else column

    def _reason(self, values: pa.Array, row: int) -> str:
        name = quoted(self._setting)
        if not values[row].is_valid:
            return f"the message has no {name}, which block.time names"
        numbers = "" if self._unit is None else f", or a number of {self._unit} since 1970"
        return f"{name}: expected a time with a zone, from 1970 to 2199{numbers}, got {quoted(_text(values, row))}"


def _text(values: pa.Array, row: int) -> str:
    """Return a row's value for an error."""
    try:
        return str(values[row].as_py() if pa.types.is_string(values.type) else values[row])
    except Exception:  # a timestamp that Python cannot hold
        return one_line(values.slice(row, 1).to_string()).strip("[] ")


def microseconds(values: pa.Array, unit: str | None) -> pa.Int64Array:
    """Convert valid times to microseconds since 1970, others to null; `unit` is the unit of numbers."""
    types, type_ = pa.types, values.type
    if types.is_dictionary(type_):
        return microseconds(values.dictionary_decode(), unit)
    if types.is_timestamp(type_):
        return _scaled(values.cast(pa.int64()), _IN_A_SECOND[type_.unit])
    if types.is_date(type_):
        return _scaled(values.cast(pa.date64()).cast(pa.int64()), 1_000)
    if types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_):
        texts = values.cast(pa.string())
        times = _scaled(moments(texts).cast(pa.int64()), _MICROSECOND)
        return times if unit is None else pc.coalesce(times, _of_numbers(texts, unit))
    if unit is not None and types.is_integer(type_):
        return _scaled(values, _IN_A_SECOND[unit])
    if unit is not None and types.is_floating(type_):
        return _of_floats(values.cast(pa.float64()), _IN_A_SECOND[unit])
    if unit is not None and types.is_decimal(type_):
        decimals = [None if number is None else f"{number:f}" for number in values.to_pylist()]
        return _of_numbers(pa.array(decimals, pa.string()), unit)
    return pa.nulls(len(values), pa.int64())


def _scaled(numbers: pa.Array, in_a_second: int) -> pa.Int64Array:
    """Convert whole numbers of a unit to microseconds."""
    units = numbers.fill_null(0).to_numpy(zero_copy_only=False)
    valid = numbers.is_valid().to_numpy(zero_copy_only=False) & (units >= 0) & (units < END * in_a_second)
    units = np.where(valid, units, 0).astype(np.int64)
    factor, divisor = max(_MICROSECOND // in_a_second, 1), max(in_a_second // _MICROSECOND, 1)
    return pa.array(units * factor // divisor, mask=~valid)


def _of_floats(numbers: pa.Array, in_a_second: int) -> pa.Int64Array:
    """Convert floats to microseconds, rounded, because most fractions have no exact binary form."""
    units = numbers.to_numpy(zero_copy_only=False)
    valid = (units >= 0) & (units < END * in_a_second)  # false for NaN
    micros = np.rint(np.where(valid, units, 0) * (_MICROSECOND / in_a_second)).astype(np.int64)
    return pa.array(micros, mask=~(valid & (micros < END * _MICROSECOND)))


def _of_numbers(texts: pa.StringArray, unit: str) -> pa.Int64Array:
    """Convert decimal text to microseconds, exactly but truncated."""
    numbers = pc.if_else(pc.match_substring_regex(texts, _NUMBER), texts, pa.scalar(None, pa.string()))
    whole = pc.replace_substring_regex(numbers, r"\..*", "").cast(pa.uint64())
    digits = pc.utf8_rpad(pc.replace_substring_regex(numbers, r"\A[0-9]+\.?", ""), _DIGITS, "0")
    part = pc.utf8_slice_codeunits(digits, 0, _DIGITS).cast(pa.int64())
    return pc.add(_scaled(whole, _IN_A_SECOND[unit]), pc.divide(part, 1_000 * _IN_A_SECOND[unit]))
