"""CSV and TSV with declared columns (RFC 4180): quotes only around a whole field, and doubled inside of it."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Int32s
from jetcapture_py.archive.arrow_bytes import joined
from jetcapture_py.config.column_types import JSON, stored
from jetcapture_py.transform.batch import BatchTooWideError, Decoded, MessageBatch
from jetcapture_py.transform.decode.bounds import MAX_ROWS, check_values
from jetcapture_py.transform.decode.common import (
    REFUSALS,
    Build,
    MisfitError,
    ReadColumn,
    assemble,
    failure,
    require,
    show,
    texts_of,
)
from jetcapture_py.transform.decode.json_declared import codec, each_declared, fitting_decimal
from jetcapture_py.transform.decode.unpack import of_messages

if TYPE_CHECKING:
    from jetcapture_py.config.decoding import Column, DecodeConfig

_MAX_FIELDS = 10_000
"""Maximum fields of a header: each costs memory, however short the message is."""


class DelimitedDecoder:
    """Decodes records of fields. Raises ValueError with one line for a wrong declaration.

    With `header`, the first record of each message names its fields; without, `columns` are all fields in order. With
    `lines`, a message has one or more records, else exactly one. An unquoted field equal to `null_text` is null.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        *,
        delimiter: str = ",",
        header: bool = False,
        null_text: str = "",
        lines: bool = False,
    ) -> None:
        self._sources: list[str] = []
        """The columns' names in a header."""

        def add(name: str, column: Column, declared: pa.DataType, path: list[str]) -> ReadColumn:
            if column.path is not None and not header:
                raise ValueError("path: only with decode.header; without, columns are the fields in their order")
            self._sources.append(".".join(path))
            return ReadColumn(name, stored(declared), text_builder(declared, column.unit))

        self._columns = each_declared(columns, add)
        self._delimiter, self._null_text = delimiter.encode(), null_text.encode()
        self._header, self._lines = header, lines
        separator = re.escape(self._delimiter)
        field = rb'"[^"]*+(?:""[^"]*+)*+"|[^"\r\n%b]*+' % separator
        self._field = re.compile(rb"(%b)(%b|\r?\n)" % (field, separator))
        self._complete = re.compile(rb"(?:(?:%b)(?:%b|\r?\n))*+" % (field, separator)).fullmatch

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message of `batch`. Raises BatchTooWideError if they have too many rows."""
        texts, failures = texts_of(batch)
        payloads: list[bytes] = texts.to_pylist()
        if not self._header and not failures and (plain := self._plain(batch, payloads)) is not None:
            return plain
        records: list[Sequence[bytes | None]] = []
        counts = [0] * len(payloads)
        for index, payload in enumerate(payloads):
            if index in failures:
                continue
            try:
                rows = self._rows(payload)
            except ValueError as error:
                failures[index] = failure(index, error)
                continue
            records += rows
            counts[index] = len(rows)
            if len(records) > MAX_ROWS and len(payloads) > 1:
                raise BatchTooWideError
        check_values(len(records) * len(self._columns), batch.column(layout.PAYLOAD).nbytes)
        owners = np.repeat(np.arange(len(payloads), dtype=np.int32), counts)
        columns = zip(*records, strict=True) if records else [()] * len(self._columns)
        decoded = self._assembled([pa.array(values, pa.binary()) for values in columns], owners)
        return decoded if not failures and len(owners) == len(batch) else of_messages(decoded, owners, failures)

    def _plain(self, batch: MessageBatch, payloads: list[bytes]) -> Decoded | None:
        """Decode messages of one record without quotes, twice as fast; None if any is different."""
        data = joined(batch.column(layout.PAYLOAD)).tobytes()
        if b'"' in data or b"\n" in data or b"\r" in data or not all(payloads):
            return None
        width = len(self._columns)
        records = [payload.split(self._delimiter, width) for payload in payloads]  # one excess field suffices
        if set(map(len, records)) != {width}:
            return None
        arrays = [pa.array(values, pa.binary()) for values in zip(*records, strict=True)]
        null = pa.scalar(None, pa.binary())
        arrays = [pc.if_else(pc.equal(array, self._null_text), null, array) for array in arrays]
        return self._assembled(arrays, None)

    def _assembled(self, arrays: list[pa.BinaryArray], owners: Int32s | None) -> Decoded:
        columns = [(column, array.cast(pa.string())) for column, array in zip(self._columns, arrays, strict=True)]
        return assemble(columns, range(len(arrays[0])), {}, owners)

    def _rows(self, payload: bytes) -> Sequence[Sequence[bytes | None]]:
        """Return the declared columns' texts of each record of a message. Raises ValueError."""
        if not payload:
            raise ValueError("the payload is empty")
        if payload.endswith(b"\n"):
            payload = payload[:-1].removesuffix(b"\r")
        quoted = b'"' in payload or b"\r" in payload
        if quoted:
            records = self._quoted(payload)
        else:
            records = [line.split(self._delimiter) for line in payload.split(b"\n", MAX_ROWS + 1)]
        head = records.pop(0) if self._header else None
        if not records:
            raise ValueError("expected a header and a record")
        if len(records) > MAX_ROWS:
            raise ValueError(f"more than {MAX_ROWS} rows")
        check_values(len(records) * len(self._columns), len(payload))  # a header may lack columns
        numbers = None if head is None else self._numbers([_unquoted(name).decode() for name in head])
        width, null = len(self._columns) if head is None else len(head), self._null_text
        for record in records:
            if len(record) != width:
                raise ValueError("a blank line" if record == [b""] else f"expected {width} fields, got {len(record)}")
        if len(records) > 1 and not self._lines:
            raise ValueError(f"expected one record, got {len(records)}")
        rows: Sequence[Sequence[bytes | None]] = [
            [None if field == null else _unquoted(field) for field in record] if quoted or null in record else record
            for record in records
        ]
        if numbers is None:
            return rows
        return [[None if number is None else row[number] for number in numbers] for row in rows]

    def _quoted(self, payload: bytes) -> list[list[bytes]]:
        """Return the fields of each record, with their quotes. Raises ValueError."""
        if payload.endswith(b"\r") or self._complete(payload + b"\n") is None:
            raise ValueError("unexpected quote or line break")
        records: list[list[bytes]] = [[]]
        for field, end in self._field.findall(payload + b"\n"):
            records[-1].append(field)
            if end != self._delimiter:
                records.append([])
        return records[:-1]

    def _numbers(self, names: list[str]) -> list[int | None]:
        """Return the field number of each declared column in a header; None if missing. Raises ValueError."""
        if len(names) > _MAX_FIELDS:
            raise ValueError(f"the header names more than {_MAX_FIELDS} fields")
        sources = self._sources
        if twice := [name for name in sources if names.count(name) > 1]:
            raise ValueError(f"the header names {show(twice[0])} twice")
        if not set(sources).intersection(names):
            raise ValueError("the header names none of the declared columns")
        return [names.index(name) if name in names else None for name in sources]


