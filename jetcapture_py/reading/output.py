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
from jetcapture_py.store import open_driver
from jetcapture_py.store.credentials import RenewedDriver
from jetcapture_py.text import escaped, one_line

Format = Literal["table", "csv", "json", "parquet"]

_MEASURED = 1000
"""Rows that determine the column widths of a table."""
_TEXT_BYTES = 8 << 20
"""Bytes of rows converted to text at a time: as Python values, they take several times as much."""
_GROUP_BYTES, _GROUP_ROWS = 32 << 20, 1 << 17
"""Bytes or rows after which a row group of Parquet ends."""
_OPEN = ("/dev/fd/", "/dev/std", "/proc/")
"""Prefixes of the paths of open files."""


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
    batches: Iterable[pa.RecordBatch] = chain([] if first is None else [first], rows)
    begin()
    if form == "parquet":
        return _write_parquet(rows.schema, batches, output or "", options or {})
    names, batches = rows.schema.names, _pieces(batches)
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
    with _whole(Path(rest if separator else output)) if local else _uploaded(output, options) as path:
        try:
            with path.open("wb") as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
                for group in _groups(batches):
                    writer.write_table(group)
        except pa.ArrowNotImplementedError as error:
            raise JetcaptureError(f"cannot write Parquet: {one_line(error)}; cast the column to VARCHAR") from error


@contextmanager
def _uploaded(output: str, options: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a temporary file's path; upload the file when the block ends without an error."""
    import tempfile

    store = open_driver(output, options)
    assert isinstance(store, RenewedDriver)  # noqa: S101  # of a URL that is not local
    number, name = tempfile.mkstemp(prefix="jetcapture-", suffix=".parquet")
    os.close(number)
    with _temporary(Path(name)) as path:
        yield path
        try:
            store.attempt(lambda driver: driver.upload(str(path), driver.root))
        except Exception as error:  # drivers raise different errors
            raise StoreError(f"cannot write {output}: {one_line(error)}") from error


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
    """Yield a path whose file is renamed to `path` when the block ends without an error.

    Links are followed. A pipe, a device or an open file is written to directly.
    """
    if str(path).startswith(_OPEN) or (path.exists() and not path.is_file()):
        yield path
        return
    path = Path(os.path.realpath(path))
    with _temporary(path.with_name(f".{path.name}.partial")) as partial:
        yield partial
        partial.replace(path)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Yield a path whose file is removed when the block ends."""
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Divide large batches."""
    for batch in batches:
        rows = max(1, batch.num_rows * _TEXT_BYTES // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    size = rows = 0
    for batch in batches:
        waiting.append(batch)
        size, rows = size + batch.nbytes, rows + batch.num_rows
        if size >= _GROUP_BYTES or rows >= _GROUP_ROWS:
            yield pa.Table.from_batches(waiting)
            waiting, size, rows = [], 0, 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def table(names: Sequence[str], rows: Iterable[Sequence[str | None]]) -> Iterator[str]:
    """Yield lines of a table with aligned columns; control characters are shown as \\n or \\u001b.

    Memory is bounded: the first rows determine the widths, and wider values in later rows shift their line.
    """
    shown = (tuple("NULL" if value is None else visible(value) for value in row) for row in rows)
    heading = tuple(map(visible, names))
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


def visible(text: str) -> str:
    """Return a text that cannot affect a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else escaped(c) for c in text)


def _texts(array: pa.Array) -> list[str | None]:
    """Return a column's values as text; timestamps as SQL writes them."""
    types, type_ = pa.types, array.type
    try:
        if types.is_timestamp(type_):
            micros = array.cast(pa.timestamp("us", type_.tz), safe=False).cast(pa.int64()).cast(pa.timestamp("us"))
            array = pc.replace_substring_regex(micros.cast(pa.string()), r"\.?0+$", "")
        elif types.is_interval(type_):
            return [None if value is None else _interval(*value) for value in array.to_pylist()]
        elif types.is_binary(type_) or types.is_large_binary(type_):
            return [None if value is None else base64.b64encode(value).decode() for value in array.to_pylist()]
        else:
            array = text_of(array)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):  # a type unknown to archives, such as a union
        return [None if value is None else str(value) for value in array.to_pylist()]
    texts: list[str | None] = array.to_pylist()
    return texts


def _interval(months: int, days: int, nanoseconds: int) -> str:
    """Return an interval as DuckDB writes it: `1 year 2 months 3 days 04:05:06.789`."""
    years = int(months / 12)
    counts = {"year": years, "month": months - 12 * years, "day": days}
    parts = [f"{count} {unit}{'' if abs(count) == 1 else 's'}" for unit, count in counts.items() if count]
    if nanoseconds or not parts:
        seconds, micros = divmod(abs(nanoseconds) // 1000, 10**6)
        minutes, hours = seconds // 60 % 60, seconds // 3600
        fraction = f".{micros:06}".rstrip("0") if micros else ""
        parts.append(f"{'-' if nanoseconds < 0 else ''}{hours:02}:{minutes:02}:{seconds % 60:02}{fraction}")
    return " ".join(parts)


def _values(array: pa.Array) -> list[Any]:
    """Return a column's values for JSON."""
    try:
        return plain_values(array)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return _texts(array)
