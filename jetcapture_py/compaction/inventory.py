"""What an archive and its table have, bucket by bucket, in some 150 bytes for each file.

An archive may have millions of objects. Their names are parsed again when a bucket is looked at, so that there are
never many of them as Python objects.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from jetcapture_py.archive.arrays import Int64s, Mask

Entry = tuple[str, Sequence[int]]
"""The path of a file, and whole numbers about it."""


class Inventory:
    """Files by bucket, each with whole numbers about it: as text, of which little is in objects at once."""

    def __init__(self) -> None:
        self._buckets: dict[int, bytearray] = {}
        self.files = 0
        """How many there are, with those that were taken."""

    def add(self, bucket: int, path: str, *numbers: int) -> None:
        entry = f"{path}\0{' '.join(map(str, numbers))}\0"
        self._buckets.setdefault(bucket, bytearray()).extend(entry.encode("utf-8", "surrogateescape"))
        self.files += 1

    @property
    def buckets(self) -> Iterable[int]:
        """The buckets of the files that were not taken."""
        return self._buckets.keys()

    def of(self, bucket: int) -> Iterator[Entry]:
        """Yield the files of a bucket, in the order in which they were added."""
        return _entries(self._buckets.get(bucket, b""))

    def take(self, bucket: int) -> Iterator[Entry]:
        """Remove and yield the files of a bucket."""
        return _entries(self._buckets.pop(bucket, b""))

    def __iter__(self) -> Iterator[Entry]:
        """Yield each file, bucket by bucket in the order of their first files."""
        return chain.from_iterable(map(_entries, self._buckets.values()))


def _entries(data: bytes | bytearray) -> Iterator[Entry]:
    parts = iter(bytes(data).split(b"\0"))
    for path, numbers in zip(parts, parts, strict=False):  # after the last one is an empty part
        yield path.decode("utf-8", "surrogateescape"), [*map(int, numbers.split())]


class PathSet:
    """A set of paths in eight bytes each: of their hashes, so that it may hold one more with a chance of 1 to 2^64."""

    __slots__ = ("_hashes", "_sorted")

    def __init__(self, paths: Iterable[str] = ()) -> None:
        self._hashes = array("q", map(hash, paths))
        self._sorted: Int64s | None = None

    def add(self, path: str) -> None:
        """Add a path that it does not have."""
        self._hashes.append(hash(path))
        self._sorted = None

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and bool(self._has([path])[0])

    def isdisjoint(self, paths: Iterable[str]) -> bool:
        """Whether it has none of these paths."""
        return not self._has(list(paths)).any()

    def issuperset_of(self, other: PathSet) -> bool:
        """Whether it has all paths of another set."""
        return bool(np.isin(np.frombuffer(other._hashes, np.int64), np.frombuffer(self._hashes, np.int64)).all())

    def _has(self, paths: Sequence[str]) -> Mask:
        """Return a mask of the paths that it has."""
        if not paths or not self._hashes:
            return np.zeros(len(paths), np.bool_)
        if self._sorted is None:
            self._sorted = np.sort(np.frombuffer(self._hashes, np.int64))  # a copy: the array can still grow
        hashes = np.fromiter(map(hash, paths), np.int64, len(paths))
        at = np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)
        return np.equal(self._sorted[at], hashes)
