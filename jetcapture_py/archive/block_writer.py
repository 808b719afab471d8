"""Formats of objects other than Parquet: NDJSON, CSV, and a user's own."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from jetcapture_py import plugins
from jetcapture_py.archive import layout
from jetcapture_py.archive.text import csv_header, csv_lines, json_lines
from jetcapture_py.text import one_line

PIECE = 4 << 20
"""Bytes of columns that are turned into text at once."""
_MOST_ROWS = 1 << 16
_GZIP_LEVEL = 6
_GZIP_WINDOW = 31  # with gzip's header, in which zlib leaves the time at 0


class BlockWriter(Protocol):
    """Writes the rows of a block as one object, in a format of its own.

    Obligations: the same rows give the same bytes, in every process, so nothing in them may depend on the time, the
    host or a random number: a block that is stored again replaces itself. `write` is called from several threads at
    once, and has no effect besides its result. `suffix` never changes: one or two parts of lower-case letters and
    digits, each after a dot, of which the first is not `.parquet`, `.ndjson`, `.csv` or `.tmp`.

    If `write` raises or returns no bytes, the block's messages go to the quarantine, which is always Parquet, with
    stage `encode`.
    """

    @property
    def suffix(self) -> str:
        """How the names of objects end, such as `.avro` or `.jsonl.gz`."""
        ...

    def write(self, table: pa.Table) -> bytes | pa.Buffer:
        """Return the object: at least one row, sorted by `_nats_seq`, each message once."""
        ...


@runtime_checkable
class BlockReader(Protocol):
    """A `BlockWriter` that also reads what it has written, so that `verify` can prove it."""

    def read(self, data: pa.Buffer) -> pa.Table:
        """Return the rows of an object, at least their columns `_nats_seq` and `_nats_timestamp`, in their order.

        Obligations: raises an exception for bytes that `write` has not returned. Called from several threads.
        """
        ...


@dataclass(frozen=True, slots=True)
class TextWriter:
    """Writes NDJSON or CSV, `kind`, in UTF-8; `compression` is none, gzip or zstd."""

    kind: str
    compression: str

    @property
    def suffix(self) -> str:
        """Such as `.csv.gz`."""
        return f".{self.kind}{layout.COMPRESSED[self.compression]}"

    def write(self, pieces: Iterable[pa.Table], schema: pa.Schema, out: Any) -> None:
        """Write rows as text to `out`, in CSV after a line with the names of the columns."""
        lines = csv_lines if self.kind == "csv" else json_lines
        with _compressed(out, self.compression) as sink:
            if self.kind == "csv":
                sink.write(csv_header(schema.names))
            for piece in pieces:
                rows = max(1, min(_MOST_ROWS, piece.num_rows * PIECE // max(1, piece.nbytes)))
                for start in range(0, piece.num_rows, rows):
                    for batch in piece.slice(start, rows).combine_chunks().to_batches():
                        sink.write(lines(batch))


class _Gzip:
    """Gzip without a time and a name, so that the same text makes the same bytes."""

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
    """A sink that stays open when what writes to it is closed."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self.closed = False

    def write(self, data: Any) -> int:
        return int(self._sink.write(data))

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self.closed = True


class UserWriter:
    """A user's writer, checked: it fails with an ordinary exception, and returns bytes."""

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
        """Whether it reads what it has written."""
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
    """Return what writes `block.format`; None for Parquet. Raises ValueError with one line.

    `package.module:object` is a `BlockWriter`, or a callable that returns one.
    """
    if format == "parquet":
        return None
    if format in ("ndjson", "csv"):
        return TextWriter(format, compression)
    found: Any = plugins.load(format)
    if callable(found) and (isinstance(found, type) or not hasattr(found, "write")):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            raise ValueError(f"{format} cannot be created: {one_line(error)}") from error
    if not callable(getattr(found, "write", None)):
        raise ValueError(f"{format} is not a writer: it has no method write")
    return checked_writer(found, format)


def checked_writer(writer: BlockWriter, name: str) -> UserWriter:
    """Return a user's writer, checked. Raises ValueError with one line."""
    try:
        return UserWriter(writer)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
