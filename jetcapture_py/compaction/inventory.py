"""Inventory of the files of an archive and its table by bucket, in some 150 bytes per file.

An archive may have millions of objects. Their names are kept as text and parsed again per bucket, so that few of them
are Python objects at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from jetcapture_py.archive.arrays import Int64s, Mask

Entry = tuple[str, Sequence[int]]
"""A file's path, and integers about it."""


class Inventory:
    """Files by bucket, each with integers about it, stored as text."""

    def __init__(self) -> None:
        self._buckets: dict[int, bytearray] = {}
        self.files = 0
        """Number of files, including taken ones."""

    def add(self, bucket: int, path: str, *numbers: int) -> None:
        entry = f"{path}\0{' '.join(map(str, numbers))}\0"
        self._buckets.setdefault(bucket, bytearray()).extend(entry.encode("utf-8", "surrogateescape"))
        self.files += 1

    @property
    def buckets(self) -> Iterable[int]:
        """The buckets with files that were not taken."""
        return self._buckets.keys()

    def of(self, bucket: int) -> Iterator[Entry]:
        """Yield the files of a bucket in the order of adding."""
        return _entries(self._buckets.get(bucket, b""))

    def take(self, bucket: int) -> Iterator[Entry]:
        """Remove and yield the files of a bucket."""
        return _entries(self._buckets.pop(bucket, b""))

    def __iter__(self) -> Iterator[Entry]:
        """Yield each file, bucket by bucket in the order of their first files."""
        return chain.from_iterable(map(_entries, self._buckets.values()))


def _entries(data: bytes | bytearray) -> Iterator[Entry]:
    parts = iter(bytes(data).split(b"\0"))
    for path, numbers in zip(parts, parts, strict=False):  # the part after the last one is empty
        yield path.decode("utf-8", "surrogateescape"), [*map(int, numbers.split())]


class PathSet:
    """A set of paths, stored as hashes of eight bytes. A false positive has a chance of 1 to 2^64 per path."""

    __slots__ = ("_hashes", "_sorted")

    def __init__(self, paths: Iterable[str] = ()) -> None:
        self._hashes = array("q", map(hash, paths))
        self._sorted: Int64s | None = None

    def add(self, path: str) -> None:
        """Add a path that is not in the set."""
        self._hashes.append(hash(path))
        self._sorted = None

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and bool(self._has([path])[0])

    def isdisjoint(self, paths: Iterable[str]) -> bool:
        return not self._has(list(paths)).any()

    def issuperset_of(self, other: PathSet) -> bool:
        return bool(np.isin(np.frombuffer(other._hashes, np.int64), np.frombuffer(self._hashes, np.int64)).all())

    def _has(self, paths: Sequence[str]) -> Mask:
        """Return a mask of the paths in the set."""
        if not paths or not self._hashes:
            return np.zeros(len(paths), np.bool_)
        if self._sorted is None:
            self._sorted = np.sort(np.frombuffer(self._hashes, np.int64))  # a copy: the array can still grow
        hashes = np.fromiter(map(hash, paths), np.int64, len(paths))
        at = np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)
        return np.equal(self._sorted[at], hashes)
