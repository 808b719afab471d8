"""Keep rows and objects that do not fit in memory in files on local disk. The files do not survive a restart.

Every process has its own locked directory below the configured one; those of dead processes are removed when another
process starts. Rows are Arrow IPC files, mapped into memory, so the system can reclaim their pages at any time. Nothing
is synced: after a crash the server delivers the messages again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from jetcapture_py.archive.schema import REPLY

_NEW, _LOCK, _SUFFIXES = ".jetcapture-", "lock", (".arrow", ".object")
_NAMED = re.compile(r"\.?jetcapture-[a-z0-9_]{8}")
"""Names of directories, as `tempfile.mkdtemp` makes them."""
_ABANDONED = 3600.0
"""Age in seconds after which an unfinished directory belongs to a dead process."""
MOST_FILES = 20_000
"""Files of rows at once. Each is mapped, and Linux lets a process have 65,530 mappings (`vm.max_map_count`)."""


class UsedUpError(OSError):
    """The spool is full. Not a failure: space will be freed."""


class Spool:
    """Files in `path` of at most `size` bytes in total. Methods raise OSError and may be called from any thread.

    Spooled rows, with up to `resident` bytes of rows from memory, are later written to an object of up to `growth`
    times that size. Space for it is reserved, here and on the disk.
    """

    def __init__(self, path: Path, size: int, resident: int = 0, growth: int = 1) -> None:
        self.path, self.size = path, size
        self._resident, self._growth = resident, growth
        self._names = count()
        self._lock, self._opening = threading.Lock(), threading.Lock()
        self._rows = self._objects = self._files = 0
        self._freed: deque[int] = deque()
        self.threads = ThreadPoolExecutor(1, "spool")
        self._directory: Path | None = None
        self._held: IO[bytes] | None = None

    @property
    def bytes(self) -> int:
        """Total bytes of the files."""
        with self._lock:
            return self._used()

    def has_room(self, size: int, *, spare: bool = True) -> bool:
        """Whether rows of `size` bytes fit, and, with `spare`, also the object written from them."""
        with self._lock:
            return self._has_room(size, spare=spare)

    def _has_room(self, size: int, *, spare: bool) -> bool:
        if spare and self._files >= MOST_FILES:
            return False
        kept = self._growth * (self._rows + size + self._resident) if spare else 0
        return self._used() + size + kept <= self.size

    def _used(self) -> int:
        """Bytes in all files, without what was freed since; the lock must be held."""
        while self._freed:
            self._objects -= self._freed.popleft()
        return self._rows + self._objects

    def open(self) -> None:
        """Create this process's directory, and remove those of dead processes."""
        self._opened()

    def write(self, batch: pa.RecordBatch, *, spare: bool = True) -> tuple[pa.RecordBatch, SpoolFile]:
        """Write rows; return the same rows, mapped, and their file.

        The ack subjects stay in memory: keeping messages alive must not wait for a disk.
        """
        position = batch.schema.get_field_index(REPLY)
        stored = batch.remove_column(position)
        size = int(stored.nbytes)
        with self._lock:
            if not self._has_room(size, spare=spare):
                raise UsedUpError(errno.ENOSPC, "limits.spool.size is used up")
            needed = size + self._growth * (self._rows + size + self._resident)
            self._rows += size
            self._files += 1
        path, file = None, None
        try:
            self._check_disk(needed)
            path = self._new("arrow")
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, stored.schema) as writer:
                writer.write_batch(stored)
            with pa.memory_map(str(path)) as source:  # the mapping stays until its last column is gone
                mapped = pa.ipc.open_file(source).get_batch(0)
            file = SpoolFile(self, path, size)
        finally:
            if file is None:
                self._forget(path, size)
        replies = batch.column(position).take(pa.array(np.arange(len(batch))))  # a copy, that holds nothing else
        return mapped.add_column(position, batch.schema.field(position), replies), file

    def sink(self) -> SpoolSink:
        """Create a file for an object."""
        return SpoolSink(self, self._new("object"))

    def close(self) -> None:
        """Remove the directory."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        if self._held is not None:
            self._held.close()
            self._held = None

    def took(self, size: int) -> None:
        """Count bytes of an object that are about to be written."""
        with self._lock:
            if self._used() + size > self.size:
                raise UsedUpError(errno.ENOSPC, "limits.spool.size is used up")
            self._objects += size

    def freed(self, size: int) -> None:
        """Count bytes of removed objects. Takes no lock, because the garbage collector may call it anywhere."""
        self._freed.append(size)

    def forget(self, file: SpoolFile) -> None:
        """Remove a file of rows."""
        self._forget(file.path, file.size)

    def _forget(self, path: Path | None, size: int) -> None:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()
        with self._lock:
            self._rows -= size
            self._files -= 1

    def _check_disk(self, needed: int) -> None:
        """Raise OSError if the disk has less free space than needed."""
        disk = os.statvfs(self._opened())
        if disk.f_bavail * disk.f_frsize < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _new(self, suffix: str) -> Path:
        return self._opened() / f"{next(self._names)}.{suffix}"

    def _opened(self) -> Path:
        """Return this process's directory; create it on first use."""
        with self._opening:
            if self._directory is None:
                self.path.mkdir(parents=True, exist_ok=True)
                _sweep(self.path)
                new = Path(tempfile.mkdtemp(prefix=_NEW, dir=self.path))
                self._held = (new / _LOCK).open("wb")
                with contextlib.suppress(OSError):  # a file system without locks: nobody sweeps there
                    fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._directory = new.rename(self.path / new.name.removeprefix("."))
            return self._directory


