"""Plan which files a table should have, bucket by bucket: from names, and from the objects' columns.

Only buckets in which table and archive differ are looked at. The footers of their objects are read some thousands at a
time. What is left of every other file is a few bytes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.info import BadObject, InfoReader, ObjectInfo
from jetcapture_py.archive.layout import MAX_INTERVAL, ObjectName, clusters
from jetcapture_py.archive.removed import Expired
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.merge import classes, disjoint
from jetcapture_py.compaction.plan import Source, Unit
from jetcapture_py.compaction.unit import Merged
from jetcapture_py.errors import JetcaptureError, VanishedError
from jetcapture_py.maintain.inventory import Inventory, PathSet, bucket_in, names_of, root_url
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.text import plural, without_credentials

if TYPE_CHECKING:
    from jetcapture_py.archive.watermark import Watermark
    from jetcapture_py.maintain.iceberg import CurrentFile, IcebergTable
    from jetcapture_py.maintain.manifests import Partitions, TableFile
    from jetcapture_py.maintain.table_columns import TableColumns

_CHUNK = 4096
"""Objects whose columns are read before their buckets are settled, about."""
_MAX_SCHEMAS = 1000
"""Different columns of objects that are remembered at once, about."""
_NO_IDS = "its columns have no field ids: it was not written by jetcapture"
_MERGES = ": compaction merges them"
_DRIFTED = " whose column types differ, which compaction cannot merge"
_NOT_PARQUET = "it is not Parquet, which a table requires"
_HOUR = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """What archive and table have in one bucket, where they differ."""

    names: Sequence[ObjectName]
    """The archive's objects, ordered by sequence."""
    files: Mapping[str, Sequence[int]]
    """Their bytes, by path."""
    current: Mapping[str, Sequence[int]]
    """The table's files by path: bytes, rows and the number of the manifest."""
    stale: AbstractSet[str]
    """Paths of those whose size differs: they were stored again."""


