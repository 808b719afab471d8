"""Spool rows and objects that do not fit in memory to local disk, and choose which ones.

The files have no names: they disappear with their last use, or with the process. Rows are Arrow IPC files, mapped into
memory, so the system can reclaim their pages at any time. Nothing is synced: after a crash the server delivers the
messages again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import pyarrow as pa

from jetcapture_py.archive.schema import REPLY
from jetcapture_py.capture.allocator import Resident
from jetcapture_py.capture.blocks import Blocks, Chunk
from jetcapture_py.config.shares import RELEASE_SHARE, SPOOL_SHARE, SPOOL_TARGET_SHARE
from jetcapture_py.log import LogLimit, event
from jetcapture_py.threads import DaemonThread, in_pool

log = logging.getLogger("jetcapture.spool")

MAX_FILES = 20_000
"""Files of rows at once. Each is mapped, and Linux lets a process have 65,530 mappings (`vm.max_map_count`)."""
TIMEOUT = 10.0
"""Seconds that the disk may take for one step."""
RETRY = 10.0
"""Seconds after a failure before the spool is tried again; until then blocks are sealed early."""
QUIET = 300.0
"""Minimum seconds between log lines about failures."""
SMALL = 256 << 10
"""Remaining bytes below which a spooled chunk returns to memory, where it is merged with others."""

T = TypeVar("T")


class UsedUpError(OSError):
    """The spool is full. Not a failure: space will be freed."""


class Spool:
    """Files in `path` of at most `size` bytes in total. Methods raise OSError and may be called from any thread.

    Spooled rows, with up to `resident` bytes of rows from memory, are later written to an object of up to `growth`
    times that size. Space for it is reserved, here and on the disk.
    """

    def __init__(self, path: Path, size: int, resident: int = 0, growth: int = 1) -> None:
        self.path, self.size = path, size
        self.disk = DaemonThread("spool-disk")
        self._resident, self._growth = resident, growth
        self._lock = threading.Lock()
        self._taken = Counter[str]()
        self._freed: deque[tuple[str, int]] = deque()

    @property
    def bytes(self) -> int:
        """Total bytes of the files."""
        with self._lock:
            return self._used()

    def has_room(self, size: int, *, spare: bool = True) -> bool:
        """Whether rows of `size` bytes fit, and, with `spare`, also the object written from them."""
        with self._lock:
            used = self._used() + size
            if not spare:
                return used <= self.size
            return used + self._reserved(size) <= self.size and self._taken["files"] < MAX_FILES

    def write(self, rows: pa.RecordBatch, *, spare: bool = True) -> pa.RecordBatch:
        """Write rows; return the same rows, mapped. Their file is removed with their last use.

        The ack subjects stay in memory: keeping messages alive must not wait for a disk.
        """
        position = rows.schema.get_field_index(REPLY)
        stored = rows.remove_column(position)
        size = int(stored.nbytes)
        if not self.has_room(size, spare=spare):
            raise UsedUpError(errno.ENOSPC, "limits.spool.size is used up")
        with SpoolFile(self, "rows", needed=size + self._reserved(size)) as file:
            with pa.ipc.new_file(file, stored.schema) as writer:
                writer.write_batch(stored)
            mapped = pa.ipc.open_file(pa.BufferReader(file.getvalue())).get_batch(0)
        replies = pa.concat_arrays([rows.column(position)])  # a copy, that holds nothing else
        return mapped.add_column(position, rows.schema.field(position), replies)

    def take(self, kind: str, size: int) -> None:
        """Reserve bytes of `kind` before they are written. Raises UsedUpError."""
        with self._lock:
            if self._used() + size > self.size:
                raise UsedUpError(errno.ENOSPC, "limits.spool.size is used up")
            self._taken[kind] += size

    def free(self, kind: str, size: int) -> None:
        """Count freed bytes. Takes no lock, because the garbage collector may call it anywhere."""
        self._freed.append((kind, size))

    def call(self, work: Callable[[], T]) -> T:
        """Make a blocking disk call. Raises its OSError, or TimeoutError if it takes too long."""
        if (self.disk.busy_for or 0) < TIMEOUT:
            future = self.disk.submit(work)
            try:
                return future.result(TIMEOUT)
            except TimeoutError:
                if future.done() and not future.cancelled():
                    raise  # the call's own
                if not future.cancel():
                    future.add_done_callback(_close_result)
            finally:
                del future, work  # an exception would hold them with the frame that it holds
        raise TimeoutError(errno.ETIMEDOUT, f"the disk did not answer within {TIMEOUT:.0f} s")

    def close(self) -> None:
        self.disk.close()

    def _used(self) -> int:
        """Bytes in all files, less the freed ones. The caller holds the lock."""
        while self._freed:
            kind, size = self._freed.popleft()
            self._taken[kind] -= size
        return self._taken["rows"] + self._taken["objects"]

    def _reserved(self, size: int) -> int:
        """Bytes reserved for the objects of all spooled rows and `size` bytes more."""
        return self._growth * (self._taken["rows"] + size + self._resident)


def _close_result(future: Future[Any]) -> None:
    """Close a file whose caller has timed out."""
    with suppress(Exception):
        future.result().close()


class SpoolFile:
    """A file without a name. Raises OSError unless the disk has room for `needed` bytes.

    `kind` is rows or objects. What is written is discarded with the context, unless `getvalue` was called.
    """

    def __init__(self, spool: Spool, kind: str = "objects", needed: int = 0) -> None:
        self._spool, self._kind, self._size = spool, kind, 0
        self._file = spool.call(partial(_created, spool.path, needed))
        spool.take("files", 1)
        self.closed = self.failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: Any) -> int:
        """Append bytes. Raises OSError without enough space."""
        rest = memoryview(data).cast("B")
        with self._noting_failure():
            self._spool.take(self._kind, len(rest))
            self._size += len(rest)
            self._spool.call(partial(_append, self._file, rest))
        return len(rest)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Nothing is buffered."""

    def getvalue(self) -> pa.Buffer:
        """Return everything written, as a writable mapping, and close the file."""
        with self._noting_failure():
            mapped = self._spool.call(lambda: mmap.mmap(self._file.fileno(), self._size))
            self._spool.take("files", 1)
        view = memoryview(mapped)
        weakref.finalize(view, _unmap, self._spool, mapped, self._kind, self._size)
        self._size = 0
        self.close()
        return pa.py_buffer(view)

    def clear(self) -> None:
        with self._noting_failure():
            self._spool.call(lambda: (self._file.seek(0), self._file.truncate()))
        self._spool.free(self._kind, self._size)
        self._size = 0

    def close(self) -> None:
        """Discard written data that was not returned."""
        if not self.closed:
            self.closed = True
            self._spool.free(self._kind, self._size)
            self._spool.free("files", 1)
            self._spool.disk.submit(self._file.close)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):
            self.failed = True
            raise


