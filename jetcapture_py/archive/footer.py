"""Find an object's Parquet footer, check its checksum, and read its metadata and its schema.

The schemas of many objects are read fast, because few of them differ: a footer starts with the file's columns, so a
footer that starts with the same bytes as a decoded one has the same columns. Comparing bytes takes a tenth of the time
of decoding them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jetcapture_py.archive import layout
from jetcapture_py.archive.varint import varint

MAGIC = b"PAR1"
"""The first and last bytes of a Parquet file."""
USUAL = 64 << 10
"""Maximum size of most footers."""
UNPROVEN = "the checksum of its footer is wrong or missing: it has changed, or jetcapture did not write it"
"""The problem of an object with a damaged footer."""
_TEXT = b"\x18"
"""The Thrift type of an entry's value, which follows its name."""
_ARROW_SCHEMA = b"ARROW:schema"
"""Entry in which Arrow stores its own types, which override those of the columns."""


def length(tail: bytes) -> int:
    """Return the size of a footer, with its length and magic bytes, given the file's last bytes; 0 if not Parquet."""
    return int.from_bytes(tail[-8:-4], "little") + 8 if tail[-4:] == MAGIC else 0


def find(end: Callable[[int], bytes], usual: int = USUAL) -> bytes:
    """Return a file's footer, with its length and magic bytes; b"" if the file is not Parquet.

    `end(n)` returns the last n bytes of the file, or all if it has fewer. `usual` is the first n.
    """
    tail = end(usual)
    size = length(tail)
    if size > len(tail) == usual:
        tail = end(size)
    return tail[-size:] if 0 < size <= len(tail) else b""


def decoded(footer: bytes) -> pq.FileMetaData:
    """Decode a footer. Raises pa.ArrowInvalid."""
    return pq.read_metadata(pa.BufferReader(MAGIC + footer))


def entries(metadata: Mapping[bytes, bytes] | None) -> dict[str, str]:
    """Return the `jetcapture.` entries of a footer's key-value metadata, without this prefix."""
    prefix = layout.METADATA_PREFIX.encode()
    return {
        name.removeprefix(prefix).decode(): text.decode()
        for name, text in (metadata or {}).items()
        if name.startswith(prefix)
    }


def statistics(group: Any, column: str) -> Any:
    """Return the statistics of a column in a row group; None without them."""
    columns = (group.column(number) for number in range(group.num_columns))
    return next((chunk.statistics for chunk in columns if chunk.path_in_schema == column), None)


def group_bounds(group: Any, column: str) -> tuple[Any, Any] | None:
    """Return minimum and maximum of a column in a row group; None without statistics."""
    return bounds(statistics(group, column))


def bounds(values: Any) -> tuple[Any, Any] | None:
    """Return minimum and maximum of a column's statistics; None without any."""
    return (values.min, values.max) if values is not None and values.has_min_max else None


def is_proven(footer: bytes) -> bool:
    """Whether a footer, with its length and magic bytes, has a valid checksum."""
    for offset in layout.checksum_offsets(footer, layout.FOOTER_CHECKSUM):
        digits = footer[offset : offset + layout.CHECKSUM_DIGITS]
        if layout.checksum([footer], [offset]).encode() == digits:
            return True
    return False


def number_in(footer: bytes, entry: str) -> int:
    """Return the number in a `jetcapture.` entry of an undecoded footer; 0 without the entry."""
    start = f"{layout.METADATA_PREFIX}{entry}".encode() + _TEXT
    at = footer.find(start)
    if footer.rfind(start) != at:  # the same bytes inside a key
        text = entries(decoded(footer).metadata).get(entry, "")
        return int(text) if text.isdecimal() else 0
    digits = footer[at + len(start) + 1 :][: footer[at + len(start)]] if at >= 0 else b""
    return int(digits) if digits.isdigit() else 0


class SchemaReader:
    """Decodes footers, and caches the bytes of distinct column lists.

    `schemas` are the schemas found, which also differ where only their field ids do. Threads may share it.
    """

    def __init__(self) -> None:
        self.schemas: list[pa.Schema] = []
        self._numbers: dict[bytes, int] = {}
        self._beginnings: dict[bytes, int] = {}
        self._lengths: dict[int, None] = {}
        self._lock = Lock()

    def number(self, footer: bytes) -> int:
        """Return the index in `schemas` of the footer's schema, without its own metadata. Raises pa.ArrowInvalid."""
        with self._lock:
            return self._number(footer)

    def _number(self, footer: bytes) -> int:
        plain = _ARROW_SCHEMA not in footer
        if plain:
            for length in self._lengths:
                cached = self._beginnings.get(footer[:length])
                if cached is not None:
                    return cached
        schema = pq.read_schema(pa.BufferReader(MAGIC + footer)).remove_metadata()
        number = self._numbers.setdefault(schema.serialize().to_pybytes(), len(self.schemas))
        if number == len(self.schemas):
            self.schemas.append(schema)
        end = columns_end(footer) if plain else None
        if end is not None:
            self._lengths[end] = None
            self._beginnings[footer[:end]] = number
        return number


def columns_end(footer: bytes) -> int | None:
    """Return the end of the list of columns (field 2); None for a footer with an unexpected layout."""
    at, field = 0, 0
    try:
        while field < 2:
            header = footer[at]
            if header < 16:  # an absolute field number instead of a delta, or the end
                return None
            field += header >> 4
            at = _skip(footer, at + 1, header & 15)
    except (IndexError, ValueError):
        return None
    return at if field == 2 and at <= len(footer) else None


_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = (*range(1, 11), 12)
"""Types of Thrift's compact protocol that occur in footers."""


def _skip(data: bytes, at: int, kind: int) -> int:
    """Return the end of the value that starts at `at`."""
    if kind in (_TRUE, _FALSE):  # the type is the value
        return at
    if kind == _BYTE:
        return at + 1
    if kind in (_I16, _I32, _I64):
        return varint(data, at)[1]
    if kind == _DOUBLE:
        return at + 8
    if kind == _BINARY:
        size, at = varint(data, at)
        return at + size
    if kind in (_LIST, _SET):
        count, inner = data[at] >> 4, data[at] & 15
        count, at = (count, at + 1) if count < 15 else varint(data, at + 1)
        for _ in range(count):
            at = _skip(data, at, _BYTE if inner in (_TRUE, _FALSE) else inner)
        return at
    if kind == _STRUCT:
        while (header := data[at]) != 0:
            at = at + 1 if header >= 16 else varint(data, at + 1)[1]
            at = _skip(data, at, header & 15)
        return at + 1
    raise ValueError(kind)
