"""Read which messages an object without a footer holds, from its rows. Raises DamagedError for what is no such object.

A piece of the object is in memory at a time, unless a single row is larger.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc_csv
import pyarrow.json as pc_json

from jetcapture_py.archive import layout
from jetcapture_py.archive.block_writer import UserWriter
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.errors import VanishedError
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.text import one_line

_READ_AHEAD = 8 << 20
_BLOCKS = (8 << 20, 128 << 20, 1 << 30)
"""Bytes of text that are parsed at once; a row must fit, so larger ones are tried where it does not."""
_TOO_SMALL = "straddl"
_CONTENT = re.compile(r"(?<= columns), got .*")
"""Arrow's excerpt of a row with too few fields, which does not belong in a report."""
_TYPES = {layout.SEQ: pa.int64(), layout.TIMESTAMP: pa.timestamp("us", "UTC")}
_CODECS = {end: codec for codec, end in layout.COMPRESSED.items() if end}


class DamagedError(Exception):
    """The object has changed since it was stored; the text says how."""


def identities(storage: ArchiveFiles, file: File, name: ObjectName, writer: UserWriter | None) -> tuple[Any, Any]:
    """Sequence and timestamp in microseconds of each row, as int64 arrays, in the object's order.

    `writer` reads objects of its own format. Raises DamagedError, VanishedError, StoreError.
    """
    try:
        if name.suffix in layout.TEXT_SUFFIXES:
            tables = _text(storage, file, name.suffix)
        elif writer is not None:
            tables = [writer.read(pa.py_buffer(storage.read(file)))]
        else:
            raise DamagedError("nothing can read it")
        seqs, times = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for table in tables:
            if table.column(layout.SEQ).null_count or table.column(layout.TIMESTAMP).null_count:
                raise DamagedError("it has rows without a sequence and a timestamp")
            seqs.append(table.column(layout.SEQ).cast(pa.int64()).to_numpy())
            stamps = table.column(layout.TIMESTAMP).cast(_TYPES[layout.TIMESTAMP])
            times.append(stamps.cast(pa.int64()).to_numpy())
    except VanishedError:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"it cannot be read: {_CONTENT.sub('', one_line(error))}") from error
    return np.concatenate(seqs), np.concatenate(times)


def _text(storage: ArchiveFiles, file: File, suffix: str) -> list[pa.Table]:
    for size in _BLOCKS:
        try:
            return list(_parsed(storage, file, suffix, size))
        except pa.ArrowInvalid as error:
            if _TOO_SMALL not in str(error) or size == _BLOCKS[-1]:
                raise
    raise AssertionError("the last size has returned or raised")


def _parsed(storage: ArchiveFiles, file: File, suffix: str, size: int) -> Iterator[pa.Table]:
    _, kind, *end = suffix.split(".")
    stream: Any = pa.BufferedInputStream(storage.stream(file), _READ_AHEAD)
    if end:
        stream = pa.CompressedInputStream(stream, _CODECS[f".{end[0]}"])
    if kind == "csv":
        reader = pc_csv.open_csv(
            stream,
            read_options=pc_csv.ReadOptions(block_size=size, use_threads=False),
            parse_options=pc_csv.ParseOptions(newlines_in_values=True),
            convert_options=pc_csv.ConvertOptions(include_columns=list(_TYPES), column_types=_TYPES),
        )
    else:
        reader = pc_json.open_json(
            stream,
            read_options=pc_json.ReadOptions(block_size=size, use_threads=False),
            parse_options=pc_json.ParseOptions(
                explicit_schema=pa.schema(list(_TYPES.items())), unexpected_field_behavior="ignore"
            ),
        )
    for batch in reader:
        yield pa.Table.from_batches([batch])
