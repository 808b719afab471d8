"""Write objects in formats other than Parquet: NDJSON, CSV, and custom formats."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import pyarrow as pa

from jetcapture_py import plugins
from jetcapture_py.archive import layout
from jetcapture_py.archive.text import csv_header, csv_lines, json_lines
from jetcapture_py.text import one_line

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


@runtime_checkable
class BlockReader(Protocol):
    """A `BlockWriter` that can also read its objects, so that `verify` can check them."""

    def read(self, data: pa.Buffer) -> pa.Table:
        """Return the rows of an object, at least their columns `_nats_seq` and `_nats_timestamp`, in their order.

        Obligations: raises an exception for bytes that `write` did not return. Called from several threads.
        """
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
        with _compressed(out, self.compression) as sink:
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
def _compressed(sink: Any, compression: str) -> Iterator[Any]:
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
        try:
            data = self._writer.write(table)
        except BaseException as error:  # also sys.exit and panics of Rust, which must not end the process
            raise ValueError(f"the writer failed: {one_line(error)}") from error
        if not isinstance(data, bytes | bytearray | memoryview | pa.Buffer):
            raise ValueError(f"the writer returned {type(data).__name__} instead of bytes")
        if not pa.py_buffer(data).size:
            raise ValueError("the writer returned no bytes")
        out.write(data)

    @property
    def reads(self) -> bool:
        """Whether it can read its objects."""
        return isinstance(self._writer, BlockReader)

    def read(self, data: pa.Buffer) -> pa.Table:
        """Return the rows of an object. Raises ValueError."""
        try:
            table = self._writer.read(data)  # type: ignore[attr-defined]
            return table.select([layout.SEQ, layout.TIMESTAMP])
        except KeyboardInterrupt:
            raise  # of a command, not of the writer
        except BaseException as error:
            raise ValueError(one_line(error)) from error


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
