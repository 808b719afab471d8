"""What an archive and its table have, bucket by bucket, in some 170 bytes for each file.

An archive may have millions of objects. Their names are parsed again when a bucket is looked at, so that there are
never many of them as Python objects.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.store.archive import ArchiveFiles

_SEPARATOR = b"\0"
_BUCKET = re.compile(r"/(\d{8}T\d{6})[ZE]-[^/]*\.parquet")


class BucketFiles:
    """Files of one bucket: their paths, and `width` whole numbers about each."""

    __slots__ = ("_numbers", "_paths", "_width")

    def __init__(self, width: int) -> None:
        self._width = width
        self._paths = bytearray()
        self._numbers = array("q")

    def add(self, path: str, *numbers: int) -> None:
        """Add a file, with as many numbers as the width says."""
        self._paths += path.encode("utf-8", "surrogateescape")
        self._paths += _SEPARATOR
        self._numbers.extend(numbers)

    def __len__(self) -> int:
        return len(self._numbers) // self._width

    def __iter__(self) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield each path and its numbers, in the order in which they were added."""
        width = self._width
        for index, path in enumerate(self._paths.split(_SEPARATOR)[:-1]):
            yield path.decode("utf-8", "surrogateescape"), self._numbers[index * width : (index + 1) * width]


class Inventory:
    """Files by bucket, each with `width` whole numbers."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._buckets: dict[int, BucketFiles] = {}
        self.files = 0
        """How many there are, with those that were taken."""

    def add(self, bucket: int, path: str, *numbers: int) -> None:
        found = self._buckets.get(bucket)
        if found is None:
            found = self._buckets[bucket] = BucketFiles(self._width)
        found.add(path, *numbers)
        self.files += 1

    @property
    def buckets(self) -> Iterable[int]:
        """The buckets of the files that were not taken."""
        return self._buckets.keys()

    def of(self, bucket: int) -> BucketFiles:
        """Return the files of a bucket."""
        return self._buckets.get(bucket) or BucketFiles(self._width)

    def take(self, bucket: int) -> BucketFiles:
        """Remove and return the files of a bucket."""
        return self._buckets.pop(bucket, None) or BucketFiles(self._width)

    def __iter__(self) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield the path and the numbers of each file, bucket by bucket in the order of their first files."""
        for files in self._buckets.values():
            yield from files


def root_url(archive: ArchiveFiles) -> str:
    """Return the URL before the paths of objects, as the table has it."""
    return f"{archive.url.rstrip('/')}/"


def bucket_in(path: str) -> int | None:
    """Return the bucket that the path of an object names; None if it cannot be that of an object."""
    match = _BUCKET.search(path)
    return None if match is None else layout.parse_bucket(match[1])


def names_of(paths: Iterable[str]) -> list[ObjectName]:
    """Return the parsed paths of objects, ordered by sequence."""
    names = [name for path in paths if (name := layout.parse_path(path)) is not None]
    return sorted(names, key=lambda name: (name.first_seq, name.path))


class PathSet:
    """A set of paths in eight bytes each: of their hashes, so that it may hold one more with a chance of 1 to 2^64."""

    __slots__ = ("_hashes", "_sorted")

    def __init__(self, paths: Iterable[str] = ()) -> None:
        self._hashes = array("q", map(hash, paths))
        self._sorted: Any = None

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

    def _has(self, paths: Sequence[str]) -> Any:
        """Return a mask of the paths that it has."""
        if not paths or not self._hashes:
            return np.zeros(len(paths), bool)
        if self._sorted is None:
            self._sorted = np.sort(np.frombuffer(self._hashes, np.int64))  # a copy: the array can still grow
        asked = np.fromiter(map(hash, paths), np.int64, len(paths))
        places = np.minimum(np.searchsorted(self._sorted, asked), len(self._sorted) - 1)
        return self._sorted[places] == asked
