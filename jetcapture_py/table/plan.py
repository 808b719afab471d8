"""Plan which files a table should have, bucket by bucket: from names, and from the objects' footers.

What a table should have follows from the archive alone: its names, its watermark, and, where names overlap, the
objects' messages. Only buckets in which table and archive differ are looked at. Objects whose sequences overlap are in
the table only if it is certain that they share no message: compaction has verified which of them have all messages, or
the messages themselves are compared here. Otherwise the table keeps what it had of them, and the rest waits.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.info import BadObject, InfoReader, ObjectInfo
from jetcapture_py.archive.layout import MAX_INTERVAL, ObjectName, clusters
from jetcapture_py.archive.removed import Expired
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.inventory import Inventory, PathSet, bucket_in, names_of
from jetcapture_py.compaction.merge import disjoint
from jetcapture_py.compaction.plan import Source, Unit, classes
from jetcapture_py.compaction.unit import Merged
from jetcapture_py.errors import JetcaptureError, VanishedError
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.table.catalog import ArchiveTable
from jetcapture_py.text import plural, without_credentials

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile

    from jetcapture_py.archive.watermark import Watermark
    from jetcapture_py.table.columns import TableColumns
    from jetcapture_py.table.files import Leaf

_CHUNK = 1024
"""Objects whose footers are read before their buckets are settled, about."""
_MAX_SCHEMAS = 1000
"""Different columns of objects that are remembered at once, about."""
_NO_DAY = -(1 << 31)
_NO_IDS = "its columns have no field ids: it was not written by jetcapture"
_MERGES = ": compaction merges them"
_DRIFTED = " whose column types differ, which compaction cannot merge"
_NOT_PARQUET = "it is not Parquet, which a table requires"


class Joining(NamedTuple):
    """An object that joins a table."""

    info: ObjectInfo
    footer: bytes
    columns: Sequence[Leaf]
    """Its columns whose bounds the table can have."""


class Change(NamedTuple):
    """What changes in one bucket of a table."""

    added: list[Joining]
    removed: list[DataFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What a table is of."""

    stream: str
    quarantine: bool
    after: float
    """Seconds since a bucket's end."""
    keep: float | None = None
    """Seconds that buckets are kept; None for ever."""
    outcomes: Sequence[Merged] = ()
    """What compaction has verified."""
    expired: AbstractSet[str] = frozenset()
    """Paths of objects that are about to be removed, beyond those of which the archive's note says so."""

    @property
    def directory(self) -> str:
        return f"{layout.QUARANTINE}/{self.stream}" if self.quarantine else self.stream


@dataclass(slots=True)
class Tally:
    """What a table has in the end."""

    paths: PathSet = field(default_factory=PathSet)
    """Paths of its objects."""
    new: PathSet = field(default_factory=PathSet)
    """Those of them that are added."""
    rows: int = 0
    removed: int = 0
    """Files that leave it."""
    unsettled: dict[str, str] = field(default_factory=dict)
    """Paths of objects that wait, and why."""
    stuck: dict[str, str] = field(default_factory=dict)
    """Those of them that no further pass can add."""
    earliest: int | None = None
    """The first bucket in which objects wait."""
    opened: int = 0
    """Objects whose footers were read."""

    def wait(self, bucket: int, paths: Collection[str], reason: str, *, stuck: bool = True) -> None:
        """Count objects that the table lacks; `stuck` if no further pass can add them."""
        self.unsettled |= dict.fromkeys(paths, reason)
        self.stuck |= dict.fromkeys(paths if stuck else (), reason)
        self.earliest = bucket if self.earliest is None else min(self.earliest, bucket)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """What archive and table have in one bucket, where they differ."""

    paths: Sequence[str]
    """The archive's objects."""
    sizes: Mapping[str, int]
    """Their bytes, by path."""
    current: Mapping[str, Sequence[int]]
    """The table's files by path: bytes, rows, specification of the partition, and day."""

    def is_stale(self, path: str) -> bool:
        """Whether an object was stored again since the table got it."""
        return path in self.current and self.current[path][0] != self.sizes[path]


