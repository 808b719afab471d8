"""Object stores. Objects appear atomically, and are durable once `put` has returned.

Retries, parallelism and buffering are up to the caller.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from jetcapture_py import plugins
from jetcapture_py.archive import watermark
from jetcapture_py.archive.layout import PROBE, ObjectName
from jetcapture_py.archive.removed import Erased
from jetcapture_py.errors import ConfigError, FullStoreError, JetcaptureError, PermanentStoreError, StoreError
from jetcapture_py.store.fast import UnsupportedError, open_fast
from jetcapture_py.store.local_files import NO_RENAME, link, make_directory, rename, sync_directory, write_durably
from jetcapture_py.store.ports import NoteChange as NoteChange
from jetcapture_py.store.ports import NoteStore as NoteStore
from jetcapture_py.store.ports import Store as Store
from jetcapture_py.store.remote import EXTRAS, RemoteStore, open_remote, root_of
from jetcapture_py.store.root import ArchiveRoot
from jetcapture_py.text import without_credentials

if TYPE_CHECKING:
    from jetcapture_py.config.model import StoreConfig

_LOCAL_PERMANENT = {
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


def change_note(store: NoteStore, path: str, change: NoteChange) -> None:
    """Change a note as `NoteStore` does. Raises JetcaptureError, whatever a store of the user raises."""
    with users_errors():
        store.change_note(path, change)


def notes_of(store: Store, url: str) -> NoteStore | None:
    """Return the store of the archive's notes; None if it cannot keep them, or if every key has a root of its own."""
    return store if isinstance(store, NoteStore) and "{key}" not in url else None


def read_erased(store: NoteStore | None, stream: str, known: Erased) -> Erased:
    """Return which messages of a stream were erased, as `Erased.read`; `known` without a store of notes.

    Raises JetcaptureError, whatever a store of the user raises.
    """
    if store is None:
        return known
    with users_errors():
        return Erased.read(stream, store.list_notes, lambda paths: map(store.read_note, paths), known)


def users_errors() -> AbstractContextManager[None]:
    """Turn whatever a store of the user raises into StoreError; let JetcaptureError pass."""
    return plugins.user_code(StoreError, JetcaptureError, KeyboardInterrupt)


def read_own_watermark(store: NoteStore, stream: str, consumer: str) -> watermark.ConsumerWatermark | None:
    """Read the file of a consumer, None without one. Raises JetcaptureError, whatever a store raises."""
    path = watermark.path(stream, consumer)
    with users_errors():
        data = store.read_note(path)
    return None if data is None else watermark.ConsumerWatermark.decode(data, stream, path)


def read_watermark(store: NoteStore, stream: str) -> watermark.Watermark | None:
    """Read the archive's watermark of a stream; None without one. Raises JetcaptureError, whatever a store raises."""
    with users_errors():
        names = store.list_notes(watermark.directory(stream))
        return watermark.read(stream, names, lambda paths: map(store.read_note, paths))


def removal_of(url: str, options: Mapping[str, Any], path: str) -> str:
    """Return a command that removes a small file of the archive at `url`; without one, an instruction."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in ("file", "local"):
        return f"rm {shlex.quote(f'{root_of(rest if separator else url, None)}/{path}')}"
    place, kind = f"{rest.rstrip('/')}/{path}", EXTRAS.get(scheme)
    if kind == "s3":
        client = options.get("client_kwargs") or {}
        flags = {
            "endpoint-url": options.get("endpoint_url") or client.get("endpoint_url"),
            "profile": options.get("profile"),
        }
        return f"aws s3 rm {shlex.quote(f's3://{place}')}{_flags(flags)}"
    if kind == "azure":
        container, _, name = place.partition("/")
        container, _, host = container.partition("@")
        account = host.partition(".")[0] or options.get("account_name")
        flags = {"account-name": account, "container-name": container, "name": name}
        return f"az storage blob delete{_flags(flags)}"
    return f"remove {without_credentials(f'{scheme}://{place}')}"


def _flags(flags: Mapping[str, Any]) -> str:
    return "".join(f" --{flag} {shlex.quote(str(value))}" for flag, value in flags.items() if value)


def configured_store(config: StoreConfig) -> Store:
    """The configured store: the user's own, or the one for the URL. Raises `ConfigError`."""
    if not config.type:
        return open_store(config.url, config.options, config.driver)
    try:
        return _users_store(config.type, config.url, config.options)
    except ValueError as error:
        raise ConfigError(f"store.type: {error}") from error


def _users_store(reference: str, url: str, options: Mapping[str, Any]) -> Store:
    store = plugins.load(reference)
    if callable(store):
        store = plugins.created(reference, partial(store, url, options), JetcaptureError, ImportError)
    for method in ("put", "probe"):
        if not callable(getattr(store, method, None)):
            raise ValueError(f"{reference} is not a store: it has no method {method}")
    return cast("Store", store)


