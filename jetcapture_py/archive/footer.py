"""Read what an object's Parquet footer says of it, after proving the footer by its checksum."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pyarrow as pa
import pyarrow.parquet as pq

from jetcapture_py.archive import layout

_MAGIC = b"PAR1"
_USUAL = 64 << 10
"""Bytes that most footers fit in."""


def read(end: Callable[[int], bytes]) -> Mapping[str, str]:
    """Read our entries in the footer of an object, of which `end(n)` gives the last n bytes, or all if it has fewer.

    Raises ValueError if there is no footer, or none that is proven: Arrow may end the process over a broken one.
    """
    tail = end(_USUAL)
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length > len(tail) == _USUAL:
        tail = end(length)
    if tail[-4:] != _MAGIC or length > len(tail) or not is_proven(tail[-length:]):
        raise ValueError("the object has no footer with a valid checksum")
    entries = pq.read_metadata(pa.BufferReader(_MAGIC + tail[-length:])).metadata or {}
    prefix = layout.METADATA_PREFIX.encode()
    return {
        name.removeprefix(prefix).decode(): text.decode() for name, text in entries.items() if name.startswith(prefix)
    }


def is_proven(footer: bytes) -> bool:
    """Whether a footer, with the length and magic bytes after it, has a checksum and is what that says."""
    for place in layout.checksum_places(footer, layout.FOOTER_CHECKSUM):
        digits = footer[place : place + layout.CHECKSUM_DIGITS]
        if layout.checksum([footer], [place]).encode() == digits:
            return True
    return False
