"""The directory of a local archive, recognized by a marker file in it.

An unmounted volume leaves its mount point: an empty directory on another file system, or none. Messages stored there
would be acknowledged and lost from sight. So the root is created only before the first use. Afterwards a directory
without the same marker is an error, and writes are relative to a descriptor of the directory where the marker was
seen: no mount, unmount or rename can happen between the check and the write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from jetcapture_py.archive.layout import MARKER
from jetcapture_py.errors import StoreError
from jetcapture_py.store.local_files import make_directory, sync_directory, write_durably

LOCK_TIMEOUT = 5.0
"""Seconds to wait for a lock, which a stopped process may keep."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_LINKS = {errno.EPERM, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_OURS = {"lost+found", "_probe"}
"""Names that an empty archive may contain besides hidden files."""


class ArchiveRoot:
    """The directory at `path`. With `unmarked`, one in which no marker may be written is recognized by its inode.

    `new` says whether this process made an archive of an empty directory. May be used from several threads.
    """

    def __init__(self, path: str, *, unmarked: bool = False) -> None:
        self.path = path
        self.new = False
        self._unmarked = unmarked
        self._opening = threading.Lock()
        self._id: str | None = None  # None before the first use; "" without a marker
        self._seen: tuple[int, ...] = ()

    @property
    def known(self) -> bool:
        """Whether it has been used, and must be the same from now on."""
        return self._id is not None

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of the directory. Raises OSError when it is not the archive that it was; StoreError when its
        marker is damaged."""
        with self._opening:
            if self._id is None:
                self._first_use()
        try:
            handle = os.open(self.path, _DIRECTORY)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._lost("it does not exist") from error
        try:
            self._check(handle)
            yield handle
        finally:
            os.close(handle)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the archive against other threads and processes, where its file system supports locks.

        Raises OSError when it stays locked.
        """
        with self.opened() as handle:
            try:
                file = os.open(MARKER, os.O_RDWR | os.O_CLOEXEC, dir_fd=handle)  # NFS locks only what may be written
            except PermissionError:
                file = os.open(MARKER, os.O_RDONLY | os.O_CLOEXEC, dir_fd=handle)
        try:
            _lock(file)
            yield
        finally:
            os.close(file)  # and with it, unlocked

    def _check(self, handle: int) -> None:
        if not self._id:
            if _identity(os.fstat(handle)) != self._seen:
                raise self._lost("it is a different directory")
            return
        try:
            found = os.stat(MARKER, dir_fd=handle)
        except FileNotFoundError as error:
            raise self._lost(f"it has no {MARKER}") from error
        seen = (*_identity(found), found.st_ctime_ns)
        if seen != self._seen:  # mounted again, restored, or another archive
            if _read_marker(handle, self.path) != self._id:
                raise OSError(errno.ENXIO, f"{self.path} is a different archive than before; restart to use it")
            self._seen = seen

    def _lost(self, reason: str) -> OSError:
        text = f"{self.path} is not the archive that was here before: {reason}; is it mounted?"
        return OSError(errno.ENXIO, text)

    def _first_use(self) -> None:
        """Create the directory and its marker where they are missing."""
        make_directory(self.path)
        handle = os.open(self.path, _DIRECTORY)
        try:
            marker = _read_marker(handle, self.path)
            if marker is None:
                names = os.listdir(handle)  # noqa: PTH208  a descriptor, not a path
                empty = all(name.startswith(".") or name in _NOT_OURS for name in names)
                try:
                    self.new = _write_marker(handle) and empty
                    marker = _read_marker(handle, self.path)  # of several replicas that start together, one wrote it
                except OSError as error:
                    if not self._unmarked or error.errno not in _REFUSED:
                        raise
            if marker is None and not self._unmarked:
                raise self._lost(f"it has no {MARKER}")
            self._id = marker or ""
            self._seen = () if marker else _identity(os.fstat(handle))
        finally:
            os.close(handle)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _write_marker(handle: int) -> bool:
    """Write a marker, whole and durable before it is visible where the file system has links; False if one is there."""
    data = json.dumps({"format": 1, "id": uuid.uuid4().hex}).encode() + b"\n"
    hidden = f"{MARKER}.{uuid.uuid4().hex}.tmp"
    written = True
    try:
        write_durably(hidden, data, handle)
        os.link(hidden, MARKER, src_dir_fd=handle, dst_dir_fd=handle)
    except FileExistsError:
        written = False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            write_durably(MARKER, data, handle)
        except FileExistsError:
            written = False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(hidden, dir_fd=handle)
    sync_directory(".", handle)
    return written


def _lock(file: int) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise OSError(errno.EAGAIN, f"another process keeps {MARKER} locked") from error
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise
        time.sleep(0.01)


def _read_marker(handle: int, root: str) -> str | None:
    """The id in the marker, None where there is none. Raises StoreError when it is damaged."""
    try:
        file = os.open(MARKER, os.O_RDONLY | os.O_CLOEXEC, dir_fd=handle)
    except FileNotFoundError:
        return None
    try:
        data = os.read(file, 4096)
    finally:
        os.close(file)
    try:
        found = json.loads(data)["id"]
    except (ValueError, TypeError, KeyError):
        found = None
    if not isinstance(found, str) or not found:
        raise StoreError(f"{root}/{MARKER} is damaged; remove it if {root} is the archive, and restart")
    return found
