"""Keep an Iceberg table of an archive's complete buckets, in which every engine reads each message once.

The files that the table should have follow from the archive alone: its names, its watermark, and, where names overlap,
the objects' messages. Nothing is remembered between passes, so any number of them may run at once:

- A commit first loads the table, then lists the archive, and then replaces exactly the snapshot that it loaded. If
  another one was faster, everything is done again. So a table never names an object that a compaction removed: the
  compaction commits what replaces it first, and removes it later, if the table as it is then does not name it.
- If an object was removed between listing and commit all the same, by one whose own commit had nothing to change,
  everything is done again, too.
- Objects whose sequences overlap are in the table only if it is certain that they share no message: compaction has
  verified which of them have all messages, or the messages themselves are compared here. Otherwise the table keeps
  what it had of them, and the rest waits for compaction; it is counted as unsettled.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from jetcapture_py.archive import layout, watermark
from jetcapture_py.archive.layout import clusters
from jetcapture_py.compaction.plan import Source
from jetcapture_py.compaction.unit import Merged
from jetcapture_py.config.maintain import CompactConfig, TableConfig
from jetcapture_py.config.model import Config, StoreConfig
from jetcapture_py.config.units import format_time
from jetcapture_py.errors import ConfigError, ConflictError, JetcaptureError, VanishedError
from jetcapture_py.maintain.inventory import PathSet, root_url
from jetcapture_py.maintain.table_plan import TablePlan, disjoint_objects
from jetcapture_py.reading.plan import list_objects
from jetcapture_py.store.archive import ArchiveFiles, open_archive
from jetcapture_py.store.remote import with_secrets
from jetcapture_py.text import plural
from jetcapture_py.verify.findings import FileList, Finding, Kind, Severity, file_findings

if TYPE_CHECKING:
    from jetcapture_py.maintain.iceberg import IcebergTable, TableChange

SNAPSHOT_AGE = timedelta(hours=1)
"""How long snapshots are kept, at least. Older ones name objects that compaction has removed."""
DIRECTORY = "_table"
"""Directory of the archive with the metadata of its tables."""
_ATTEMPTS = 8
"""How often a commit is planned again because another one was faster."""
_WAIT = 0.2
"""Seconds that the first of them waits at most; each further one twice as long."""
_AT_ONCE = 4096
"""Paths that are looked up at once."""
_LISTED = 10
"""Objects that wait of which the reason is told."""

T = TypeVar("T")


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
        text = f"table {self.name}: {plural(self.files, 'file', grouped=True)}, {self.rows:,} rows"
        text += f" (+{self.added:,} -{self.removed:,})" if self.added or self.removed else ""
        yield text + (f", complete to {format_time(self.complete_to)}" if self.complete_to else "")
        if self.unsettled:
            count = plural(self.unsettled, "object", grouped=True)
            yield f"table {self.name}: {count} of complete buckets not in it yet"
            yield from (f"  {problem}" for problem in self.problems)
        if self.left_out:
            columns = ", ".join(f"{name} ({type_})" for name, type_ in self.left_out.items())
            yield f"table {self.name}: columns of types that Iceberg does not have are left out: {columns}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A table after a pass."""

    result: TableResult
    paths: PathSet
    """Paths of the objects that the table has: nobody may remove them."""
    dropped: Mapping[str, float]
    """Paths of objects that snapshots of the last time removed, and when, in seconds since the epoch: queries may still
    read them."""


def commit(
    config: Config,
    archive: ArchiveFiles,
    *,
    after: float,
    quarantine: bool = False,
    outcomes: Iterable[Merged] = (),
    expired: Collection[str] = (),
    dry_run: bool = False,
    recent: float = 0.0,
) -> Committed:
    """Make the table as the archive is, without what has expired and without the paths `expired`, in one snapshot.

    Buckets must have ended `after` seconds ago. `outcomes` are what a compaction of these objects has verified.
    `recent` is for how many seconds to tell what was dropped. Raises JetcaptureError, ConfigError without the
    extra `table`.
    """
    known = list(outcomes)
    for attempt in range(_ATTEMPTS):
        try:
            with open_table(config, archive, quarantine=quarantine, read_only=dry_run) as table:
                plan = _planned(
                    config,
                    archive,
                    table,
                    after=after,
                    quarantine=quarantine,
                    outcomes=known,
                    expired=expired,
                )
                snapshot = table.snapshot
                if (plan.new or plan.removed) and not dry_run:
                    snapshot = table.commit(_change(plan, _content(config, quarantine=quarantine), recent))
                    if plan.new:
                        _refuse_gone(plan)
                dropped = _relative(archive, table.dropped(time.time() - recent)) if recent else {}
                result = _result(plan, snapshot)
                for path in plan.added():
                    plan.kept.add(path)
                return Committed(result=result, paths=plan.kept, dropped=dropped)
        except (ConflictError, VanishedError):
            if attempt + 1 == _ATTEMPTS:
                raise
            time.sleep(random.uniform(0, _WAIT * 2**attempt))  # noqa: S311  # only so that two do not meet again
    raise AssertionError  # the last attempt returns or raises


