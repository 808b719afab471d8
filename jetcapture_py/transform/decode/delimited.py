"""CSV and TSV with declared columns (RFC 4180).

Arrow parses the payloads of a batch as one buffer, which is far faster than one by one. Joining is safe only for
payloads that are complete records by themselves. That is proven first, for each of them: it has no quote, or it matches
a pattern that allows quotes only around a whole field and doubled inside of it. A payload that does not fails alone.
"""

from __future__ import annotations

import base64
import binascii
import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from jetcapture_py.archive import layout
from jetcapture_py.config.column_types import JSON, stored
from jetcapture_py.transform.batch import Decoded, Failure, MessageBatch
from jetcapture_py.transform.decode.bounds import check_values
from jetcapture_py.transform.decode.common import (
    REFUSALS,
    Build,
    MisfitError,
    Values,
    assemble,
    failure,
    show,
    texts_of,
    unique_names,
)
from jetcapture_py.transform.decode.json_declared import codec, declaration, fitting_decimal
from jetcapture_py.transform.decode.unpack import MAX_ROWS, check_rows, of_messages

if TYPE_CHECKING:
    from jetcapture_py.config.decoding import Column, DecodeConfig

_BOM = "\ufeff"
_MAX_FIELDS = 10_000
"""Maximum fields of a header: each costs memory, however short the message is."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A declared column."""

    name: str
    source: str
    """Its name in a header."""
    type: pa.DataType
    build: Build
    """Builds it from an array of texts."""


@dataclass(frozen=True, slots=True)
class _Records:
    """Records of messages, in their order."""

    owners: Any
    """The message of each."""
    columns: Sequence[pa.StringArray]
    """A text for each, null for null."""
    failures: dict[int, Failure]
    """The messages without a record."""


