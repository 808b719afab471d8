"""Read files of an object store from its archive, checked against their SHA-256.

Messages on `$O.<store>.M.<name>` have a file's metadata (the newest counts), and those on `$O.<store>.C.<nuid>` its
contents. Only row groups that may have messages of the file are read.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import heapq
import io
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import msgspec
import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Seqs
from jetcapture_py.archive.incarnations import Bounds, bounds_by_incarnation
from jetcapture_py.config.buckets import PREFIXES, AsOf, is_name, moment
from jetcapture_py.config.units import format_time, microseconds_of, moment_of, quoted
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.reading.arrow import PlanReader
from jetcapture_py.reading.bucket import incarnations, start_of
from jetcapture_py.reading.columns import INSTANT, Table
from jetcapture_py.reading.plan import Bound, read_identities
from jetcapture_py.retry import retried
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.text import escaped, plural


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedFile:
    """A file of an object store, described by its metadata.

    `modified` is the metadata's time, `revision` its sequence. `digest` is as stored, such as `SHA-256=…`. `link` is
    the target's store and file; a link to a store has no file. `renamed` is the file's new name. `problem` says why the
    metadata cannot be used.
    """

    store: str
    name: str
    revision: int
    modified: datetime
    nuid: str = ""
    size: int = 0
    chunks: int = 0
    digest: str = ""
    description: str = ""
    headers: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] | None = None
    link: tuple[str, str | None] | None = None
    deleted: bool = False
    renamed: str | None = None
    problem: str | None = None

    @property
    def present(self) -> bool:
        """Whether the file is in the store: neither deleted nor renamed."""
        return not self.deleted and self.renamed is None


class _Link(msgspec.Struct):
    bucket: str = ""
    name: str | None = None


class _Options(msgspec.Struct):
    link: _Link | None = None


class _Info(msgspec.Struct):
    """The JSON of a file's metadata."""

    nuid: str = ""
    size: int = 0
    chunks: int = 0
    digest: str = ""
    description: str = ""
    headers: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    options: _Options | None = None
    deleted: bool = False


_decode = msgspec.json.Decoder(dict[str, Any]).decode


def parsed(store: str, token: str, seq: int, microseconds: int, payload: bytes) -> ArchivedFile:
    """Read a message with metadata; `token` is the end of its subject, the name in Base64."""
    common: dict[str, Any] = {
        "store": store,
        "name": _decoded(token),
        "revision": seq,
        "modified": moment_of(microseconds),
    }
    try:
        given = {name: value for name, value in _decode(payload).items() if value not in (None, {})}
        info = msgspec.convert(given, _Info)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return ArchivedFile(**common, problem=f"its metadata cannot be read: {error}")
    fields = msgspec.structs.asdict(info)
    options = fields.pop("options")
    link = None if options is None or options.link is None else (options.link.bucket, options.link.name or None)
    return ArchivedFile(**common, **fields, link=link)


def _decoded(token: str) -> str:
    try:
        return base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    except (binascii.Error, ValueError):
        return token


def newest(metadata: Iterable[ArchivedFile]) -> dict[str, ArchivedFile]:
    """Return the newest metadata of each name.

    A renamed file has newer metadata with the same NUID under another name, and no mark under the old one.
    """
    files: dict[str, ArchivedFile] = {}
    by_nuid: dict[str, ArchivedFile] = {}
    for file in sorted(metadata, key=lambda file: file.revision):
        files[file.name] = file
        if file.nuid:
            by_nuid[file.nuid] = file
    for name, file in files.items():
        last = by_nuid.get(file.nuid, file)
        if last.name != name and last.revision > file.revision:
            files[name] = replace(file, renamed=last.name)
    return files


