"""Remove objects from an archive's tables for good: from every snapshot and metadata file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from jetcapture_py.archive import layout
from jetcapture_py.archive.removed import Erased
from jetcapture_py.config.model import Config
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.table.catalog import ArchiveTable, open_table, root_url, table_names
from jetcapture_py.table.commit import commit
from jetcapture_py.table.latest import drop_latest, latest_config
from jetcapture_py.table.plan import CommitRequest
from jetcapture_py.text import plural, without_credentials

_MANIFEST = ".avro"


@dataclass(slots=True)
class TablesErased:
    """The effect on an archive's tables."""

    snapshots: int = 0
    """Number of forgotten snapshots."""
    remains: list[str] = field(default_factory=list)
    """Remaining references to the removed objects, or possible ones."""
    unnamed: list[File] = field(default_factory=list)
    """Manifests and manifest lists without a snapshot, left by killed commits."""
    directories: list[str] = field(default_factory=list)
    """Directories of the tables' metadata in the archive."""
    dropped: list[str] = field(default_factory=list)
    """Directories of dropped tables."""
    notes: list[str] = field(default_factory=list)
    """Places that were not searched."""


def check_tables(config: Config, archive: ArchiveFiles) -> None:
    """Open the tables, so that problems show before anything changes. Raises ConfigError, JetcaptureError."""
    for quarantine in table_names(config):
        with open_table(config, archive, quarantine=quarantine, read_only=True):
            pass


def drop_objects(
    config: Config, archive: ArchiveFiles, paths: Collection[str], erased: Erased | None = None
) -> TablesErased:
    """Remove objects from the tables before they are deleted, and forget all earlier snapshots.

    With `erased`, also drop the table of newest rows, which maintenance makes again, search tags and branches for
    vanished objects that may have had erased messages, and find manifests without a snapshot.
    """
    names, root, done = table_names(config), root_url(archive), TablesErased()
    leaving, present = frozenset(paths), set[str]()
    if names and erased:
        stream = config.source.stream
        directories = [f"{layout.QUARANTINE}/{stream}" if quarantine else stream for quarantine in names]
        present.update(file.path for file in archive.below(*directories))

    def is_removed(place: str) -> bool:
        path = place.removeprefix(root)
        if erased is None:
            return path in leaving
        name = layout.parse_path(path)
        return name is not None and path not in present and erased.near(name.first_seq, name.last_seq)

    for quarantine, name in names.items():
        try:
            with open_table(config, archive, quarantine=quarantine) as table:
                exists = table.loaded is not None
                if erased is not None and not exists:
                    _find_unnamed(archive, table, done)
            if not exists:
                continue
            committed = commit(config, archive, CommitRequest(quarantine=quarantine, expired=leaving, forget=True))
            done.snapshots += committed.forgotten
            done.remains += [f"table {name}: {place} cannot be deleted" for place in committed.remains]
            with open_table(config, archive, quarantine=quarantine) as table:
                for reference in _naming(table, is_removed):
                    done.remains.append(f"table {name}: {reference} names snapshots that have erased messages")
                if erased is not None:
                    _find_unnamed(archive, table, done)
        except JetcaptureError as error:
            done.remains.append(str(error))
    if erased is not None and (given := latest_config(config)) is not None:
        try:
            done.dropped += drop_latest(config, archive, given)
        except JetcaptureError as error:
            done.remains.append(str(error))
    return done


def _naming(table: ArchiveTable, is_removed: Callable[[str], bool]) -> Iterator[str]:
    """Yield the tags and branches whose snapshots reference removed files."""
    loaded = table.loaded
    for name, reference in loaded.metadata.refs.items() if loaded else ():
        snapshot = loaded.metadata.snapshot_by_id(reference.snapshot_id) if loaded else None
        if loaded and snapshot and snapshot.snapshot_id != table.snapshot:
            entries = (
                entry
                for manifest in snapshot.manifests(loaded.io)
                for entry in manifest.fetch_manifest_entry(loaded.io, discard_deleted=False)
            )
            if any(is_removed(entry.data_file.file_path) for entry in entries):
                yield name


def _find_unnamed(archive: ArchiveFiles, table: ArchiveTable, done: TablesErased) -> None:
    """Find a table's manifests without a snapshot: they may have paths of objects, and so keys.

    Those of a table that the catalog does not have remain: another catalog, or a running first pass, may need them.
    """
    loaded, root = table.loaded, table.root
    place = f"{table.location}/metadata"
    if loaded is not None:
        place = loaded.location_provider().new_metadata_location("").rstrip("/")
    if not place.startswith(root):
        done.notes.append(f"manifests below {without_credentials(place)} that no snapshot names")
        return
    directory = place.removeprefix(root)
    files = [file for file in archive.below(directory) if file.path.endswith(_MANIFEST)]
    if loaded is None:
        if files:
            done.remains.append(
                f"{plural(len(files), 'manifest')} below {directory}, and the catalog has no table {table.name}: run "
                "`jetcapture maintain` and this command again, or remove them if no other catalog has the table"
            )
        return
    snapshots = loaded.refresh().metadata.snapshots  # after the listing: a commit may have ended
    named = {part.manifest_path for snapshot in snapshots for part in snapshot.manifests(loaded.io)}
    named |= {snapshot.manifest_list for snapshot in snapshots}
    done.directories.append(directory)
    done.unnamed += [file for file in files if f"{root}{file.path}" not in named]
