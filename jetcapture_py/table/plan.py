"""Plan the files of a table, bucket by bucket, from objects' names and footers.

The contents of a table follow from the archive alone: its names, its watermark and, where names overlap, the objects'
messages. Only buckets in which table and archive differ are examined. Objects with overlapping sequences join the table
only if they certainly share no message: compaction has verified which of them have all messages, or the messages are
compared here. Otherwise the table keeps its files of them, and the rest waits.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import tee
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.info import BadObject, InfoReader, ObjectInfo
from jetcapture_py.archive.layout import ObjectName, clusters
from jetcapture_py.archive.removed import Expired
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.inventory import Inventory, PathSet
from jetcapture_py.compaction.merge import disjoint
from jetcapture_py.compaction.plan import Source, Unit, classes
from jetcapture_py.compaction.unit import Merged
from jetcapture_py.config.maintain import CompactConfig
from jetcapture_py.config.model import Config
from jetcapture_py.errors import JetcaptureError, VanishedError
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.table.catalog import ArchiveTable
from jetcapture_py.text import plural, without_credentials

if TYPE_CHECKING:
    from jetcapture_py.archive.watermark import Watermark
    from jetcapture_py.table.files import Leaf

_BUCKET = re.compile(r"/(\d{8}T\d{6})[ZE]-[^/]*\.parquet")
_MAX_SCHEMAS = 1000
"""Approximate maximum of distinct schemas in the cache."""
_NO_IDS = "its columns have no field ids: it was not written by jetcapture"
_MERGES = ": compaction merges them"
_DRIFTED = " whose column types differ, which compaction cannot merge"
_NOT_PARQUET = "it is not Parquet, which a table requires"


class Joining(NamedTuple):
    """An object to add to a table."""

    info: ObjectInfo
    footer: bytes
    columns: Sequence[Leaf]
    """Its columns with bounds."""


class Leaving(NamedTuple):
    """A file to remove from a table."""

    manifest: int
    """The number of its manifest."""
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """A request to update a table."""

    quarantine: bool = False
    """Use the table of the quarantine instead of the messages'."""
    after: float | None = None
    """Seconds since a bucket's end; None for `maintain.compact.after`."""
    outcomes: Sequence[Merged] = ()
    """Verified results of a compaction of these objects."""
    expired: frozenset[str] = frozenset()
    """Paths of objects about to be removed, besides those recorded in the archive."""
    recent: float = 0.0
    """Report files dropped within this many seconds."""
    forget: bool = False
    """Forget all earlier snapshots."""
    dry_run: bool = False


@dataclass(slots=True)
class Tally:
    """A table's contents after the changes."""

    paths: PathSet = field(default_factory=PathSet)
    """Paths of its objects."""
    new: PathSet = field(default_factory=PathSet)
    """Paths of added objects."""
    rows: int = 0
    removed: int = 0
    """Number of removed files."""
    unsettled: dict[str, str] = field(default_factory=dict)
    """Paths of waiting objects, with the reason."""
    stuck: dict[str, str] = field(default_factory=dict)
    """Waiting objects that no further pass can add, with the reason."""
    earliest: int | None = None
    """The first bucket with waiting objects."""
    opened: int = 0
    """Number of footers read."""

    def wait(self, bucket: int, paths: Collection[str], reason: str, *, stuck: bool = True) -> None:
        """Count objects that the table lacks; `stuck` if no further pass can add them."""
        self.unsettled |= dict.fromkeys(paths, reason)
        self.stuck |= dict.fromkeys(paths if stuck else (), reason)
        self.earliest = bucket if self.earliest is None else min(self.earliest, bucket)


@dataclass(slots=True)
class _Bucket:
    """The archive's objects and the table's files of one bucket."""

    sizes: Mapping[str, int]
    """Sizes of the archive's unexpired objects, by path."""
    current: Mapping[str, Sequence[int]]
    """The table's files by path: bytes, rows, and the number of their manifest."""
    staying: set[str] = field(default_factory=set)
    """Paths of files to keep in the table."""

    def is_stale(self, path: str) -> bool:
        """Whether an object was stored again since the table got it."""
        return path in self.current and self.current[path][0] != self.sizes[path]


