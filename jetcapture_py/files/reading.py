"""Give files of an object store back from its archive, checked against their SHA-256."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from jetcapture_py.config.buckets import PREFIXES, AsOf, is_name, moment
from jetcapture_py.config.units import format_time, microseconds_of, moment_of, quoted
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.files.catalog import ArchivedFile, expected_digest, newest, parsed, prefix, subject
from jetcapture_py.files.objects import StoreObjects
from jetcapture_py.store.archive import ArchiveFiles, retried
from jetcapture_py.text import plural

_MAX_LINKS = 10

T = TypeVar("T")


def list_files(
    url: str, store: str, *, as_of: AsOf | None = None, options: Mapping[str, Any] | None = None
) -> list[ArchivedFile]:
    """Return the files of an object store in the archive at `url`, by name, links among them, without deleted ones.

    `as_of` chooses a moment; by default it is the newest one in the archive. `options` are `store.options`. Raises
    JetcaptureError.
    """
    archive = _Archive(url, options)
    found = retried(lambda: archive.catalog(store, moment(as_of)))
    return [found.files[name] for name in sorted(found.files) if found.files[name].present]


def read_file(
    url: str, store: str, name: str, *, as_of: AsOf | None = None, options: Mapping[str, Any] | None = None
) -> bytes:
    """Return the contents of a file of an object store in the archive at `url`; see `save_file`."""

    def read() -> bytes:
        found = io.BytesIO()
        _Archive(url, options).copy(store, name, moment(as_of), found)
        return found.getvalue()

    return retried(read)


def save_file(
    url: str,
    store: str,
    name: str,
    target: str | os.PathLike[str] | BinaryIO,
    *,
    as_of: AsOf | None = None,
    options: Mapping[str, Any] | None = None,
) -> ArchivedFile:
    """Write a file of an object store in the archive at `url` to `target`; return its metadata.

    The file is that of the moment `as_of`, by default the newest in the archive. Links are followed, to other object
    stores in the same archive as well. Size and SHA-256 are checked: a path gets the contents only if they are right,
    and a file object gets them in any case before an error is raised. Contents are copied piece by piece. Raises
    JetcaptureError, also for a file that was deleted.
    """
    archive = _Archive(url, options)
    if not isinstance(target, str | os.PathLike):
        try:
            return archive.copy(store, name, moment(as_of), target)
        except OSError as error:
            raise JetcaptureError(f"cannot write: {os.strerror(error.errno or 0)}") from error
    try:
        return _replaced(Path(target), lambda file: archive.copy(store, name, moment(as_of), file))
    except OSError as error:
        raise JetcaptureError(f"cannot write {target}: {os.strerror(error.errno or 0)}") from error


def _replaced(target: Path, write: Callable[[BinaryIO], T]) -> T:
    """Replace the file `target` with what `write` writes, unless it fails. `write` may be called several times."""
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "")
    partial = target.parent / f".{secrets.token_hex(16)}.partial"
    file = partial.open("xb")  # never a file or link that is there

    def again() -> T:
        file.seek(0)
        file.truncate()
        return write(file)

    try:
        with file:
            found = retried(again)
        partial.replace(target)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Catalog:
    """The files of a store at a moment; `time` is that of the newest metadata, in microseconds since 1970."""

    objects: StoreObjects
    files: Mapping[str, ArchivedFile]
    time: int


class _Archive:
    """The archive of several object stores."""

    def __init__(self, url: str, options: Mapping[str, Any] | None) -> None:
        self._storage = ArchiveFiles(url, options or {})

    def catalog(self, store: str, moment: int | datetime | None) -> _Catalog:
        """Read the metadata of a store's files."""
        if not is_name(store):
            raise JetcaptureError(f"object store {quoted(store)}: expected ASCII letters, digits, '-' and '_'")
        objects = StoreObjects(self._storage, f"{PREFIXES['object_store']}{store}")
        until = microseconds_of(moment) if isinstance(moment, datetime) else None
        start, found, time = objects.start_of(until), [], 0
        for row in objects.rows(prefix(store)):
            late = row.seq > moment if isinstance(moment, int) else until is not None and row.time > until
            if row.time >= start and not late:
                found.append(parsed(store, row.subject, row.seq, row.time, row.payload))
                time = max(time, row.time)
        return _Catalog(objects=objects, files=newest(found), time=time)

    def copy(self, store: str, name: str, moment: int | datetime | None, target: BinaryIO) -> ArchivedFile:
        """Write the contents of a file to `target`, and check them."""
        for _ in range(_MAX_LINKS):
            found = self.catalog(store, moment)
            file = _usable(store, name, found.files)
            if file.link is None:
                _copy(found.objects, file, target)
                return file
            bucket, linked = file.link
            if linked is None:
                raise JetcaptureError(f"{quoted(name)} is a link to the whole object store {bucket}, not to a file")
            if bucket != store and isinstance(moment, int):  # revisions of one store mean nothing in another
                moment = moment_of(found.time)
            store, name = bucket, linked
        raise JetcaptureError(f"more than {_MAX_LINKS} links, which probably lead in a circle, up to {quoted(name)}")


def _usable(store: str, name: str, files: Mapping[str, ArchivedFile]) -> ArchivedFile:
    """Return a file; raise JetcaptureError with the reason if there is none."""
    file = files.get(name)
    if file is None:
        raise JetcaptureError(f"object store {store} has no file {quoted(name)} in the archive")
    if file.problem is not None:
        raise JetcaptureError(f"{quoted(name)}: {file.problem}")
    if file.deleted:
        when = format_time(file.modified)
        raise JetcaptureError(f"{quoted(name)} was deleted at {when}; as of an earlier time, it may be in the archive")
    if file.renamed is not None:
        raise JetcaptureError(f"{quoted(name)} was renamed to {quoted(file.renamed)}")
    return file


def _copy(objects: StoreObjects, file: ArchivedFile, target: BinaryIO) -> None:
    try:
        expected = expected_digest(file)
    except ValueError as error:
        raise JetcaptureError(f"{quoted(file.name)}: {error}") from error
    state, size, chunks = hashlib.sha256(), 0, 0
    if file.chunks:
        for payload in objects.payloads(subject(file.store, file.nuid), file.revision, file.chunks):
            target.write(payload)
            state.update(payload)
            size, chunks = size + len(payload), chunks + 1
    if (chunks, size) != (file.chunks, file.size):
        there = f"{chunks} of {plural(file.chunks, 'chunk')} and {size} of {plural(file.size, 'byte')}"
        reason = "the store removed chunks before they were captured"
        raise JetcaptureError(f"{quoted(file.name)} is incomplete: the archive has {there}; {reason}")
    if state.digest() != expected:
        raise JetcaptureError(f"{quoted(file.name)}: the contents do not have the SHA-256 of the metadata")