_LAST = "\U0010ffff"
_TABLE = Table(
    [
        pa.schema(
            [
                (layout.SUBJECT, pa.string()),
                (layout.SEQ, pa.int64()),
                (layout.TIMESTAMP, INSTANT),
                (layout.PAYLOAD, pa.binary()),
            ]
        )
    ],
    quarantine=False,
    columns=None,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectPart:
    """An object, and the sequences of its rows of one subject, ascending.

    The rows are not `in_order` in a bundle if their keys differ.
    """

    name: layout.ObjectName
    seqs: Seqs
    in_order: bool


class StoreObjects:
    """The objects of one stream in `storage`. Methods raise JetcaptureError."""

    def __init__(self, storage: ArchiveFiles, stream: str) -> None:
        self._storage, self._stream = storage, stream
        self._objects = {file.name: file for file in storage.files(stream) if file.name is not None}
        if not self._objects:
            raise JetcaptureError(f"the archive has no objects of stream {stream}")
        if not all(name.parquet for name in self._objects):
            raise JetcaptureError(f"the archive of stream {stream} has objects in other formats than Parquet")

    def rows(self, prefix: str) -> Iterator[tuple[str, int, int, bytes]]:
        """Yield the messages whose subject starts with `prefix`, copies included, in any order.

        A message is the rest of its subject, its sequence, its timestamp in microseconds, and its payload.
        """
        columns = [layout.SUBJECT, layout.SEQ, layout.TIMESTAMP, layout.PAYLOAD]
        reader = self._reader(columns, prefix, prefix + _LAST)

        def read(name: layout.ObjectName) -> list[pa.RecordBatch]:
            return list(reader.batches(self._objects[name], name))

        for batch in chain.from_iterable(self._storage.map(read, self._objects)):
            times = batch.column(2).cast(pa.int64()).to_pylist()
            subjects, seqs, payloads = (batch.column(number).to_pylist() for number in (0, 1, 3))
            for subject, seq, time, payload in zip(subjects, seqs, times, payloads, strict=True):
                yield subject[len(prefix) :], seq, time, payload or b""

    def _reader(self, columns: Sequence[str], low: str, high: str, before: int | None = None) -> PlanReader:
        """Return a reader of the rows with subjects from `low` to `high` (exclusive), and sequences below `before`."""
        return PlanReader(
            files=self._storage,
            table=_TABLE,
            columns=columns,
            bounds=[Bound((layout.SUBJECT,), low, high)],
            keys=None,
            seqs=None if before is None else (0, before - 1),
        )

    def payloads(self, subject: str, before: int, count: int) -> Iterator[bytes]:
        """Yield the payloads of a subject's messages with sequences below `before`, in order, each once.

        Objects are searched from there backwards until `count` messages are found; there may be fewer.
        """
        low, high = subject, f"{subject}\0"
        searching = self._reader([layout.SEQ], low, high, before)
        reading = self._reader([layout.SEQ, layout.PAYLOAD], low, high, before)
        parts: list[ObjectPart] = []
        seqs: Seqs = np.zeros(0, np.int64)
        for name in sorted(self._objects, key=lambda name: (name.last_seq, name.path), reverse=True):
            if name.first_seq < before and len(seqs) < count:
                rows = list(searching.batches(self._objects[name], name))
                if rows:
                    stored = np.concatenate([batch.column(0).to_numpy() for batch in rows])
                    in_order = bool((np.diff(stored) >= 0).all())
                    parts.append(ObjectPart(name=name, seqs=np.sort(stored), in_order=in_order))
                    seqs = np.union1d(seqs, stored)
        for cluster in _clusters(parts):
            last = -1
            for seq, payload in heapq.merge(*(self._chunks(part, reading) for part in cluster), key=itemgetter(0)):
                if seq != last:
                    last = seq
                    yield payload

    def _chunks(self, part: ObjectPart, reader: PlanReader) -> Iterable[tuple[int, bytes]]:
        """Return the sequences and payloads of a part in order."""
        # sequences select row groups more exactly than subjects
        span = int(part.seqs[0]), int(part.seqs[-1])
        chunks = (
            (seq, payload or b"")
            for batch in reader.batches(self._objects[part.name], part.name, [span])
            for seq, payload in zip(*(column.to_pylist() for column in batch.columns), strict=True)
        )
        return chunks if part.in_order else sorted(chunks, key=itemgetter(0))

    def start_of(self, until: int | None) -> int:
        """Return the creation time of the store's incarnation at a time; 0 for the first one. Microseconds since 1970.

        As with a KV bucket, a recreated mirror and a restored store continue the earlier one.
        """
        recorded = incarnations(self._storage, self._stream, None, None)
        bounds: dict[int, Bounds] = {}
        if any(incarnation.continues for incarnation in recorded[1:]):
            identities = read_identities(self._storage, self._objects, self._objects)
            seqs, times = (np.concatenate(columns) for columns in zip(*identities, strict=True))
            bounds = bounds_by_incarnation([incarnation.created for incarnation in recorded], seqs, times)
        return start_of(recorded, until, bounds)[1]


def _clusters(parts: Iterable[ObjectPart]) -> Iterator[list[ObjectPart]]:
    """Yield the parts in order, grouped by overlapping sequences."""
    cluster: list[ObjectPart] = []
    end = -1
    for part in sorted(parts, key=lambda part: int(part.seqs[0])):
        if cluster and int(part.seqs[0]) > end:
            yield cluster
            cluster = []
        cluster.append(part)
        end = max(end, int(part.seqs[-1]))
    if cluster:
        yield cluster


_MAX_LINKS = 10

T = TypeVar("T")


def list_files(
    url: str, store: str, *, as_of: AsOf | None = None, options: Mapping[str, Any] | None = None
) -> list[ArchivedFile]:
    """Return the files and links of an object store in the archive at `url`, by name, without deleted ones.

    `as_of` chooses a moment, by default the newest one in the archive. `options` are `store.options`. Raises
    JetcaptureError.
    """
    archive = ArchiveFiles(url, options or {})
    files = retried(lambda: _catalog(archive, store, moment(as_of))).files
    return [files[name] for name in sorted(files) if files[name].present]


def read_file(
    url: str, store: str, name: str, *, as_of: AsOf | None = None, options: Mapping[str, Any] | None = None
) -> bytes:
    """Return the contents of a file of an object store in the archive at `url`; see `save_file`."""

    def read() -> bytes:
        contents = io.BytesIO()
        _copy(ArchiveFiles(url, options or {}), store, name, moment(as_of), contents)
        return contents.getvalue()

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
    archive = ArchiveFiles(url, options or {})
    path = Path(target) if isinstance(target, str | os.PathLike) else None

    def copy(file: BinaryIO) -> ArchivedFile:
        return _copy(archive, store, name, moment(as_of), file)

    try:
        return copy(cast("BinaryIO", target)) if path is None else _replaced(path, copy)
    except OSError as error:
        where = "" if path is None else f" {target}"
        raise JetcaptureError(f"cannot write{where}: {os.strerror(error.errno or 0)}") from error


def _replaced(target: Path, write: Callable[[BinaryIO], T]) -> T:
    """Replace the file `target` by the output of `write`, unless it fails. `write` may be called several times."""
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "")
    partial = target.parent / f".{secrets.token_hex(16)}.partial"
    file = partial.open("xb")  # never an existing file or link

    def again() -> T:
        file.seek(0)
        file.truncate()
        return write(file)

    try:
        with file:
            result = retried(again)
        partial.replace(target)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Catalog:
    """The files of a store at a moment; `time` is the newest metadata's, in microseconds since 1970."""

    objects: StoreObjects
    files: Mapping[str, ArchivedFile]
    time: int