def _refuse_gone(plan: TablePlan) -> None:
    """Raise ConflictError if an object was removed while it was committed. Those in the table before are not."""
    present = PathSet(file.path for file in plan.archive.below(plan.directory))
    added = plan.added()
    while some := list(islice(added, _AT_ONCE)):
        if not present.issuperset(some):
            path = next(path for path in some if path not in present)
            shown, name = plan.archive.shown, plan.table.identifier
            raise ConflictError(f"{shown}/{path} was removed while table {name} was committed")


def drop_quarantined(config: Config, paths: Collection[str]) -> None:
    """Take objects that are about to be removed out of the quarantine's table, if there is one. Raises as `commit`."""
    if config.maintain is None or config.maintain.table is None or config.maintain.table.quarantine is None:
        return
    archive = open_archive(config.store.url, config.store.options)
    commit(config, archive, after=(config.maintain.compact or CompactConfig()).after, quarantine=True, expired=paths)


def named_paths(config: Config, archive: ArchiveFiles, *, quarantine: bool = False) -> PathSet:
    """Return the paths of the objects that the table names now. Raises JetcaptureError, and ConfigError."""
    root = root_url(archive)
    with open_table(config, archive, quarantine=quarantine) as table:
        return PathSet(file.place.removeprefix(root) for file in table.files())


def table_config(config: Config) -> TableConfig:
    """Return the section `maintain.table`. Raises ConfigError without one."""
    given = config.maintain.table if config.maintain else None
    if given is None:
        raise ConfigError("maintain.table: required for a table, but not set")
    return given


def _relative(archive: ArchiveFiles, files: Mapping[str, T]) -> dict[str, T]:
    """Return a mapping of the table's files by their paths in the archive, or whole for files elsewhere."""
    root = root_url(archive)
    return {place.removeprefix(root): value for place, value in files.items()}


def table_path(archive: ArchiveFiles, path: str) -> str:
    """Return the path of an object as the table has it."""
    return f"{root_url(archive)}{path}"


@contextmanager
def open_table(
    config: Config, archive: ArchiveFiles, *, quarantine: bool = False, read_only: bool = False
) -> Iterator[IcebergTable]:
    """Load the table of a capture's messages or of its quarantine. Raises JetcaptureError, and ConfigError."""
    given = table_config(config)
    try:
        from jetcapture_py.maintain.iceberg import IcebergTable, explained, open_catalog
    except ImportError as error:
        raise ConfigError(
            f"maintain.table: PyIceberg is not installed ({error}): pip install 'jetcapture[table]'"
        ) from error
    name = given.quarantine if quarantine else given.name
    if name is None:
        raise ConfigError("maintain.table.quarantine: not set")
    location = (given.location or f"{root_url(archive)}{DIRECTORY}").rstrip("/")
    with open_catalog({**file_properties(config.store), **given.catalog}, read_only=read_only) as catalog:
        table = IcebergTable(catalog, name, f"{location}/{name}")
        if table.exists and table.content != _content(config, quarantine=quarantine):
            whose = f"of {table.content}" if table.content else "not made by jetcapture"
            raise JetcaptureError(f"table {name} is {whose}: it is left as it is; use another name")
        try:
            with explained(f"cannot keep table {name}"):
                yield table
        except ConflictError:
            raise
        except JetcaptureError as error:
            if "location" not in str(error).lower():
                raise
            allow = f"the catalog must allow {root_url(archive)} for the files and {location}/ for the metadata"
            raise JetcaptureError(f"{error}; {allow}") from error


def _content(config: Config, *, quarantine: bool) -> str:
    """Return what a table is of."""
    return f"{'quarantine of ' if quarantine else ''}stream {config.source.stream}"


_PROPERTIES = {
    "key": "s3.access-key-id",
    "secret": "s3.secret-access-key",
    "token": "s3.session-token",
    "endpoint_url": "s3.endpoint",
    "region_name": "s3.region",
    "anon": "s3.anonymous",
    "account_name": "adls.account-name",
    "account_key": "adls.account-key",
    "sas_token": "adls.sas-token",
    "connection_string": "adls.connection-string",
    "tenant_id": "adls.tenant-id",
    "client_id": "adls.client-id",
    "client_secret": "adls.client-secret",
    "project": "gcs.project-id",
}
"""PyIceberg's names of the store's options."""


def file_properties(store: StoreConfig) -> dict[str, str]:
    """Return the properties with which PyIceberg opens the same store. Raises ConfigError for secret files."""
    options = with_secrets(store.options)
    nested = options.get("client_kwargs")
    every: dict[str, Any] = {**options, **(nested if isinstance(nested, dict) else {})}
    return {
        _PROPERTIES[name]: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in every.items()
        if name in _PROPERTIES and value is not None
    }