class DelimitedDecoder:
    """Decodes records of fields; ValueError, one line, when a declaration is wrong.

    With `header`, the first record of each message names its fields; without, `columns` are all fields in their order.
    With `lines`, a message has one record or more, else exactly one. A field that is `null_text`, without quotes, is
    null.
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
        self._columns = [_column(name, column, header=header) for name, column in columns.items()]
        unique_names({declared: column.name for declared, column in zip(columns, self._columns, strict=True)})
        self._delimiter, self._header, self._null_text, self._lines = delimiter, header, null_text, lines
        separator = r"\t" if delimiter == "\t" else re.escape(delimiter)
        field = rf'(?:"(?:[^"]|"")*"|[^"\r\n{separator}]*)'
        record = f"{field}(?:{separator}{field})*"
        self._pattern = rf"\A{record}(?:\r?\n{record})*\z"
        self._head = rf"\A(?P<head>{record})\r?\n(?P<rest>(?s:.*))\z"

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message of `batch`."""
        _, failures = texts_of(batch)
        payloads = batch.column(layout.PAYLOAD).fill_null(b"")
        good = np.array([index for index in range(len(batch)) if index not in failures], np.int32)
        texts = (payloads.take(pa.array(good)) if failures else payloads).cast(pa.string())
        texts, good = self._complete(texts, good, failures)
        width = len(self._columns)
        records = self._with_headers(texts, good) if self._header else self._parse(texts, good, width, range(width))
        failures |= records.failures
        columns = [
            Values(name=column.name, type=column.type, values=values, build=column.build)
            for column, values in zip(self._columns, records.columns, strict=True)
        ]
        owners = records.owners
        decoded = assemble(columns, range(len(owners)), {}, owners)
        return decoded if not failures and len(owners) == len(batch) else of_messages(decoded, owners, failures)

    def _complete(self, texts: pa.StringArray, good: Any, failures: dict[int, Failure]) -> tuple[pa.StringArray, Any]:
        """Return the texts that are complete records, and their messages; the others become failures."""
        wrong = empty = pc.equal(pc.binary_length(texts), 0)
        texts = _trimmed(texts)
        data = _joined(texts)
        if b'"' in data or b"\r" in data:
            wrong = pc.or_(wrong, pc.invert(pc.match_substring_regex(texts, self._pattern)))
        if not pc.any(wrong).as_py():
            return texts, good
        mask = wrong.to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(mask).tolist():
            error = "the payload is empty" if empty[row].as_py() else "a quote or a line break where none is allowed"
            failures[int(good[row])] = failure(int(good[row]), error)
        return texts.filter(pa.array(~mask)), good[~mask]

    def _parse(self, texts: pa.StringArray, messages: Any, width: int, fields: Sequence[int]) -> _Records:
        """Parse `texts` of `messages`, each of complete records, which must have `width` fields each."""
        data, failures = _joined(texts), dict[int, Failure]()
        if width > 1 and (blank := _blank(texts, data)) is not None:  # Arrow takes it for a record of nulls
            failures = {int(index): failure(int(index), "a blank line") for index in messages[blank]}
            texts, messages = texts.filter(pa.array(~blank)), messages[~blank]
            data = _joined(texts)
        counts = np.ones(len(texts), np.int64)
        if data.count(b"\n") != len(texts) - 1:
            unquoted = _bare(texts) if b'"' in data else texts
            counts = pc.count_substring(unquoted, "\n").to_numpy(zero_copy_only=False) + 1
            many = np.flatnonzero(counts > (MAX_ROWS if self._lines else 1))
            for row in many.tolist():
                error = f"more than {MAX_ROWS} rows" if self._lines else f"expected one record, got {counts[row]}"
                failures[int(messages[row])] = failure(int(messages[row]), error)
            if len(many):
                texts = texts.take(pa.array(np.delete(np.arange(len(texts)), many)))
                messages, counts = np.delete(messages, many), np.delete(counts, many)
                data = _joined(texts)
            check_rows(counts.tolist())
        owners = np.repeat(messages, counts).astype(np.int32)
        columns, invalid = self._read(data, len(owners), width, fields)
        for record, error in invalid.items():
            failures.setdefault(int(owners[record]), failure(int(owners[record]), error))
        return _Records(np.delete(owners, list(invalid)), columns, failures)

    def _read(
        self, records: bytes, count: int, width: int, fields: Sequence[int]
    ) -> tuple[Sequence[pa.StringArray], dict[int, str]]:
        """Parse `count` complete records; return the numbered `fields` as columns, and the errors of invalid records.

        The first record given to Arrow is not a message's, because it drops a byte order mark where its buffer starts.
        """
        names = [str(number) for number in range(width)]
        if not count:
            return [pa.array([], pa.string()) for _ in fields], {}
        data = b"".join([self._delimiter.encode() * (width - 1), b"\n", records, b"\n"])
        # a copy outside of Python, because the thread with which Arrow reads ahead may release it at the process's exit
        source = pa.array([data], pa.large_binary()).buffers()[2].slice(0, len(data))
        invalid: dict[int, str] = {}

        def skip(row: arrow_csv.InvalidRow) -> str:
            invalid[row.number - 2] = f"expected {row.expected_columns} fields, got {row.actual_columns}"
            return "skip"

        table = arrow_csv.read_csv(
            pa.BufferReader(source),
            arrow_csv.ReadOptions(column_names=names, use_threads=False, block_size=len(data) + 1),
            arrow_csv.ParseOptions(
                delimiter=self._delimiter,
                newlines_in_values=b'"' in data,
                ignore_empty_lines=False,
                invalid_row_handler=skip,
            ),
            arrow_csv.ConvertOptions(
                check_utf8=False,
                column_types=dict.fromkeys(names, pa.string()),
                null_values=[self._null_text],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                include_columns=[names[number] for number in fields],
            ),
        )
        if table.num_rows != 1 + count - len(invalid):
            raise RuntimeError(f"Arrow found {table.num_rows - 1} records instead of {count - len(invalid)}")
        return [column.combine_chunks().slice(1) for column in table.columns], invalid

    def _with_headers(self, texts: pa.StringArray, messages: Any) -> _Records:
        """Parse texts with headers, grouped by header."""
        split = pc.extract_regex(texts, self._head)
        failures: dict[int, Failure] = {}
        for row in np.flatnonzero(split.is_null().to_numpy(zero_copy_only=False)).tolist():
            failures[int(messages[row])] = failure(int(messages[row]), "expected a header and a record")
        heads = pc.struct_field(split, "head").dictionary_encode()
        codes = heads.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        rest = pc.struct_field(split, "rest")
        parts: list[_Records] = []
        records = 0
        for code, head in enumerate(heads.dictionary.to_pylist()):
            rows = np.flatnonzero(codes == code)
            try:
                names = self._names(head)
            except (ValueError, csv.Error) as error:
                failures |= {int(index): failure(int(index), error) for index in messages[rows]}
            else:
                parts.append(self._below(names, rest.take(pa.array(rows)), messages[rows]))
                check_rows([records, len(parts[-1].owners)])
                records += len(parts[-1].owners)
                check_values(records * len(self._columns), texts.nbytes)  # a header may lack columns
        for part in parts:
            failures |= part.failures
        owners = np.concatenate([np.empty(0, np.int32), *(part.owners for part in parts)])
        order = pa.array(np.argsort(owners, kind="stable"))
        columns = [
            pa.concat_arrays([pa.array([], pa.string()), *(part.columns[number] for part in parts)]).take(order)
            for number in range(len(self._columns))
        ]
        return _Records(np.sort(owners, kind="stable"), columns, failures)

    def _names(self, head: str) -> list[str]:
        """Return the names of a header. Raises ValueError or csv.Error."""
        if head.count(self._delimiter) >= _MAX_FIELDS:
            raise ValueError(f"the header names more than {_MAX_FIELDS} fields")
        (names,) = csv.reader([head], delimiter=self._delimiter, strict=True)
        sources = [column.source for column in self._columns]
        if twice := [name for name in sources if names.count(name) > 1]:
            raise ValueError(f"the header names {show(twice[0])} twice")
        if not set(sources).intersection(names):
            raise ValueError("the header names none of the declared columns")
        return names

    def _below(self, names: list[str], texts: pa.StringArray, messages: Any) -> _Records:
        """Parse texts that had a header of `names`; declared columns that it does not name are null."""
        sources = [column.source for column in self._columns]
        named = [name for name in sources if name in names]
        records = self._parse(texts, messages, len(names), [names.index(name) for name in named])
        columns = dict(zip(named, records.columns, strict=True))
        nulls = pa.nulls(len(records.owners), pa.string())
        return _Records(records.owners, [columns.get(name, nulls) for name in sources], records.failures)