def _catalog(archive: ArchiveFiles, store: str, moment: int | datetime | None) -> _Catalog:
    """Read the metadata of a store's files."""
    if not is_name(store):
        raise JetcaptureError(f"object store {quoted(store)}: expected ASCII letters, digits, '-' and '_'")
    objects = StoreObjects(archive, f"{PREFIXES['object_store']}{store}")
    until = microseconds_of(moment) if isinstance(moment, datetime) else None
    start, files, time = objects.start_of(until), [], 0
    for token, seq, stored, payload in objects.rows(f"$O.{store}.M."):
        late = seq > moment if isinstance(moment, int) else until is not None and stored > until
        if stored >= start and not late:
            files.append(parsed(store, token, seq, stored, payload))
            time = max(time, stored)
    return _Catalog(objects=objects, files=newest(files), time=time)


def _copy(
    archive: ArchiveFiles, store: str, name: str, moment: int | datetime | None, target: BinaryIO
) -> ArchivedFile:
    """Write the contents of a file to `target`, and check them."""
    for _ in range(_MAX_LINKS):
        catalog = _catalog(archive, store, moment)
        file = _usable(store, name, catalog.files)
        if file.link is None:
            _copy_contents(catalog.objects, file, target)
            return file
        bucket, linked = file.link
        if linked is None:
            raise JetcaptureError(f"{quoted(name)} is a link to the whole object store {bucket}, not to a file")
        if bucket != store and isinstance(moment, int):  # revisions of another store differ
            moment = moment_of(catalog.time)
        store, name = bucket, linked
    raise JetcaptureError(f"more than {_MAX_LINKS} links, which probably lead in a circle, up to {quoted(name)}")


def _usable(store: str, name: str, files: Mapping[str, ArchivedFile]) -> ArchivedFile:
    """Return a file. Raises JetcaptureError with the reason if it is missing or unusable."""
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


def _copy_contents(objects: StoreObjects, file: ArchivedFile, target: BinaryIO) -> None:
    algorithm, _, digest = file.digest.partition("=")
    if algorithm.upper() != "SHA-256":
        reason = f"unknown digest {escaped(file.digest)}" if file.digest else "its metadata has no digest"
        raise JetcaptureError(f"{quoted(file.name)}: {reason}")
    try:
        expected = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4))
    except ValueError as error:
        raise JetcaptureError(f"{quoted(file.name)}: {error}") from error
    state, size, chunks = hashlib.sha256(), 0, 0
    if file.chunks:
        for payload in objects.payloads(f"$O.{file.store}.C.{file.nuid}", file.revision, file.chunks):
            target.write(payload)
            state.update(payload)
            size, chunks = size + len(payload), chunks + 1
    if (chunks, size) != (file.chunks, file.size):
        archived = f"{chunks} of {plural(file.chunks, 'chunk')} and {size} of {plural(file.size, 'byte')}"
        reason = "the store removed chunks before they were captured"
        raise JetcaptureError(f"{quoted(file.name)} is incomplete: the archive has {archived}; {reason}")
    if state.digest() != expected:
        raise JetcaptureError(f"{quoted(file.name)}: the contents do not have the SHA-256 of the metadata")
