"""Write one commit of a table: new columns, one snapshot, and expired snapshots, all or nothing.

Manifests of new files are written continuously, so that few entries are in memory. A commit replaces exactly the loaded
snapshot, or fails.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from pyiceberg.avro.file import AvroOutputFile
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NamespaceAlreadyExistsError
from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    DEFAULT_READ_VERSION,
    DataFile,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table, Transaction
from pyiceberg.table.snapshots import Operation, Snapshot, SnapshotSummaryCollector, Summary, update_snapshot_summaries
from pyiceberg.table.update import (
    AddPartitionSpecUpdate,
    AddSchemaUpdate,
    AddSnapshotUpdate,
    SetCurrentSchemaUpdate,
    SetDefaultSpecUpdate,
    UpdatesAndRequirements,
)
from pyiceberg.table.update.snapshot import ExpireSnapshots, _MergeAppendFiles
from pyiceberg.transforms import DayTransform
from pyiceberg.typedef import EMPTY_DICT

from jetcapture_py.archive import footer
from jetcapture_py.table.catalog import CONTENT, ArchiveTable, explained, is_refused
from jetcapture_py.table.files import DAILY, data_file
from jetcapture_py.table.plan import Joining, Leaving

if TYPE_CHECKING:
    from jetcapture_py.table.columns import TableColumns

SUMMARY = "jetcapture."
"""Prefix of jetcapture's entries in a snapshot's summary."""
_FILES = 5_000
"""Approximate files per manifest; manifests with less than half as many are merged."""
_BLOCK = 100
"""Manifest entries compressed together."""
_PROPERTIES = {
    "gc.enabled": "false",  # engines that honor it neither purge nor clean up the archive's objects
    "commit.retry.num-retries": "0",  # a concurrent commit changes the plan
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.target-size-bytes": "524288",  # some 6,000 files
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}


class TableWriter:
    """Writes the changes of one commit."""

    def __init__(self, table: ArchiveTable, columns: TableColumns, summary: Mapping[str, str]) -> None:
        self._table, self._columns = table, columns
        self._added: dict[int, list[DataFile]] = defaultdict(list)
        """Files to add, by partition spec."""
        if table.loaded is None:
            with suppress(NamespaceAlreadyExistsError):  # by another process, just now
                table.catalog.create_namespace_if_not_exists(Catalog.namespace_from(table.name))
            self._tx: Transaction = table.catalog.create_table_transaction(table.name, Schema(), table.location)
        else:
            self._tx = table.loaded.transaction()
        properties = {**_PROPERTIES, CONTENT: table.content}
        if not properties.items() <= self._tx.table_metadata.properties.items():
            self._tx.set_properties(properties)
        self._snapshot = _Snapshot(self._tx, {f"{SUMMARY}{name}": text for name, text in summary.items()})

    def add(self, change: Joining | Leaving) -> None:
        """Add a change to the snapshot."""
        if isinstance(change, Leaving):
            self._snapshot.removed[change.manifest].add(change.place)
            return
        info, data, columns = change
        place = f"{self._table.root}{info.name.path}"
        file = data_file(place, info.size, footer.decoded(data), columns, self._table.time)
        files = self._added[file.spec_id]
        files.append(file)
        if len(files) >= _FILES:
            self._write(file.spec_id)

    def _write(self, spec: int) -> None:
        """Write the manifest of new files."""
        self._set_columns()
        self._snapshot.add(spec, self._added.pop(spec))

    def _set_columns(self) -> None:
        """Update the table's columns to those of the files so far."""
        metadata, schema = self._tx.table_metadata, self._columns.schema
        if metadata.schema().fields != schema.fields:
            number = 1 + max(earlier.schema_id for earlier in metadata.schemas)
            added = AddSchemaUpdate(schema=Schema(*schema.fields, schema_id=number))
            self._tx._stage((added, SetCurrentSchemaUpdate(schema_id=-1)))
        if DAILY not in metadata.specs():
            name = schema.find_column_name(self._table.time)
            day = PartitionField(self._table.time, PARTITION_FIELD_ID_START, DayTransform(), f"{name}_day")
            self._tx._stage(
                (AddPartitionSpecUpdate(spec=PartitionSpec(day, spec_id=DAILY)), SetDefaultSpecUpdate(spec_id=DAILY))
            )

    def commit(self, *, keep: datetime | None) -> tuple[Table, list[Snapshot]]:
        """Commit the changes, and forget snapshots replaced before `keep`; without it, all but the last and tagged
        ones.

        Returns the table, and the forgotten snapshots. Raises ConflictError if the table was changed since it was
        loaded, and JetcaptureError.
        """
        with explained(f"cannot commit to table {self._table.name}"):
            try:
                for spec in list(self._added):
                    self._write(spec)
                self._snapshot.traceless = keep is None
                self._snapshot.commit()
            except BaseException:  # such as a manifest that another process has deleted with its snapshot
                self.discard()
                raise
            forgotten = forget(self._tx, keep)
            try:
                return self._tx.commit_transaction(), forgotten
            except Exception as error:
                if is_refused(error):
                    self.discard()
                raise

    def discard(self) -> None:
        """Delete the files of an abandoned commit."""
        self._snapshot._clean_all_uncommitted()


