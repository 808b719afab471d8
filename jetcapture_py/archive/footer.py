"""Find an object's Parquet footer, check its checksum, and read its metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jetcapture_py.archive import layout

MAGIC = b"PAR1"
"""The first and last bytes of a Parquet file."""
USUAL = 64 << 10
"""Size that most footers do not exceed."""


def length(tail: bytes) -> int:
    """Return the size of a footer with its length and magic bytes, from a file's last bytes; 0 if it is not Parquet."""
    return int.from_bytes(tail[-8:-4], "little") + 8 if tail[-4:] == MAGIC else 0


def read(end: Callable[[int], bytes]) -> Mapping[str, str]:
    """Read our entries in the footer of an object, of which `end(n)` gives the last n bytes, or all if it has fewer.

    Raises ValueError without a footer with a valid checksum: Arrow may crash on a broken one.
    """
    tail = end(USUAL)
    size = length(tail)
    if size > len(tail) == USUAL:
        tail = end(size)
    if not 0 < size <= len(tail) or not is_proven(tail[-size:]):
        raise ValueError("the object has no footer with a valid checksum")
    return entries(pq.read_metadata(pa.BufferReader(MAGIC + tail[-size:])).metadata)


def entries(metadata: Mapping[bytes, bytes] | None) -> dict[str, str]:
    """Return our own entries of a footer's key-value metadata, without their prefix."""
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
    """Whether a footer, with its length and magic bytes, has a valid checksum."""
    for place in layout.checksum_places(footer, layout.FOOTER_CHECKSUM):
        digits = footer[place : place + layout.CHECKSUM_DIGITS]
        if layout.checksum([footer], [place]).encode() == digits:
            return True
    return False