@dataclass(slots=True)
class TablePlan:
    """What a table has and should have. `run` fills it."""

    archive: ArchiveFiles
    table: IcebergTable
    columns: TableColumns
    """The table's columns, which grow."""
    directory: str
    """The directory of the objects, relative to the archive's root."""
    stream: str
    quarantine: bool
    after: float
    """Seconds since a bucket's end."""
    outcomes: Iterable[Merged] = ()
    """Facts verified by compaction."""
    expired: Collection[str] = ()
    """Paths of objects that are about to be removed, beyond those of which the archive's note says so."""
    keep: float | None = None
    """Seconds that buckets are kept; None for ever."""
    mark: Watermark | None = field(init=False, default=None)
    """The watermark, as it was before the archive was listed."""
    closed: float = field(init=False, default=0.0)
    """Complete buckets end before this time, in seconds since the epoch."""
    kept: PathSet = field(init=False, default_factory=PathSet)
    """Paths of objects that are in the table and stay there."""
    rows: int = field(init=False, default=0)
    """Rows of the files that the table has in the end."""
    removed: dict[str, int] = field(init=False, default_factory=dict)
    """Places of files that leave the table, and the numbers of their manifests."""
    unsettled: dict[str, str] = field(init=False, default_factory=dict)
    """Paths of objects that wait, and why."""
    stuck: dict[str, str] = field(init=False, default_factory=dict)
    """Those of them that no further pass can add."""
    earliest: int | None = field(init=False, default=None)
    """The first bucket in which objects wait."""
    opened: int = field(init=False, default=0)
    """Objects whose footers were read."""
    _added: Inventory = field(init=False)
    """The objects to add, with their sizes and the index of their kind."""
    _kinds: dict[tuple[Partitions, int], int] = field(init=False, default_factory=dict)
    """How files are divided, and the length of their buckets."""
    _replaced: dict[str, Merged] = field(init=False)
    """Verified facts, by the paths of the replaced objects."""
    _reader: InfoReader = field(init=False, default_factory=InfoReader)
    _fitting: dict[int, bool] = field(init=False, default_factory=dict)
    """Whether the table can have objects of a schema of the reader."""
    _rest: list[CurrentFile] = field(init=False, default_factory=list)
    """Files of the table that are not objects of the archive."""

    def __post_init__(self) -> None:
        self._replaced = {path: outcome for outcome in self.outcomes for path in outcome.removable}
        self._added = Inventory(2)
        self.expired = frozenset(self.expired)

    @property
    def root(self) -> str:
        """The URL before the paths of objects, as the table has it."""
        return root_url(self.archive)

    @property
    def new(self) -> int:
        """How many files are to be added."""
        return self._added.files

    @property
    def partitions(self) -> Collection[Partitions]:
        """How the files to add are divided."""
        return {partitions for partitions, _ in self._kinds}

    def run(self) -> None:
        """Compare the table, which was loaded before, with the archive as it is now.

        Raises JetcaptureError, also for a table of another archive; and VanishedError for objects that go meanwhile.
        """
        current = self._current()
        self.mark = self.archive.watermark(self.stream)
        self.closed = time.time() - self.after
        if self.mark is not None:
            self.closed = min(self.closed, self.mark.time.timestamp())
        present, others = self._listed()
        self._refuse_others(current, present.files)
        note = None if self.keep is None else self.archive.expired(self.stream)
        waiting: list[_Bucket] = []
        for bucket in sorted({*current.buckets, *present.buckets}):
            files = dict(present.take(bucket))
            names = self._lasting(bucket, files, note)
            compared = self._compared(bucket, names, files, dict(current.take(bucket)))
            if compared is not None:
                waiting.append(compared)
                if sum(len(each.names) for each in waiting) >= _CHUNK:
                    self._settle(waiting)
                    waiting = []
        self._settle(waiting)
        for bucket in sorted(bucket for bucket in others.buckets if bucket < self.closed):
            if paths := self._lasting(bucket, dict(others.take(bucket)), note):
                self.wait(bucket, paths, _NOT_PARQUET)
        self.removed |= {file.place: file.manifest for file in self._rest}

    def files(self) -> Iterator[TableFile]:
        """Yield the files to add, bucket by bucket, as the table describes them."""
        from jetcapture_py.maintain.manifests import TableFile

        kinds = list(self._kinds)
        for path, (size, number) in self._added:
            name = layout.parse_path(path)
            if name is not None:
                partitions, interval = kinds[number]
                yield TableFile(
                    path=f"{self.root}{path}",
                    size=size,
                    rows=name.rows,
                    partitions=partitions,
                    key=name.bundle or name.key,
                    bucket=name.bucket,
                    interval=interval,
                    first_seq=name.first_seq,
                    last_seq=name.last_seq,
                )

    def added(self) -> Iterator[str]:
        """Yield the paths of the objects to add."""
        return (path for path, _ in self._added)

    def _listed(self) -> tuple[Inventory, Inventory]:
        """Return the Parquet objects, each with its bytes, and the objects of other formats."""
        present, others = Inventory(1), Inventory(1)
        for file in self.archive.below(self.directory):
            if file.name is not None and file.name.parquet:
                present.add(file.name.bucket, file.path, file.size)
            elif file.name is not None:
                others.add(file.name.bucket, file.path, file.size)
        return present, others

    def _current(self) -> Inventory:
        """Return the table's files with their sizes, rows and manifests; those of other archives are put aside."""
        found, root = Inventory(3), self.root
        for file in self.table.files():
            path = file.place.removeprefix(root)
            bucket = None if path == file.place else bucket_in(path)
            if bucket is None:
                self._rest.append(file)
            else:
                found.add(bucket, path, file.size, file.rows, file.manifest)
        return found

    def _refuse_others(self, current: Inventory, present: int) -> None:
        """Raise JetcaptureError for a table of another archive, or of one that is not there."""
        name, shown = self.table.identifier, self.archive.shown
        explained = present or (self.quarantine and self._has_messages())
        if (current.files or self._rest) and not explained and not self._all_erased(current):
            raise JetcaptureError(
                f"{shown} has no objects of stream {self.stream}, but table {name} does: it is left as it is"
            )
        if self._rest and not current.files and not any(file.place.startswith(self.root) for file in self._rest):
            other = without_credentials(min(file.place for file in self._rest))
            raise JetcaptureError(
                f"table {name} is of another archive than {shown}, such as {other}: it is left as it is; use another "
                "name, or drop it from its catalog, without purging it, if the archive was moved"
            )

    def _has_messages(self) -> bool:
        return any(file.name is not None and file.name.parquet for file in self.archive.below(self.stream))

    def _all_erased(self, current: Inventory) -> bool:
        """Whether every message of the table's files is erased."""
        erased = self.archive.erased(self.stream)
        names = names_of(path for path, _ in current)
        return bool(names) and all(erased.count(name.first_seq, name.last_seq) >= name.rows for name in names)

    def _lasting(self, bucket: int, files: Iterable[str], note: Expired | None) -> list[str]:
        """Return the paths of a bucket without what has expired: any pass with `keep` may be removing it now."""
        paths = files
        if note is not None and bucket < min(note.until.timestamp(), time.time() - (self.keep or 0)):
            names = names_of(files)
            seqs = np.array([(name.first_seq, name.last_seq) for name in names], np.int64).reshape(-1, 2)
            gone = note.contains(seqs[:, 0]) & note.contains(seqs[:, 1])
            paths = [name.path for name, each in zip(names, gone, strict=True) if not each]
        return [path for path in paths if path not in self.expired]

    def _compared(
        self,
        bucket: int,
        paths: Iterable[str],
        files: Mapping[str, Sequence[int]],
        current: Mapping[str, Sequence[int]],
    ) -> _Bucket | None:
        """Return a bucket in which table and archive differ; keep the files of all others."""
        present = set(paths)
        there = present & current.keys()
        stale = {path for path in there if current[path][0] != files[path][0]}
        if not stale and (len(there) == len(present) or bucket >= self.closed):
            self.keep_files(current, there)
            return None
        return _Bucket(names=names_of(present), files=files, current=current, stale=stale)

    def keep_files(self, current: Mapping[str, Sequence[int]], kept: AbstractSet[str]) -> None:
        """Keep these of a bucket's files, and have the others leave the table."""
        for path, (_, rows, manifest) in current.items():
            if path in kept:
                self.kept.add(path)
                self.rows += rows
            else:
                self.removed[f"{self.root}{path}"] = manifest

    def _settle(self, buckets: Sequence[_Bucket]) -> None:
        """Read the columns of the objects in these buckets, and decide which of them the table has."""
        names = [name for bucket in buckets for name in bucket.names]
        numbers = {path: each for bucket in buckets for path, each in bucket.files.items()}
        files = [self.archive.at(name.path, numbers[name.path][0]) for name in names]
        if len(self._reader.schemas) > _MAX_SCHEMAS:
            self._reader = InfoReader()
            self._fitting.clear()
        infos = self.archive.infos(files, detailed=lambda name: name.event_time, reader=self._reader)
        read = {info.name: info for info in infos}
        self.opened += len(read)
        for bucket in buckets:
            _Settlement(self, bucket, read).run()

    def fits(self, schema: int) -> bool:
        """Whether the table can have objects of a schema of the reader, whose columns it then has."""
        if schema not in self._fitting:
            self._fitting[schema] = self.columns.add(self._reader.schemas[schema])
        return self._fitting[schema]

    def add(self, name: ObjectName, size: int, partitions: Partitions, interval: int) -> None:
        """Have an object join the table."""
        kind = self._kinds.setdefault((partitions, interval), len(self._kinds))
        self._added.add(name.bucket, name.path, size, kind)
        self.rows += name.rows

    def wait(self, bucket: int, paths: Collection[str], reason: str, *, stuck: bool = True) -> None:
        """Count objects that the table lacks; `stuck` if no further pass can add them."""
        self.unsettled |= dict.fromkeys(paths, reason)
        self.stuck |= dict.fromkeys(paths if stuck else (), reason)
        self.earliest = bucket if self.earliest is None else min(self.earliest, bucket)

    def outcome(self, path: str) -> Merged | None:
        """Return the verified facts of a replaced object."""
        return self._replaced.get(path)


