"""Bound the memory of compaction, expiry and erasure: work waits until its maximum is free.

New objects, downloads from a remote store, row groups and row identities count.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jetcapture_py.archive.writer import ROW_GROUP_BYTES
from jetcapture_py.compaction.files import CACHE
from jetcapture_py.compaction.plan import TOLERANCE, Source
from jetcapture_py.compaction.unit import CompactionSpec
from jetcapture_py.config.shares import COMPACTING_SHARE

_ROW_GROUPS = 3
"""Row groups of an object that are in memory at once: as read, sorted or compared, and encoded."""
_MAX_RATIO = 16
"""Uncompressed bytes of a row group for each byte of an object, if it is small."""
_ROW_BYTES = 140
"""Bytes for the identity of a row while its object is surveyed, named and checked."""
_TEXT_PIECES = 64 << 20
"""Bytes for the text of an object that is parsed, compared and compressed, piece by piece."""


class MemoryBudget:
    """A share of `limits.memory` for work in several threads. Thread-safe."""

    def __init__(self, limit: int) -> None:
        """`limit` is `limits.memory`, in bytes."""
        self.size = self._free = limit // COMPACTING_SHARE
        """Bytes for all work together."""
        self._freed = threading.Condition()

    @property
    def rows(self) -> int:
        """The number of rows whose identities fit."""
        return self.size // _ROW_BYTES

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Reserve `size` bytes, or everything for a larger size; wait until they are free."""
        size = min(size, self.size)
        with self._freed:
            self._freed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._freed:
                self._free += size
                self._freed.notify_all()


def merging(sources: Sequence[Source], size: int, spec: CompactionSpec, *, local: bool) -> int:
    """Return the maximum memory for compacting a unit of `size` bytes.

    It holds one new object (twice for a remote store), the identities of its rows, and row groups.
    """
    rows = sum(source.name.rows for source in sources)
    share = min(1.0, spec.target * TOLERANCE / max(size, rows * spec.row_bytes, 1))
    identities = max(rows * share, *(source.name.rows for source in sources)) * _ROW_BYTES
    written = size * share * (1 if local else 2) + identities
    return int(written) + _pieces(size) + (0 if local else min(size, CACHE))


def searching(source: Source, *, local: bool) -> int:
    """Return the maximum memory for reading some columns of an object."""
    size, identities = source.size, source.name.rows * _ROW_BYTES
    if source.name.parquet:
        return identities + _pieces(size) + (0 if local else min(size, CACHE))
    return identities + min(_TEXT_PIECES, _MAX_RATIO * size) + (0 if local else size)


def rewriting(source: Source, *, local: bool) -> int:
    """Return the maximum memory for rewriting an object and reading both.

    The new object grows in memory, and a remote store gets a copy; text is downloaded as a whole.
    """
    return searching(source, local=local) + source.size * (2 if local else 3)


def _pieces(size: int) -> int:
    """Return the memory of the row groups held at once for objects of `size` bytes."""
    return min(_ROW_GROUPS * ROW_GROUP_BYTES, _MAX_RATIO * size)