class TablePlan:
    """Compares a table, as it was loaded, with its archive; `changes` yields what differs and fills `tally`."""

    def __init__(self, archive: ArchiveFiles, table: ArchiveTable, columns: TableColumns, scope: Scope) -> None:
        self.archive, self.table, self.columns, self.scope = archive, table, columns, scope
        self.tally = Tally()
        self.mark: Watermark | None = archive.watermark(scope.stream)
        """The watermark, as it was before the archive was listed."""
        self.closed = time.time() - scope.after
        """Complete buckets end before this time, in seconds since the epoch."""
        if self.mark is not None:
            self.closed = min(self.closed, self.mark.time.timestamp())
        self.replaced = {path: outcome for outcome in scope.outcomes for path in outcome.removable}
        """What compaction has verified, by the paths of replaced objects."""
        self._footers = _Footers(columns)

    def changes(self) -> Iterator[Change]:
        """Yield what changes, bucket by bucket.

        Raises JetcaptureError, also for a table of another archive; and VanishedError for objects that go meanwhile.
        """
        current, elsewhere = self._current()
        present, others = self._listed()
        self._refuse_other_archive(current, elsewhere, present.files)
        scope = self.scope
        note = None if scope.keep is None else self.archive.expired(scope.stream)
        if elsewhere:
            self.tally.removed += len(elsewhere)
            yield Change([], elsewhere)
        waiting: list[_Bucket] = []
        for number in sorted({*current.buckets, *present.buckets}):
            sizes = {path: size for path, (size,) in present.take(number)}
            paths = self._lasting(number, sizes, note)
            bucket = _Bucket(paths=paths, sizes=sizes, current=dict(current.take(number)))
            if self._is_same(number, bucket):
                yield from self._change(bucket, paths, [])
                continue
            waiting.append(bucket)
            if sum(len(item.paths) for item in waiting) >= _CHUNK:
                yield from self._settle(waiting)
                waiting = []
        yield from self._settle(waiting)
        for number in sorted(number for number in others.buckets if number < self.closed):
            if paths := self._lasting(number, [path for path, _ in others.take(number)], note):
                self.tally.wait(number, paths, _NOT_PARQUET)

    def _listed(self) -> tuple[Inventory, Inventory]:
        """Return the Parquet objects, each with its bytes, and the objects of other formats."""
        present, others = Inventory(1), Inventory(1)
        for file in self.archive.below(self.scope.directory):
            if file.name is not None:
                (present if file.name.parquet else others).add(file.name.bucket, file.path, file.size)
        return present, others

    def _current(self) -> tuple[Inventory, list[DataFile]]:
        """Return the table's files that are objects of the archive, and the others."""
        objects, elsewhere, root = Inventory(4), list["DataFile"](), self.table.root
        for file in files_of(self.table):
            path = file.file_path.removeprefix(root)
            bucket = None if path == file.file_path else bucket_in(path)
            if bucket is None:
                elsewhere.append(file)
            else:
                day = file.partition[0] if len(file.partition) else None
                numbers = file.file_size_in_bytes, file.record_count, file.spec_id, _NO_DAY if day is None else day
                objects.add(bucket, path, *numbers)
        return objects, elsewhere

    def _refuse_other_archive(self, current: Inventory, elsewhere: Sequence[DataFile], present: int) -> None:
        """Raise JetcaptureError for a table of another archive, or of one that is not there."""
        name, shown, stream = self.table.name, self.archive.shown, self.scope.stream
        explained = present or (self.scope.quarantine and self._has_messages())
        if (current.files or elsewhere) and not explained and not self._all_erased(current):
            raise JetcaptureError(
                f"{shown} has no objects of stream {stream}, but table {name} does: it is left as it is"
            )
        if (
            elsewhere
            and not current.files
            and not any(file.file_path.startswith(self.table.root) for file in elsewhere)
        ):
            other = without_credentials(min(file.file_path for file in elsewhere))
            raise JetcaptureError(
                f"table {name} is of another archive than {shown}, such as {other}: it is left as it is; use another "
                "name, or drop it from its catalog, without purging it, if the archive was moved"
            )

    def _has_messages(self) -> bool:
        return any(file.name is not None and file.name.parquet for file in self.archive.below(self.scope.stream))

    def _all_erased(self, current: Inventory) -> bool:
        """Whether every message of the table's files is erased."""
        erased = self.archive.erased(self.scope.stream)
        names = names_of(path for path, _ in current)
        return bool(names) and all(erased.count(name.first_seq, name.last_seq) >= name.rows for name in names)

    def _lasting(self, bucket: int, paths: Iterable[str], note: Expired | None) -> list[str]:
        """Return the paths of a bucket without what has expired: any pass with `keep` may be removing it now."""
        if note is not None and bucket < min(note.until.timestamp(), time.time() - (self.scope.keep or 0)):
            names = names_of(paths)
            seqs = np.array([(name.first_seq, name.last_seq) for name in names], np.int64).reshape(-1, 2)
            gone = note.contains(seqs[:, 0]) & note.contains(seqs[:, 1])
            paths = [name.path for name, is_gone in zip(names, gone, strict=True) if not is_gone]
        return [path for path in paths if path not in self.scope.expired]

    def _is_same(self, number: int, bucket: _Bucket) -> bool:
        """Whether the archive has nothing in a bucket that the table lacks and may have."""
        lacks = any(path not in bucket.current for path in bucket.paths)
        return not any(map(bucket.is_stale, bucket.paths)) and (not lacks or number >= self.closed)

    def _settle(self, buckets: Sequence[_Bucket]) -> Iterator[Change]:
        """Read the footers of the objects in these buckets, and decide which of them the table has."""
        names = [names_of(bucket.paths) for bucket in buckets]
        files = [
            self.archive.at(name.path, bucket.sizes[name.path], name)
            for bucket, objects in zip(buckets, names, strict=True)
            for name in objects
        ]
        self.tally.opened += len(files)
        self._footers.forget_many()
        data = iter(list(self.archive.footers(files)))
        for bucket, objects in zip(buckets, names, strict=True):
            footers = {name: next(data) for name in objects}
            infos = {name: self._footers.read(name, bucket.sizes[name.path], footers[name]) for name in objects}
            stays, joins = _Settlement(self, bucket, infos, self._footers).run()
            for info in joins:
                self.tally.rows += info.name.rows
                self.tally.new.add(info.name.path)
                self.tally.paths.add(info.name.path)
            added = [Joining(info, footers[info.name], self._footers.leaves(info) or []) for info in joins]
            yield from self._change(bucket, stays, added)

    def _change(self, bucket: _Bucket, stays: Collection[str], added: list[Joining]) -> Iterator[Change]:
        """Count the files that stay, and yield those that join and leave."""
        from jetcapture_py.table.files import known_file

        removed, root, staying = list["DataFile"](), self.table.root, frozenset(stays)
        for path, (size, rows, spec, day) in bucket.current.items():
            if path in staying:
                self.tally.paths.add(path)
                self.tally.rows += rows
            else:
                removed.append(known_file(f"{root}{path}", size, rows, spec, None if day == _NO_DAY else day))
        self.tally.removed += len(removed)
        if added or removed:
            yield Change(added, removed)