def disjoint_objects(archive: ArchiveFiles, sources: Iterable[Source]) -> tuple[list[ObjectName] | None, bool]:
    """Return objects that together have all messages of overlapping ones, each once, or None; and whether a compaction
    could merge them. Raises JetcaptureError."""
    files = Files(archive)
    unit = Unit(archive.map(files.info, sources))
    return disjoint(files, unit), len(classes([info.schema for info in unit.sources])) == 1


@dataclass(slots=True)
class _Settlement:
    """Decides which objects of one bucket a table has."""

    plan: TablePlan
    bucket: _Bucket
    infos: Mapping[ObjectName, ObjectInfo | BadObject]
    _kept: set[str] = field(init=False, default_factory=set)

    def run(self) -> None:
        """Add objects to the plan, and keep files or have them leave."""
        names, plan = self.bucket.names, self.plan
        known = [info for name in names if isinstance(info := self.infos[name], ObjectInfo)]
        if names and max((info.end for info in known), default=names[0].bucket + MAX_INTERVAL) > plan.closed:
            self._hold(names)
        else:
            present = {name.path for name in names}
            for cluster in clusters(names, self._bundles(names)):
                chosen, reason = self._settled(cluster, present)
                stuck = not reason.endswith(_MERGES)
                if not all(map(self._fits, chosen)):
                    reason = next(filter(None, map(self._bad, chosen)), _NO_IDS)
                if reason:
                    missing = [name.path for name in cluster if name.path not in self.bucket.current]
                    plan.wait(cluster[0].bucket, missing, reason, stuck=stuck)
                    self._hold(cluster)
                    continue
                for name in chosen:
                    self._keep_or_add(name)
        plan.keep_files(self.bucket.current, self._kept)

    def _keep_or_add(self, name: ObjectName) -> None:
        if name.path in self.bucket.current and name.path not in self.bucket.stale:
            self._kept.add(name.path)
        else:
            self._add(name)

    def _hold(self, names: Iterable[ObjectName]) -> None:
        """Keep what the table has of these objects, or add it, because it was stored again."""
        for name in names:
            if name.path in self.bucket.current:
                if name.path in self.bucket.stale and not self._fits(name):
                    reason = self._bad(name) or _NO_IDS  # the table would name bytes that are no longer there
                    self.plan.wait(name.bucket, [name.path], reason)
                else:
                    self._keep_or_add(name)

    def _fits(self, name: ObjectName) -> bool:
        """Whether the table can have an object, by its columns, which it then has."""
        info = self.infos[name]
        return isinstance(info, ObjectInfo) and self.plan.fits(info.schema_number)

    def _bad(self, name: ObjectName) -> str:
        """Return why an object cannot be read; "" if it can."""
        info = self.infos[name]
        return str(self.plan.archive.refusal(info)) if isinstance(info, BadObject) else ""

    def _bundles(self, names: Iterable[ObjectName]) -> Mapping[ObjectName, int]:
        infos = (self.infos[name] for name in names)
        return {info.name: info.bundles for info in infos if isinstance(info, ObjectInfo) and info.bundles}

    def _settled(self, cluster: list[ObjectName], present: AbstractSet[str]) -> tuple[list[ObjectName], str]:
        """Return objects of a cluster that have all its messages, each once; or why that is not certain."""
        if len(cluster) == 1:
            return cluster, ""
        left = {name.path: name for name in cluster}
        for path in list(left):
            outcome = self.plan.outcome(path)
            if outcome is not None and outcome.holders and present >= set(outcome.holders):  # they have its messages
                del left[path]
        names, bundles = list(left.values()), self._bundles(cluster)
        if all(len(each) == 1 for each in clusters(names, bundles)):
            return names, ""
        if unreadable := next(filter(None, map(self._bad, names)), ""):
            return [], unreadable
        try:
            infos = [info for name in names if isinstance(info := self.infos[name], ObjectInfo)]
            sources = [Source(info.name, info.size) for info in infos]
            chosen, mergeable = disjoint_objects(self.plan.archive, sources)
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

    def _add(self, name: ObjectName) -> None:
        from jetcapture_py.maintain.manifests import Partitions

        info = self.infos[name]
        if isinstance(info, BadObject):
            raise self.plan.archive.refusal(info)
        names, interval = info.schema.names, info.interval
        time_ = layout.TIME if name.event_time else layout.TIMESTAMP
        several = name.event_time and layout.ROW in names  # a bucket has the time of the first row of a message
        exact = time_ in names and not several and not (name.event_time and info.details.untimed)
        partitions = Partitions(
            key=not (name.quarantine or name.bundle),
            # messages without a key are in bundle 0, but in no bucket of Iceberg's
            bundles=info.bundles if name.bundle and int(name.bundle) else 0,
            time=time_ if exact else "",
            day=exact and _HOUR % interval > 0,
        )
        self.plan.add(name, info.size, partitions, interval)
