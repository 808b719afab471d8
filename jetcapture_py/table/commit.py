"""Make the table as the archive is, in one commit.

Nothing is remembered between passes, so any number of them may run at once:

- A commit first loads the table, then lists the archive, and then replaces exactly the snapshot that it loaded. If
  another one was faster, everything is done again. So a table never names an object that a compaction removed: the
  compaction commits what replaces it first, and removes it later, if the table as it is then does not name it.
- If an object was removed between listing and commit all the same, by one whose own commit had nothing to change,
  everything is done again, too.
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
"""How long snapshots are kept once they are replaced, at least. Queries may have been planned from them."""
_LISTED = 10
"""Objects that wait of which the reason is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableResult:
    """What a pass did to a table, or would do."""

    name: str
    """Namespace and name of the table."""
    snapshot: int | None
    """The current snapshot's id; None if there is none."""
    files: int
    """Files of the table."""
    rows: int
    """Rows of the table."""
    added: int
    """Files that were added."""
    removed: int
    """Files that were removed from the table: of objects that were replaced or have expired."""
    unsettled: int
    """Objects of complete buckets that wait: they overlap, and it is not certain that no message is in two of them, or
    they cannot be read."""
    complete_to: datetime | None
    """Every message of buckets that ended up to here is in the table; None if there are no complete buckets."""
    renamed: Sequence[str]
    """Columns whose names say their type, because a column of that name has another."""
    left_out: Mapping[str, str]
    """Columns that a table cannot have, and their types."""
    opened: int
    """Objects whose footers were read."""
    problems: Sequence[str] = ()
    """Why objects wait, one line each for the first ones."""
    error: str = ""
    """Which objects no further pass can add, and why."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return {**asdict(self), "complete_to": format_time(self.complete_to) if self.complete_to else None}

    def lines(self) -> Iterator[str]:
        text = f"table {self.name}: {plural(self.files, 'file')}, {self.rows:,} rows"
        text += f" (+{self.added:,} -{self.removed:,})" if self.added or self.removed else ""
        yield text + (f", complete to {format_time(self.complete_to)}" if self.complete_to else "")
        if self.unsettled:
            count = plural(self.unsettled, "object")
            yield f"table {self.name}: {count} of complete buckets not in it yet"
            yield from (f"  {problem}" for problem in self.problems)
        if self.left_out:
            columns = ", ".join(f"{name} ({type_})" for name, type_ in self.left_out.items())
            yield f"table {self.name}: columns of types that Iceberg does not have are left out: {columns}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A table after a commit."""

    result: TableResult
    paths: PathSet
    """Paths of the objects that the table has: nobody may remove them."""
    dropped: Mapping[str, float]
    """Paths of objects that snapshots of the last time removed, and when, in seconds since the epoch: queries may still
    read them."""
    forgotten: int = 0
    """Snapshots that were forgotten."""
    remains: Sequence[str] = ()
    """Files of forgotten snapshots that could not be deleted, by their places."""


def commit(config: Config, archive: ArchiveFiles, request: CommitRequest) -> Committed:
    """Make the table as the archive is, without what has expired.

    Raises JetcaptureError, ConfigError without the extra `table`.
    """
    requests = [request]

    def attempt() -> Committed:
        try:
            return _commit(config, archive, requests[-1])
        except _GoneError:
            if archive.erased(config.source.stream):  # the snapshot must not go on naming what was erased
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
    """Commit what the plan says, if there is anything; return the table, and what became of earlier snapshots."""
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
    """Whether a table has earlier snapshots, or says which files it no longer has."""
    snapshots = table.loaded.metadata.snapshots if table.loaded else []
    return len(snapshots) > 1 or any(
        not manifest.has_added_files() and not manifest.has_existing_files() for manifest in table.manifests()
    )


def _refuse_gone(plan: TablePlan) -> None:
    """Raise _GoneError if an object was removed while it was committed. Those in the table before are not."""
    present = PathSet(plan.archive.paths(plan.directory))
    if not present.issuperset_of(plan.tally.new):
        raise _GoneError(f"{plan.archive.shown} has lost objects while table {plan.table.name} was committed")


def named_paths(config: Config, archive: ArchiveFiles, *, quarantine: bool = False) -> PathSet:
    """Return the paths of the objects that the table names now. Raises JetcaptureError, and ConfigError."""
    with open_table(config, archive, quarantine=quarantine) as table:
        return PathSet(file.file_path.removeprefix(table.root) for _, file in table.files())


def drop_quarantined(config: Config, archive: ArchiveFiles, paths: Collection[str]) -> None:
    """Take objects that are about to be removed out of the quarantine's table, if there is one. Raises as `commit`."""
    if True in table_names(config):
        commit(config, archive, CommitRequest(quarantine=True, expired=frozenset(paths)))


def _summary(mark: watermark.Watermark | None) -> dict[str, str]:
    """Return what a snapshot says of the archive."""
    if mark is None:
        return {}
    return {
        "watermark-seq": str(mark.seq),
        "watermark-time": watermark.time_text(mark.time),
        "stream-created": mark.created,
    }


def _result(plan: TablePlan, snapshot: int | None) -> TableResult:
    """Return what was done, or would be."""
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
    """Return which objects no further pass can add, in one line; "" for none."""
    if not stuck:
        return ""
    path, reason = next(iter(stuck.items()))
    return f"table {table} cannot have {plural(len(stuck), 'object')}, such as {path}: {reason}"