def _created(path: Path, needed: int) -> IO[bytes]:
    path.mkdir(parents=True, exist_ok=True)  # it may have been removed
    file = tempfile.TemporaryFile(dir=path, buffering=0)  # noqa: SIM115 - it is closed with its last use
    disk = os.fstatvfs(file.fileno())
    if disk.f_bavail * disk.f_frsize < needed:
        file.close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return file


def _append(file: IO[bytes], rest: memoryview) -> None:
    while rest:
        rest = rest[file.write(rest) :]


def _unmap(spool: Spool, mapped: mmap.mmap, kind: str, size: int) -> None:
    """Free a file's bytes after its last use."""
    spool.free(kind, size)
    spool.free("files", 1)
    spool.disk.submit(mapped.close)  # which removes the file


class Spooling:
    """Spools chunks of `blocks` while their open rows use more than a share of `memory` bytes.

    `active` while spooling. Never raises: rows that cannot be spooled stay in memory.
    """

    def __init__(self, blocks: Blocks, spool: Spool, memory: int) -> None:
        self.spool = spool
        self.active = False
        self.failures = 0
        self._blocks, self._memory = blocks, memory
        self._threads = ThreadPoolExecutor(1, "spool")
        self._resident = Resident(memory // RELEASE_SHARE)
        self._target = 0
        self._wake = asyncio.Event()
        self._retry_at = 0.0
        self._limit = LogLimit(QUIET)

    async def check(self) -> None:
        """Warn if no file can be created."""
        try:
            await in_pool(self._threads, lambda: SpoolFile(self.spool).close())
        except OSError as error:
            self.failed(error)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.spool.close()

    @property
    def works(self) -> bool:
        """Whether there was no failure in the last `RETRY` seconds."""
        return time.monotonic() >= self._retry_at

    def begin(self, *, starved: bool) -> bool:
        """Start spooling if memory is short, everything if `starved`. Return False if not needed or not possible."""
        if not self.active:
            enough = 0 if starved else self._memory // SPOOL_SHARE
            if self._blocks.resident <= enough or not self.works or self._next() is None:
                return False
            self.active = True
            self._wake.set()
        self._target = 0 if starved else self._memory // SPOOL_TARGET_SHARE
        return True

    async def steps(self) -> AsyncIterator[None]:
        """Wait for `begin`, then spool one chunk per step until enough is spooled or it fails."""
        await self._wake.wait()
        self._wake.clear()
        try:
            while self._blocks.resident > self._target and (chunk := self._next()) is not None:
                await self._spool(chunk)
                yield
        except (OSError, pa.ArrowException) as error:
            self.failed(error)
        finally:
            self.active = False

    def failed(self, error: Exception) -> None:
        """Record a failure, and pause spooling. May be called from any thread."""
        if isinstance(error, UsedUpError):
            return
        self.failures += 1
        self._retry_at = time.monotonic() + RETRY
        if times := self._limit.due(time.monotonic()):
            event(log, logging.WARNING, "spool.failed", path=self.spool.path, error=error, times=times)

    def _next(self) -> Chunk | None:
        """Return the oldest chunk with rows of open blocks if it fits, else a spooled one that can shrink."""
        chunk = next((chunk for chunk in self._blocks.large if chunk.open_size), None)
        if chunk is not None and self.spool.has_room(chunk.memory):
            return chunk
        sparse = (chunk for chunk in self._blocks.spooled if chunk.live * 2 < chunk.rows.num_rows)
        return next((chunk for chunk in sparse if self.spool.has_room(chunk.size, spare=False)), None)

    async def _spool(self, chunk: Chunk) -> None:
        kept, slices = chunk.kept()
        replaces, to_file = chunk.spooled, not chunk.spooled or chunk.size >= SMALL
        rows = await in_pool(self._threads, partial(self._moved, slices, to_file=to_file, spare=not replaces))
        self._blocks.move(chunk, rows, kept, spooled=to_file)

    def _moved(self, slices: Sequence[pa.RecordBatch], *, to_file: bool, spare: bool) -> pa.RecordBatch:
        self._resident.release_unused()  # earlier spooled rows
        rows = slices[0] if to_file and len(slices) == 1 else pa.concat_batches(slices)
        return self.spool.write(rows, spare=spare) if to_file else rows
