"""Write objects in formats other than Parquet: NDJSON, CSV, and custom formats.

Text is made one column at a time, without a Python object per value.

| type | JSON | CSV |
|---|---|---|
| timestamp | RFC 3339 with microseconds, with `Z` unless it has no zone | the same |
| date, time | `2026-05-01`, `12:00:00.000000` | the same |
| float | a number; null for NaN and infinity | a number, `NaN`, `Inf`, `-Inf` |
| duration | a number of its units | the same |
| binary | base64 | the same |
| list, struct, map | arrays and objects | their JSON |
| null | null | `\\N` |
"""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py import plugins
from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Int64s
from jetcapture_py.archive.arrow_bytes import joined

NULL = "\\N"
"""Null in CSV, never quoted. Many databases use it; some readers cannot distinguish empty fields from empty text."""

_ESCAPED = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_CONTROL = r"[\x00-\x1f]"
_DATE_END = 10
"""Length of a date in characters."""


def json_values(array: pa.Array) -> pa.StringArray:
    """Return the JSON text of each value, without nulls. Raises pa.ArrowNotImplementedError for a type without one."""
    types, kind = pa.types, array.type
    if types.is_null(kind):
        return _constant("null", len(array))
    if types.is_struct(kind):
        return _or_null(_objects(array), array)
    if types.is_map(kind):
        return _or_null(_maps(array), array)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _or_null(_lists(array), array)
    text = _plain(array)
    if types.is_floating(kind):
        text = pc.if_else(pc.is_finite(array.cast(pa.float64())), text, pa.scalar(None, pa.string()))
    elif not (types.is_integer(kind) or types.is_boolean(kind) or types.is_decimal(kind) or types.is_duration(kind)):
        text = _quoted(text)
    return text.fill_null("null")


def csv_fields(array: pa.Array) -> pa.StringArray:
    """Return the CSV field of each value, without nulls. Raises pa.ArrowNotImplementedError for a type without one."""
    types, kind = pa.types, array.type
    if types.is_null(kind):
        return _constant(NULL, len(array))
    if types.is_nested(kind):
        text = pc.if_else(array.is_valid(), json_values(array), pa.scalar(None, pa.string()))
        return _csv_text(text).fill_null(NULL)
    text = _plain(array)
    if types.is_floating(kind):
        for arrow, ours in (("nan", "NaN"), ("-nan", "NaN"), ("inf", "Inf"), ("-inf", "-Inf")):
            text = pc.if_else(pc.equal(text, arrow), ours, text)
    elif not (types.is_primitive(kind) or types.is_decimal(kind)):
        text = _csv_text(text)
    return text.fill_null(NULL)


def csv_header(names: list[str]) -> bytes:
    """Return the line of column names."""
    return b",".join(name.encode() for name in _csv_text(pa.array(names, pa.string())).to_pylist()) + b"\n"


def json_lines(batch: pa.RecordBatch) -> memoryview:
    """Return each row as a JSON object on a line."""
    return joined(pc.binary_join_element_wise(*_members(batch.schema.names, batch.columns), "}\n", "")).data


def csv_lines(batch: pa.RecordBatch) -> memoryview:
    """Return each row as a line of CSV (RFC 4180, with LF)."""
    parts: list[Any] = []
    for column in batch.columns:
        parts += [*([","] if parts else []), csv_fields(column)]
    return joined(pc.binary_join_element_wise(*parts, "\n", "")).data


def _constant(text: str, count: int) -> pa.StringArray:
    return pa.repeat(pa.scalar(text, pa.string()), count)


def _or_null(text: pa.StringArray, array: pa.Array) -> pa.StringArray:
    return pc.if_else(array.is_valid(), text, "null")


