"""Open an Iceberg table with PyIceberg, list its files, and commit one snapshot that changes them.

A commit is one conditional update of the catalog: columns, partitions, snapshot and expired snapshots together, and
only if the table's current snapshot is still the one that was planned from. Nothing here opens or deletes a file of the
archive: what is deleted are manifests that no snapshot names any more.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import StagedTable, Table
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
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
from pyiceberg.typedef import Record

from jetcapture_py.archive.layout import FIELD_IDS, KEY, SEQ
from jetcapture_py.errors import ConflictError, JetcaptureError
from jetcapture_py.text import one_line

CATALOG = "jetcapture"
"""The name that PyIceberg knows the catalog by, unless its settings have a `name`."""
SUMMARY = "jetcapture."
"""Prefix of our entries in a snapshot's summary."""

_FORMAT: Literal[2] = 2
"""PyIceberg cannot write version 3, and not every engine reads it."""
_CODEC: Literal["deflate"] = "deflate"
_MERGED = 32
"""Manifests of one layout from which on the small ones are merged into one."""
_LARGE = 5_000
"""Files of a manifest from which on it is not small."""
_PROPERTIES = {
    "gc.enabled": "false",  # engines that honor it neither purge nor clean up the archive's objects
    "write.delete.isolation-level": "snapshot",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}
