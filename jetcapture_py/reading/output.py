"""Write the rows of a query as a table, CSV, JSON lines or Parquet."""

from __future__ import annotations

import base64
import csv
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TextIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jetcapture_py.errors import JetcaptureError, StoreError
from jetcapture_py.reading.convert import encode_json, plain_values, text_of
from jetcapture_py.store.remote import open_remote
from jetcapture_py.text import escaped, one_line

Format = Literal["table", "csv", "json", "parquet"]

_MEASURED = 1000
"""Rows that determine the column widths of a table."""


def write(
    rows: pa.RecordBatchReader,
    form: Format,
    output: str | None,
    options: Mapping[str, Any] | None = None,
    begin: Callable[[], object] = lambda: None,
) -> None:
    """Write rows to a file, or to standard output; Parquet also to a URL, with `store.options`.

    `begin` is called before the first byte is written, when the first rows are known. Raises JetcaptureError, OSError.
    """
    first = next(iter(rows), None)
    batches = chain([] if first is None else [first], rows)
    begin()
    if form == "parquet":
        return _write_parquet(rows.schema, batches, output or "", options or {})
    names = rows.schema.names
    if form == "json":
        check_names(names, "columns")
    with target(output) as file:
        if form == "json":
            for batch in batches:
                columns = [_values(column) for column in batch.columns]
                for row in zip(*columns, strict=True):
                    file.write(f"{encode_json(dict(zip(names, row, strict=True))).decode()}\n")
            return None
        texts = chain.from_iterable(zip(*map(_texts, batch.columns), strict=True) for batch in batches)
        if form == "csv":
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(names)
            writer.writerows(texts)
        else:
            file.writelines(f"{line}\n" for line in table(names, texts))
    return None


def _write_parquet(
    schema: pa.Schema, batches: Iterable[pa.RecordBatch], output: str, options: Mapping[str, Any]
) -> None:
    scheme, separator, rest = output.partition("://")
    local = not separator or scheme in ("file", "local")
    with _whole(Path(rest if separator else output)) if local else _uploaded(scheme, rest, options) as path:
        try:
            with pq.ParquetWriter(path, schema, compression="zstd") as writer:
                for batch in batches:
                    writer.write_batch(batch)
        except pa.ArrowNotImplementedError as error:
            raise JetcaptureError(f"cannot write Parquet: {one_line(error)}; cast the column to VARCHAR") from error


@contextmanager
def _uploaded(scheme: str, rest: str, options: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the path of a temporary file, which is uploaded when the block ends without an error."""
    import tempfile

    store = open_remote(scheme, rest, options)
    with tempfile.TemporaryDirectory(prefix="jetcapture-") as directory:
        path = Path(directory, "rows.parquet")
        yield path
        try:
            store.attempt(lambda fs: fs.put_file(str(path), rest))
        except Exception as error:  # fsspec backends raise different errors
            raise StoreError(f"cannot write {scheme}://{rest}: {one_line(error)}") from error


@contextmanager
def target(output: str | None) -> Iterator[TextIO]:
    """Yield standard output, or a file that gets its name only when complete."""
    if output is None:
        try:
            yield sys.stdout
            sys.stdout.flush()
        except BrokenPipeError:  # as after `| head`: keep the interpreter from failing at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    with whole_file(Path(output)) as file:
        yield file


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Open a text file for writing that appears atomically when the block ends without an error."""
    with _whole(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        yield file


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yield a path whose file is renamed to `path` when the block ends without an error."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def table(names: Sequence[str], rows: Iterable[Sequence[str | None]]) -> Iterator[str]:
    """Yield lines of a table with aligned columns; control characters are shown as \\n or \\u001b.

    Memory is bounded: the first rows determine the widths, and wider values in later rows shift their line.
    """
    shown = (tuple("NULL" if value is None else _visible(value) for value in row) for row in rows)
    heading = tuple(map(_visible, names))
    first = list(islice(shown, _MEASURED))
    widths = [max(map(len, column)) for column in zip(heading, *first, strict=True)]
    for line in chain((heading, tuple("-" * width for width in widths)), first, shown):
        yield "  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)).rstrip()


def check_names(names: Iterable[str], what: str) -> None:
    """Raise JetcaptureError if a name occurs twice: a JSON object must not repeat a key."""
    known: set[str] = set()
    for name in names:
        if name in known:
            raise JetcaptureError(f"two {what} are called {name}: names in JSON must be unique; rename one with AS")
        known.add(name)


def _visible(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else escaped(c) for c in text)


def _texts(array: pa.Array) -> list[str | None]:
    """Return a column's values as Spark SQL writes them as text."""
    types, type_ = pa.types, array.type
    try:
        if types.is_timestamp(type_):
            micros = array.cast(pa.timestamp("us", type_.tz), safe=False).cast(pa.int64()).cast(pa.timestamp("us"))
            array = pc.replace_substring_regex(micros.cast(pa.string()), r"\.?0+$", "")
        elif types.is_binary(type_) or types.is_large_binary(type_):
            return [None if value is None else base64.b64encode(value).decode() for value in array.to_pylist()]
        else:
            array = text_of(array)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):  # a type that an archive does not have, as an interval
        return [None if value is None else str(value) for value in array.to_pylist()]
    texts: list[str | None] = array.to_pylist()
    return texts


def _values(array: pa.Array) -> list[Any]:
    """Return a column's values for JSON."""
    try:
        return plain_values(array, java=True)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return _texts(array)