class SpoolFile:
    """A file of mapped rows."""

    def __init__(self, spool: Spool, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self._spool: Spool | None = spool

    def release(self) -> None:
        """Remove the file in the background; rows in use stay readable."""
        spool, self._spool = self._spool, None
        if spool is not None:
            with contextlib.suppress(RuntimeError):  # the spool is closed
                spool.threads.submit(spool.forget, self)


class SpoolSink:
    """An unnamed file that an object is written to. It disappears with its last use."""

    def __init__(self, spool: Spool, path: Path) -> None:
        self._spool = spool
        self._size = 0
        self._file = path.open("w+b", buffering=0)
        path.unlink()
        self.failed = False

    @property
    def closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._file.closed

    def write(self, data: Any) -> int:
        """Append bytes. Raises OSError without enough space."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            self._spool.took(size)
            self._size += size
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self.failed = True
            raise
        return size

    def tell(self) -> int:
        """Bytes written."""
        return self._size

    def flush(self) -> None:
        """Nothing is buffered."""

    def getvalue(self) -> pa.Buffer:
        """Return everything written, as a writable mapping."""
        try:
            mapped = mmap.mmap(self._file.fileno(), self._size)
        except (OSError, ValueError):
            self.failed = True
            raise
        self._file.close()
        weakref.finalize(mapped, self._spool.freed, self._size)
        self._size = 0
        return pa.py_buffer(mapped)

    def clear(self) -> None:
        """Discard what was written."""
        try:
            self._file.seek(0)
            self._file.truncate()
        except OSError:
            self.failed = True
            raise
        self._spool.freed(self._size)
        self._size = 0

    def close(self) -> None:
        """Discard an unfinished object."""
        self._file.close()
        self._spool.freed(self._size)
        self._size = 0


def _sweep(path: Path) -> None:
    """Remove the directories of processes that no longer run, and nothing else that is there."""
    for directory in path.iterdir():
        new = directory.name.startswith(_NEW)
        if _NAMED.fullmatch(directory.name) and (not new or time.time() - directory.stat().st_mtime > _ABANDONED):
            with contextlib.suppress(OSError):  # locked, or with something in it that is not ours
                _remove_unlocked(directory)


def _remove_unlocked(directory: Path) -> None:
    """Remove a directory if its lock is free. Raises OSError if it is held, or if other files are there."""
    with contextlib.suppress(FileNotFoundError), (directory / _LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in directory.iterdir():
            if path.suffix in _SUFFIXES:
                path.unlink()
        (directory / _LOCK).unlink()
    directory.rmdir()
