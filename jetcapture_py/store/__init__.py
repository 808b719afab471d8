"""Object stores. Objects appear atomically, and are durable once `put` has returned.

Retries, parallelism and buffering are up to the caller.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from jetcapture_py import plugins
from jetcapture_py.archive import inferred, watermark
from jetcapture_py.archive.removed import Erased
from jetcapture_py.errors import ConfigError, JetcaptureError, StoreError
from jetcapture_py.store.credentials import RenewedDriver
from jetcapture_py.store.fsspec import KINDS, FsspecDriver
from jetcapture_py.store.local import ABANDONED as ABANDONED
from jetcapture_py.store.local import LocalDriver, explained
from jetcapture_py.store.objects import ObjectStore, root_of
from jetcapture_py.store.obstore import ObstoreDriver, as_fsspec
from jetcapture_py.store.ports import NoteChange as NoteChange
from jetcapture_py.store.ports import NoteStore as NoteStore
from jetcapture_py.store.ports import Store as Store
from jetcapture_py.text import without_credentials

if TYPE_CHECKING:
    from jetcapture_py.config.model import StoreConfig


def change_note(store: NoteStore, path: str, change: NoteChange) -> None:
    """Change a metadata file as `NoteStore` does. Raises JetcaptureError for any error of a user's store."""
    with users_errors():
        store.change_note(path, change)


def notes_of(store: Store, url: str) -> NoteStore | None:
    """Return the store of the archive's metadata files; None if it cannot keep them, or with one root per key."""
    return store if isinstance(store, NoteStore) and "{key}" not in url else None


def read_erased(store: NoteStore | None, stream: str, known: Erased) -> Erased:
    """Return a stream's erased messages, as `Erased.read`; `known` without a store of metadata files.

    Raises JetcaptureError for any error of a user's store.
    """
    if store is None:
        return known
    with users_errors():
        return Erased.read(stream, store.list_notes, lambda paths: map(store.read_note, paths), known)


def read_inferred(store: NoteStore | None, stream: str, consumer: str) -> inferred.KnownTypes:
    """Read the types of a capture's inferred columns; none without a file, or a store of metadata files.

    Raises JetcaptureError for any error of a store.
    """
    if store is None:
        return {}
    path = inferred.path(stream, consumer)
    with users_errors():
        data = store.read_note(path)
    return {} if data is None else inferred.InferredColumns.decode(data, stream, path).types


def users_errors() -> AbstractContextManager[None]:
    """Turn any error of a user's store into StoreError; let JetcaptureError pass."""
    return plugins.user_code(StoreError, JetcaptureError, KeyboardInterrupt)


def read_own_watermark(store: NoteStore, stream: str, consumer: str) -> watermark.ConsumerWatermark | None:
    """Read a consumer's watermark file; None without one. Raises JetcaptureError for any error of a store."""
    path = watermark.path(stream, consumer)
    with users_errors():
        data = store.read_note(path)
    return None if data is None else watermark.ConsumerWatermark.decode(data, stream, path)


def read_watermark(store: NoteStore, stream: str) -> watermark.Watermark | None:
    """Read the archive's watermark of a stream; None without one. Raises JetcaptureError for any error of a store."""
    with users_errors():
        names = store.list_notes(watermark.directory(stream))
        return watermark.read(stream, names, lambda paths: map(store.read_note, paths))


def removal_of(url: str, options: Mapping[str, Any], path: str) -> str:
    """Return a command that removes a metadata file of the archive at `url`; else an instruction."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in ("file", "local"):
        return f"rm {shlex.quote(f'{root_of(rest if separator else url, None)}/{path}')}"
    location, kind = f"{rest.rstrip('/')}/{path}", KINDS.get(scheme)
    if kind == "s3":
        client = options.get("client_kwargs") or {}
        flags = {
            "endpoint-url": as_fsspec(options).get("endpoint_url") or client.get("endpoint_url"),
            "profile": options.get("profile"),
        }
        return f"aws s3 rm {shlex.quote(f's3://{location}')}{_flags(flags)}"
    if kind == "azure":
        container, _, name = location.partition("/")
        container, _, host = container.partition("@")
        account = host.partition(".")[0] or as_fsspec(options).get("account_name")
        flags = {"account-name": account, "container-name": container, "name": name}
        return f"az storage blob delete{_flags(flags)}"
    if kind == "gcs":
        return f"gcloud storage rm {shlex.quote(f'gs://{location}')}"
    return f"remove {without_credentials(f'{scheme}://{location}')}"


def _flags(flags: Mapping[str, Any]) -> str:
    return "".join(f" --{flag} {shlex.quote(str(value))}" for flag, value in flags.items() if value)


def configured_store(config: StoreConfig) -> Store:
    """The configured store: the user's own, or the one for the URL. Raises `ConfigError`."""
    if not config.type:
        return open_store(config.url, config.options)
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


def open_driver(url: str, options: Mapping[str, Any]) -> LocalDriver | RenewedDriver:
    """Open the driver of `url`; `options` are its library's, and `driver` may name the library. Raises ConfigError."""
    scheme, separator, rest = url.partition("://")
    given = dict(options)
    name = given.pop("driver", "fsspec")
    if name not in ("fsspec", "obstore"):
        raise ConfigError(f"store.driver: expected fsspec or obstore, got {name}")
    if not separator or scheme in ("file", "local"):
        if name == "obstore":
            raise ConfigError("store.driver: obstore is not for local directories")
        return LocalDriver(rest if separator else url)
    if name == "obstore":
        return RenewedDriver(partial(ObstoreDriver, url), given)
    if KINDS.get(scheme) == "gcs":
        raise ConfigError(f"store.driver: {scheme}:// needs the driver obstore")
    return RenewedDriver(partial(FsspecDriver, url), given)


def open_store(url: str, options: Mapping[str, Any]) -> ObjectStore:
    """Open the store at `url`, as `open_driver`. Raises `ConfigError`."""
    driver = open_driver(url, options)
    return LocalStore(driver.root) if isinstance(driver, LocalDriver) else ObjectStore(driver, url)


def driver_of(store: Store) -> str | None:
    """Return the name of a remote store's driver."""
    if not isinstance(store, ObjectStore) or not isinstance(store.driver, RenewedDriver):
        return None
    return "obstore" if isinstance(store.driver.driver, ObstoreDriver) else "fsspec"


class LocalStore(ObjectStore):
    """A directory."""

    def __init__(self, root: str) -> None:
        self._directory = LocalDriver(root)
        super().__init__(self._directory, root)

    @property
    def root(self) -> str:
        return self._directory.root

    @property
    def new(self) -> bool:
        """Whether the archive was empty when this process first used it."""
        return self._directory.archive.new

    def try_out(self) -> bool:
        """Store and remove a small file and leave nothing behind; return whether the archive is empty or missing."""
        with explained(self._directory.archive.path):
            return self._directory.archive.try_out()

    def probe(self) -> None:
        """Store and remove a small object; with a root per key, only check the directory."""
        if "{key}" in self.root:
            with explained(self._directory.archive.path), self._directory.archive.opened():
                return
        super().probe()