def compare_tables(config: Config) -> list[Finding]:
    """Return what of the tables' files differs from the archive's. Raises JetcaptureError, ConfigError without one."""
    given = table_config(config)
    archive = open_archive(config.store.url, config.store.options)
    after = ((config.maintain and config.maintain.compact) or CompactConfig()).after
    findings: list[Finding] = []
    for name, quarantine in ((given.name, False), (given.quarantine, True)):
        if name is not None:
            with open_table(config, archive, quarantine=quarantine, read_only=True) as table:
                plan = _planned(config, archive, table, after=after, quarantine=quarantine)
                findings += _differences(name, plan)
    return findings


def _differences(name: str, plan: TablePlan) -> Iterator[Finding]:
    """Yield what differs between a table and what it should have."""
    archive = plan.archive
    listing = list_objects(archive, plan.directory)
    present = {file.path: file.size for file in listing.values()}
    gone, changed, twice, later, waiting, stuck = (FileList() for _ in range(6))
    current = _relative(archive, {file.place: file.size for file in plan.table.files()})
    for path, size in sorted(current.items()):
        if path not in present:
            gone.add(path)
        elif present[path] != size:
            changed.add(path, f"{present[path]:,} bytes, {size:,} in the table")
    for cluster in clusters(each for each in listing if each.parquet and each.path in current):
        if len(cluster) > 1:
            whole, _ = disjoint_objects(archive, [Source(each, listing[each].size) for each in cluster])
            for each in cluster if len(whole or ()) < len(cluster) else ():
                twice.add(each.path)
    for path in sorted(path for path in plan.added() if path not in current):
        later.add(path)
    for path, reason in plan.unsettled.items():
        (stuck if path in plan.stuck else waiting).add(path, reason)
    again = "drop the table from its catalog, without purging it, and run `jetcapture maintain`, which makes it again"
    run = "run `jetcapture maintain`"
    for files, severity, summary, action in (
        (gone, Severity.FAILURE, f"table {name} has objects that are gone: queries of it fail", run),
        (
            changed,
            Severity.FAILURE,
            f"table {name} has objects whose size has changed",
            f"{run}; see `jetcapture verify --deep` if that does not help",
        ),
        (twice, Severity.FAILURE, f"table {name} has objects that share messages: queries count them twice", again),
        (later, Severity.WARNING, f"table {name} does not have these objects of complete buckets yet", run),
        (waiting, Severity.WARNING, f"table {name} cannot have these objects of complete buckets yet", run),
        (
            stuck,
            Severity.WARNING,
            f"table {name} cannot have these objects",
            "no further pass can add them, for the reasons given",
        ),
    ):
        yield from file_findings(Kind.TABLE, severity, files, summary, action)


def _planned(
    config: Config,
    archive: ArchiveFiles,
    table: IcebergTable,
    *,
    after: float,
    quarantine: bool,
    outcomes: Sequence[Merged] = (),
    expired: Collection[str] = (),
) -> TablePlan:
    """Plan what a table should have, as it was loaded. Raises JetcaptureError, VanishedError."""
    from jetcapture_py.maintain.table_columns import TableColumns

    stream = config.source.stream
    plan = TablePlan(
        archive=archive,
        table=table,
        columns=TableColumns(table.schema, quarantine=quarantine),
        directory=f"{layout.QUARANTINE}/{stream}" if quarantine else stream,
        stream=stream,
        quarantine=quarantine,
        after=after,
        outcomes=outcomes,
        expired=expired,
        keep=config.maintain.keep if config.maintain else None,
    )
    plan.run()
    return plan


def _change(plan: TablePlan, content: str, recent: float) -> TableChange:
    """Return what a commit changes to make the table as planned."""
    from jetcapture_py.maintain.iceberg import TableChange

    return TableChange(
        content=content,
        schema=plan.columns.schema,
        partitions=plan.partitions,
        added=plan.files(),
        removed=plan.removed,
        summary=_summary(plan.mark),
        keep=datetime.now(UTC) - max(SNAPSHOT_AGE, timedelta(seconds=recent)),
    )


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
    upto = plan.closed if plan.earliest is None else min(plan.closed, plan.earliest)
    files = len(plan.kept) + plan.new
    return TableResult(
        name=plan.table.identifier,
        snapshot=snapshot,
        files=files,
        rows=plan.rows,
        added=plan.new,
        removed=len(plan.removed),
        unsettled=len(plan.unsettled),
        complete_to=datetime.fromtimestamp(upto, UTC) if files else None,
        renamed=plan.columns.drifted,
        left_out=plan.columns.left_out,
        opened=plan.opened,
        problems=[f"{path}: {reason}" for path, reason in islice(plan.unsettled.items(), _LISTED)],
        error=_error(plan),
    )


def _error(plan: TablePlan) -> str:
    """Return which objects no further pass can add, in one line; "" for none."""
    if not plan.stuck:
        return ""
    path, reason = next(iter(plan.stuck.items()))
    return f"table {plan.table.identifier} cannot have {plural(len(plan.stuck), 'object')}, such as {path}: {reason}"
