"""The port to an archive's bytes: list, open, read, write and remove objects, with one-line errors.

Every reader of an archive uses it: verify, files, jobs, and Spark's executors, which get a pickled one. Requests time
out, and rejected credentials are re-read. With `{key}` in `store.url`, every key has its own root;
roots are found by listing.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from jetcapture_py.archive import footer, layout, stream_config, watermark
from jetcapture_py.archive.info import BadObject, InfoReader, ObjectInfo
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.removed import Erased, Expired, expired_path
from jetcapture_py.archive.stream_config import StreamConfig
from jetcapture_py.archive.watermark import Watermark
from jetcapture_py.config.values import is_stream_name
from jetcapture_py.errors import ConfigError, JetcaptureError, StoreError, VanishedError
from jetcapture_py.store import open_driver, open_store
from jetcapture_py.store.credentials import RenewedDriver, with_secrets
from jetcapture_py.store.local import LocalDriver
from jetcapture_py.store.object_file import PIECE, ObjectFile, ObjectParts
from jetcapture_py.store.objects import ObjectStore, root_of
from jetcapture_py.store.ports import Entry, RemoteDriver, is_unknown_header, is_unmet
from jetcapture_py.store.protection import Protection, azure_protection, s3_protection
from jetcapture_py.store.root import NOT_OURS
from jetcapture_py.text import one_line, without_credentials
from jetcapture_py.threads import futures_of

SHARE = "every worker of Spark needs the archive at this path"
_KEY = "{key}"
_REMOTE_THREADS, _LOCAL_THREADS = 32, 1
_PIECE = 8 << 20
"""Bytes of a file read at once."""
_AHEAD = 4
"""Maximum items per thread in progress, or with a waiting result."""
_TAIL = 1 << 14
"""Bytes first read from the end of an object; almost every footer is shorter."""
_REMOVAL = "removal of objects"
"""Name of the lock for removing objects."""
SMALL = 4 << 20
"""Maximum size of a remote object that is fetched in one request, and so cannot vanish while it is read."""
_UNREADABLE = (OSError, ValueError, pa.ArrowException)
ASIDE = ".damaged"
"""Suffix of the hidden name of a damaged object that was moved aside."""
AGAIN = "read it again; maintain.compact.grace is how long a read may take"
"""Advice for a vanished object."""
IF_DAMAGED = "if it is damaged, jetcapture verify CONFIG --deep --repair stores its messages again or moves it aside"
T = TypeVar("T")
Item = TypeVar("Item")


def open_archive(url: str | os.PathLike[str], options: Mapping[str, Any]) -> ArchiveFiles:
    """Open one archive with `store.options`. Raises JetcaptureError, also for a separate archive per key."""
    url = os.fspath(url)
    try:
        files = ArchiveFiles(url, with_secrets(options))
    except ConfigError as error:
        reason = str(error).removeprefix("store.url: ")
        raise JetcaptureError(f"cannot open {without_credentials(url)}: {reason}") from error
    if files.divided:
        raise JetcaptureError(f"{files.shown} is a separate archive per key: replace {{key}} with one key")
    return files


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of the archive."""

    path: str
    """Relative to the archive's root or, with `{key}`, to the common parent of all roots."""
    place: str = field(repr=False)
    """Its path for the driver."""
    size: int
    """Bytes."""
    name: ObjectName | None
    """The parsed path; None for files that are not objects."""
    modified: float | None = None
    """Modification time in seconds since the epoch; None if the store does not tell."""
    tag: str | None = field(default=None, compare=False)
    """The store's tag of its content, set by `again`; `remove` depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OldVersion:
    """A noncurrent version or delete marker in a versioned bucket."""

    archive: ArchiveFiles
    """The archive to read this version with."""
    file: File
    """Its `path` is the file's, and its `place` is the version's."""
    marker: bool
    """Whether it is a delete marker. Without the marker, the last version would become current again."""
    remove: Callable[[], object]
    """Deletes it permanently. Raises StoreError, also for one that Object Lock protects."""


class ArchiveFiles:
    """The archive at `url`, with `store.options`. Thread-safe, and can be pickled.

    Errors name the object, without credentials: VanishedError if it is gone, else StoreError.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        """Raises ConfigError if a package is missing or options are invalid."""
        if re.match("file:/(?!/)", url):  # Hadoop's spelling
            url = url.removeprefix("file:")
        self._driver = open_driver(url, options)
        if isinstance(self._driver, LocalDriver):  # other processes may have another directory
            self._driver = LocalDriver(str(Path(self._driver.root or "/").expanduser().absolute()))
        self._template = self._driver.root.rstrip("/")
        self.url = f"file://{self._template}" if self.local else url
        """URL for other processes, with an absolute local path. May contain secrets."""
        self.shown = without_credentials(self.url)
        self._options = options
        head, _, _ = self._template.partition(_KEY)
        self._base = head.rpartition("/")[0] if _KEY in self._template else self._template
        self.threads = _LOCAL_THREADS if self.local else _REMOTE_THREADS

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self._options)

    @property
    def local(self) -> bool:
        """Whether it is in a local directory."""
        return isinstance(self._driver, LocalDriver)

    @property
    def divided(self) -> bool:
        """Whether every key has its own root."""
        return _KEY in self._template

    @property
    def storage_options(self) -> Mapping[str, Any]:
        """The options of the driver's library, including those in the URL. May contain secrets."""
        return {} if isinstance(self._driver, LocalDriver) else self._driver.driver.options

    # ------------------------------------------------------------------ listing

    def files(self, stream: str) -> Iterator[File]:
        """Yield every file of the quarantine, then of the archive: messages may move from the former to the latter."""
        yield from self.below(f"{layout.QUARANTINE}/{stream}")
        yield from self.below(stream)

    def below(self, *directories: str, wanted: Callable[[str], bool] = bool) -> Iterator[File]:
        """Yield every file below directories, relative to the archive's root, unordered. Raises StoreError.

        `wanted` decides by a path, as in `File`, whether to yield the file.
        """
        tops = [(root, f"{root}/{directory}") for root in self._roots() for directory in directories]
        start = len(self._base) + 1
        if len(tops) == 1:  # the listing need not fit in memory
            root, top = tops[0]
            yield from (self._file(root, entry) for entry in self._list(top) if wanted(entry.path[start:]))
            return
        for (root, _), entries in zip(tops, self.map(lambda top: list(self._list(top[1])), tops), strict=True):
            yield from (self._file(root, entry) for entry in entries if wanted(entry.path[start:]))

    def paths(self, directory: str) -> Iterator[str]:
        """Yield the path of every file below a directory, without parsing it, unordered. Raises StoreError."""
        start = len(self._base) + 1
        return (entry.path[start:] for root in self._roots() for entry in self._list(f"{root}/{directory}"))

    def directories(self, stream: str, keys: Iterable[str | None]) -> list[str]:
        """List the directories that may hold messages of `keys`: the keys' own and all bundles."""
        bundles = sorted(name for name in self.names(stream) if name.startswith(f"{layout.BUNDLE}="))
        key_directories = (f"{layout.KEY}={layout.escape_key(key)}" for key in dict.fromkeys(keys))
        return [f"{stream}/{name}" for name in (*key_directories, *bundles)]

    def names(self, directory: str = "") -> list[str]:
        """List the names directly in a directory; none if it does not exist. Raises StoreError."""
        entries = self._list(f"{self._template}/{directory}".rstrip("/"), deep=False)
        return [entry.path.rpartition("/")[2] for entry in entries]

    def streams(self) -> list[str]:
        """List the streams with an archive or a quarantine, also deleted ones. Raises StoreError."""
        names = {*self.names(), *self.names(layout.QUARANTINE)} - NOT_OURS
        return sorted(filter(is_stream_name, names))

    def known_streams(self) -> str:
        """Return a list of the archived streams for an error about an unknown stream; "" if that fails."""
        with suppress(StoreError):
            streams = ", ".join(self.streams())
            return f"; there are: {streams}" if streams else ""
        return ""

    def _file(self, root: str, entry: Entry) -> File:
        path = entry.path
        name = layout.parse_path(path[len(root) + 1 :])
        if name is not None and root_of(self._template, name.key) != root:
            name = None  # another key's object in this root
        return File(path=path[len(self._base) + 1 :], place=path, size=entry.size, name=name, modified=entry.modified)

    def _list(self, directory: str, *, deep: bool = True) -> Iterator[Entry]:
        try:
            yield from self._driver.list(directory, deep=deep)
        except Exception as error:  # drivers raise different errors
            raise StoreError(f"cannot list {directory or '/'}: {one_line(error)}") from error

    def _roots(self) -> list[str]:
        roots = [self._base]
        for part in self._template[len(self._base) + 1 :].split("/") if self.divided else ():
            if _KEY not in part:
                roots = [f"{root}/{part}" for root in roots]
                continue
            pattern = re.compile(re.escape(part).replace(re.escape(_KEY), ".+"))
            roots = [
                directory
                for root in roots
                for directory in self._below(root)
                if pattern.fullmatch(directory.rpartition("/")[2])
            ]
        return roots

    def _below(self, root: str) -> list[str]:
        return [entry.path for entry in self._list(root, deep=False) if entry.directory]

    # ------------------------------------------------------------------ reading

    def read(self, file: File, start: int = 0, end: int | None = None) -> bytes:
        """Read the bytes of a file from `start` to `end` (exclusive). Raises VanishedError, StoreError."""
        with self._explained(file.path, Exception):  # drivers raise different errors
            return self._driver.read(file.place, start, file.size if end is None else end)

    def infos(
        self,
        files: Sequence[File],
        *,
        detailed: Callable[[ObjectName], bool] | None = None,
        reader: InfoReader | None = None,
    ) -> Iterator[ObjectInfo | BadObject]:
        """Yield the infos of these Parquet objects in order; a `BadObject` for an unusable footer.

        Footers of objects for which `detailed` is true are decoded. A `reader` caches schemas across calls. Raises
        VanishedError, also for an object that was stored again since it was listed, and StoreError.
        """
        reader = reader or InfoReader()
        for file, data in zip(files, self.footers(files), strict=True):
            assert file.name is not None  # noqa: S101  # callers have objects
            yield reader.read(
                file.name,
                data,
                size=file.size,
                modified=file.modified,
                detailed=detailed is not None and detailed(file.name),
            )

    def footers(self, files: Iterable[File]) -> Iterator[bytes]:
        """Yield the footer of each object; b"" without one. Raises VanishedError, StoreError."""
        return self.map(self._footer, files)

    def _footer(self, file: File, data: bytes | None = None) -> bytes:
        """Return the footer of an object, or of the bytes already read from it; b"" without one."""
        if data is not None:
            return footer.find(lambda size: data[-size:], _TAIL)
        end = footer.find(lambda size: self.read(file, max(0, file.size - size)), _TAIL)
        if not end:
            self.refuse_changed(file)  # with the old size, its footer would not be found
        return end

    def refusal(self, bad: BadObject) -> JetcaptureError:
        """Return the error for an object that cannot be read."""
        return JetcaptureError(f"cannot read {self.shown}/{bad.name.path}: {bad.reason}; {IF_DAMAGED}")

    def pieces(self, file: File, size: int = _PIECE) -> Iterator[bytes]:
        """Yield the bytes of a file, at most `size` at once. Raises VanishedError, StoreError."""
        for start in range(0, file.size, size):
            yield self.read(file, start, min(start + size, file.size))

    def again(self, file: File) -> File:
        """Refresh the file's size and time, because it may have been rewritten. Raises VanishedError, StoreError."""
        with self._explained(file.path, Exception):  # drivers raise different errors
            entry = self._driver.stat(file.place)
            return replace(file, size=entry.size, modified=entry.modified, tag=entry.tag)

    def refuse_changed(self, file: File, error: Exception | None = None) -> None:
        """Raise VanishedError if the object is gone, or was stored again by a redelivery since it was listed."""
        if self.again(file).size != file.size:
            raise self.stored_again(file) from error

    def stored_again(self, file: File) -> VanishedError:
        """Return the error for a file that has been rewritten since it was listed."""
        return VanishedError(f"{self.shown}/{file.path} was stored again: read it again")

    def at(self, path: str, size: int | None = None, name: ObjectName | None = None) -> File:
        """Return the file at `path`, as in `File`; without `size`, stat it. Raises VanishedError, StoreError."""
        file = File(path=path, place=f"{self._base}/{path}", size=size or 0, name=name or layout.parse_path(path))
        return self.again(file) if size is None else file

    def open(self, file: File) -> pa.PythonFile:
        """Open the file for Arrow, which reads only the needed ranges."""
        return pa.PythonFile(ObjectParts(file.size, partial(self.read, file)), mode="r")

    @contextmanager
    def parquet(self, file: File, data: bytes | None = None, *, buffer: int = 0) -> Iterator[ObjectFile]:
        """Open an object, or the bytes already read from it, as `open_parquet` does; page checksums are verified.

        `buffer` is the number of bytes of a column to read at once; 0 for a whole column chunk. Raises VanishedError,
        StoreError, also inside the block.
        """
        source: Any = file.place
        parts = metadata = None
        try:
            with self._explained(file.path, *_UNREADABLE):
                if data is None and not self.local and file.size <= SMALL:
                    data = self.read(file)
                end = self._footer(file, data)
                if end and not footer.is_proven(end):  # Arrow must not parse it: a damaged one may abort the process
                    raise ValueError(footer.UNPROVEN)
                if data is not None:
                    source = pa.BufferReader(data)
                elif not self.local:
                    parts = ObjectParts(file.size, partial(self.read, file))
                    source, metadata = pa.PythonFile(parts, mode="r"), footer.decoded(end) if end else None
                with ObjectFile(
                    source, parts, metadata=metadata, page_checksum_verification=True, buffer_size=buffer
                ) as parquet:
                    yield parquet
        except VanishedError:
            raise
        except StoreError as error:
            if not self.local:
                self.refuse_changed(file, error)
            raise

    def stream(self, file: File) -> pa.NativeFile:
        """Open an object for Arrow's own threads: a local file, or all bytes of a remote object.

        Raises VanishedError, StoreError.
        """
        if self.local:
            with self._explained(file.path, OSError):
                return pa.OSFile(file.place)
        copy = pa.BufferOutputStream()
        for piece in self.pieces(file, PIECE):
            copy.write(piece)
        return pa.BufferReader(copy.getvalue())

    def map(self, do: Callable[[Item], T], items: Iterable[Item], *, threads: int = 0) -> Iterator[T]:
        """Yield the result of `do` for every item, in order; a remote store gets several requests at a time."""
        workers = threads or self.threads
        if workers <= 1:  # reading a footer of a local file is faster than handing it to a thread
            yield from map(do, items)
            return
        with closing(futures_of(do, items, workers, workers * _AHEAD)) as futures:
            for future in futures:
                yield future.result()

    # ------------------------------------------------------------------ writing

    @contextmanager
    def removing(self) -> Iterator[None]:
        """Lock a local archive against other removals; remote stores have no locks. Raises StoreError."""
        with self.store.driver.locked(_REMOVAL) if self.local else nullcontext():
            yield

    @cached_property
    def store(self) -> ObjectStore:
        return open_store(self.url, self._options) if self.local else ObjectStore(self._driver, self.url)

    def remove(self, file: File) -> None:
        """Remove a file if it exists; objects are removed by `store.removal`. Raises StoreError, and VanishedError if
        it no longer has its tag."""
        try:
            self._driver.remove(file.place, file.tag)
        except FileNotFoundError:
            return
        except Exception as error:
            if file.tag is not None and is_unknown_header(error):
                self.remove(replace(file, tag=None))
                return
            if file.tag is not None and is_unmet(error):
                try:
                    self.again(file)
                except VanishedError:  # some stores say of what is gone that it has changed
                    return
                raise self.stored_again(file) from error
            raise StoreError(f"cannot remove {self.shown}/{file.path}: {one_line(error)}") from error

    def move_aside(self, file: File) -> str:
        """Rename a file so that it is no longer taken for an object; return its new path. `store.removal` calls it.

        Raises StoreError, also if it no longer has its tag.
        """

        def renamed(path: str) -> str:
            directory, _, name = path.rpartition("/")
            return f"{directory}/.{name}{ASIDE}"

        try:
            if self.local:
                Path(file.place).rename(renamed(file.place))
            else:
                self._driver.write(renamed(file.place), pa.py_buffer(self._driver.read(file.place, 0, file.size)), None)
                try:
                    self.remove(file)
                except VanishedError:
                    self._driver.remove(renamed(file.place))
                    raise
        except Exception as error:  # drivers raise different errors
            raise StoreError(f"cannot move {self.shown}/{file.path}: {one_line(error)}") from error
        return renamed(file.path)

    def remove_empty(self, stream: str) -> None:
        """Remove the empty directories of a stream and its quarantine from a local archive: their names contain
        keys."""
        for directory in (stream, f"{layout.QUARANTINE}/{stream}") if self.local else ():
            for below, _, _ in os.walk(f"{self._base}/{directory}", topdown=False):
                if below.count("/") > f"{self._base}/{directory}".count("/"):
                    with suppress(OSError):  # not empty, or gone
                        os.rmdir(below)  # noqa: PTH106

    def old_versions(self, *directories: str) -> Iterator[OldVersion]:
        """Yield S3's noncurrent versions and delete markers of files below directories; nothing for other stores.

        A bucket without versioning is not searched. Raises StoreError.
        """
        if self._kind != "s3":
            return
        if self.protection is not None and self.protection.keeps_versions is False:
            return
        obstore = self._options.get("driver") == "obstore"
        aware = self if obstore else ArchiveFiles(self.url, {**self._options, "version_aware": True})

        def call(method: str, key: str, **request: Any) -> Any:
            try:
                return aware._ask(lambda driver: driver.s3(method, Bucket=bucket, **request))
            except Exception as error:  # of botocore
                verb = "list the versions of" if method.startswith("list") else "delete a version of"
                raise StoreError(f"cannot {verb} {bucket}/{key}: {one_line(error)}") from error

        for directory in directories:
            bucket, _, prefix = f"{self._template}/{directory}".partition("/")
            request: dict[str, Any] = {"Prefix": f"{prefix}/"}
            while request:
                answer = call("list_object_versions", prefix, **request)
                for entry, marker in (
                    *product(answer.get("Versions", ()), [False]),
                    *product(answer.get("DeleteMarkers", ()), [True]),
                ):
                    key, version = entry["Key"], entry["VersionId"]
                    if marker or not entry["IsLatest"]:
                        time = entry["LastModified"].timestamp()
                        file = self._file(self._template, Entry(f"{bucket}/{key}", entry.get("Size") or 0, time))
                        yield OldVersion(
                            archive=aware,
                            file=replace(file, place=f"{file.place}?versionId={version}"),
                            marker=marker,
                            remove=partial(call, "delete_object", key, Key=key, VersionId=version),
                        )
                names = {"KeyMarker": "NextKeyMarker", "VersionIdMarker": "NextVersionIdMarker"}
                more = {name: answer[next_] for name, next_ in names.items() if answer.get(next_)}
                request = {**request, **more} if answer.get("IsTruncated") and more else {}

    @cached_property
    def protection(self) -> Protection | None:
        """Protection of objects in the bucket or container; cached.

        None for stores without such settings, and for several buckets with `{key}` in the name.
        """
        bucket, _, _ = self._template.partition("/")
        if _KEY in bucket:
            return None
        if self._kind == "s3":
            return s3_protection(
                lambda method: self._ask(lambda driver: driver.s3(method, Bucket=bucket)), self._options
            )
        answers = self._ask(lambda driver: driver.azure()) if self._kind == "azure" else None
        return None if answers is None else azure_protection(*answers)

    @property
    def _kind(self) -> str:
        return self._driver.driver.kind if isinstance(self._driver, RenewedDriver) else ""

    def _ask(self, work: Callable[[RemoteDriver], Any]) -> Any:
        assert isinstance(self._driver, RenewedDriver)  # noqa: S101  # only kinds of remote stores are asked
        return self._driver.attempt(work)

    # ------------------------------------------------------------------ small files

    def notes(self, directory: str) -> list[str]:
        """List the metadata files in a directory by their paths relative to the root; none with `{key}` in the URL.

        Raises StoreError.
        """
        entries = () if self.divided else self._list(f"{self._template}/{directory}", deep=False)
        return sorted(f"{directory}/{entry.path.rpartition('/')[2]}" for entry in entries if not entry.directory)

    def watermark(self, stream: str, *, future: bool = False) -> Watermark | None:
        """Return the watermark of a stream; None without one.

        Raises JetcaptureError if a file is unreadable, damaged, of another stream, or, unless `future`, in the future.
        """
        names = self.notes(watermark.directory(stream))
        return watermark.read(stream, names, lambda paths: self.map(self.read_note, paths), future=future)

    def stream_configs(self, stream: str) -> list[StreamConfig]:
        """Return the recorded configurations of a stream, one for each incarnation, oldest first.

        Raises JetcaptureError, also if one is damaged.
        """
        return stream_config.read(stream, self.notes, lambda paths: self.map(self.read_note, paths))

    def expired(self, stream: str) -> Expired | None:
        """Return the record of a stream's expired messages; None without one. Raises JetcaptureError, also if
        damaged."""
        data = None if self.divided else self.read_note(expired_path(stream))
        return None if data is None else Expired.decode(data, stream, expired_path(stream))

    def erased(self, stream: str, known: Erased | None = None) -> Erased:
        """Return a stream's erased messages; tombstones in `known` are not read again.

        Raises JetcaptureError, also if one is damaged.
        """
        return Erased.read(stream, self.notes, lambda paths: self.map(self.read_note, paths), known)

    def read_note(self, path: str) -> bytes | None:
        """Read the metadata file at `path`, relative to the root; None if it does not exist. Raises StoreError."""
        try:
            with self._explained(path, Exception):
                return self._driver.read(f"{self._template}/{path}")
        except VanishedError:
            return None

    # ------------------------------------------------------------------ errors

    @contextmanager
    def _explained(self, path: str, *errors: type[Exception]) -> Iterator[None]:
        """Turn these errors about the file at `path` into VanishedError or StoreError."""
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError as error:
            raise self._gone(path) from error
        except errors as error:
            # the store's errors are already converted, and the disk's have a number
            advice = f"; {IF_DAMAGED}" if errors == _UNREADABLE and not getattr(error, "errno", None) else ""
            raise StoreError(f"cannot read {self.shown}/{path}: {one_line(error)}{advice}") from error

    def _gone(self, path: str) -> VanishedError:
        """Return the error for a vanished object; a Spark worker may have another disk than the driver."""
        top = path.partition("/")[0]
        if self.local and not os.path.exists(f"{self._base}/{top}"):  # noqa: PTH110
            return VanishedError(f"{self.shown}/{top} does not exist on {socket.gethostname()}: {SHARE}")
        return VanishedError(f"{self.shown}/{path} is gone, removed by maintenance: {AGAIN}")