def files_of(table: ArchiveTable) -> Iterator[DataFile]:
    """Yield the current files of a table."""
    loaded = table.loaded
    for manifest in table.manifests():
        if loaded is not None:
            yield from (entry.data_file for entry in manifest.fetch_manifest_entry(loaded.io))


class _Footers:
    """Parses footers, and says what of the objects the table can have."""

    def __init__(self, columns: TableColumns) -> None:
        self._columns = columns
        self._reader = InfoReader()
        self._leaves: dict[int, list[Leaf] | None] = {}
        """By the number of a schema."""

    def forget_many(self) -> None:
        """Forget schemas, if there are very many."""
        if len(self._reader.schemas) > _MAX_SCHEMAS:
            self._reader = InfoReader()
            self._leaves.clear()

    def read(self, name: ObjectName, size: int, data: bytes) -> ObjectInfo | BadObject:
        """Return what an object's footer says."""
        return self._reader.read(name, data, size=size)

    def leaves(self, info: ObjectInfo) -> list[Leaf] | None:
        """Return the columns of an object that can have bounds, which the table then has; None if it cannot have it."""
        from jetcapture_py.table.files import leaves

        if info.schema_number not in self._leaves:
            fits = self._columns.add(info.schema)
            self._leaves[info.schema_number] = leaves(info.schema, self._columns.schema) if fits else None
        return self._leaves[info.schema_number]