def open_store(url: str, options: Mapping[str, Any], driver: str = "fsspec") -> Store:
    """Open the store at `url` with a value of `store.driver`; `options` are fsspec's.

    Raises `ConfigError` if a package is missing, or if the driver cannot be used.
    """
    scheme, separator, rest = url.partition("://")
    local = not separator or scheme in ("file", "local")
    reason = ""
    if driver != "fsspec" and scheme in EXTRAS:
        try:
            return open_fast(scheme, rest, options)
        except UnsupportedError as error:
            reason = str(error)
    elif driver == "obstore":
        reason = f"obstore is for S3 and Azure, not for {'local directories' if local else f'{scheme}://'}"
    if driver == "obstore":
        raise ConfigError(f"store.driver: {reason}")
    if local:
        return LocalStore(rest if separator else url)
    store = open_remote(scheme, rest, options)
    store.reason = reason
    return store


def driver_of(store: Store) -> dict[str, str]:
    """Return the `driver` of a store that is not local, and the `reason` if `auto` has not chosen obstore."""
    if not isinstance(store, RemoteStore):
        return {}
    return {"driver": store.driver, **({"reason": store.reason} if store.reason else {})}


class LocalStore:
    """A directory. Files are written to a hidden sibling, synced and renamed, then the directory is synced. An existing
    object is not replaced: one of the same name has the same messages.

    If the directory has been replaced since the first use, for example by an unmount, writes raise `StoreError` (see
    `store.root`). With `{key}` in `root`, this applies to the directory above the first part with `{key}`.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        head, divided, _ = root.partition("{key}")
        self._base = head.rpartition("/")[0] if divided else root_of(root, None)
        default = "/" if root.startswith("/") else "."
        self._archive = ArchiveRoot(self._base or default, unmarked=bool(divided))
        self._known: set[str] = set()

    @property
    def new(self) -> bool:
        """Whether the archive was empty when this process first used it."""
        return self._archive.new

    def try_out(self) -> bool:
        """Store and remove a small file and leave nothing behind; return whether the archive is empty or missing."""
        with _explained(self._archive.path):
            return self._archive.try_out()

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        """Store `data` durably under its name, unless that exists."""
        path = f"{root_of(self.root, name.key)}/{name.path}"
        self._publish(path, data, link)
        return path

    def probe(self) -> None:
        """Store and remove a small object; with a root per key, only check the directory."""
        if "{key}" in self.root:
            with _explained(self._archive.path), self._archive.opened():
                return
        path = f"{root_of(self.root, None)}/{PROBE}/{uuid.uuid4().hex}"
        self._publish(path, pa.py_buffer(b"jetcapture"))
        with contextlib.suppress(OSError):
            Path(path).unlink()

    def read_note(self, path: str) -> bytes | None:
        """Read a small file; return None if it does not exist."""
        try:
            if self._archive.known:
                with self._archive.opened():
                    pass
            return Path(f"{root_of(self.root, None)}/{path}").read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error

    def list_notes(self, directory: str) -> list[str]:
        """List the small files in a directory; none if it does not exist."""
        try:
            names = [entry.name for entry in Path(f"{root_of(self.root, None)}/{directory}").iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"cannot list {directory}: {error.strerror or error}") from error
        return sorted(f"{directory}/{name}" for name in names)

    def write_note(self, path: str, data: bytes) -> None:
        self._publish(f"{root_of(self.root, None)}/{path}", pa.py_buffer(data))

    def change_note(self, path: str, change: NoteChange) -> None:
        """Replace a small file with the result of `change` for its content, under a lock."""
        with self.locked(path):
            if (data := change(self.read_note(path))) is not None:
                self.write_note(path, data)

    @contextlib.contextmanager
    def locked(self, what: str) -> Iterator[None]:
        """Lock the path of a small file, or another name. Raises StoreError."""
        with _explained(self._archive.path), self._archive.locked(what):
            yield

    def _publish(self, path: str, data: pa.Buffer, move: Callable[[str, str, int], None] = rename) -> None:
        directory, _, name = path.rpartition("/")
        below = directory[len(self._base) + 1 :] if self._base or path.startswith("/") else directory
        hidden, visible = f"{below}/.{name}.{uuid.uuid4().hex}.tmp", f"{below}/{name}"
        with _explained(directory), self._archive.opened() as root:
            try:
                self._prepare(below, root)
                try:
                    write_durably(hidden, data, root)
                except FileNotFoundError:  # an erasure has removed the empty directory
                    self._known.discard(below)
                    self._prepare(below, root)
                    write_durably(hidden, data, root)
                move(hidden, visible, root)
                sync_directory(below, root)
            except BaseException:
                self._known.discard(below)
                with contextlib.suppress(OSError):
                    os.unlink(hidden, dir_fd=root)
                raise

    def _prepare(self, directory: str, root: int) -> None:
        """Create the directory, or remove abandoned files in it, once."""
        if directory not in self._known:
            if len(self._known) > _MAX_KNOWN:
                self._known.clear()
            if not make_directory(directory, root):
                _sweep(directory, root)
            self._known.add(directory)


@contextlib.contextmanager
def _explained(directory: str) -> Iterator[None]:
    """Turn an OSError into `StoreError`, `FullStoreError` or `PermanentStoreError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise FullStoreError(f"cannot write {directory}: {_FULL[error.errno]}") from error
        kind = PermanentStoreError if error.errno in _LOCAL_PERMANENT else StoreError
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
