"""Where objects are kept. An object appears whole or not at all, and is durable once `put` has returned.

Everything else is left to the caller: retries, parallelism, and holding the data meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import fsspec
import pyarrow as pa

from jetcapture_py.errors import ConfigError, PermanentStoreError, StoreError
from jetcapture_py.layout import ObjectName, escape_key
from jetcapture_py.log import one_line

PROBE = "_probe"
EXTRAS = {"s3": "s3", "s3a": "s3", "abfs": "azure", "abfss": "azure", "az": "azure"}
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
_REMOTE_PERMANENT = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "ParamValidationError",
    "ClientAuthenticationError",
    "CredentialUnavailableError",
}
_SINGLE_PUT = 3 << 30
"""s3fs sends objects of up to twice this size as one PUT: nothing is left behind by a process that dies in it."""
_LONGEST_ERROR = 300
_MOST_KNOWN = 100_000
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


def open_store(url: str, options: Mapping[str, Any]) -> Store:
    """The store for `url`; `options` go to fsspec. Raises `ConfigError` when a package for it is missing."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in ("file", "local"):
        return LocalStore(rest if separator else url)
    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        extra = EXTRAS.get(scheme)
        hint = f"install it with: pip install 'jetcapture[{extra}]'" if extra else str(error)
        raise ConfigError(f"store.url: {scheme}:// is not available here; {hint}") from error
    try:
        return FsspecStore(scheme, rest, options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"store.options: {scheme}:// cannot be used with them; {one_line(error)[:_LONGEST_ERROR]}"
        ) from error


def _root(template: str, key: str | None) -> str:
    """The archive's root for `key`, which alone between two slashes must not be a way up."""
    name = escape_key(key)
    return template.replace("{key}", "%2E" * len(name) if not name.strip(".") else name).rstrip("/")


class LocalStore:
    """A directory. Objects are written to a hidden sibling, synced, renamed, and the directory is synced."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._known: set[str] = set()

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        """Store `data` durably under its name."""
        path = f"{_root(self.root, name.key)}/{name.path}"
        self._publish(path, data)
        return path

    def probe(self) -> None:
        """Store and remove a small object; with a root for every key there is no one place to try."""
        if "{key}" in self.root:
            return
        path = f"{_root(self.root, None)}/{PROBE}/{uuid.uuid4().hex}"
        self._publish(path, pa.py_buffer(b"jetcapture"))
        Path(path).unlink()

    def read_note(self, path: str) -> bytes | None:
        """A small file's content; None when it does not exist."""
        try:
            return Path(f"{_root(self.root, None)}/{path}").read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error

    def write_note(self, path: str, data: bytes) -> None:
        """Replace a small file."""
        self._publish(f"{_root(self.root, None)}/{path}", pa.py_buffer(data))

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
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _make_directory(directory: str) -> bool:
    """Create `directory` and what is above it, durably; False when it was there already."""
    parent = directory.rpartition("/")[0] or "/"
    try:
        os.mkdir(directory)  # noqa: PTH102  as in `_publish`
    except FileNotFoundError:
        _make_directory(parent)
        return _make_directory(directory)
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


class FsspecStore:
    """Any fsspec file system whose writes are atomic: S3, Azure, Google, memory. Objects go up whole, in one call."""

    def __init__(self, scheme: str, root: str, options: Mapping[str, Any]) -> None:
        self.scheme = scheme
        self.root = root
        self.fs = fsspec.filesystem(scheme, **options)
        # aiohttp fears for the event loop; this one is fsspec's own, in a thread where nothing else waits
        warnings.filterwarnings("ignore", "Sending a large body directly", ResourceWarning)
        self._put_options = {"chunksize": _SINGLE_PUT} if scheme in ("s3", "s3a") else {}

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        """Store `data` under its name."""
        path = f"{_root(self.root, name.key)}/{name.path}"
        self._pipe(path, data.to_pybytes())
        return f"{self.scheme}://{path}"

    def probe(self) -> None:
        """Store a small object, and remove it where that is allowed; not with a root for every key."""
        if "{key}" in self.root:
            return
        path = f"{_root(self.root, None)}/{PROBE}/{uuid.uuid4().hex}"
        self._pipe(path, b"jetcapture")
        with contextlib.suppress(Exception):
            self.fs.rm_file(path)

    def read_note(self, path: str) -> bytes | None:
        """A small file's content; None when it does not exist."""
        try:
            return bytes(self.fs.cat_file(f"{_root(self.root, None)}/{path}"))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise StoreError(f"cannot read {path}: {one_line(error)[:_LONGEST_ERROR]}") from error

    def write_note(self, path: str, data: bytes) -> None:
        """Replace a small file."""
        self._pipe(f"{_root(self.root, None)}/{path}", data)

    def _pipe(self, path: str, data: bytes) -> None:
        try:
            self.fs.pipe_file(path, data, **self._put_options)
        except Exception as error:
            kind = PermanentStoreError if _is_permanent(error) else StoreError
            place = f"{self.scheme}://{path.rsplit('/', 1)[0]}"
            raise kind(f"cannot write {place}: {one_line(error)[:_LONGEST_ERROR]}") from error


def _is_permanent(error: BaseException) -> bool:
    """Whether only a person can change it: credentials, permissions, a missing bucket or container."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, PermissionError | FileNotFoundError) or type(seen).__name__ in _REMOTE_PERMANENT:
            return True
        if getattr(seen, "status_code", None) in (401, 403, 404):
            return True
        seen = seen.__cause__
    return False
