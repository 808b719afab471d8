"""Convert text fields to columns of declared types. Raises `MisfitError` for bad values."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.config.column_types import JSON
from jetcapture_py.transform.decode.common import REFUSALS, MisfitError, misfits, of_failed, show
from jetcapture_py.transform.decode.json_values import codec, fitting_decimal

BuildTexts = Callable[[pa.StringArray], pa.Array]
"""Makes a column of texts, null for null; raises `MisfitError`, or another of `REFUSALS`, when a value does not fit."""

_INTEGER = r"\A-?[0-9]+\z"
_NUMBER = r"\A-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?\z"
_MOST_DIGITS = 38
_MOST_REASONS = 10_000
_BOOL = r"\A(?i:true|false)\z"


def text_builder(declared: pa.DataType, unit: str | None = None) -> BuildTexts:
    """Return the function that builds a column of the type `declared` (from `column_types.parse_declared`).

    Lists, structs, maps and `json` are JSON texts, as in a JSON message. Raises ValueError.
    """
    types = pa.types
    inner = codec(declared, unit)
    if unit is not None:
        return lambda texts: inner.build(_numbers(texts))
    if types.is_string(declared) and declared != JSON:
        return lambda texts: texts
    if types.is_integer(declared):
        return lambda texts: _matching(texts, _INTEGER, "a whole number").cast(declared)
    if types.is_floating(declared):
        return lambda texts: _finite(_matching(texts, _NUMBER, "a number").cast(declared), texts)
    if types.is_boolean(declared):
        return lambda texts: _matching(texts, _BOOL, "true or false").cast(declared)
    if types.is_decimal(declared):
        return _decimals(declared)
    if types.is_binary(declared):
        return _binary
    if types.is_timestamp(declared) or types.is_date(declared):
        return lambda texts: inner.build(texts.to_pylist())
    decode = msgspec.json.Decoder(inner.accepts).decode
    return lambda texts: inner.build(_each(texts, lambda text: decode(text.encode())))


def convert(build: BuildTexts, texts: pa.StringArray, owners: Any) -> tuple[pa.Array, dict[int, str]]:
    """Convert `texts` to a column, with null for values that do not fit, and return the reasons.

    `owners` has the message of each text, ascending; of a message, only the first bad text is looked for.
    """
    bad: dict[int, str] = {}
    while True:
        try:
            return build(texts), bad
        except REFUSALS as error:
            bad |= misfits(build, texts, error, owners)
        mask = of_failed(bad, len(texts), owners)
        texts = pc.if_else(pa.array(mask), pa.scalar(None, pa.string()), texts)


def _matching(texts: pa.StringArray, pattern: str, expected: str) -> pa.StringArray:
    return _where(pc.match_substring_regex(texts, pattern), texts, expected)


def _where(fits: pa.BooleanArray, texts: pa.StringArray, expected: str) -> pa.StringArray:
    if pc.all(fits).as_py() is False:
        rows = np.flatnonzero(~fits.fill_null(fill_value=True).to_numpy(zero_copy_only=False)).tolist()
        raise MisfitError({row: f"expected {expected}, got {show(texts[row].as_py())}" for row in rows})
    return texts


def _finite(numbers: pa.Array, texts: pa.StringArray) -> pa.Array:
    _where(pc.is_finite(numbers), texts, f"a number that fits {numbers.type}")
    return numbers


def _decimals(declared: pa.Decimal128Type) -> BuildTexts:
    """Let Arrow cast plain numbers of the right size: it is fast, but wraps around beyond 128 bits, and crashes for
    large exponents.
    """
    whole, scale = declared.precision - declared.scale, declared.scale
    digits = f"0*[0-9]{{1,{whole}}}" if whole else "0+"
    fraction = rf"(?:\.[0-9]{{1,{scale}}}0{{0,{_MOST_DIGITS - declared.precision}}})?" if scale else ""
    plain = rf"\A-?{digits}{fraction}\z"
    fitting = fitting_decimal(declared)

    def build(texts: pa.StringArray) -> pa.Array:
        fits = pc.match_substring_regex(texts, plain)
        if pc.all(fits).as_py() is not False:
            return texts.cast(declared)
        null = pa.scalar(None, pa.string())
        others = _each(_matching(pc.if_else(fits, null, texts), _NUMBER, "a number"), fitting)
        return pc.coalesce(pc.if_else(fits, texts, null).cast(declared), pa.array(others, declared))

    return build


def _each(texts: pa.StringArray, read: Callable[[str], Any]) -> list[Any]:
    """Read each text with `read`. Raises MisfitError."""
    values: list[Any] = []
    bad: dict[int, str] = {}
    for row, text in enumerate(texts.to_pylist()):
        try:
            values.append(None if text is None else read(text))
        except REFUSALS as error:
            bad[row] = str(error) or type(error).__name__
            if len(bad) == _MOST_REASONS:  # those of one message, mostly
                break
    if bad:
        raise MisfitError(bad)
    return values


def _numbers(texts: pa.StringArray) -> list[Any]:
    def number(text: str) -> int | float:
        if text.removeprefix("-").isdecimal():
            return int(text)
        return float(text)

    return _each(_matching(texts, _NUMBER, "a number"), number)


def _binary(texts: pa.StringArray) -> pa.Array:
    def plain(text: str) -> bytes:
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(f"expected base64, got {show(text)}") from None

    return pa.array(_each(texts, plain), pa.binary())
