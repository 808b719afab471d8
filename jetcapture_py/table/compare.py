"""Compare the tables with the archive, for `jetcapture verify --table`."""

from __future__ import annotations

from collections.abc import Iterator

from jetcapture_py.archive.layout import clusters
from jetcapture_py.compaction.plan import Source
from jetcapture_py.config.model import Config
from jetcapture_py.reading.plan import list_objects
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.table.catalog import AGAIN, ArchiveTable, open_table, table_config, table_names
from jetcapture_py.table.plan import CommitRequest, Joining, TablePlan, disjoint_objects
from jetcapture_py.verify.findings import FileList, Finding, Kind, Severity, file_findings


def compare_tables(config: Config, archive: ArchiveFiles) -> list[Finding]:
    """Return the differences between the tables and the archive. Raises JetcaptureError, ConfigError without a
    table."""
    table_config(config)
    findings: list[Finding] = []
    for quarantine in table_names(config):
        request = CommitRequest(quarantine=quarantine, dry_run=True)
        with open_table(config, archive, quarantine=quarantine, read_only=True) as table:
            findings += _differences(table, TablePlan(config, archive, table, request))
    return findings


def _differences(table: ArchiveTable, plan: TablePlan) -> Iterator[Finding]:
    """Yield the differences between a table and its plan."""
    archive, name = plan.archive, table.name
    joining = [change.info.name.path for change in plan.changes() if isinstance(change, Joining)]
    listing = list_objects(archive, plan.directory)
    present = {file.path: file.size for file in listing.values()}
    gone, changed, twice, later, waiting, stuck = (FileList() for _ in range(6))
    current = {file.file_path.removeprefix(table.root): file.file_size_in_bytes for _, file in table.files()}
    for path, size in sorted(current.items()):
        if path not in present:
            gone.add(path)
        elif present[path] != size:
            changed.add(path, f"{present[path]:,} bytes, {size:,} in the table")
    for cluster in clusters(stored for stored in listing if stored.parquet and stored.path in current):
        if len(cluster) > 1:
            alone, _ = disjoint_objects(archive, [Source(stored, listing[stored].size) for stored in cluster])
            for stored in cluster if len(alone or ()) < len(cluster) else ():
                twice.add(stored.path)
    for path in sorted(path for path in joining if path not in current):
        later.add(path)
    for path, reason in plan.tally.unsettled.items():
        (stuck if path in plan.tally.stuck else waiting).add(path, reason)
    run = "run `jetcapture maintain`"
    for files, severity, summary, action in (
        (gone, Severity.FAILURE, f"table {name} has objects that are gone: queries of it fail", run),
        (
            changed,
            Severity.FAILURE,
            f"table {name} has objects whose size has changed",
            f"{run}; see `jetcapture verify --deep` if that does not help",
        ),
        (twice, Severity.FAILURE, f"table {name} has objects that share messages: queries count them twice", AGAIN),
        (later, Severity.WARNING, f"table {name} does not have these objects of complete time slices yet", run),
        (waiting, Severity.WARNING, f"table {name} cannot have these objects of complete time slices yet", run),
        (
            stuck,
            Severity.WARNING,
            f"table {name} cannot have these objects",
            "no further pass can add them, for the reasons given",
        ),
    ):
        yield from file_findings(Kind.TABLE, severity, files, summary, action)
