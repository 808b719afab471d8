"""Write one commit of a table: its new columns, its changes, and the snapshots that it forgets, all or nothing.

Changes are written as they come, so that few of them are in memory. Each becomes part of one snapshot, and every
snapshot that stays has each message once. A commit replaces exactly the snapshot that was loaded, or fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NamespaceAlreadyExistsError
from pyiceberg.manifest import DataFile, ManifestEntryStatus
from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table, Transaction
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import (
    AddPartitionSpecUpdate,
    AddSchemaUpdate,
    AddSnapshotUpdate,
    SetCurrentSchemaUpdate,
    SetDefaultSpecUpdate,
)
from pyiceberg.table.update.snapshot import ExpireSnapshots
from pyiceberg.transforms import DayTransform

from jetcapture_py.archive import footer
from jetcapture_py.table.catalog import CONTENT, ArchiveTable, explained, is_refused
from jetcapture_py.table.files import DAILY, WHOLE, data_file
from jetcapture_py.table.plan import Change

if TYPE_CHECKING:
    from pyiceberg.table.update.snapshot import _SnapshotProducer

SUMMARY = "jetcapture."
"""Prefix of our entries in a snapshot's summary."""
_FILES = 5_000
"""Files of a manifest, about."""
_PROPERTIES = {
    "gc.enabled": "false",  # engines that honor it neither purge nor clean up the archive's objects
    "commit.retry.num-retries": "0",  # another one's commit changes the plan
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.target-size-bytes": "2097152",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}


class TableWriter:
    """Writes the changes of one commit."""

    def __init__(self, table: ArchiveTable, summary: Mapping[str, str]) -> None:
        self._table = table
        self._summary = {f"{SUMMARY}{name}": text for name, text in summary.items()}
        self._producers: list[_SnapshotProducer[Any]] = []
        self._passing: set[int] = set()
        """Snapshots that are forgotten at once."""
        self._added: dict[int, list[DataFile]] = {DAILY: [], WHOLE: []}
        """Files to add, by the specification of their partitions."""
        self._replaced: list[DataFile] = []
        self._removed: list[DataFile] = []
        """What is done at once, because messages move from some files to others."""
        if table.loaded is None:
            with suppress(NamespaceAlreadyExistsError):  # by another process, just now
                table.catalog.create_namespace_if_not_exists(Catalog.namespace_from(table.name))
            self._tx: Transaction = table.catalog.create_table_transaction(table.name, Schema(), table.location)
        else:
            self._tx = table.loaded.transaction()
        properties = {**_PROPERTIES, CONTENT: table.content}
        if not properties.items() <= self._tx.table_metadata.properties.items():
            self._tx.set_properties(properties)

    def set_columns(self, schema: Schema) -> None:
        """Give the table these columns, if it has others."""
        metadata = self._tx.table_metadata
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

    def add(self, change: Change) -> None:
        """Write a change, or keep it for the next snapshot."""
        added = [
            data_file(f"{self._table.root}{info.name.path}", info.size, footer.decoded(data), columns, self._table.time)
            for info, data, columns in change.added
        ]
        if change.removed:
            self._replaced.extend(added)
            self._removed.extend(change.removed)
            if len(self._replaced) >= _FILES:
                self._replace()
            return
        for file in added:
            self._added[file.spec_id].append(file)
        for spec, files in self._added.items():
            if len(files) >= _FILES:
                self._append(spec)

    def _replace(self) -> None:
        """Make a snapshot in which files take the place of others."""
        added, removed = self._replaced, self._removed
        self._replaced, self._removed = [], []
        files = {spec: [file for file in added if file.spec_id == spec] for spec in (WHOLE, DAILY)}
        first = len(self._producers)
        if files[WHOLE]:  # a snapshot has files of one specification: those before the last one are forgotten
            whole = {file.file_path for file in files[WHOLE]}
            if again := [file for file in removed if file.file_path in whole]:  # a removal takes all of this path
                self._overwrite([], again)
                removed = [file for file in removed if file.file_path not in whole]
            self._added[WHOLE] += files[WHOLE]
            self._append(WHOLE)
        if files[DAILY] or removed:
            self._overwrite(files[DAILY], removed)
        self._passing.update(producer.snapshot_id for producer in self._producers[first:-1])

    def _overwrite(self, added: Iterable[DataFile], removed: Iterable[DataFile]) -> None:
        producer = self._tx.update_snapshot(self._summary).overwrite()
        for file in added:
            producer.append_data_file(file)
        for file in removed:
            producer.delete_data_file(file)
        self._finish(producer)

    def _append(self, spec: int, *, last: bool = False) -> None:
        """Make a snapshot with more files; the `last` one merges small manifests."""
        files, self._added[spec] = self._added[spec], []
        if not files and not last:
            return
        if spec == WHOLE:
            self._tx._stage((SetDefaultSpecUpdate(spec_id=WHOLE),))
        update = self._tx.update_snapshot(self._summary)
        producer = update.merge_append() if last else update.fast_append()
        for file in files:
            producer.append_data_file(file)
        self._finish(producer)
        if spec == WHOLE:
            self._tx._stage((SetDefaultSpecUpdate(spec_id=DAILY),))

    def _finish(self, producer: _SnapshotProducer[Any]) -> None:
        """Write a snapshot, later than the one before: a clock may have been ahead."""
        self._producers.append(producer)
        snapshots = self._tx.table_metadata.snapshots
        before = max(self._tx._table.metadata.last_updated_ms, *(snapshot.timestamp_ms for snapshot in snapshots), 0)
        producer.commit()
        producer._added_data_files = []
        self._tx._updates = tuple(
            AddSnapshotUpdate(snapshot=_not_before(update.snapshot, before + 1))
            if isinstance(update, AddSnapshotUpdate) and update.snapshot.snapshot_id == producer.snapshot_id
            else update
            for update in self._tx._updates
        )

    def commit(self, *, keep: datetime | None) -> tuple[Table, list[Snapshot]]:
        """Change the table, and forget snapshots from before `keep`; without it, all but the last and tagged ones.

        Returns the table, and the forgotten snapshots. Raises ConflictError if the table was changed since it was
        loaded, and JetcaptureError.
        """
        with explained(f"cannot commit to table {self._table.name}"):
            if self._removed:
                self._replace()
            self._append(WHOLE)
            # also without files: after it, no manifest names a file that was removed
            if self._added[DAILY] or keep is None or not self._producers:
                self._append(DAILY, last=True)
            metadata = self._tx.table_metadata
            named = {reference.snapshot_id for reference in metadata.refs.values()}
            limit = metadata.last_updated_ms + 1 if keep is None else keep.astimezone(UTC).timestamp() * 1000
            forgotten = [
                snapshot
                for snapshot in metadata.snapshots
                if snapshot.snapshot_id not in named
                and (snapshot.timestamp_ms < limit or snapshot.snapshot_id in self._passing)
            ]
            if forgotten:
                ExpireSnapshots(self._tx).by_ids([snapshot.snapshot_id for snapshot in forgotten]).commit()
            written = {path for producer in self._producers for path in producer._written_manifests}
            new = {producer.snapshot_id for producer in self._producers}
            try:
                table = self._tx.commit_transaction()
            except Exception as error:
                if is_refused(error):
                    self.discard()
                raise
            lists = (snapshot for snapshot in table.metadata.snapshots if snapshot.snapshot_id in new)
            used = {part.manifest_path for snapshot in lists for part in snapshot.manifests(table.io)}
            _delete(table, written - used)  # they were merged at once
            return table, forgotten

    def discard(self) -> None:
        """Delete what was written for a commit that does not happen."""
        for producer in self._producers:
            producer._clean_all_uncommitted()


def _not_before(snapshot: Snapshot, earliest: int) -> Snapshot:
    return snapshot.model_copy(update={"timestamp_ms": max(snapshot.timestamp_ms, earliest)})


def delete_manifests(table: Table, forgotten: Collection[Snapshot]) -> list[str]:
    """Delete the manifests that only forgotten snapshots named; return those that stay behind, or may."""
    if not forgotten:
        return []
    lists = [snapshot.manifest_list for snapshot in forgotten]
    try:
        named = {part.manifest_path for snapshot in table.metadata.snapshots for part in snapshot.manifests(table.io)}
        old = {part.manifest_path for snapshot in forgotten for part in snapshot.manifests(table.io)}
    except Exception:  # file systems raise their own errors, and nothing is lost
        return lists
    return _delete(table, [*(old - named), *lists])


def _delete(table: Table, paths: Iterable[str]) -> list[str]:
    """Delete files of a table's metadata, as far as that is possible; return the paths of the others."""
    kept: list[str] = []
    for path in paths:
        try:
            table.io.delete(path)
        except FileNotFoundError:
            continue
        except Exception:  # file systems raise their own errors
            kept.append(path)
    return kept


def removed_since(table: ArchiveTable, since: float) -> dict[str, float]:
    """Return the places of files that snapshots after `since` have removed, and when, in seconds since the epoch.

    Queries that were planned before may still read them.
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
