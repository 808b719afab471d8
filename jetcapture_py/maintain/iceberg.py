"""Open an Iceberg table with PyIceberg, list its files, and commit one snapshot that changes them.

A commit is one conditional update of the catalog: columns, partitions, snapshot and expired snapshots together, and
only if the table's current snapshot is still the one that was planned from. Nothing here opens or deletes a file of the
archive: what is deleted are manifests that no snapshot names any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.manifest import ManifestEntryStatus, ManifestFile
from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import StagedTable, Table
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.table.update import (
    AddPartitionSpecUpdate,
    AddSchemaUpdate,
    AddSnapshotUpdate,
    AddSortOrderUpdate,
    AssertCreate,
    AssertRefSnapshotId,
    AssertTableUUID,
    AssignUUIDUpdate,
    RemoveSnapshotsUpdate,
    SetCurrentSchemaUpdate,
    SetDefaultSortOrderUpdate,
    SetDefaultSpecUpdate,
    SetLocationUpdate,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    TableRequirement,
    TableUpdate,
    UpgradeFormatVersionUpdate,
)
from pyiceberg.transforms import BucketTransform, DayTransform, HourTransform, IdentityTransform, Transform

from jetcapture_py.archive.layout import FIELD_IDS, KEY
from jetcapture_py.errors import ConflictError, JetcaptureError
from jetcapture_py.maintain.manifests import FORMAT, SUMMARY, Partitions, SnapshotWriter, TableFile, delete_files
from jetcapture_py.text import one_line

CATALOG = "jetcapture"
"""The name that PyIceberg knows the catalog by, unless its settings have a `name`."""

_PROPERTIES = {
    "gc.enabled": "false",  # engines that honor it neither purge nor clean up the archive's objects
    "write.delete.isolation-level": "snapshot",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}
_CONTENT = f"{SUMMARY}content"


@contextmanager
def open_catalog(settings: Mapping[str, Any], *, read_only: bool = False) -> Iterator[Catalog]:
    """Connect to a catalog with the properties of `pyiceberg.catalog.load_catalog`.

    With `read_only`, a database that does not exist yet is not made. Raises JetcaptureError.
    """
    properties: dict[str, Any] = {name: _text(value) for name, value in settings.items()}
    if read_only:
        scheme, _, path = str(properties.get("uri")).partition("?")[0].partition(":///")
        missing = scheme.startswith("sqlite") and not Path(path).exists()
        properties |= {"uri": "sqlite://"} if missing else {"init_catalog_tables": "false"}
    with explained("cannot open the table's catalog"):
        catalog = load_catalog(properties.pop("name", CATALOG), **properties)
    try:
        yield catalog
    finally:
        with suppress(Exception):  # drivers raise their own errors, and nothing is lost
            catalog.close()


def _text(value: Any) -> Any:
    """Return a property as PyIceberg expects it: as text, or properties inside it as they are."""
    return value if isinstance(value, dict) else str(value).lower() if isinstance(value, bool) else str(value)


@contextmanager
def explained(problem: str) -> Iterator[None]:
    """Turn what a catalog or its store raises into one line: ConflictError if a commit was refused."""
    try:
        yield
    except JetcaptureError:
        raise
    except Exception as error:  # catalogs, drivers and file systems raise their own
        reason = one_line(getattr(error, "orig", None) or error)  # without SQL
        raise (ConflictError if _is_refused(error) else JetcaptureError)(f"{problem}: {reason}") from error


def _is_refused(error: Exception) -> bool:
    """Whether another process was faster, or is at it."""
    return isinstance(error, CommitFailedException | TableAlreadyExistsError) or "database is locked" in str(error)


def _has_no_tables(error: Exception) -> bool:
    """Whether the database of a catalog has none of the catalog's own tables yet, as it may be if nothing is made."""
    return "iceberg_tables" in str(error) and any(each in str(error) for each in ("no such table", "not exist"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChange:
    """What one commit changes."""

    content: str
    """What the table is of."""
    schema: Schema
    """The columns, with their ids."""
    partitions: Collection[Partitions]
    """How the new files are divided."""
    added: Iterable[TableFile]
    """The new files, which are taken once."""
    removed: Mapping[str, int]
    """The places of files that leave the table, with the numbers of their manifests."""
    summary: Mapping[str, str]
    """Entries of the snapshot's summary."""
    keep: datetime
    """Snapshots that are older are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentFile:
    """A file that the table has."""

    place: str
    """Its path or URL."""
    size: int
    """Bytes."""
    rows: int
    manifest: int
    """The number of the manifest that names it, from 0."""


@dataclass(slots=True)
class IcebergTable:
    """A table, as it was when it was loaded."""

    catalog: Catalog
    identifier: str
    """Namespace and name, separated by dots."""
    location: str
    """URL of the directory for a new table's metadata."""
    _table: Table | None = field(init=False, default=None)
    _created: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        with self._explained("load"):
            try:
                self._table = self.catalog.load_table(self.identifier)
            except NoSuchTableError:
                self._table = None
            except Exception as error:
                if not _has_no_tables(error):
                    raise

    def _explained(self, verb: str) -> Any:
        return explained(f"cannot {verb} table {self.identifier}")

    @property
    def schema(self) -> Schema:
        """The columns; none for a new table."""
        return Schema() if self._table is None else self._table.schema()

    @property
    def exists(self) -> bool:
        return self._table is not None

    @property
    def snapshot(self) -> int | None:
        """The id of the current snapshot; None without one."""
        current = self._table and self._table.current_snapshot()
        return current.snapshot_id if current else None

    @property
    def content(self) -> str | None:
        """What the table is of, as its first commit said; None for a new table, or one that was made otherwise."""
        return self._table.properties.get(_CONTENT) if self._table else None

    def files(self) -> Iterator[CurrentFile]:
        """Yield the current files. Raises JetcaptureError."""
        with self._explained("read"):
            for number, manifest in enumerate(self._manifests()):
                for entry in manifest.fetch_manifest_entry(self._loaded.io):
                    file = entry.data_file
                    yield CurrentFile(
                        place=file.file_path,
                        size=file.file_size_in_bytes,
                        rows=file.record_count,
                        manifest=number,
                    )

    def dropped(self, since: float) -> dict[str, float]:
        """Return the paths of files that snapshots after `since` have removed, and when, in seconds since the epoch.

        Queries that were planned before may still read them. Raises JetcaptureError.
        """
        found: dict[str, float] = {}
        with self._explained("read"):
            for snapshot in self._table.metadata.snapshots if self._table else ():
                if snapshot.timestamp_ms >= since * 1000:
                    for manifest in snapshot.manifests(self._loaded.io):
                        if manifest.added_snapshot_id == snapshot.snapshot_id and manifest.deleted_files_count:
                            for entry in manifest.fetch_manifest_entry(self._loaded.io, discard_deleted=False):
                                if entry.status is ManifestEntryStatus.DELETED:
                                    found[entry.data_file.file_path] = snapshot.timestamp_ms / 1000
        return found

    def _manifests(self) -> list[ManifestFile]:
        current = self._table and self._table.current_snapshot()
        return list(current.manifests(self._loaded.io)) if current else []

    @property
    def _loaded(self) -> Table:
        assert self._table is not None  # noqa: S101  # every caller has one
        return self._table

    def commit(self, change: TableChange) -> int:
        """Make a snapshot, and return its id. Raises ConflictError if the table was changed since it was loaded, and
        JetcaptureError."""
        with self._explained("commit to"):
            updates: list[TableUpdate] = []
            if self._table is None:
                self._stage()
                updates += _creation(self._loaded.metadata)
            table, metadata = self._loaded, self._loaded.metadata
            if self._created or metadata.schema().fields != change.schema.fields:
                number = 0 if self._created else 1 + max(each.schema_id for each in metadata.schemas)
                schema = Schema(*change.schema.fields, schema_id=number)
                updates += [AddSchemaUpdate(schema=schema), SetCurrentSchemaUpdate(schema_id=-1)]
            else:
                schema = metadata.schema()
            properties = {**_PROPERTIES, _CONTENT: change.content}
            if any(table.properties.get(name) != value for name, value in properties.items()):
                updates.append(SetPropertiesUpdate(updates=properties))
            specs, changes = _specs(metadata, change.partitions, new=self._created)
            updates += changes
            writer = SnapshotWriter(table, schema, metadata.specs() | {spec.spec_id: spec for spec in specs.values()})
            added = ((specs[file.partitions], file) for file in change.added)
            snapshot = writer.write(self._manifests(), added, change.removed, change.summary)
            updates += _current(snapshot)
            expired = [] if self._created else _expired(metadata, change.keep)
            if expired:
                updates.append(RemoveSnapshotsUpdate(snapshot_ids=[each.snapshot_id for each in expired]))
            self._apply(updates, writer)
            self._created = False
            _clean(table, expired)
            return snapshot.snapshot_id

    def _apply(self, updates: Sequence[TableUpdate], writer: SnapshotWriter) -> None:
        """Change the table if it is as it was loaded; if that is refused, delete what was written for it, and raise."""
        table = self._loaded
        requirements: tuple[TableRequirement, ...] = (AssertCreate(),)
        if not self._created:
            assertion = AssertRefSnapshotId(ref=MAIN_BRANCH, snapshot_id=self.snapshot)
            requirements = AssertTableUUID(uuid=table.metadata.table_uuid), assertion
        try:
            table._do_commit(tuple(updates), requirements)
        except Exception as error:
            if _is_refused(error):
                writer.discard()
            raise

    def forget(self, is_removed: Callable[[str], bool]) -> tuple[int, list[str]]:
        """Forget every snapshot that names a removed file, also as one that it deleted, and the manifests of it.

        If the current snapshot still names one as deleted, another one replaces it that has the same files. Returns how
        many snapshots were forgotten, and what still names such files. `is_removed` gets paths as the table has them.
        Raises ConflictError, also if the table has such a file, and JetcaptureError.
        """
        with self._explained("expire snapshots of"):
            if self._table is None:
                return 0, []
            table, metadata, current = self._loaded, self._loaded.metadata, self.snapshot
            concerned = self._naming(is_removed)
            names = {each.snapshot_id: name for name, each in metadata.refs.items() if name != MAIN_BRANCH}
            gone = [each for each in metadata.snapshots if each.snapshot_id in concerned.keys() - names.keys()]
            kept = [
                f"{names[number]} names snapshots that have erased messages" for number in concerned if number in names
            ]
            updates: list[TableUpdate] = []
            writer = SnapshotWriter(table, metadata.schema(), metadata.specs())
            # without a snapshot, the table would be dated by a clock that may be behind its last one
            if current in concerned or (gone and metadata.last_updated_ms > time.time() * 1000):
                again = concerned.get(current or 0, frozenset())
                snapshot = writer.write(self._manifests(), [], {}, self._own_summary(), again=again)
                updates += _current(snapshot)
            if gone:
                updates.append(RemoveSnapshotsUpdate(snapshot_ids=[each.snapshot_id for each in gone]))
            if not updates:
                return 0, kept
            self._apply(updates, writer)
            return len(gone), [*kept, *(f"{path} cannot be deleted" for path in _clean(table, gone))]

    def _naming(self, is_removed: Callable[[str], bool]) -> dict[int, frozenset[str]]:
        """Return the ids of the snapshots that name removed files, and the manifests that do, by their paths.

        Raises ConflictError if the table has one of these files.
        """
        io, metadata = self._loaded.io, self._loaded.metadata
        deleted: dict[str, bool | None] = {}
        """By the paths of manifests: whether they only say that such files were deleted; None if they name none."""
        for snapshot in metadata.snapshots:
            for part in snapshot.manifests(io):
                if part.manifest_path not in deleted:
                    found = [
                        entry.status is ManifestEntryStatus.DELETED
                        for entry in part.fetch_manifest_entry(io, discard_deleted=False)
                        if is_removed(entry.data_file.file_path)
                    ]
                    deleted[part.manifest_path] = all(found) if found else None
        if not all(deleted[part.manifest_path] in (True, None) for part in self._manifests()):
            raise ConflictError(f"table {self.identifier} was changed meanwhile: it has a file that is to be removed")
        found_in = {
            snapshot.snapshot_id: frozenset(
                part.manifest_path for part in snapshot.manifests(io) if deleted[part.manifest_path] is not None
            )
            for snapshot in metadata.snapshots
        }
        return {number: parts for number, parts in found_in.items() if parts}

    def _own_summary(self) -> dict[str, str]:
        """Return our entries in the summary of the current snapshot, without their prefix."""
        current = self._loaded.current_snapshot()
        entries = current.summary.additional_properties if current and current.summary else {}
        return {name.removeprefix(SUMMARY): text for name, text in entries.items() if name.startswith(SUMMARY)}

    @property
    def metadata_directory(self) -> str | None:
        """URL of the directory of the manifests; None for a new table."""
        if self._table is None:
            return None
        location = load_location_provider(self._table.metadata.location, self._table.metadata.properties)
        return location.new_metadata_location("").rstrip("/")

    def metadata_files(self) -> frozenset[str]:
        """Return the paths of all manifests, and lists of them, that a snapshot names. Raises JetcaptureError."""
        with self._explained("read"):
            snapshots = self._table.metadata.snapshots if self._table else []
            parts = (part.manifest_path for each in snapshots for part in each.manifests(self._loaded.io))
            return frozenset((*parts, *(each.manifest_list for each in snapshots)))

    def _stage(self) -> None:
        """Prepare a new table, which the commit creates."""
        namespace = Catalog.namespace_from(self.identifier)
        with suppress(NamespaceAlreadyExistsError):  # by another process, just now
            self.catalog.create_namespace_if_not_exists(namespace)
        metadata = new_table_metadata(
            Schema(), PartitionSpec(), UNSORTED_SORT_ORDER, self.location, {"format-version": str(FORMAT)}
        )
        place = load_location_provider(self.location, {}).new_table_metadata_file_location()
        self._table = StagedTable(
            identifier=Catalog.identifier_to_tuple(self.identifier),
            metadata=metadata,
            metadata_location=place,
            io=self.catalog._load_file_io({}, place),
            catalog=self.catalog,
        )
        self._created = True


def _creation(metadata: TableMetadata) -> list[TableUpdate]:
    """Return the updates that make a new table, but for its columns and partitions."""
    return [
        AssignUUIDUpdate(uuid=metadata.table_uuid),
        UpgradeFormatVersionUpdate(format_version=FORMAT),
        SetLocationUpdate(location=metadata.location),
        AddSortOrderUpdate(sort_order=UNSORTED_SORT_ORDER),
        SetDefaultSortOrderUpdate(sort_order_id=-1),
    ]


def _specs(
    metadata: TableMetadata, needed: Collection[Partitions], *, new: bool
) -> tuple[dict[Partitions, PartitionSpec], list[TableUpdate]]:
    """Return the table's specification of each kind of partitions, and the updates that add those it lacks."""
    existing = [] if new else list(metadata.partition_specs)
    numbers = {(field.source_id, str(field.transform)): field.field_id for spec in existing for field in spec.fields}
    specs: dict[Partitions, PartitionSpec] = {}
    updates: list[TableUpdate] = []
    for partitions in sorted(needed, key=repr) or ([Partitions()] if new else []):
        fields = []
        for name, source, transform in _transforms(partitions):
            highest = max(numbers.values(), default=PARTITION_FIELD_ID_START - 1)
            number = numbers.setdefault((source, str(transform)), highest + 1)
            fields.append(PartitionField(source_id=source, field_id=number, transform=transform, name=name))
        spec = next((each for each in existing if list(each.fields) == fields), None)
        if spec is None:
            spec = PartitionSpec(*fields, spec_id=1 + max((each.spec_id for each in existing), default=-1))
            existing.append(spec)
            updates.append(AddPartitionSpecUpdate(spec=spec))
        specs[partitions] = spec
    if updates:
        updates.append(SetDefaultSpecUpdate(spec_id=-1))
    return specs, updates


def _transforms(partitions: Partitions) -> Iterator[tuple[str, int, Transform[Any, Any]]]:
    """Yield the name, source column and transform of each partition field; no column can have such a name."""
    if partitions.key:
        yield KEY, FIELD_IDS[KEY], IdentityTransform()
    if partitions.bundles:
        yield f"_nats_key_bucket_{partitions.bundles}", FIELD_IDS[KEY], BucketTransform(partitions.bundles)
    if partitions.time:
        unit = "day" if partitions.day else "hour"
        transform: Transform[Any, Any] = DayTransform() if partitions.day else HourTransform()
        yield f"{partitions.time}_{unit}", FIELD_IDS[partitions.time], transform


def _current(snapshot: Snapshot) -> list[TableUpdate]:
    """Return what makes a snapshot the current one."""
    reference = SetSnapshotRefUpdate(
        snapshot_id=snapshot.snapshot_id, ref_name=MAIN_BRANCH, type=SnapshotRefType.BRANCH
    )
    return [AddSnapshotUpdate(snapshot=snapshot), reference]


def _expired(metadata: TableMetadata, keep: datetime) -> list[Snapshot]:
    """Return the snapshots from before `keep` that are neither the current one nor tagged by somebody."""
    named = {reference.snapshot_id for reference in metadata.refs.values()}
    oldest = keep.astimezone(UTC).timestamp() * 1000
    return [each for each in metadata.snapshots if each.timestamp_ms < oldest and each.snapshot_id not in named]


def _clean(table: Table, expired: Iterable[Snapshot]) -> list[str]:
    """Delete the manifests that only expired snapshots named; return those that stay behind, or may."""
    gone = list(expired)
    if not gone:
        return []
    try:
        named = {part.manifest_path for each in table.metadata.snapshots for part in each.manifests(table.io)}
        old = {part.manifest_path for each in gone for part in each.manifests(table.io)}
    except Exception:  # file systems raise their own errors, and nothing is lost
        return [each.manifest_list for each in gone]
    return delete_files(table, [*(old - named), *(each.manifest_list for each in gone)])