def make(config: DecodeConfig) -> DelimitedDecoder:
    """Return the configured decoder. Raises ValueError with one line."""
    return DelimitedDecoder(
        config.columns,
        delimiter="\t" if config.format == "tsv" else config.delimiter,
        header=config.header,
        null_text=config.null_text,
        lines=config.rows == "lines",
    )


def _column(name: str, column: Column, *, header: bool) -> _Column:
    try:
        declared, _ = declaration(name, column)
        if column.path is not None and not header:
            raise ValueError("path: only with decode.header; without, columns are the fields in their order")
        return _Column(
            layout.field_name(name), column.path or name, stored(declared), text_builder(declared, column.unit)
        )
    except ValueError as error:
        raise ValueError(f"column {show(name)}: {error}") from None


def _trimmed(texts: pa.StringArray) -> pa.StringArray:
    """Strip the byte order mark at the start and the line break at the end."""
    if pc.any(pc.starts_with(texts, _BOM)).as_py():
        texts = pc.replace_substring_regex(texts, rf"\A{_BOM}", "")
    if pc.any(pc.ends_with(texts, "\n")).as_py():
        texts = pc.replace_substring_regex(texts, r"\r?\n\z", "")
    return texts


def _joined(texts: pa.StringArray) -> bytes:
    """Join the texts with line breaks."""
    one = pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts)
    return bytes(pc.binary_join(one, "\n")[0].as_buffer())


def _blank(texts: pa.StringArray, data: bytes) -> Any:
    """Mark the texts with a blank line outside of quotes; None without any. `data` is the joined texts."""
    framed = b"\n%b\n" % data
    if not len(texts) or (b"\n\n" not in framed and b"\n\r\n" not in framed):
        return None
    return pc.match_substring_regex(_bare(texts), r"(?:\A|\n)\r?(?:\n|\z)").to_numpy(zero_copy_only=False)


def _bare(texts: pa.StringArray) -> pa.StringArray:
    """Remove quoted parts from the texts."""
    return pc.replace_substring_regex(texts, '"[^"]*"', "")


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
    return _where(pc.match_substring_regex(texts, pattern), texts, expected)


def _where(fits: pa.BooleanArray, texts: pa.StringArray, expected: str) -> pa.StringArray:
    if pc.all(fits).as_py() is False:
        rows = np.flatnonzero(~fits.fill_null(fill_value=True).to_numpy(zero_copy_only=False)).tolist()
        raise MisfitError({row: f"expected {expected}, got {show(texts[row].as_py())}" for row in rows})
    return texts


def _floats(declared: pa.DataType) -> Build:
    def build(texts: pa.StringArray) -> pa.Array:
        numbers = _matching(texts, _NUMBER, "a number").cast(declared)
        _where(pc.is_finite(numbers), texts, f"a number that fits {declared}")
        return numbers

    return build


def _decimals(declared: pa.Decimal128Type) -> Build:
    """Let Arrow cast plain numbers of the right size: it is fast, but wraps around beyond 128 bits, and crashes for
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
            if len(bad) == _MAX_REASONS:  # those of one message, mostly
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
