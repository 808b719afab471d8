"""Choose how the columns of an object are encoded, from its rows alone, so that the same rows give the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jetcapture_py.archive import layout

_SAMPLE, _SHARE = 512, 16
"""Rows to sample for repeated values: the first 512, or a sixteenth of all if that is more."""
_FEW_ROWS, _FEW_BYTES = 64, 512
"""Below this many rows a dictionary does not pay off, and below this many bytes compression does not."""
_TASTE, _SHRINKS = 16 << 10, 3
"""Bytes of text or payloads to sample, and the compression ratio from which `_LEVEL` is used."""
_LEVEL = 3
"""zstd level for data with long repetitions, where a higher level is faster: 10 KB of JSON with text take 23 µs and
1.5 KB, against 28 µs and 2.1 KB with level 1. Other data would take twice the time for nothing."""
_DICTIONARY_BYTES = 8 << 20
"""Maximum size of a dictionary. With Arrow's 1 MiB, 200 repeated texts of 10 KB are written as often as they occur."""
_NARROW = 1 << 32
"""Numbers whose differences are within this range are delta-encoded, which takes fewer bits."""

_DICTIONARY, _DELTA, _PLAIN, _DENSE = "dictionary", "DELTA_BINARY_PACKED", "plain", "plain, and compressed more"
_OPAQUE = (layout.PAYLOAD, layout.RAW_HEADERS)
_KNOWN = {
    layout.STREAM: _DICTIONARY,
    layout.SEQ: _DELTA,
    layout.TIMESTAMP: _DELTA,
    layout.KEY: _DICTIONARY,
}
_PAGE_ROWS = 4096
"""Rows of a page in objects that are sorted by key, so that readers with a page index can skip most of a row group."""


def settings(table: pa.Table, compression: str, *, by_key: bool, compatible: bool = False) -> dict[str, Any]:
    """Return the arguments of `ParquetWriter` for `table`; `by_key`: its rows are sorted by key.

    With `compatible`, no column is delta-encoded.
    """
    schema, columns = table.schema, table.columns
    if table.num_rows >= _FEW_ROWS:
        encodings = tuple(_encoding(field, column) for field, column in zip(schema, columns, strict=True))
    else:
        encodings = tuple(_DELTA if _KNOWN.get(name) == _DELTA else _PLAIN for name in schema.names)
    if compatible:
        encodings = tuple(_PLAIN if how == _DELTA else how for how in encodings)
    small: tuple[bool, ...] = (False,) * (len(columns) - 1)
    if table.num_rows < _FEW_BYTES:
        small = tuple(_is_small(column) for column in columns[1:])
    # the first column keeps the configured codec, so that the footer shows it
    settings = _settings(schema, compression, encodings, (False, *small))
    if not by_key:
        return settings
    ascending = [(layout.KEY, "ascending"), (layout.SEQ, "ascending")]
    order = pq.SortingColumn.from_ordering(schema, ascending, null_placement="at_start")
    return settings | {"sorting_columns": order, "write_page_index": True, "max_rows_per_page": _PAGE_ROWS}


def _is_small(column: pa.ChunkedArray) -> bool:
    """Return True if a column is too small to compress. The check for a fixed width is faster than `nbytes`."""
    kind = column.type
    fixed = kind.num_buffers == 2 and not kind.num_fields  # a bitmap and values
    return (fixed and len(column) < _FEW_ROWS) or bool(column.nbytes < _FEW_BYTES)


def _encoding(field: pa.Field, column: pa.ChunkedArray) -> str:
    """Choose a column's encoding. A dictionary of values that do not repeat can cost more than everything else."""
    if field.name in _OPAQUE:
        return _DENSE if _shrinks(column) else _PLAIN
    if field.name in _KNOWN:
        return _KNOWN[field.name]
    number = pa.types.is_integer(field.type) or pa.types.is_timestamp(field.type)
    if not (number or is_text(field.type) or pa.types.is_floating(field.type)):
        return _DICTIONARY
    sample = column.slice(0, max(_SAMPLE, len(column) // _SHARE))
    if pc.count_distinct(sample, mode="all").as_py() * 4 <= len(sample) * 3:
        return _DICTIONARY
    if number:
        numbers = sample.drop_null().to_numpy().astype(np.float64)
        return _DELTA if np.ptp(np.diff(numbers)) < _NARROW else _PLAIN
    return _DENSE if is_text(field.type) and _shrinks(column) else _PLAIN


def _shrinks(texts: pa.ChunkedArray) -> bool:
    """Return True if the first bytes compress well."""
    taste = bytearray()
    for text in texts.slice(0, _FEW_ROWS):
        if text.is_valid:
            taste += memoryview(text.as_buffer())[:_TASTE]
        if len(taste) >= _TASTE:
            break
    return len(pa.Codec("zstd", compression_level=1).compress(taste)) * _SHRINKS < len(taste)


def is_text(kind: pa.DataType) -> bool:
    """Whether values are texts or bytes."""
    types = pa.types
    return any(of(kind) for of in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary))


@lru_cache(maxsize=1024)
def _settings(
    schema: pa.Schema, compression: str, encodings: tuple[str, ...], small: tuple[bool, ...]
) -> dict[str, Any]:
    paths = [list(leaves(column)) for column in schema]
    columns = list(zip(schema, paths, encodings, small, strict=True))
    return {
        "use_dictionary": [leaf for _, paths, how, _ in columns if how == _DICTIONARY for leaf in paths],
        "column_encoding": {column.name: how for column, _, how, _ in columns if how == _DELTA},
        "compression": {leaf: "none" if tiny else compression for _, paths, _, tiny in columns for leaf in paths},
        "compression_level": {
            column.name: _LEVEL
            for column, _, how, tiny in columns
            if how == _DENSE and not tiny and compression == "zstd"
        }
        or None,
        "write_statistics": [leaf for column, paths, _, _ in columns if column.name not in _OPAQUE for leaf in paths],
        "dictionary_pagesize_limit": _DICTIONARY_BYTES,
        "write_page_checksum": True,
        "store_schema": False,
    }


def leaves(column: pa.Field, path: str = "") -> Iterator[str]:
    """Yield the Parquet paths of a column's leaves; lists and maps as in the format's LogicalTypes."""
    path += column.name
    kind = column.type
    if pa.types.is_map(kind):
        yield from leaves(kind.key_field.with_name("key"), f"{path}.key_value.")
        yield from leaves(kind.item_field.with_name("value"), f"{path}.key_value.")
    elif pa.types.is_list(kind):
        yield from leaves(kind.value_field.with_name("element"), f"{path}.list.")
    elif pa.types.is_struct(kind):
        for child in kind:
            yield from leaves(child, f"{path}.")
    else:
        yield path
