"""Write the manifests of a table's new snapshot, which describe files by their names, without opening them."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriter,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.typedef import Record

from jetcapture_py.archive.layout import FIELD_IDS, SEQ

SUMMARY = "jetcapture."
"""Prefix of our entries in a snapshot's summary."""
FORMAT: Literal[2] = 2
"""PyIceberg cannot write version 3, and not every engine reads it."""
_CODEC: Literal["deflate"] = "deflate"
_MERGED = 32
"""Manifests of one layout from which on the small ones are merged into one."""
_LARGE = 5_000
"""Files of a manifest from which on it is not small."""
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


class SnapshotWriter:
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
        added: Iterable[tuple[PartitionSpec, TableFile]],
        removed: Mapping[str, int],
        summary: Mapping[str, str],
        *,
        again: Collection[str] = (),
    ) -> Snapshot:
        """Write the manifests of a snapshot with those of the current one, changed, and return it.

        `removed` are the places of files, with the indexes of their manifests in `manifests`. The manifests at the
        paths `again` are written again, without what they say of deleted files.
        """
        try:
            return self._snapshot_with(manifests, added, removed, summary, frozenset(again))
        except Exception:
            self.discard()
            raise

    def _snapshot_with(
        self,
        manifests: Sequence[ManifestFile],
        added: Iterable[tuple[PartitionSpec, TableFile]],
        removed: Mapping[str, int],
        summary: Mapping[str, str],
        again: frozenset[str],
    ) -> Snapshot:
        counts: defaultdict[str, int] = defaultdict(int)
        kept = self._changed(manifests, removed, counts, again)
        with _Parts(self) as parts:
            for spec, file in added:
                entry = ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED, snapshot_id=self._snapshot, data_file=_data_file(file, spec)
                )
                parts.add(spec.spec_id, entry)
                _count(counts, "added", file.rows, file.size)
        new = parts.written
        metadata = self._table.metadata
        current = metadata.current_snapshot()
        path = self._new_path(f"snap-{self._snapshot}-{self._name}.avro")
        number = metadata.next_sequence_number()
        with write_manifest_list(
            FORMAT,
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
            timestamp_ms=max(int(time.time() * 1000), metadata.last_updated_ms + 1),  # a clock may have been ahead
            manifest_list=path,
            summary=_summary(counts, before, summary),
            schema_id=self._schema.schema_id,
        )

    def discard(self) -> None:
        """Delete what was written for a commit that was refused."""
        delete_files(self._table, self._written)

    def _changed(
        self,
        manifests: Sequence[ManifestFile],
        removed: Mapping[str, int],
        counts: dict[str, int],
        again: Collection[str],
    ) -> list[ManifestFile]:
        """Return the manifests without `removed` files, those of `again` as new ones, and many small ones merged."""
        small: defaultdict[int, list[int]] = defaultdict(list)
        alive = [number for number, manifest in enumerate(manifests) if _is_alive(manifest)]
        for number in alive:
            if _files_of(manifests[number]) < _LARGE:
                small[manifests[number].partition_spec_id].append(number)
        rewritten = {number for some in small.values() if len(some) >= _MERGED for number in some}
        rewritten.update(removed.values(), (number for number in alive if manifests[number].manifest_path in again))
        kept = [manifests[number] for number in alive if number not in rewritten]
        with _Parts(self) as parts:
            for number in (number for number in alive if number in rewritten):
                for entry in manifests[number].fetch_manifest_entry(self._table.io):
                    file, status = entry.data_file, ManifestEntryStatus.EXISTING
                    if file.file_path in removed:
                        _count(counts, "deleted", file.record_count, file.file_size_in_bytes)
                        status = ManifestEntryStatus.DELETED
                    parts.add(manifests[number].partition_spec_id, self._with(entry, status))
        return kept + parts.written

    def _with(self, entry: ManifestEntry, status: ManifestEntryStatus) -> ManifestEntry:
        return ManifestEntry.from_args(
            status=status,
            snapshot_id=self._snapshot if status is ManifestEntryStatus.DELETED else entry.snapshot_id,
            sequence_number=entry.sequence_number,
            file_sequence_number=entry.file_sequence_number,
            data_file=entry.data_file,
        )

    def open(self, spec: int) -> ManifestWriter:
        path = self._new_path(f"{self._name}-m{len(self._written)}.avro")
        output = self._table.io.new_output(path)
        return write_manifest(FORMAT, self._specs[spec], self._schema, output, self._snapshot, _CODEC)

    def _new_path(self, name: str) -> str:
        path = self._location.new_metadata_location(name)
        self._written.append(path)
        return path


class _Parts:
    """Writes entries to manifests of limited size, in their order, so that readers can skip those of other times."""

    def __init__(self, snapshot: SnapshotWriter) -> None:
        self._snapshot = snapshot
        self._open: dict[int, tuple[ManifestWriter, int]] = {}
        self.written: list[ManifestFile] = []
        """The manifests that are complete."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for spec in list(self._open):
            self._end(spec)

    def add(self, spec: int, entry: ManifestEntry) -> None:
        writer, count = self._open.get(spec, (None, 0))
        if writer is None:
            writer = self._snapshot.open(spec)
            writer.__enter__()
        writer.add_entry(entry)
        self._open[spec] = writer, count + 1
        if count + 1 == _LARGE:
            self._end(spec)

    def _end(self, spec: int) -> None:
        writer, _ = self._open.pop(spec)
        writer.__exit__(None, None, None)
        self.written.append(writer.to_manifest_file())


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
    if not counts:
        operation = Operation.REPLACE
    if operation is Operation.OVERWRITE and not counts.get("added-data-files"):
        operation = Operation.DELETE
    return Summary(operation, **entries)


def delete_files(table: Table, paths: Iterable[str]) -> list[str]:
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
