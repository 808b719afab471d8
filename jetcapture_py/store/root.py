"""The directory of a local archive, identified by a marker file in it.

An unmounted volume leaves an empty mount point on another file system, or no directory. Messages stored there would be
acknowledged but hidden once the volume is mounted again. So the root is created only on first use. Afterwards a
directory without the same marker is an error, and writes are relative to a descriptor of the directory with the marker:
no mount, unmount or rename can happen between the check and the write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import struct
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec

from jetcapture_py.archive.layout import MARKER, PROBE
from jetcapture_py.errors import StoreError
from jetcapture_py.store.local_files import NO_LINKS, make_directory, rename, sync_directory, write_durably

LOCK_TIMEOUT = 5.0
"""Seconds to wait for a lock, which a suspended process may hold."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
NOT_OURS = {"lost+found", PROBE}
"""Names in a directory that still counts as empty, besides hidden files."""


class _Marker(msgspec.Struct, frozen=True, tag_field="format", tag=1):
    id: Annotated[str, msgspec.Meta(min_length=1)]


class ArchiveRoot:
    """The directory at `path`. With `unmarked`, a directory without write permission is identified by its inode.

    `new`: it was empty at the first use. Thread-safe.
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
        """Whether the directory has been used, and so must stay the same."""
        return self._id is not None

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open the directory and yield its descriptor. Raises OSError if it is not the same archive as before, and
        StoreError if its marker is damaged."""
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
    def locked(self, name: str) -> Iterator[None]:
        """Lock a metadata file's path, or another name, against threads and processes, if the file system has locks.

        Raises OSError after `LOCK_TIMEOUT`, and if the marker cannot be written to, which a lock requires.
        """
        with self.opened() as handle:
            try:
                file = os.open(MARKER, os.O_RDWR | os.O_CLOEXEC, dir_fd=handle)
            except PermissionError as error:
                raise OSError(error.errno, f"this user cannot lock {name}: make {MARKER} writable") from error
        try:
            _lock(file, name)
            yield
        finally:
            os.close(file)  # also unlocks

    def try_out(self) -> bool:
        """Write, rename and remove a file in the archive's directory, or where it would be created.

        Return whether the directory is empty or missing. Raises OSError, and StoreError if its marker is damaged.
        """
        path, missing = self.path, False
        while True:
            try:
                handle = os.open(path, _DIRECTORY)
                break
            except FileNotFoundError:
                path, missing = _parent(path), True
        try:
            hidden = f".{PROBE}.{uuid.uuid4().hex}.tmp"
            renamed = f"{hidden}.tmp"
            marker = None if missing else _read_marker(handle, self.path)
            try:
                write_durably(hidden, b"jetcapture", handle)
                rename(hidden, renamed, handle)
                os.unlink(renamed, dir_fd=handle)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.unlink(hidden, dir_fd=handle)
                if missing or marker or not self._unmarked or error.errno not in _REFUSED:
                    raise
            return missing or _is_empty(handle)
        finally:
            os.close(handle)

    def _check(self, handle: int) -> None:
        if not self._id:
            if _identity(os.fstat(handle)) != self._seen:
                raise self._lost("it is a different directory")
            return
        try:
            status = os.stat(MARKER, dir_fd=handle)
        except FileNotFoundError as error:
            raise self._lost(f"it has no {MARKER}") from error
        seen = (*_identity(status), status.st_ctime_ns)
        if seen != self._seen:  # remounted, restored, or another archive
            if _read_marker(handle, self.path) != self._id:
                raise OSError(errno.ENXIO, f"{self.path} is a different archive than before; restart to use it")
            self._seen = seen

    def _lost(self, reason: str) -> OSError:
        text = f"{self.path} is not the archive that was here before: {reason}; is it mounted?"
        return OSError(errno.ENXIO, text)

    def _first_use(self) -> None:
        """Create the directory and its marker if missing."""
        make_directory(self.path)
        handle = os.open(self.path, _DIRECTORY)
        try:
            marker = _read_marker(handle, self.path)
            self.new = _is_empty(handle)
            if marker is None:
                try:
                    _write_marker(handle)
                    marker = _read_marker(handle, self.path)  # another replica may have written it
                except OSError as error:
                    if not self._unmarked or error.errno not in _REFUSED:
                        raise
            if marker is None and not self._unmarked:
                raise self._lost(f"it has no {MARKER}")
            self._id = marker or ""
            self._seen = () if marker else _identity(os.fstat(handle))
        finally:
            os.close(handle)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or ("/" if path.startswith("/") else ".")


def _is_empty(handle: int) -> bool:
    """Whether a directory has nothing but hidden and foreign files."""
    names = os.listdir(handle)
    return all(name.startswith(".") or name in NOT_OURS for name in names)


def _write_marker(handle: int) -> None:
    """Write a marker unless one exists, atomically if the file system supports hard links."""
    data = msgspec.json.encode(_Marker(id=uuid.uuid4().hex)) + b"\n"
    hidden = f"{MARKER}.{uuid.uuid4().hex}.tmp"
    try:
        write_durably(hidden, data, handle)
        os.link(hidden, MARKER, src_dir_fd=handle, dst_dir_fd=handle)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with contextlib.suppress(FileExistsError):
            write_durably(MARKER, data, handle)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(hidden, dir_fd=handle)
    sync_directory(".", handle)


def _lock(file: int, name: str) -> None:
    """Lock the name's byte in the marker. The lock belongs to the open file, so it excludes threads, too."""
    start = int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=7).digest())
    request = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            if sys.platform == "linux":
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, request)
            else:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # one lock for all files
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                reason = f"another capture or command has kept it locked for {LOCK_TIMEOUT:g} s"
                raise OSError(errno.EAGAIN, f"{name}: {reason}") from error
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return
            raise
        time.sleep(0.01)


def _read_marker(handle: int, root: str) -> str | None:
    """Return the id in the marker, None without one. Raises StoreError if it is damaged."""
    try:
        file = os.open(MARKER, os.O_RDONLY | os.O_CLOEXEC, dir_fd=handle)
    except FileNotFoundError:
        return None
    try:
        data = os.read(file, 4096)
    finally:
        os.close(file)
    try:
        return msgspec.json.decode(data, type=_Marker).id
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        remedy = f"if {root} is the archive, delete only this file, then restart"
        raise StoreError(f"{root}/{MARKER} is damaged: {error}; {remedy}") from error