def _plain(array: pa.Array) -> pa.StringArray:
    """Return values as text; nulls stay."""
    types, kind = pa.types, array.type
    if types.is_dictionary(kind):
        return _plain(array.cast(kind.value_type))
    if types.is_timestamp(kind):
        naive = (
            array.cast(pa.timestamp("us", kind.tz), safe=kind.unit != "ns").cast(pa.int64()).cast(pa.timestamp("us"))
        )
        text = pc.binary_replace_slice(naive.cast(pa.string()), _DATE_END, _DATE_END + 1, "T")
        return text if kind.tz is None else pc.binary_join_element_wise(text, "Z", "")
    if types.is_duration(kind):
        return array.cast(pa.int64()).cast(pa.string())
    if types.is_float16(kind):
        return array.cast(pa.float32()).cast(pa.string())
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return pa.array(
            [None if value is None else b64encode(value).decode() for value in array.to_pylist()], pa.string()
        )
    return array.cast(pa.string())


def _quoted(text: pa.StringArray) -> pa.StringArray:
    """Return text as JSON strings; nulls stay."""
    if pc.any(pc.match_substring_regex(text, r'["\\\x00-\x1f]')).as_py():
        for character, escaped in _ESCAPED.items():
            text = pc.replace_substring(text, character, escaped)
        if pc.any(pc.match_substring_regex(text, _CONTROL)).as_py():
            for code in range(0x20):
                text = pc.replace_substring(text, chr(code), f"\\u{code:04x}")
    return pc.binary_join_element_wise('"', text, '"', "")


def _csv_text(text: pa.StringArray) -> pa.StringArray:
    """Quote text that needs it, including empty text and text that looks like null; nulls stay."""
    special = pc.match_substring_regex(text, r'[",\r\n]|\A\z|\A\\N\z')
    if not pc.any(special).as_py():
        return text
    quoted = pc.binary_join_element_wise('"', pc.replace_substring(text, '"', '""'), '"', "")
    return pc.if_else(special, quoted, text)


def _objects(array: pa.StructArray) -> pa.StringArray:
    parts = _members([field.name for field in array.type], array.flatten())
    return pc.binary_join_element_wise(*parts, "}", "") if parts else _constant("{}", len(array))


def _members(names: Sequence[str], columns: Sequence[pa.Array]) -> list[Any]:
    """Return the pieces of `{"name":value,…`, without the closing brace."""
    parts: list[Any] = []
    for name, column in zip(names, columns, strict=True):
        parts += [f"{',' if parts else '{'}{_quoted(pa.array([name]))[0].as_py()}:", json_values(column)]
    return parts


def _lists(array: pa.Array) -> pa.StringArray:
    """Return lists as JSON arrays; ignore values under null lists."""
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    return _joined(json_values(array.flatten()), lengths, "[", "]")


def _maps(array: pa.MapArray) -> pa.StringArray:
    offsets = array.offsets.to_numpy()
    first, count = int(offsets[0]), int(offsets[-1] - offsets[0])
    keys, items = array.keys.slice(first, count), array.items.slice(first, count)
    pairs = pc.binary_join_element_wise(_quoted(_plain(keys)), json_values(items), ":")
    return _joined(pairs, np.diff(offsets), "{", "}")


def _joined(texts: pa.StringArray, lengths: Int64s, begin: str, end: str) -> pa.StringArray:
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
    inner = pc.binary_join(pa.ListArray.from_arrays(offsets, texts), ",")
    return pc.binary_join_element_wise(begin, inner, end, "")


PIECE = 4 << 20
"""Bytes of columns to convert to text at once."""
_FIRST_ROWS, _MAX_ROWS = 64, 1 << 16
_GZIP_LEVEL = 6
_GZIP_WINDOW = 31  # with gzip's header, in which zlib leaves the time at 0


class BlockWriter(Protocol):
    """Writes the rows of a block as one object in a custom format.

    Obligations: the same rows give the same bytes in every process, so they must not depend on the time, the host or a
    random number; storing a block again then does not change its object. `write` is called from several threads at once
    and has no side effects. `suffix` never changes: one or two parts of lower-case letters and digits, each after a
    dot; the first is not `.parquet`, `.ndjson`, `.csv` or `.tmp`.

    If `write` raises or returns no bytes, the block's messages go to the quarantine, which is always Parquet, with
    stage `encode`.
    """

    @property
    def suffix(self) -> str:
        """The end of objects' names, such as `.avro` or `.jsonl.gz`."""
        ...

    def write(self, table: pa.Table) -> bytes | pa.Buffer:
        """Return the object: at least one row, each message once, sorted by `_nats_seq`; in bundles, by `key` first."""
        ...