class _Blocks(AvroOutputFile[ManifestEntry]):
    """Compresses many entries together: one by one, as in PyIceberg, takes twice as long to write and to read."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._waiting: list[ManifestEntry] = []

    def write_block(self, objects: list[ManifestEntry]) -> None:
        self._waiting += objects
        if len(self._waiting) >= _BLOCK:
            self._flush()

    def _flush(self) -> None:
        super().write_block(self._waiting)
        self._waiting = []

    def __exit__(
        self, exctype: type[BaseException] | None, excinst: BaseException | None, exctb: TracebackType | None
    ) -> None:
        if self._waiting:
            self._flush()
        super().__exit__(exctype, excinst, exctb)


class _Manifest(ManifestWriterV2):
    def new_writer(self) -> AvroOutputFile[ManifestEntry]:
        return _Blocks(
            output_file=self._output_file,
            file_schema=self._with_partition(self.version),
            record_schema=self._with_partition(DEFAULT_READ_VERSION),
            schema_name="manifest_entry",
            metadata=self._meta,
        )


class _Snapshot(_MergeAppendFiles):
    """Adds files to a table and removes others. PyIceberg's own keeps all new ones in memory until the commit, and
    allows one partition spec for them."""

    def __init__(self, tx: Transaction, properties: dict[str, str]) -> None:
        super().__init__(Operation.APPEND, tx, tx._table.io, snapshot_properties=properties)
        self.removed: dict[int, set[str]] = defaultdict(set)
        """Locations of files to remove, by manifest number."""
        self.traceless = False
        """Whether to leave no trace of removed files in manifests."""
        self._new: list[ManifestFile] = []
        self._counts = SnapshotSummaryCollector()

    def add(self, spec: int, files: Iterable[DataFile]) -> None:
        """Write the manifest of new files with this partition spec."""
        entries = []
        for file in files:
            self._counts.metrics.add_file(file)
            entries.append(ManifestEntry.from_args(snapshot_id=self._snapshot_id, data_file=file))
        self._new.append(self._written(spec, ManifestEntryStatus.ADDED, entries))

    def _written(self, spec: int, status: ManifestEntryStatus, entries: Iterable[ManifestEntry]) -> ManifestFile:
        with self.new_manifest_writer(self.spec(spec)) as writer:
            for entry in entries:
                entry.status = status
                writer.add_entry(entry)
        return writer.to_manifest_file()

    def new_manifest_writer(self, spec: PartitionSpec) -> ManifestWriterV2:
        return _Manifest(spec, self.schema(), self.new_manifest_output(), self._snapshot_id, self._compression)

    def _manifests(self) -> list[ManifestFile]:
        parent = self._transaction.table_metadata.snapshot_by_id(self._parent_snapshot_id or -1)
        manifests, small = list(self._new), list[ManifestFile]()
        for number, manifest in enumerate(parent.manifests(self._io) if parent else ()):
            files = (manifest.added_files_count or 0) + (manifest.existing_files_count or 0)
            if number in self.removed:
                manifests += self._without(manifest, self.removed[number])
            elif files:  # other entries are removals of an earlier snapshot
                (small if files < _FILES // 2 else manifests).append(manifest)
        return [*manifests, *self._process_manifests(small)]

    def _without(self, manifest: ManifestFile, removed: Collection[str]) -> list[ManifestFile]:
        """Rewrite a manifest without some of its files, and write another one of those."""
        entries = manifest.fetch_manifest_entry(self._io)
        gone = [entry for entry in entries if entry.data_file.file_path in removed]
        for entry in gone:
            entry.snapshot_id = self._snapshot_id
            self._counts.metrics.remove_file(entry.data_file)
        parts = {
            ManifestEntryStatus.EXISTING: [entry for entry in entries if entry.data_file.file_path not in removed],
            ManifestEntryStatus.DELETED: [] if self.traceless else gone,
        }
        return [self._written(manifest.partition_spec_id, status, part) for status, part in parts.items() if part]

    def _summary(self, snapshot_properties: dict[str, str] = EMPTY_DICT) -> Summary:
        parent = self._transaction.table_metadata.snapshot_by_id(self._parent_snapshot_id or -1)
        operation = Operation.OVERWRITE if self.removed else Operation.APPEND
        summary = Summary(operation=operation, **self._counts.build(), **snapshot_properties)
        return update_snapshot_summaries(summary, parent.summary if parent else None)

    def _commit(self) -> UpdatesAndRequirements:
        """Return the snapshot, with a later time than the previous one, whose clock may have been ahead."""
        before = self._transaction._table.metadata
        earliest = 1 + max(before.last_updated_ms, *(snapshot.timestamp_ms for snapshot in before.snapshots), 0)
        (added, *others), requirements = super()._commit()
        snapshot = cast(AddSnapshotUpdate, added).snapshot
        later = snapshot.model_copy(update={"timestamp_ms": max(snapshot.timestamp_ms, earliest)})
        return (AddSnapshotUpdate(snapshot=later), *others), requirements


def forget(tx: Transaction, keep: datetime | None) -> list[Snapshot]:
    """Forget snapshots replaced before `keep`; without it, all but the last and tagged ones. Return them."""
    metadata = tx.table_metadata
    named = {reference.snapshot_id for reference in metadata.refs.values()}
    limit = metadata.last_updated_ms + 1 if keep is None else keep.astimezone(UTC).timestamp() * 1000
    in_order = sorted(metadata.snapshots, key=lambda snapshot: snapshot.timestamp_ms)
    forgotten = [
        snapshot
        for snapshot, following in pairwise(in_order)
        if snapshot.snapshot_id not in named and following.timestamp_ms < limit
    ]
    if forgotten:
        ExpireSnapshots(tx).by_ids([snapshot.snapshot_id for snapshot in forgotten]).commit()
    return forgotten


def delete_manifests(table: Table, forgotten: Collection[Snapshot]) -> list[str]:
    """Delete manifests that only forgotten snapshots referenced; return those that remain, or may."""
    return _delete(table, forgotten, _manifests)


def delete_files(table: Table, forgotten: Collection[Snapshot], listed: str) -> list[str]:
    """Delete a table's files that only forgotten snapshots referenced; return those that remain, or may.

    `listed` is the entry of a summary with the location of a further file.
    """

    known: dict[str, list[str]] = {}  # snapshots share most manifests

    def files(io: FileIO, snapshot: Snapshot) -> Iterator[str]:
        for part in snapshot.manifests(io):
            if part.manifest_path not in known:
                known[part.manifest_path] = [entry.data_file.file_path for entry in part.fetch_manifest_entry(io)]
            yield part.manifest_path
            yield from known[part.manifest_path]
        if snapshot.summary and (place := snapshot.summary[listed]):
            yield place

    return _delete(table, forgotten, files)


def _manifests(io: FileIO, snapshot: Snapshot) -> Iterator[str]:
    return (part.manifest_path for part in snapshot.manifests(io))


def _delete(
    table: Table, forgotten: Collection[Snapshot], files: Callable[[FileIO, Snapshot], Iterable[str]]
) -> list[str]:
    if not forgotten:
        return []
    lists = [snapshot.manifest_list for snapshot in forgotten]
    try:
        named = {place for snapshot in table.metadata.snapshots for place in files(table.io, snapshot)}
        old = {place for snapshot in forgotten for place in files(table.io, snapshot)}
    except Exception:  # file systems raise their own errors
        return lists
    kept: list[str] = []
    for path in [*(old - named), *lists]:
        try:
            table.io.delete(path)
        except FileNotFoundError:
            continue
        except Exception:  # file systems raise their own errors
            kept.append(path)
    return kept


def removed_since(table: ArchiveTable, since: float) -> dict[str, float]:
    """Return the locations of files removed by snapshots after `since`, and the times, in seconds since the epoch.

    Queries planned earlier may still read them.
    """
    removed: dict[str, float] = {}
    loaded = table.loaded
    for snapshot in loaded.metadata.snapshots if loaded else ():
        if loaded and snapshot.timestamp_ms >= since * 1000:
            for manifest in snapshot.manifests(loaded.io):
                if manifest.added_snapshot_id == snapshot.snapshot_id and manifest.deleted_files_count:
                    for entry in manifest.fetch_manifest_entry(loaded.io, discard_deleted=False):
                        if entry.status is ManifestEntryStatus.DELETED:
                            removed[entry.data_file.file_path] = snapshot.timestamp_ms / 1000
    return removed
