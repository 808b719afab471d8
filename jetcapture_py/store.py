"""Where objects are kept. An object appears whole or not at all, and is durable once `put` has returned.

Everything else is left to the caller: retries, parallelism, and holding the data meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from jetcapture_py.errors import PermanentStoreError, StoreError
from jetcapture_py.layout import ObjectName
from jetcapture_py.remote import PROBE, open_remote, root_of

_LOCAL_PERMANENT = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EEXIST,  # a file where a directory should be
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.EINVAL,
}
_MOST_KNOWN = 100_000
_FILE_MODE, _DIRECTORY_MODE = 0o664, 0o775
"""Less what the umask takes: writable for everybody they never are."""
_ABANDONED = 3600.0
"""Age in seconds at which a temporary file of a local store is taken for a dead process's."""


class Store(Protocol):
    """Keeps objects.

    Obligations of `put`: when it returns, the object is durable and visible under its name, whole; when it raises
    `StoreError`, no part of it is visible. Putting an object again is not an error. It is called from several threads.
    """

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        """Store `data` as `name` and return where it lies. Raises `StoreError`, `PermanentStoreError`."""
        ...

    def probe(self) -> None:
        """Show that objects can be stored, by storing and removing a small one. Raises as `put` does."""
        ...


@runtime_checkable
class NoteStore(Protocol):
    """What a store may do besides: keep small files that are written again and again, as the watermark is.

    `read_note` gives None where there is no such file. Both raise `StoreError`.
    """

    def read_note(self, path: str) -> bytes | None:
        """The file at `path`, relative to the archive's root."""
        ...

    def write_note(self, path: str, data: bytes) -> None:
        """Replace the file at `path`, at once and whole."""
        ...


@runtime_checkable
class ObjectReader(Protocol):
    """What a store may do besides: give the end of an object, where its footer is. Raises `StoreError`."""

    def read_end(self, path: str, size: int) -> bytes:
        """The last `size` bytes of the object at `path`, relative to the archive's root, or all if it has fewer."""
        ...


def open_store(url: str, options: Mapping[str, Any]) -> Store:
    """The store for `url`; `options` go to fsspec. Raises `ConfigError` when a package for it is missing."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in ("file", "local"):
        return LocalStore(rest if separator else url)
    return open_remote(scheme, rest, options)


class LocalStore:
    """A directory. Objects are written to a hidden sibling, synced, renamed, and the directory is synced."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._known: set[str] = set()

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        """Store `data` durably under its name."""
        path = f"{root_of(self.root, name.key)}/{name.path}"
        self._publish(path, data)
        return path

    def probe(self) -> None:
        """Store and remove a small object; with a root for every key there is no one place to try."""
        if "{key}" in self.root:
            return
        path = f"{root_of(self.root, None)}/{PROBE}/{uuid.uuid4().hex}"
        self._publish(path, pa.py_buffer(b"jetcapture"))
        Path(path).unlink()

    def read_note(self, path: str) -> bytes | None:
        """A small file's content; None when it does not exist."""
        try:
            return Path(f"{root_of(self.root, None)}/{path}").read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error

    def write_note(self, path: str, data: bytes) -> None:
        """Replace a small file."""
        self._publish(f"{root_of(self.root, None)}/{path}", pa.py_buffer(data))

    def read_end(self, path: str, size: int) -> bytes:
        """The last bytes of an object."""
        try:
            with Path(f"{root_of(self.root, None)}/{path}").open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - size))
                return file.read()
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error

    def _publish(self, path: str, data: pa.Buffer) -> None:
        directory, _, name = path.rpartition("/")
        hidden = f"{directory}/.{name}.{uuid.uuid4().hex}.tmp"
        try:
            self._prepare(directory)
            try:
                _write_durably(hidden, data)
                os.replace(hidden, path)  # noqa: PTH105  a pathlib object per name doubles the cost of a small object
            except BaseException:
                with contextlib.suppress(OSError):
                    Path(hidden).unlink()
                raise
            _sync_directory(directory)
        except OSError as error:
            self._known.discard(directory)
            kind = PermanentStoreError if error.errno in _LOCAL_PERMANENT else StoreError
            raise kind(f"cannot write {directory}: {error.strerror or error}") from error

    def _prepare(self, directory: str) -> None:
        """Have the directory, and sweep it, once."""
        if directory not in self._known:
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            if not _make_directory(directory):
                _sweep(Path(directory))
            self._known.add(directory)


def _write_durably(path: str, data: pa.Buffer) -> None:
    """A new file with `data`, on the disk when this returns."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    try:
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _make_directory(directory: str, *, parents: bool = True) -> bool:
    """Create `directory` and what is above it, durably; False when it was there already."""
    parent = directory.rpartition("/")[0] or "/"
    try:
        os.mkdir(directory, _DIRECTORY_MODE)  # noqa: PTH102  as in `_publish`
    except FileNotFoundError:
        if not parents:  # the parent is there, and yet nothing can be: not every file system has directories made
            raise
        _make_directory(parent)
        return _make_directory(directory, parents=False)
    except FileExistsError as error:
        if not os.path.isdir(directory):  # noqa: PTH112
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory) from error
        return False
    _sync_directory(parent)
    return True


def _sweep(directory: Path) -> None:
    """Remove what a killed process left unfinished in `directory`."""
    for path in directory.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED:
                path.unlink()


def _sync_directory(directory: str) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
