"""Bring the table to the state of the archive, in one commit.

Passes share no state, so any number of them may run at once:

- A commit first loads the table, then lists the archive, and then replaces exactly the snapshot that it loaded. If
  another one was faster, everything is repeated. So a table never references an object that a compaction removed: the
  compaction first commits the replacement, and later removes the object unless the current table references it.
- If another pass, whose own commit had nothing to change, removed an object between listing and commit, everything is
  repeated, too.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from jetcapture_py.archive import watermark
from jetcapture_py.compaction.inventory import PathSet
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import format_time
from jetcapture_py.errors import ConflictError
from jetcapture_py.retry import retried_on_conflict
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.table.catalog import ArchiveTable, open_table, table_names
from jetcapture_py.table.plan import CommitRequest, TablePlan
from jetcapture_py.text import plural

SNAPSHOT_AGE = timedelta(hours=1)
"""Minimum age of a replaced snapshot before it is removed: queries may have been planned from it."""
_LISTED = 10
"""Maximum waiting objects with a reported reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableResult:
    """The effect of a pass or its dry run on a table."""

    name: str
    """Namespace and name of the table."""
    snapshot: int | None
    """The current snapshot's id; None if there is none."""
    files: int
    """Files of the table."""
    rows: int
    """Rows of the table."""
    added: int
    """Added files."""
    removed: int
    """Files removed from the table, because their objects were replaced or have expired."""
    unsettled: int
    """Objects of complete buckets that wait: they overlap and may share messages, or cannot be read."""
    complete_to: datetime | None
    """The table has every message of buckets that ended up to this time; None for an empty table."""
    renamed: Sequence[str]
    """Columns with their type in the name, because another column has the plain name."""
    left_out: Mapping[str, str]
    """Columns that a table cannot have, and their types."""
    opened: int
    """Objects whose footers were read."""
    problems: Sequence[str] = ()
    """Reasons why objects wait, for the first ones."""
    error: str = ""
    """Objects that no further pass can add, with the reason."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return {**asdict(self), "complete_to": format_time(self.complete_to) if self.complete_to else None}

    def lines(self) -> Iterator[str]:
        text = f"table {self.name}: {plural(self.files, 'file')}, {self.rows:,} rows"
        text += f" (+{self.added:,} -{self.removed:,})" if self.added or self.removed else ""
        yield text + (f", complete to {format_time(self.complete_to)}" if self.complete_to else "")
        if self.unsettled:
            count = plural(self.unsettled, "object")
            yield f"table {self.name}: {count} of complete time slices not in it yet"
            yield from (f"  {problem}" for problem in self.problems)
        if self.left_out:
            columns = ", ".join(f"{name} ({type_})" for name, type_ in self.left_out.items())
            yield f"table {self.name}: columns of types that Iceberg does not have are left out: {columns}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A table after a commit."""

    result: TableResult
    paths: PathSet
    """Paths of the table's objects, which must not be removed."""
    dropped: Mapping[str, float]
    """Paths of objects that recent snapshots removed, and when, in seconds since the epoch: queries may still read
    them."""
    forgotten: int = 0
    """Number of forgotten snapshots."""
    remains: Sequence[str] = ()
    """Locations of files of forgotten snapshots that could not be deleted."""


def commit(config: Config, archive: ArchiveFiles, request: CommitRequest) -> Committed:
    """Bring the table to the state of the archive, without expired objects.

    Raises JetcaptureError, ConfigError without the extra `table`.
    """
    requests = [request]

    def attempt() -> Committed:
        try:
            return _commit(config, archive, requests[-1])
        except _GoneError:
            if archive.erased(config.source.stream):  # the snapshot must no longer reference erased messages
                requests.append(replace(request, forget=True))
            raise

    return retried_on_conflict(attempt)


class _GoneError(ConflictError):
    """Objects were removed while they were committed."""