class _Part(NamedTuple):
    """Objects of one bucket that are decided together; empty at the bucket's end."""

    bucket: _Bucket
    names: Sequence[ObjectName]


class TablePlan:
    """Compares a loaded table with its archive; `changes` yields the differences and fills `tally`."""

    def __init__(self, config: Config, archive: ArchiveFiles, table: ArchiveTable, request: CommitRequest) -> None:
        from jetcapture_py.table.columns import TableColumns, first_columns

        self.archive, self.table, self.request = archive, table, request
        self.stream = config.source.stream
        self.columns = TableColumns(table.loaded.schema() if table.loaded else first_columns(table.time))
        self.tally = Tally()
        self.mark: Watermark | None = archive.watermark(self.stream)
        """The watermark before the archive was listed."""
        compact = (config.maintain and config.maintain.compact) or CompactConfig()
        self.closed = time.time() - (compact.after if request.after is None else request.after)
        """Complete buckets end before this time, in seconds since the epoch."""
        if self.mark is not None:
            self.closed = min(self.closed, self.mark.time.timestamp())
        self._keep = config.maintain.keep if config.maintain else None
        self._replaced = {path: outcome for outcome in request.outcomes for path in outcome.removable}
        """Verified results of compaction, by the paths of replaced objects."""
        self._reader = InfoReader()
        self._leaves: dict[int, list[Leaf] | None] = {}
        """Columns with bounds by schema number; None for objects that the table cannot have."""

    @property
    def directory(self) -> str:
        """The archive's directory of the table's objects."""
        return f"{layout.QUARANTINE}/{self.stream}" if self.request.quarantine else self.stream

    def changes(self) -> Iterator[Joining | Leaving]:
        """Yield the changes.

        Raises JetcaptureError, also for a table of another archive, and VanishedError for objects that vanish
        meanwhile.
        """
        current, elsewhere = self._current()
        present, others = self._listed()
        self._refuse_other_archive(current, elsewhere, present.files)
        note = None if self._keep is None else self.archive.expired(self.stream)
        self.tally.removed += len(elsewhere)
        yield from elsewhere
        parts, ahead = tee(self._parts(current, present, note))
        objects = ((bucket.sizes[name.path], name) for bucket, names in ahead for name in names)
        footers = self.archive.footers(self.archive.at(name.path, size, name) for size, name in objects)
        for bucket, names in parts:
            if names:
                yield from self._joining(bucket, {name: next(footers) for name in names})
            else:
                yield from self._leaving(bucket)
        for number in sorted(number for number in others.buckets if number < self.closed):
            if paths := self._lasting(number, [path for path, _ in others.take(number)], note):
                self.tally.wait(number, paths, _NOT_PARQUET)

    def _parts(self, current: Inventory, present: Inventory, note: Expired | None) -> Iterator[_Part]:
        """Yield the parts of each bucket, whose objects are read if table and archive differ."""
        for number in sorted({*current.buckets, *present.buckets}):
            sizes = {path: size for path, (size,) in present.take(number)}
            lasting = {path: sizes[path] for path in self._lasting(number, sizes, note)}
            bucket = _Bucket(lasting, dict(current.take(number)))
            lacks = number < self.closed and not lasting.keys() <= bucket.current.keys()
            if lacks or any(map(bucket.is_stale, lasting)):
                names = _names_of(lasting)
                # footers of bundles show which of them may share messages
                parts = [names] if any(name.bundle for name in names) else clusters(names)
                yield from (_Part(bucket, objects) for objects in parts)
            else:
                bucket.staying.update(lasting)
            yield _Part(bucket, ())

    def _listed(self) -> tuple[Inventory, Inventory]:
        """Return the Parquet objects with their sizes, and the objects of other formats."""
        present, others = Inventory(), Inventory()
        for file in self.archive.below(self.directory):
            if file.name is not None:
                (present if file.name.parquet else others).add(file.name.bucket, file.path, file.size)
        return present, others

    def _current(self) -> tuple[Inventory, list[Leaving]]:
        """Return the table's files that are objects of the archive, and the others."""
        objects, elsewhere, root = Inventory(), list[Leaving](), self.table.root
        for manifest, file in self.table.files():
            path = file.file_path.removeprefix(root)
            bucket = None if path == file.file_path else _bucket_in(path)
            if bucket is None:
                elsewhere.append(Leaving(manifest, file.file_path))
            else:
                objects.add(bucket, path, file.file_size_in_bytes, file.record_count, manifest)
        return objects, elsewhere

    def _refuse_other_archive(self, current: Inventory, elsewhere: Sequence[Leaving], present: int) -> None:
        """Raise JetcaptureError for a table of another or a missing archive."""
        name, shown, stream = self.table.name, self.archive.shown, self.stream
        explained = present or (self.request.quarantine and self._has_messages())
        if (current.files or elsewhere) and not explained and not self._all_erased(current):
            raise JetcaptureError(
                f"{shown} has no objects of stream {stream}, but table {name} does: it is left as it is"
            )
        places = [file.place for file in elsewhere]
        if places and not current.files and not any(place.startswith(self.table.root) for place in places):
            other = without_credentials(min(places))
            raise JetcaptureError(
                f"table {name} is of another archive than {shown}, such as {other}: it is left as it is; use another "
                "name, or drop it from its catalog, without purging it, if the archive was moved"
            )

    def _has_messages(self) -> bool:
        return any(file.name is not None and file.name.parquet for file in self.archive.below(self.stream))

    def _all_erased(self, current: Inventory) -> bool:
        """Whether every message of the table's files is erased."""
        erased = self.archive.erased(self.stream)
        names = _names_of(path for path, _ in current)
        return bool(names) and all(erased.count(name.first_seq, name.last_seq) >= name.rows for name in names)

    def _lasting(self, bucket: int, paths: Iterable[str], note: Expired | None) -> list[str]:
        """Return the unexpired paths of a bucket; another pass may be deleting the others."""
        if note is not None and bucket < min(note.until.timestamp(), time.time() - (self._keep or 0)):
            names = _names_of(paths)
            seqs = np.array([(name.first_seq, name.last_seq) for name in names], np.int64).reshape(-1, 2)
            gone = note.contains(seqs[:, 0]) & note.contains(seqs[:, 1])
            paths = [name.path for name, is_gone in zip(names, gone, strict=True) if not is_gone]
        return [path for path in paths if path not in self.request.expired]

    def _joining(self, bucket: _Bucket, footers: Mapping[ObjectName, bytes]) -> Iterator[Joining]:
        """Yield the objects that join the table, and record the ones that stay."""
        self.tally.opened += len(footers)
        if len(self._reader.schemas) > _MAX_SCHEMAS:
            self._reader = InfoReader()
            self._leaves.clear()
        infos = {name: self._reader.read(name, data, size=bucket.sizes[name.path]) for name, data in footers.items()}
        bundles = {name: info.bundles for name, info in infos.items() if isinstance(info, ObjectInfo) and info.bundles}
        for cluster in clusters(infos, bundles) if len(infos) > 1 else [list(infos)]:
            ends = [info.end for name in cluster if isinstance(info := infos[name], ObjectInfo)]
            complete = max(ends, default=0) <= self.closed
            chosen, reason = self._settled(bucket, cluster, infos, bundles) if complete else ([], "")
            stuck = not reason.endswith(_MERGES)
            reason = next(filter(None, (self._unfit(infos[name]) for name in chosen)), reason)
            if reason:
                missing = [name.path for name in cluster if name.path not in bucket.current]
                self.tally.wait(cluster[0].bucket, missing, reason, stuck=stuck)
            if reason or not complete:  # the table's files of them stay, and are re-read if stored again
                chosen = [name for name in cluster if name.path in bucket.current]
            for name in chosen:
                info = infos[name]
                if name.path in bucket.current and not bucket.is_stale(name.path):
                    bucket.staying.add(name.path)
                elif unfit := self._unfit(info):
                    self.tally.wait(name.bucket, [name.path], unfit)  # the file was replaced since the table got it
                elif isinstance(info, ObjectInfo):
                    leaves = self._leaves[info.schema_number] or []
                    self.tally.rows += name.rows
                    self.tally.new.add(name.path)
                    self.tally.paths.add(name.path)
                    yield Joining(info, footers[name], leaves)

    def _unfit(self, info: ObjectInfo | BadObject) -> str:
        """Return why the table cannot have an object; "" if it can, after adding its columns."""
        from jetcapture_py.table.files import leaves

        if isinstance(info, BadObject):
            return str(self.archive.refusal(info))
        if info.schema_number not in self._leaves:
            fits = self.columns.add(info.schema)
            self._leaves[info.schema_number] = leaves(info.schema, self.columns.schema) if fits else None
        return _NO_IDS if self._leaves[info.schema_number] is None else ""

    def _leaving(self, bucket: _Bucket) -> Iterator[Leaving]:
        """Count the files of a bucket that stay, and yield the ones to remove."""
        for path, (_, rows, manifest) in bucket.current.items():
            if path in bucket.staying:
                self.tally.paths.add(path)
                self.tally.rows += rows
            else:
                self.tally.removed += 1
                yield Leaving(manifest, f"{self.table.root}{path}")

    def _settled(
        self,
        bucket: _Bucket,
        cluster: list[ObjectName],
        infos: Mapping[ObjectName, ObjectInfo | BadObject],
        bundles: Mapping[ObjectName, int],
    ) -> tuple[list[ObjectName], str]:
        """Return objects of a cluster that have each of its messages once, or the reason of the uncertainty."""
        if len(cluster) == 1:
            return cluster, ""
        remaining = {name.path: name for name in cluster}
        for path in list(remaining):
            outcome = self._replaced.get(path)
            if (
                outcome is not None and outcome.holders and bucket.sizes.keys() >= set(outcome.holders)
            ):  # they have its messages
                del remaining[path]
        names = list(remaining.values())
        if all(len(several) == 1 for several in clusters(names, bundles)):
            return names, ""
        for name in names:
            if isinstance(info := infos[name], BadObject):
                return [], str(self.archive.refusal(info))
        try:
            sources = [Source(name, bucket.sizes[name.path]) for name in names]
            chosen, mergeable = disjoint_objects(self.archive, sources)
        except VanishedError:
            raise
        except (JetcaptureError, pa.ArrowException) as error:
            return [], str(error)
        if chosen is not None:
            return chosen, ""
        others = f"it may share messages with {plural(len(names) - 1, 'other object')}"
        if len({layout.layout_of(name, bundles) for name in names}) > 1:
            return [], f"{others}, not all in the same number of bundles, which compaction does not merge"
        return [], f"{others}{_MERGES if mergeable else _DRIFTED}"


def disjoint_objects(archive: ArchiveFiles, sources: Iterable[Source]) -> tuple[list[ObjectName] | None, bool]:
    """Return objects that together have each message of overlapping ones once, or None, and whether a compaction could
    merge them. Raises JetcaptureError."""
    files = Files(archive)
    unit = Unit(archive.map(files.info, sources))
    return disjoint(files, unit), len(classes([info.schema for info in unit.sources])) == 1


def _bucket_in(path: str) -> int | None:
    """Return the bucket in an object's path; None if it is not an object's."""
    match = _BUCKET.search(path)
    return None if match is None else layout.parse_bucket(match[1])


def _names_of(paths: Iterable[str]) -> list[ObjectName]:
    """Return the parsed paths of objects, ordered by sequence."""
    names = [name for path in paths if (name := layout.parse_path(path)) is not None]
    return sorted(names, key=lambda name: (name.first_seq, name.path))