_CONTENT = f"{SUMMARY}content"
_NAME_MAPPING = "schema.name-mapping.default"
_MICROSECONDS = 1_000_000
_HOUR, _DAY = 3600, 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Partitions:
    """How files are divided: by the transforms of their messages' keys and times."""

    key: bool = False
    """By the key itself."""
    bundles: int = 0
    """By the key's bucket, of so many; 0: not."""
    time: str = ""
    """The column whose hour or day divides, "" for none."""
    day: bool = False
    """By day, not by hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFile:
    """A file of the table, or one to add to it."""

    path: str
    """Where it is: a path or URL, as engines open it."""
    size: int
    """Bytes."""
    rows: int
    partitions: Partitions
    """How it is divided from others."""
    key: str | None
    """Its key or, in bundles, the bundle's number as text; None without one."""
    bucket: int
    """Start of the bucket in seconds since the epoch."""
    interval: int
    """Length of the bucket in seconds."""
    first_seq: int
    last_seq: int


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
        """Whether the catalog has it."""
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

    def files(self) -> dict[str, int]:
        """Return the paths of the current files, and their sizes. Raises JetcaptureError."""
        with self._explained("read"):
            return {entry.data_file.file_path: entry.data_file.file_size_in_bytes for entry in self._entries()}

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

    def _entries(self) -> Iterator[ManifestEntry]:
        for manifest in self._manifests():
            yield from manifest.fetch_manifest_entry(self._loaded.io)

    def _manifests(self) -> list[ManifestFile]:
        current = self._table and self._table.current_snapshot()
        return list(current.manifests(self._loaded.io)) if current else []

    @property
    def _loaded(self) -> Table:
        assert self._table is not None  # noqa: S101  # every caller has one
        return self._table

    def commit(
        self,
        content: str,
        schema: Schema,
        name_mapping: str,
        added: Sequence[TableFile],
        removed: Collection[str],
        summary: Mapping[str, str],
        *,
        keep: datetime,
    ) -> int:
        """Make a snapshot without the files `removed` and with those `added`; return its id.

        `content` says what the table is of, `schema` has the columns, with their ids, and `summary` becomes part of the
        snapshot's. Snapshots older than `keep` are forgotten. Raises ConflictError if the table was changed since it
        was loaded, and JetcaptureError.
        """
        with self._explained("commit to"):
            return self._commit(content, schema, name_mapping, added, removed, summary, keep)

    def _commit(
        self,
        content: str,
        schema: Schema,
        name_mapping: str,
        added: Sequence[TableFile],
        removed: Collection[str],
        summary: Mapping[str, str],
        keep: datetime,
    ) -> int:
        updates: list[TableUpdate] = []
        if self._table is None:
            self._stage()
            updates += _creation(self._loaded.metadata)
        table, metadata = self._loaded, self._loaded.metadata
        if self._created or metadata.schema().fields != schema.fields:
            number = 0 if self._created else 1 + max(each.schema_id for each in metadata.schemas)
            schema = Schema(*schema.fields, schema_id=number)
            updates += [AddSchemaUpdate(schema=schema), SetCurrentSchemaUpdate(schema_id=-1)]
        else:
            schema = metadata.schema()
        properties = {**_PROPERTIES, _CONTENT: content, _NAME_MAPPING: name_mapping}
        if any(table.properties.get(name) != value for name, value in properties.items()):
            updates.append(SetPropertiesUpdate(updates=properties))
        specs, changes = _specs(metadata, {file.partitions for file in added}, new=self._created)
        updates += changes
        writer = _SnapshotWriter(table, schema, metadata.specs() | {spec.spec_id: spec for spec in specs.values()})
        snapshot = writer.write(self._manifests(), [(specs[file.partitions], file) for file in added], removed, summary)
        updates += [
            AddSnapshotUpdate(snapshot=snapshot),
            SetSnapshotRefUpdate(snapshot_id=snapshot.snapshot_id, ref_name=MAIN_BRANCH, type=SnapshotRefType.BRANCH),
        ]
        expired = [] if self._created else _expired(metadata, keep)
        if expired:
            updates.append(RemoveSnapshotsUpdate(snapshot_ids=[each.snapshot_id for each in expired]))
        requirements: tuple[TableRequirement, ...] = (AssertCreate(),)
        if not self._created:
            assertion = AssertRefSnapshotId(ref=MAIN_BRANCH, snapshot_id=self.snapshot)
            requirements = AssertTableUUID(uuid=metadata.table_uuid), assertion
        try:
            table._do_commit(tuple(updates), requirements)
        except Exception as error:
            if _is_refused(error):
                writer.discard()
            raise
        self._created = False
        _clean(table, expired)
        return snapshot.snapshot_id

    def expire(self, paths: Collection[str]) -> tuple[int, list[str]]:
        """Forget the snapshots before the current one that name these files; return how many, and which tags still do.

        Raises ConflictError, JetcaptureError.
        """
        with self._explained("expire snapshots of"):
            table, wanted = self.catalog.load_table(self.identifier), set(paths)
            metadata, io = table.metadata, table.io
            names = {each.snapshot_id: name for name, each in metadata.refs.items()}

            def concerned(snapshot: Snapshot) -> bool:
                entries = (entry for part in snapshot.manifests(io) for entry in part.fetch_manifest_entry(io))
                return any(entry.data_file.file_path in wanted for entry in entries)

            found = [each for each in metadata.snapshots if concerned(each)]
            gone = [each for each in found if each.snapshot_id not in names]
            if gone:
                update = RemoveSnapshotsUpdate(snapshot_ids=[each.snapshot_id for each in gone])
                try:
                    table._do_commit((update,), (AssertTableUUID(uuid=metadata.table_uuid),))
                except CommitFailedException as error:
                    raise ConflictError(f"table {self.identifier} was changed meanwhile: {one_line(error)}") from error
                _clean(table, gone)
            return len(gone), sorted(names[each.snapshot_id] for each in found if each.snapshot_id in names)

    def _stage(self) -> None:
        """Prepare a new table, which the commit creates."""
        namespace = Catalog.namespace_from(self.identifier)
        with suppress(NamespaceAlreadyExistsError):  # by another process, just now
            self.catalog.create_namespace_if_not_exists(namespace)
        metadata = new_table_metadata(
            Schema(), PartitionSpec(), UNSORTED_SORT_ORDER, self.location, {"format-version": str(_FORMAT)}
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
        UpgradeFormatVersionUpdate(format_version=_FORMAT),
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


def _data_file(file: TableFile, spec: PartitionSpec) -> DataFile:
    """Describe a file by its name, without opening it."""
    partitions = file.partitions
    values: list[Any] = []
    if partitions.key:
        values.append(file.key)
    if partitions.bundles:
        values.append(int(file.key or 0))
    if partitions.time:
        values.append(file.bucket // (_DAY if partitions.day else _HOUR))
    lower, upper = {FIELD_IDS[SEQ]: file.first_seq}, {FIELD_IDS[SEQ]: file.last_seq}
    if partitions.time:
        lower[FIELD_IDS[partitions.time]] = file.bucket * _MICROSECONDS
        upper[FIELD_IDS[partitions.time]] = (file.bucket + file.interval) * _MICROSECONDS - 1
    data_file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=file.path,
        file_format=FileFormat.PARQUET,
        partition=Record(*values),
        record_count=file.rows,
        file_size_in_bytes=file.size,
        column_sizes={},
        value_counts={},
        null_value_counts={},
        nan_value_counts={},
        lower_bounds={number: _long(value) for number, value in lower.items()},
        upper_bounds={number: _long(value) for number, value in upper.items()},
        key_metadata=None,
        split_offsets=None,
        equality_ids=None,
        sort_order_id=None,
    )
    data_file.spec_id = spec.spec_id
    return data_file


def _long(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


class _SnapshotWriter:
    """Writes the manifests of one new snapshot."""

    def __init__(self, table: Table, schema: Schema, specs: Mapping[int, PartitionSpec]) -> None:
        self._table, self._schema, self._specs = table, schema, specs
        self._location = load_location_provider(table.metadata.location, table.metadata.properties)
        self._snapshot = table.metadata.new_snapshot_id()
        self._name = uuid.uuid4()
        self._written: list[str] = []

    def write(
        self,
        manifests: Sequence[ManifestFile],
        added: Sequence[tuple[PartitionSpec, TableFile]],
        removed: Collection[str],
        summary: Mapping[str, str],
    ) -> Snapshot:
        """Write the manifests of a snapshot with those of the current one, changed, and return it."""
        counts: defaultdict[str, int] = defaultdict(int)
        kept = self._changed([each for each in manifests if _is_alive(each)], frozenset(removed), counts)
        by_spec: defaultdict[int, list[ManifestEntry]] = defaultdict(list)
        for spec, file in added:
            entry = ManifestEntry.from_args(
                status=ManifestEntryStatus.ADDED, snapshot_id=self._snapshot, data_file=_data_file(file, spec)
            )
            by_spec[spec.spec_id].append(entry)
            _count(counts, "added", file.rows, file.size)
        new = [part for number, entries in by_spec.items() for part in self._write(number, entries)]
        metadata = self._table.metadata
        current = metadata.current_snapshot()
        path = self._new_path(f"snap-{self._snapshot}-{self._name}.avro")
        number = metadata.next_sequence_number()
        with write_manifest_list(
            _FORMAT,
            self._table.io.new_output(path),
            self._snapshot,
            current.snapshot_id if current else None,
            number,
            _CODEC,
        ) as listing:
            listing.add_manifests([*new, *kept])
        before = current.summary.additional_properties if current and current.summary else {}
        return Snapshot(
            snapshot_id=self._snapshot,
            parent_snapshot_id=current.snapshot_id if current else None,
            sequence_number=number,
            manifest_list=path,
            summary=_summary(counts, before, summary),
            schema_id=self._schema.schema_id,
        )

    def discard(self) -> None:
        """Delete what was written for a commit that was refused."""
        _delete(self._table, self._written)

    def _changed(
        self, manifests: Sequence[ManifestFile], removed: Collection[str], counts: dict[str, int]
    ) -> list[ManifestFile]:
        """Return the manifests without `removed` files, and with small ones merged where they are many."""
        small: defaultdict[int, list[ManifestFile]] = defaultdict(list)
        for manifest in manifests:
            if _files_of(manifest) < _LARGE:
                small[manifest.partition_spec_id].append(manifest)
        merged = {each.manifest_path for some in small.values() if len(some) >= _MERGED for each in some}
        kept: list[ManifestFile] = []
        rewritten: defaultdict[int, list[ManifestEntry]] = defaultdict(list)
        for manifest in manifests:
            if not removed and manifest.manifest_path not in merged:
                kept.append(manifest)
                continue
            entries = manifest.fetch_manifest_entry(self._table.io)
            gone = {entry.data_file.file_path for entry in entries if entry.data_file.file_path in removed}
            if not gone and manifest.manifest_path not in merged:
                kept.append(manifest)
                continue
            for entry in entries:
                file = entry.data_file
                if file.file_path in gone:
                    _count(counts, "deleted", file.record_count, file.file_size_in_bytes)
                    rewritten[manifest.partition_spec_id].append(self._with(entry, ManifestEntryStatus.DELETED))
                else:
                    rewritten[manifest.partition_spec_id].append(self._with(entry, ManifestEntryStatus.EXISTING))
        return kept + [part for number, entries in rewritten.items() for part in self._write(number, entries)]

    def _with(self, entry: ManifestEntry, status: ManifestEntryStatus) -> ManifestEntry:
        return ManifestEntry.from_args(
            status=status,
            snapshot_id=self._snapshot if status is ManifestEntryStatus.DELETED else entry.snapshot_id,
            sequence_number=entry.sequence_number,
            file_sequence_number=entry.file_sequence_number,
            data_file=entry.data_file,
        )

    def _write(self, spec: int, entries: Sequence[ManifestEntry]) -> Iterator[ManifestFile]:
        """Write manifests of these entries, in their order, so that readers can skip those of other times."""
        for start in range(0, len(entries), _LARGE):
            path = self._new_path(f"{self._name}-m{len(self._written)}.avro")
            with write_manifest(
                _FORMAT, self._specs[spec], self._schema, self._table.io.new_output(path), self._snapshot, _CODEC
            ) as writer:
                for entry in entries[start : start + _LARGE]:
                    writer.add_entry(entry)
            yield writer.to_manifest_file()

    def _new_path(self, name: str) -> str:
        path = self._location.new_metadata_location(name)
        self._written.append(path)
        return path


def _is_alive(manifest: ManifestFile) -> bool:
    return bool(manifest.has_added_files() or manifest.has_existing_files())


def _files_of(manifest: ManifestFile) -> int:
    return (manifest.added_files_count or 0) + (manifest.existing_files_count or 0)


def _count(counts: dict[str, int], verb: str, rows: int, size: int) -> None:
    counts[f"{verb}-data-files"] += 1
    counts[f"{verb}-records"] += rows
    counts["removed-files-size" if verb == "deleted" else "added-files-size"] += size


def _summary(counts: Mapping[str, int], before: Mapping[str, str], own: Mapping[str, str]) -> Summary:
    """Return a snapshot's summary: what it changed, the totals after it, and our own entries."""
    totals = {
        "total-data-files": counts.get("added-data-files", 0) - counts.get("deleted-data-files", 0),
        "total-records": counts.get("added-records", 0) - counts.get("deleted-records", 0),
        "total-files-size": counts.get("added-files-size", 0) - counts.get("removed-files-size", 0),
    }
    entries = {name: str(number) for name, number in counts.items() if number}
    entries |= {name: str(int(before.get(name, 0)) + change) for name, change in totals.items()}
    entries |= {"total-delete-files": "0", "total-position-deletes": "0", "total-equality-deletes": "0"}
    entries |= {f"{SUMMARY}{name}": text for name, text in own.items()}
    operation = Operation.OVERWRITE if counts.get("deleted-data-files") else Operation.APPEND
    if operation is Operation.OVERWRITE and not counts.get("added-data-files"):
        operation = Operation.DELETE
    return Summary(operation, **entries)


def _expired(metadata: TableMetadata, keep: datetime) -> list[Snapshot]:
    """Return the snapshots from before `keep` that are neither the current one nor tagged by somebody."""
    named = {reference.snapshot_id for reference in metadata.refs.values()}
    oldest = keep.astimezone(UTC).timestamp() * 1000
    return [each for each in metadata.snapshots if each.timestamp_ms < oldest and each.snapshot_id not in named]


def _clean(table: Table, expired: Iterable[Snapshot]) -> None:
    """Delete the manifests that only expired snapshots named; what cannot be read or deleted stays behind."""
    gone = list(expired)
    if not gone:
        return
    with suppress(Exception):  # file systems raise their own errors, and nothing is lost
        named = {part.manifest_path for each in table.metadata.snapshots for part in each.manifests(table.io)}
        old = {part.manifest_path for each in gone for part in each.manifests(table.io)}
        _delete(table, [*(old - named), *(each.manifest_list for each in gone)])


def _delete(table: Table, paths: Iterable[str]) -> None:
    for path in paths:
        with suppress(Exception):  # a file that stays behind costs a few bytes
            table.io.delete(path)