def _commit(config: Config, archive: ArchiveFiles, request: CommitRequest) -> Committed:
    with open_table(config, archive, quarantine=request.quarantine, read_only=request.dry_run) as table:
        from jetcapture_py.table.writer import removed_since

        plan = TablePlan(config, archive, table, request)
        forgotten, remains = 0, list[str]()
        if request.dry_run:
            for _ in plan.changes():
                pass
        else:
            table, forgotten, remains = _write(plan)
            if plan.tally.new:
                _refuse_gone(plan)
        dropped = removed_since(table, time.time() - request.recent) if request.recent else {}
        return Committed(
            result=_result(plan, table.snapshot),
            paths=plan.tally.paths,
            dropped={place.removeprefix(table.root): moment for place, moment in dropped.items()},
            forgotten=forgotten,
            remains=remains,
        )


def _write(plan: TablePlan) -> tuple[ArchiveTable, int, list[str]]:
    """Commit the plan's changes, if any; return the table and the effect on earlier snapshots."""
    from jetcapture_py.table.writer import TableWriter, delete_manifests

    table, request, writer = plan.table, plan.request, None
    try:
        for change in plan.changes():
            writer = writer or TableWriter(table, plan.columns, _summary(plan.mark))
            writer.add(change)
        if writer is None and request.forget and _has_history(table):
            writer = TableWriter(table, plan.columns, _summary(plan.mark))
        if writer is None:
            return table, 0, []
    except BaseException:
        if writer is not None:
            writer.discard()
        raise
    age = max(SNAPSHOT_AGE, timedelta(seconds=request.recent))
    loaded, forgotten = writer.commit(keep=None if request.forget else datetime.now(UTC) - age)
    return replace(table, loaded=loaded), len(forgotten), delete_manifests(loaded, forgotten)


def _has_history(table: ArchiveTable) -> bool:
    """Whether a table has earlier snapshots, or entries of removed files."""
    snapshots = table.loaded.metadata.snapshots if table.loaded else []
    return len(snapshots) > 1 or any(
        not manifest.has_added_files() and not manifest.has_existing_files() for manifest in table.manifests()
    )


def _refuse_gone(plan: TablePlan) -> None:
    """Raise _GoneError if an object was removed while it was committed. Earlier files of the table are protected."""
    present = PathSet(plan.archive.paths(plan.directory))
    if not present.issuperset_of(plan.tally.new):
        raise _GoneError(f"{plan.archive.shown} has lost objects while table {plan.table.name} was committed")


def named_paths(config: Config, archive: ArchiveFiles, *, quarantine: bool = False) -> PathSet:
    """Return the paths of the objects that the table references now. Raises JetcaptureError, ConfigError."""
    with open_table(config, archive, quarantine=quarantine) as table:
        return PathSet(file.file_path.removeprefix(table.root) for _, file in table.files())


def drop_quarantined(config: Config, archive: ArchiveFiles, paths: Collection[str]) -> None:
    """Remove objects from the quarantine's table, if any, before they are deleted. Raises as `commit`."""
    if True in table_names(config):
        commit(config, archive, CommitRequest(quarantine=True, expired=frozenset(paths)))


def _summary(mark: watermark.Watermark | None) -> dict[str, str]:
    """Return a snapshot's summary of the archive."""
    if mark is None:
        return {}
    return {
        "watermark-seq": str(mark.seq),
        "watermark-time": watermark.time_text(mark.time),
        "stream-created": mark.created,
    }


def _result(plan: TablePlan, snapshot: int | None) -> TableResult:
    """Return the result of the commit or its dry run."""
    tally = plan.tally
    upto = plan.closed if tally.earliest is None else min(plan.closed, tally.earliest)
    return TableResult(
        name=plan.table.name,
        snapshot=snapshot,
        files=len(tally.paths),
        rows=tally.rows,
        added=len(tally.new),
        removed=tally.removed,
        unsettled=len(tally.unsettled),
        complete_to=datetime.fromtimestamp(upto, UTC) if tally.paths else None,
        renamed=plan.columns.drifted,
        left_out=plan.columns.left_out,
        opened=tally.opened,
        problems=[f"{path}: {reason}" for path, reason in islice(tally.unsettled.items(), _LISTED)],
        error=_error(plan.table.name, tally.stuck),
    )


def _error(table: str, stuck: Mapping[str, str]) -> str:
    """Return in one line the objects that no further pass can add; "" for none."""
    if not stuck:
        return ""
    path, reason = next(iter(stuck.items()))
    return f"table {table} cannot have {plural(len(stuck), 'object')}, such as {path}: {reason}"