def _unquoted(field: bytes) -> bytes:
    return field[1:-1].replace(b'""', b'"') if field.startswith(b'"') else field


def make(config: DecodeConfig) -> DelimitedDecoder:
    """Return the configured decoder. Raises ValueError with one line."""
    return DelimitedDecoder(
        config.columns,
        delimiter="\t" if config.format == "tsv" else config.delimiter,
        header=config.header,
        null_text=config.null_text,
        lines=config.rows == "lines",
    )


# ------------------------------------------------------------------ columns of texts


_INTEGER = r"\A-?[0-9]+\z"
_NUMBER = r"\A-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?\z"
_MAX_DIGITS = 38
_MAX_REASONS = 10_000
_BOOL = r"\A(?i:true|false)\z"


def text_builder(declared: pa.DataType, unit: str | None = None) -> Build:
    """Return the function that builds a column of the type `declared` (from `column_types.parse_declared`).

    Lists, structs, maps and `json` are JSON texts, as in a JSON message. Raises ValueError.
    """
    types = pa.types
    inner = codec(declared, unit)
    if unit is not None:
        return lambda texts: inner.build(_each(_matching(texts, _NUMBER, "a number"), _number))
    if types.is_string(declared) and declared != JSON:
        return lambda texts: texts
    if types.is_integer(declared):
        return lambda texts: _matching(texts, _INTEGER, "a whole number").cast(declared)
    if types.is_floating(declared):
        return _floats(declared)
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


def _matching(texts: pa.StringArray, pattern: str, expected: str) -> pa.StringArray:
    require(pc.match_substring_regex(texts, pattern), texts, expected)
    return texts


def _floats(declared: pa.DataType) -> Build:
    def build(texts: pa.StringArray) -> pa.Array:
        numbers = _matching(texts, _NUMBER, "a number").cast(declared)
        require(pc.is_finite(numbers), texts, f"a number that fits {declared}")
        return numbers

    return build


def _decimals(declared: pa.Decimal128Type) -> Build:
    """Let Arrow cast plain numbers of the right size: it is fast, but wraps around beyond 128 bits and crashes for
    large exponents.
    """
    whole, scale = declared.precision - declared.scale, declared.scale
    digits = f"0*[0-9]{{1,{whole}}}" if whole else "0+"
    fraction = rf"(?:\.[0-9]{{1,{scale}}}0{{0,{_MAX_DIGITS - declared.precision}}})?" if scale else ""
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
            if len(bad) == _MAX_REASONS:  # mostly of one message
                break
    if bad:
        raise MisfitError(bad)
    return values


def _number(text: str) -> int | float:
    return int(text) if text.removeprefix("-").isdecimal() else float(text)


def _binary(texts: pa.StringArray) -> pa.Array:
    def plain(text: str) -> bytes:
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(f"expected base64, got {show(text)}") from None

    return pa.array(_each(texts, plain), pa.binary())
