"""The driver of local directories."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from jetcapture_py.errors import FullStoreError, PermanentStoreError, StoreError
from jetcapture_py.store.local_files import (
    NO_RENAME,
    files_below,
    link,
    make_directory,
    rename,
    sync_directory,
    write_durably,
)
from jetcapture_py.store.ports import NEW, Entry
from jetcapture_py.store.root import ArchiveRoot

_PERMANENT = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EEXIST,  # a file where a directory should be
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.EINVAL,
    *NO_RENAME,
}
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
_MAX_KNOWN = 100_000
ABANDONED = 3600.0
"""Age in seconds after which a temporary file counts as abandoned."""


class LocalDriver:
    """A directory. Files are written to a hidden sibling, synced and renamed, then the directory is synced.

    If the directory has been replaced since the first use, for example by an unmount, writes raise `StoreError` (see
    `store.root`). With `{key}` in `root`, this applies to the directory above the first part with `{key}`.
    """

    conditional = False

    def __init__(self, root: str) -> None:
        self.root = root
        head, divided, _ = root.partition("{key}")
        self._base = head.rpartition("/")[0] if divided else root.rstrip("/")
        default = "/" if root.startswith("/") else "."
        self.archive = ArchiveRoot(self._base or default, unmarked=bool(divided))
        self._known: set[str] = set()

    def list(self, directory: str, *, deep: bool = True) -> Iterator[Entry]:
        """Yield files, also through symbolic links, as Spark lists them."""
        try:
            directory = directory or "/"
            if deep:
                for path, status in files_below(directory):
                    yield Entry(path, status.st_size, status.st_mtime)
                return
            with os.scandir(directory) as entries:
                yield from [Entry(entry.path, directory=entry.is_dir()) for entry in entries]
        except OSError as error:
            # a key with so long a name cannot exist
            too_long = error.errno == errno.ENAMETOOLONG and str(error.filename) == directory
            if error.errno != errno.ENOENT and not too_long:
                raise

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Read a file with one unbuffered system call."""
        if self.archive.known:
            with self.archive.opened():
                pass
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            handle = file.fileno()
            return os.pread(handle, (os.fstat(handle).st_size if end is None else end) - start, start)

    def stat(self, path: str) -> Entry:
        status = os.stat(path)  # noqa: PTH116
        return Entry(path, status.st_size, status.st_mtime)

    def write(self, path: str, data: pa.Buffer, condition: str | None) -> None:
        """Write a file durably. `NEW` replaces an empty file, which a crash may leave."""
        directory, _, name = path.rpartition("/")
        below = directory[len(self._base) + 1 :] if self._base or path.startswith("/") else directory
        hidden, visible = f"{below}/.{name}.{uuid.uuid4().hex}.tmp", f"{below}/{name}"
        with explained(directory), self.archive.opened() as root:
            try:
                self._prepare(below, root)
                try:
                    write_durably(hidden, data, root)
                except FileNotFoundError:  # an erasure has removed the empty directory
                    self._known.discard(below)
                    self._prepare(below, root)
                    write_durably(hidden, data, root)
                made = (link if condition == NEW else rename)(hidden, visible, root)
                sync_directory(below, root)
            except BaseException:
                self._known.discard(below)
                with contextlib.suppress(OSError):
                    os.unlink(hidden, dir_fd=root)
                raise
        if not made:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def remove(self, path: str, condition: str | None = None) -> None:  # noqa: ARG002  locks are enough
        Path(path).unlink()

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Lock the path of a metadata file, or another name. Raises StoreError."""
        with explained(self.archive.path), self.archive.locked(name):
            yield

    def _prepare(self, directory: str, root: int) -> None:
        """Create the directory, or remove abandoned files in it, once."""
        if directory not in self._known:
            if len(self._known) > _MAX_KNOWN:
                self._known.clear()
            if not make_directory(directory, root):
                _sweep(directory, root)
            self._known.add(directory)


@contextlib.contextmanager
def explained(directory: str) -> Iterator[None]:
    """Turn an OSError into `StoreError`, `FullStoreError` or `PermanentStoreError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise FullStoreError(f"cannot write {directory}: {_FULL[error.errno]}") from error
        kind = PermanentStoreError if error.errno in _PERMANENT else StoreError
        raise kind(f"cannot write {directory}: {error.strerror or error}") from error


def _sweep(directory: str, root: int) -> None:
    """Remove temporary files of killed processes from `directory`."""
    handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC, dir_fd=root)
    try:
        for name in os.listdir(handle):  # noqa: PTH208  a descriptor, not a path
            if name.startswith(".") and name.endswith(".tmp"):
                with contextlib.suppress(OSError):
                    if time.time() - os.stat(name, dir_fd=handle).st_mtime > ABANDONED:
                        os.unlink(name, dir_fd=handle)
    finally:
        os.close(handle)