@dataclass(frozen=True, slots=True)
class TextWriter:
    """Writes UTF-8 text; `kind` is ndjson or csv, `compression` is none, gzip or zstd."""

    kind: str
    compression: str

    @property
    def suffix(self) -> str:
        """The end of objects' names, such as `.csv.gz`."""
        return f".{self.kind}{layout.COMPRESSED[self.compression]}"

    def write(self, pieces: Iterable[pa.Table], schema: pa.Schema, out: Any) -> None:
        """Write rows as text to `out`; CSV starts with a line of column names."""
        lines = csv_lines if self.kind == "csv" else json_lines
        with compressed(out, self.compression) as sink:
            if self.kind == "csv":
                sink.write(csv_header(schema.names))
            rows = _FIRST_ROWS  # text can be much larger than its columns, because it repeats their names
            for piece in pieces:
                most = max(1, min(_MAX_ROWS, piece.num_rows * PIECE // max(1, piece.nbytes)))
                start = 0
                while start < piece.num_rows:
                    for batch in piece.slice(start, min(rows, most)).combine_chunks().to_batches():
                        text = lines(batch)
                        sink.write(text)
                        start += len(batch)
                        rows = max(1, min(4 * rows, len(batch) * PIECE // len(text)))


class _Gzip:
    """Writes gzip without a timestamp and a file name, so that the same text gives the same bytes."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self._state = zlib.compressobj(_GZIP_LEVEL, wbits=_GZIP_WINDOW)

    def write(self, data: bytes | memoryview) -> None:
        self._sink.write(self._state.compress(data))

    def close(self) -> None:
        self._sink.write(self._state.flush())


@contextmanager
def compressed(sink: Any, compression: str) -> Iterator[Any]:
    """Yield a stream that compresses text and writes it to `sink`."""
    if compression == "none":
        yield sink
        return
    out = _Gzip(sink) if compression == "gzip" else pa.CompressedOutputStream(_Open(sink), compression)
    yield out
    out.close()


class _Open:
    """A sink that stays open when a stream on top of it is closed."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self.closed = False

    def write(self, data: Any) -> int:
        return int(self._sink.write(data))

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def close(self) -> None:
        self.closed = True


class UserWriter:
    """Wraps a user's writer: it can only raise ValueError or return bytes."""

    def __init__(self, writer: BlockWriter) -> None:
        """Raises ValueError with one line if its suffix cannot be used."""
        suffix = getattr(writer, "suffix", None)
        if not isinstance(suffix, str) or not layout.is_own_suffix(suffix):
            raise ValueError(
                f"its suffix is {suffix!a}: expected one such as .avro or .jsonl.gz, and not that of a built-in format"
            )
        self.suffix = suffix
        self._writer = writer

    def write(self, pieces: Iterable[pa.Table], _schema: pa.Schema, out: Any) -> None:
        """Write the object to `out`. Raises ValueError."""
        table = pa.concat_tables(pieces)
        with plugins.user_code(lambda reason: ValueError(f"the writer failed: {reason}")):
            data = self._writer.write(table)
        if not isinstance(data, bytes | bytearray | memoryview | pa.Buffer):
            raise ValueError(f"the writer returned {type(data).__name__} instead of bytes")
        if not pa.py_buffer(data).size:
            raise ValueError("the writer returned no bytes")
        out.write(data)


def make_writer(format: str, compression: str) -> TextWriter | UserWriter | None:  # noqa: A002 - named as the setting is
    """Return the writer for `block.format`; None for Parquet. Raises ValueError with one line.

    `package.module:object` is a `BlockWriter`, or a callable that returns one.
    """
    if format == "parquet":
        return None
    if format in ("ndjson", "csv"):
        return TextWriter(format, compression)
    return checked_writer(cast("BlockWriter", plugins.make(format, "writer", "write")), format)


def checked_writer(writer: BlockWriter, name: str) -> UserWriter:
    """Check and wrap a user's writer. Raises ValueError with one line."""
    try:
        return UserWriter(writer)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
