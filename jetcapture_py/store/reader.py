"""List an archive's objects through fsspec, and read any part of an object.

With `{key}` in `store.url`, every key has its own root; roots are found by listing.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from jetcapture_py.archive import layout
from jetcapture_py.errors import StoreError, VanishedError
from jetcapture_py.store.local_files import files_below
from jetcapture_py.store.remote import FsspecStore, open_remote, root_of
from jetcapture_py.text import one_line

_KEY = "{key}"
_REMOTE_THREADS, _LOCAL_THREADS = 16, 1
_ATTEMPTS = 3
_SMALL = 4 << 20
"""Maximum bytes of an object that is fetched from a remote store in one request."""
_PIECE = 32 << 20
"""Bytes of a larger object that one request fetches."""
T = TypeVar("T")


def retried(work: Callable[[], T]) -> T:
    """Call `work` again if an object disappears because a compaction has replaced it."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(VanishedError):
            return work()
    return work()


def open_parquet(source: Any, **options: Any) -> pq.ParquetFile:
    """Open Parquet so that only the calling thread reads it; also pass `use_threads=False` to the file's methods.

    A thread of Arrow's that still holds a Python file when the interpreter exits ends the process with SIGABRT:
    https://github.com/apache/arrow/issues/34314.
    """
    return pq.ParquetFile(source, pre_buffer=False, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of the archive. `path` is relative to its root or, with `{key}`, to the common parent of all roots.

    `place` is its path in fsspec, `size` is in bytes, `name` is the parsed path, None for files that are not objects.
    """

    path: str
    place: str = field(repr=False)
    size: int
    name: layout.ObjectName | None


class ObjectStorage:
    """The archive at `url`; `options` go to fsspec, as for the store. Thread-safe."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        """Raises ConfigError if a package is missing or options are invalid."""
        scheme, separator, rest = url.partition("://")
        self._store: FsspecStore | None = None
        if not separator or scheme in ("file", "local"):
            self._fs, path = LocalFileSystem(), rest if separator else url
        else:
            self._store = open_remote(scheme, rest, options)
            self._fs, path = self._store.fs, url
        self._template = str(self._fs._strip_protocol(path)).rstrip("/")
        head, _, _ = self._template.partition(_KEY)
        self._base = head.rpartition("/")[0] if _KEY in self._template else self._template
        find = self._fs._find if isinstance(self._fs, AsyncFileSystem) else self._fs.find
        # whether it lists all levels at once, in place of fsspec's walk of the directories
        self._flat = find.__func__ not in (AsyncFileSystem._find, AbstractFileSystem.find)
        self.threads = _LOCAL_THREADS if self._store is None else _REMOTE_THREADS

    @property
    def divided(self) -> bool:
        """Whether every key has its own root."""
        return _KEY in self._template

    def _do(self, work: Callable[[Any], Any]) -> Any:
        """Return the result of `work` on the file system; a remote store refreshes rejected credentials."""
        return work(self._fs) if self._store is None else self._store.attempt(work)

    def files(self, stream: str) -> Iterator[File]:
        """Yield every file of the stream and its quarantine, unordered. Raises StoreError."""
        self._do(_fresh)
        places = [
            (root, f"{root}/{part}") for root in self._roots() for part in (stream, f"{layout.QUARANTINE}/{stream}")
        ]
        with ThreadPoolExecutor(self.threads, "list") as threads:
            for (root, _), found in zip(
                places, threads.map(lambda place: list(self._find(place[1])), places), strict=True
            ):
                yield from (self._file(root, path, size) for path, size in found)

    def _file(self, root: str, path: str, size: int) -> File:
        name = layout.parse_path(path[len(root) + 1 :])
        if name is not None and root_of(self._template, name.key) != root:
            name = None  # an object of one key in another key's root
        return File(path=path[len(self._base) + 1 :], place=path, size=size, name=name)

    def _find(self, directory: str) -> Iterator[tuple[str, int]]:
        """Yield the files below a directory with their sizes, without fsspec's walk, which hides listing errors."""
        if isinstance(self._fs, LocalFileSystem):
            yield from self._local(directory)
            return
        if self._flat:
            found = self._listed("find", directory)
            yield from ((path, info["size"] or 0) for path, info in found.items() if info.get("type") != "directory")
            return
        directories = [directory]
        while directories:
            for entry in self._listed("ls", directories.pop()):
                if entry["type"] == "directory":
                    directories.append(str(entry["name"]).rstrip("/"))
                else:
                    yield str(entry["name"]), entry["size"] or 0

    def _local(self, directory: str) -> Iterator[tuple[str, int]]:
        try:
            yield from ((path, found.st_size) for path, found in files_below(directory))
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(f"cannot list {directory or '/'}: {one_line(error)}") from error

    def _listed(self, how: str, directory: str) -> Any:
        try:
            return self._do(lambda fs: getattr(fs, how)(directory, detail=True))
        except FileNotFoundError:
            return {}
        except Exception as error:  # fsspec backends raise different errors
            raise StoreError(f"cannot list {directory or '/'}: {one_line(error)}") from error

    def _roots(self) -> list[str]:
        """List the existing roots."""
        roots = [self._base]
        for part in self._template[len(self._base) + 1 :].split("/") if self.divided else ():
            if _KEY not in part:
                roots = [f"{root}/{part}" for root in roots]
                continue
            pattern = re.compile(re.escape(part).replace(re.escape(_KEY), ".+"))
            roots = [each for root in roots for each in self._below(root) if pattern.fullmatch(each.rpartition("/")[2])]
        return roots

    def _below(self, root: str) -> list[str]:
        entries = self._listed("ls", root)
        return [str(entry["name"]).rstrip("/") for entry in entries if entry.get("type") == "directory"]

    def read(self, file: File, start: int = 0, end: int | None = None) -> bytes:
        """Read the bytes of a file from `start` to `end` (exclusive). Raises VanishedError, StoreError."""
        last = file.size if end is None else end
        with _explained(file.path):
            return bytes(self._do(lambda fs: fs.cat_file(file.place, start=start, end=last)))

    def again(self, file: File) -> File:
        """Refresh the file's size, because it may have been rewritten. Raises VanishedError, StoreError."""
        with _explained(file.path):
            return replace(file, size=int(self._do(lambda fs: _fresh(fs).info(file.place))["size"] or 0))

    def parquet(self, file: File, **options: Any) -> pq.ParquetFile:
        """Open an object as `open_parquet` does; only the ranges that Arrow needs are read, or a small object at once.

        Raises VanishedError, StoreError, pa.ArrowException, OSError.
        """
        if self._store is not None and file.size <= _SMALL:
            return open_parquet(pa.BufferReader(self.read(file)), **options)
        return open_parquet(pa.PythonFile(_Parts(self, file), mode="r"), **options)

    def stream(self, file: File) -> pa.NativeFile:
        """Open an object for Arrow's own threads, without Python: a local file, or all bytes of a remote object.

        Raises VanishedError, StoreError.
        """
        if self._store is None:
            with _explained(file.path):
                return pa.OSFile(file.place)
        copy = pa.BufferOutputStream()
        for start in range(0, file.size, _PIECE):
            copy.write(self.read(file, start, min(start + _PIECE, file.size)))
        return pa.BufferReader(copy.getvalue())

    def notes(self, directory: str) -> list[str]:
        """List the small files in a directory, by their paths relative to the root; none with `{key}` in the URL.

        Raises StoreError.
        """
        self._do(_fresh)
        found = [] if self.divided else self._listed("ls", f"{self._template}/{directory}")
        return sorted(f"{directory}/{str(each['name']).rpartition('/')[2]}" for each in found if each["type"] == "file")

    def note(self, path: str) -> bytes | None:
        """Read the small file at `path`, relative to the root; None if it does not exist. Raises StoreError."""
        try:
            with _explained(path):
                return bytes(self._do(lambda fs: fs.cat_file(f"{self._template}/{path}")))
        except VanishedError:
            return None


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """Turn any error of an fsspec backend into VanishedError or StoreError."""
    try:
        yield
    except FileNotFoundError as error:
        raise VanishedError(f"{path} is gone") from error
    except Exception as error:
        raise StoreError(f"cannot read {path}: {one_line(error)}") from error


def _fresh(fs: Any) -> Any:
    """Clear the file system's listing cache and return it."""
    fs.invalidate_cache()
    return fs


class _Parts(io.RawIOBase):
    """A file-like object; each read is one request, without read-ahead."""

    def __init__(self, storage: ObjectStorage, file: File) -> None:
        self._storage, self._file = storage, file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        end = self._file.size if size < 0 else min(self._position + size, self._file.size)
        data = self._storage.read(self._file, self._position, end) if end > self._position else b""
        self._position += len(data)
        return data
