"""Find and prove an object's Parquet footer, and read what it says of the object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jetcapture_py.archive import layout

MAGIC = b"PAR1"
"""What a Parquet file begins and ends with."""
USUAL = 64 << 10
"""Bytes that most footers fit in."""


def length(tail: bytes) -> int:
    """The size of a footer, with the length and magic bytes after it, by a file's last bytes; 0 if it is no Parquet."""
    return int.from_bytes(tail[-8:-4], "little") + 8 if tail[-4:] == MAGIC else 0


def read(end: Callable[[int], bytes]) -> Mapping[str, str]:
    """Read our entries in the footer of an object, of which `end(n)` gives the last n bytes, or all if it has fewer.

    Raises ValueError if there is no footer, or none that is proven: Arrow may end the process over a broken one.
    """
    tail = end(USUAL)
    size = length(tail)
    if size > len(tail) == USUAL:
        tail = end(size)
    if not 0 < size <= len(tail) or not is_proven(tail[-size:]):
        raise ValueError("the object has no footer with a valid checksum")
    return entries(pq.read_metadata(pa.BufferReader(MAGIC + tail[-size:])).metadata)


def entries(metadata: Mapping[bytes, bytes] | None) -> dict[str, str]:
    """Our own entries among a footer's key-value metadata, without their prefix."""
    prefix = layout.METADATA_PREFIX.encode()
    return {
        name.removeprefix(prefix).decode(): text.decode()
        for name, text in (metadata or {}).items()
        if name.startswith(prefix)
    }


def bounds(metadata: pq.FileMetaData, column: str) -> tuple[Any, Any] | None:
    """Return minimum and maximum of a column at the top level; None without statistics in the footer."""
    found = []
    for number in range(metadata.num_row_groups):
        if (group := group_bounds(metadata.row_group(number), column)) is None:
            return None
        found.append(group)
    return (min(low for low, _ in found), max(high for _, high in found)) if found else None


def group_bounds(group: Any, column: str) -> tuple[Any, Any] | None:
    """Return minimum and maximum of a column in a row group; None without statistics."""
    columns = (group.column(number) for number in range(group.num_columns))
    known = next((each.statistics for each in columns if each.path_in_schema == column), None)
    return (known.min, known.max) if known is not None and known.has_min_max else None


def is_proven(footer: bytes) -> bool:
    """Whether a footer, with the length and magic bytes after it, has a checksum and is what that says."""
    for place in layout.checksum_places(footer, layout.FOOTER_CHECKSUM):
        digits = footer[place : place + layout.CHECKSUM_DIGITS]
        if layout.checksum([footer], [place]).encode() == digits:
            return True
    return False