class _Settlement:
    """Decides which objects of one bucket a table has."""

    def __init__(
        self, plan: TablePlan, bucket: _Bucket, infos: Mapping[ObjectName, ObjectInfo | BadObject], footers: _Footers
    ) -> None:
        self._plan, self._bucket, self._infos, self._footers = plan, bucket, infos, footers
        self._bundles = {
            name: info.bundles for name, info in infos.items() if isinstance(info, ObjectInfo) and info.bundles
        }
        self._stays: list[str] = []
        self._joins: list[ObjectInfo] = []

    def run(self) -> tuple[list[str], list[ObjectInfo]]:
        """Return the paths of the objects that stay in the table, and the objects that join it."""
        names, plan = list(self._infos), self._plan
        ends = [info.end for info in self._infos.values() if isinstance(info, ObjectInfo)]
        if names and max(ends, default=names[0].bucket + MAX_INTERVAL) > plan.closed:
            self._hold(names)
            return self._stays, self._joins
        present = {name.path for name in names}
        for cluster in clusters(names, self._bundles):
            chosen, reason = self._settled(cluster, present)
            stuck = not reason.endswith(_MERGES)
            reason = next(filter(None, map(self._unfit, chosen)), reason)
            if reason:
                missing = [name.path for name in cluster if name.path not in self._bucket.current]
                plan.tally.wait(cluster[0].bucket, missing, reason, stuck=stuck)
                self._hold(cluster)
            else:
                for name in chosen:
                    self._keep_or_add(name)
        return self._stays, self._joins

    def _unfit(self, name: ObjectName) -> str:
        """Return why the table cannot have an object; "" if it can, with its columns, which it then has."""
        info = self._infos[name]
        if isinstance(info, BadObject):
            return str(self._plan.archive.refusal(info))
        return _NO_IDS if self._footers.leaves(info) is None else ""

    def _keep_or_add(self, name: ObjectName) -> None:
        info = self._infos[name]
        if name.path in self._bucket.current and not self._bucket.is_stale(name.path):
            self._stays.append(name.path)
        elif isinstance(info, ObjectInfo):
            self._joins.append(info)

    def _hold(self, names: Iterable[ObjectName]) -> None:
        """Keep what the table has of these objects, or add it, because it was stored again."""
        for name in names:
            if name.path in self._bucket.current:
                if self._bucket.is_stale(name.path) and (reason := self._unfit(name)):
                    self._plan.tally.wait(name.bucket, [name.path], reason)  # the bytes that it names are gone
                else:
                    self._keep_or_add(name)

    def _settled(self, cluster: list[ObjectName], present: AbstractSet[str]) -> tuple[list[ObjectName], str]:
        """Return objects of a cluster that have all its messages, each once; or why that is not certain."""
        if len(cluster) == 1:
            return cluster, ""
        remaining = {name.path: name for name in cluster}
        for path in list(remaining):
            outcome = self._plan.replaced.get(path)
            if outcome is not None and outcome.holders and present >= set(outcome.holders):  # they have its messages
                del remaining[path]
        names = list(remaining.values())
        if all(len(several) == 1 for several in clusters(names, self._bundles)):
            return names, ""
        archive = self._plan.archive
        for name in names:
            if isinstance(info := self._infos[name], BadObject):
                return [], str(archive.refusal(info))
        try:
            chosen, mergeable = disjoint_objects(
                archive, [Source(name, self._bucket.sizes[name.path]) for name in names]
            )
        except VanishedError:
            raise
        except (JetcaptureError, pa.ArrowException) as error:
            return [], str(error)
        if chosen is not None:
            return chosen, ""
        others = f"it may share messages with {plural(len(names) - 1, 'other object')}"
        if len({layout.layout_of(name, self._bundles) for name in names}) > 1:
            return [], f"{others}, not all in the same number of bundles, which compaction does not merge"
        return [], f"{others}{_MERGES if mergeable else _DRIFTED}"


def disjoint_objects(archive: ArchiveFiles, sources: Iterable[Source]) -> tuple[list[ObjectName] | None, bool]:
    """Return objects that together have all messages of overlapping ones, each once, or None; and whether a compaction
    could merge them. Raises JetcaptureError."""
    files = Files(archive)
    unit = Unit(archive.map(files.info, sources))
    return disjoint(files, unit), len(classes([info.schema for info in unit.sources])) == 1
