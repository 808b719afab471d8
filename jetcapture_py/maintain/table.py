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
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from jetcapture_py.archive import layout, watermark
from jetcapture_py.archive.layout import LONGEST_INTERVAL, ObjectName, clusters
from jetcapture_py.archive.overlaps import resolve
from jetcapture_py.compaction.unit import Outcome
from jetcapture_py.config.maintain import CompactConfig, TableConfig
from jetcapture_py.config.model import Config, StoreConfig
from jetcapture_py.config.units import format_time
from jetcapture_py.errors import ConfigError, ConflictError, JetcaptureError, VanishedError
from jetcapture_py.reading.plan import Listing, ObjectFacts, list_objects, read_facts, read_identities
from jetcapture_py.store.archive import ArchiveFiles, open_archive
from jetcapture_py.store.remote import with_secrets
from jetcapture_py.text import plural, without_credentials
from jetcapture_py.verify.findings import FileList, Finding, Kind, Severity, file_findings

if TYPE_CHECKING:
    from jetcapture_py.maintain.iceberg import IcebergTable
    from jetcapture_py.maintain.manifests import TableFile
    from jetcapture_py.maintain.table_columns import TableColumns

SNAPSHOT_AGE = timedelta(hours=1)
"""How long snapshots are kept, at least. Older ones name objects that compaction has removed."""
DIRECTORY = "_table"
"""Directory of the archive with the metadata of its tables."""
_ATTEMPTS = 8
"""How often a commit is planned again because another one was faster."""
_WAIT = 0.2
"""Seconds that the first of them waits at most; each further one twice as long."""
_OTHER_TYPES = "its columns have names but no field ids, and other types than in the table"
_LISTED = 10
"""Objects that wait of which the reason is told."""
_LONGEST = int(LONGEST_INTERVAL.total_seconds())
_HOUR = 3600

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
    problems: Sequence[str] = ()
    """Why objects wait, one line each for the first ones."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return {**asdict(self), "complete_to": format_time(self.complete_to) if self.complete_to else None}

    def lines(self) -> Iterator[str]:
        """Yield the result as text."""
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
    paths: frozenset[str]
    """Paths of the objects that the table has: nobody may remove them."""
    waiting: Mapping[str, str]
    """Paths of objects of complete buckets that are not in it, and why."""
    directory: str
    """The directory of the objects, relative to the archive's root."""
    dropped: Mapping[str, float]
    """Paths of objects that snapshots of the last time removed, and when, in seconds since the epoch: queries may still
    read them."""


def commit(
    config: Config,
    archive: ArchiveFiles,
    *,
    after: float,
    quarantine: bool = False,
    outcomes: Iterable[Outcome] = (),
    expired: Collection[str] = (),
    dry_run: bool = False,
    recent: float = 0.0,
) -> Committed:
    """Make the table as the archive is, without what has expired and without the paths `expired`, in one snapshot.

    Buckets must have ended `after` seconds ago. `outcomes` are what a compaction of these objects has verified.
    `recent` is for how many seconds to tell what was dropped. Raises JetcaptureError, ConfigError without the extra
    `table`.
    """
    known = list(outcomes)
    for attempt in range(_ATTEMPTS):
        try:
            with open_table(config, archive, quarantine=quarantine, read_only=dry_run) as table:
                done = _Commit(config, archive, table, after, quarantine, known, expired, recent).run(dry_run=dry_run)
                if done.result.added and not dry_run:
                    _refuse_gone(archive, done)
                return replace(done, dropped=_relative(archive, table.dropped(time.time() - recent)) if recent else {})
        except (ConflictError, VanishedError):
            if attempt + 1 == _ATTEMPTS:
                raise
            time.sleep(random.uniform(0, _WAIT * 2**attempt))  # noqa: S311  # only so that two do not meet again
    raise AssertionError  # the last attempt returns or raises


def _refuse_gone(archive: ArchiveFiles, done: Committed) -> None:
    """Raise ConflictError if an object of the table was removed while it was committed."""
    if gone := done.paths - {file.path for file in archive.below(done.directory)}:
        raise ConflictError(f"{archive.shown}/{min(gone)} was removed while table {done.result.name} was committed")


def drop_quarantined(config: Config, paths: Collection[str]) -> None:
    """Take objects that are about to be removed out of the quarantine's table, if there is one. Raises as `commit`."""
    if config.maintain is None or config.maintain.table is None or config.maintain.table.quarantine is None:
        return
    archive = open_archive(config.store.url, config.store.options)
    commit(config, archive, after=(config.maintain.compact or CompactConfig()).after, quarantine=True, expired=paths)


def named_paths(config: Config, archive: ArchiveFiles, *, quarantine: bool = False) -> frozenset[str]:
    """Return the paths of the objects that the table names now. Raises JetcaptureError, and ConfigError."""
    with open_table(config, archive, quarantine=quarantine) as table:
        return frozenset(_relative(archive, table.files()))


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


def root_url(archive: ArchiveFiles) -> str:
    """Return the URL before the paths of objects, as the table has it."""
    return f"{archive.url.rstrip('/')}/"


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
        with explained(f"cannot keep table {name}"):
            yield table


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
                attempt = _Commit(config, archive, table, after, quarantine)
                findings += _differences(name, archive, table, attempt.run(dry_run=True))
    return findings


def _differences(name: str, archive: ArchiveFiles, table: IcebergTable, planned: Committed) -> Iterator[Finding]:
    """Yield what differs between a table and what it should have."""
    listing = list_objects(archive, planned.directory)
    present = {file.path: file.size for file in listing.files.values()}
    gone, changed, twice, later, waiting = (FileList() for _ in range(5))
    current = _relative(archive, table.files())
    for path, size in sorted(current.items()):
        if path not in present:
            gone.add(path)
        elif present[path] != size:
            changed.add(path, f"{present[path]:,} bytes, {size:,} in the table")
    for cluster in clusters(each for each in listing.objects if each.path in current):
        whole = cluster
        if len(cluster) > 1:
            whole = resolve(cluster, lambda names: read_identities(archive, names, listing)).whole
        for each in cluster if len(whole) < len(cluster) else ():
            twice.add(each.path)
    for path in sorted(planned.paths - current.keys()):
        later.add(path)
    for path, reason in planned.waiting.items():
        waiting.add(path, reason)
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
    ):
        yield from file_findings(Kind.TABLE, severity, files, summary, action)


@dataclass(slots=True)
class _Commit:
    """One attempt to commit, from the table as it was loaded."""

    config: Config
    archive: ArchiveFiles
    table: IcebergTable
    after: float
    quarantine: bool
    outcomes: Sequence[Outcome] = ()
    expired: Collection[str] = ()
    """Paths of objects that are about to be removed, beyond those of which the archive's note says so."""
    recent: float = 0.0
    """For how many seconds the snapshots are needed at least, because they tell what was dropped."""
    _replaced: dict[str, Outcome] = field(init=False)
    """What compaction has verified, by the paths of the objects that it replaces."""
    _known: dict[int, bool] = field(init=False, default_factory=dict)
    """Whether the table can have objects of a schema."""
    _kept: set[str] = field(init=False, default_factory=set)
    """Paths of objects that are in the table and stay there."""
    _stale: set[str] = field(init=False, default_factory=set)
    """Paths of objects that are in the table with another size: they were stored again."""
    _unsettled: dict[str, str] = field(init=False, default_factory=dict)
    """Paths of objects that wait, and why."""
    _earliest: int | None = field(init=False, default=None)
    """The first bucket in which objects wait."""

    def __post_init__(self) -> None:
        self._replaced = {path: outcome for outcome in self.outcomes for path in outcome.removable}

    def run(self, *, dry_run: bool) -> Committed:
        """Make the commit, if it changes anything. Raises ConflictError, VanishedError."""
        from jetcapture_py.maintain.table_columns import TableColumns

        files = self.table.files()
        current = _relative(self.archive, {place: place for place in files})
        stream = self.config.source.stream
        directory = f"{layout.QUARANTINE}/{stream}" if self.quarantine else stream
        listing = list_objects(self.archive, directory)
        if current and not listing.objects and not (self.quarantine and list_objects(self.archive, stream).objects):
            raise JetcaptureError(
                f"{self.archive.shown} has no objects of stream {stream}, but table {self.table.identifier} does: "
                "it is left as it is"
            )
        if current and all(path == place for path, place in current.items()):
            raise JetcaptureError(
                f"table {self.table.identifier} is of another archive than {self.archive.shown}, such as "
                f"{without_credentials(min(current))}: it is left as it is; use another name, or drop it from its "
                "catalog, without purging it, if the archive was moved"
            )
        mark = self.archive.watermark(stream)
        closed = time.time() - self.after
        if mark is not None:
            closed = min(closed, mark.time.timestamp())
        names = [name for name in self._lasting(listing.objects) if name.path not in self.expired]
        sizes = {name.path: file.size for name, file in listing.files.items()}
        self._stale = {path for path, place in current.items() if files[place] != sizes.get(path)}
        touched = self._touched(names, current, closed)
        broken: dict[ObjectName, str] = {}
        untimed: set[ObjectName] = set()
        facts = read_facts(self.archive, touched, listing, broken=broken, untimed=untimed)
        columns = TableColumns(self.table.schema, quarantine=self.quarantine)
        added = self._chosen(touched, listing, facts, broken, columns, current, closed)
        removed = [place for path, place in current.items() if path not in self._kept]
        new = [self._file(name, listing, facts, timed=name not in untimed) for name in added]
        snapshot = self.table.snapshot
        if (new or removed) and not dry_run:
            summary = self._summary(mark)
            keep = datetime.now(UTC) - max(SNAPSHOT_AGE, timedelta(seconds=self.recent))
            content = _content(self.config, quarantine=self.quarantine)
            mapping = columns.name_mapping
            snapshot = self.table.commit(content, columns.schema, mapping, new, removed, summary, keep=keep)
        rows = sum(name.rows for name in names if name.path in self._kept) + sum(file.rows for file in new)
        upto = closed if self._earliest is None else min(closed, self._earliest)
        result = TableResult(
            name=self.table.identifier,
            snapshot=snapshot,
            files=len(self._kept) + len(new),
            rows=rows,
            added=len(new),
            removed=len(removed),
            unsettled=len(self._unsettled),
            complete_to=datetime.fromtimestamp(upto, UTC) if self._kept or new else None,
            renamed=columns.drifted,
            left_out=columns.left_out,
            problems=[f"{path}: {reason}" for path, reason in list(self._unsettled.items())[:_LISTED]],
        )
        paths = frozenset((*self._kept, *(name.path for name in added)))
        return Committed(result=result, paths=paths, waiting=self._unsettled, directory=directory, dropped={})

    def _lasting(self, names: Sequence[ObjectName]) -> Sequence[ObjectName]:
        """Return the objects without those that have expired: any pass with `keep` may be removing them now."""
        keep = self.config.maintain.keep if self.config.maintain else None
        note = None if keep is None else self.archive.expired(self.config.source.stream)
        if keep is None or note is None:
            return names
        limit = min(note.until.timestamp(), time.time() - keep)
        seqs = np.array([(name.first_seq, name.last_seq) for name in names], np.int64).reshape(-1, 2)
        gone = note.contains(seqs[:, 0]) & note.contains(seqs[:, 1])
        return [name for name, each in zip(names, gone, strict=True) if not (each and name.bucket < limit)]

    def _touched(self, names: Sequence[ObjectName], current: Mapping[str, str], closed: float) -> list[ObjectName]:
        """Return the objects of buckets in which table and archive differ, and keep the files of all others."""
        buckets: defaultdict[int, list[ObjectName]] = defaultdict(list)
        for name in names:
            buckets[name.bucket].append(name)
        touched: list[ObjectName] = []
        for bucket in sorted(buckets):
            present = {name.path for name in buckets[bucket]}
            there = present.intersection(current)
            if self._stale.isdisjoint(there) and (len(there) == len(present) or bucket >= closed):
                self._kept |= there
            else:
                touched += sorted(buckets[bucket], key=lambda name: (name.first_seq, name.path))
        return touched

    def _chosen(
        self,
        touched: Sequence[ObjectName],
        listing: Listing,
        facts: ObjectFacts,
        broken: Mapping[ObjectName, str],
        columns: TableColumns,
        current: Collection[str],
        closed: float,
    ) -> list[ObjectName]:
        """Return the objects to add, and decide which files stay."""
        buckets: defaultdict[int, list[ObjectName]] = defaultdict(list)
        for name in touched:
            buckets[name.bucket].append(name)
        fits = partial(self._fits, facts=facts, broken=broken, columns=columns)
        added: list[ObjectName] = []
        for bucket, names in buckets.items():
            if bucket + max(facts.intervals.get(name, _LONGEST) for name in names) > closed:
                added += self._held(names, current, fits, broken)
                continue
            present = {name.path for name in names}
            for cluster in clusters(names, facts.bundles):
                chosen, reason = self._settled(cluster, present, listing, facts, broken)
                if not all(map(fits, chosen)):
                    reason = next((broken[name] for name in chosen if name in broken), _OTHER_TYPES)
                if reason:
                    self._wait(cluster, current, reason)
                    added += self._held(cluster, current, fits, broken)
                    continue
                fresh = [name for name in chosen if name.path in current and name.path not in self._stale]
                self._kept.update(name.path for name in fresh)
                added += [name for name in chosen if name.path not in self._kept]
        return added

    def _held(
        self,
        names: Iterable[ObjectName],
        current: Collection[str],
        fits: Callable[[ObjectName], bool],
        broken: Mapping[ObjectName, str],
    ) -> Iterator[ObjectName]:
        """Keep what the table has of these objects; yield those of them to add, because they were stored again."""
        for name in names:
            if name.path in current and name.path not in self._stale:
                self._kept.add(name.path)
            elif name.path in current and fits(name):
                yield name
            elif name.path in current:  # the table would name bytes that are no longer there
                self._wait([name], (), broken.get(name, _OTHER_TYPES))

    def _fits(
        self, name: ObjectName, facts: ObjectFacts, broken: Mapping[ObjectName, str], columns: TableColumns
    ) -> bool:
        """Whether the table can have an object, by its columns, which it then has."""
        if name in broken:
            return False
        schema = facts.schema_of[name]
        if schema not in self._known:
            self._known[schema] = columns.add(facts.schemas[schema])
        return self._known[schema]

    def _wait(self, cluster: Sequence[ObjectName], current: Collection[str], reason: str) -> None:
        """Count the objects of a cluster that the table lacks."""
        self._unsettled |= {name.path: reason for name in cluster if name.path not in current}
        first = cluster[0].bucket
        self._earliest = first if self._earliest is None else min(self._earliest, first)

    def _settled(
        self,
        cluster: list[ObjectName],
        present: AbstractSet[str],
        listing: Listing,
        facts: ObjectFacts,
        broken: Mapping[ObjectName, str],
    ) -> tuple[list[ObjectName], str]:
        """Return objects of a cluster that have all its messages, each once; or why that is not certain."""
        if len(cluster) == 1:
            return cluster, ""
        left = {name.path: name for name in cluster}
        for path in list(left):
            outcome = self._replaced.get(path)
            if outcome is not None and outcome.holders and present >= set(outcome.holders):  # they have its messages
                del left[path]
        names = list(left.values())
        if all(len(each) == 1 for each in clusters(names, facts.bundles)):
            return names, ""
        if unreadable := next((broken[name] for name in names if name in broken), ""):
            return [], unreadable
        resolved = resolve(names, lambda some: read_identities(self.archive, some, listing), facts.bundles)
        if resolved.parts or resolved.unresolved:
            return [], f"it may share messages with {plural(len(names) - 1, 'other object')}: compaction merges them"
        return resolved.whole, ""

    def _file(self, name: ObjectName, listing: Listing, facts: ObjectFacts, *, timed: bool) -> TableFile:
        from jetcapture_py.maintain.manifests import Partitions, TableFile

        names = facts.schemas[facts.schema_of[name]].names
        interval = facts.intervals.get(name, 0)
        time_ = layout.TIME if name.event_time else layout.TIMESTAMP
        several = name.event_time and layout.ROW in names  # a bucket has the time of the first row of a message
        exact = interval > 0 and time_ in names and not several and timed
        # messages without a key are in bundle 0, but in no bucket of Iceberg's
        number = facts.bundles.get(name, 0) if name.bundle and int(name.bundle) else 0
        return TableFile(
            path=table_path(self.archive, name.path),
            size=listing.files[name].size,
            rows=name.rows,
            partitions=Partitions(
                key=not (name.quarantine or name.bundle),
                bundles=number,
                time=time_ if exact else "",
                day=exact and _HOUR % interval > 0,
            ),
            key=name.bundle or name.key,
            bucket=name.bucket,
            interval=interval,
            first_seq=name.first_seq,
            last_seq=name.last_seq,
        )

    def _summary(self, mark: watermark.Watermark | None) -> dict[str, str]:
        """Return what a snapshot says of the archive."""
        if mark is None:
            return {}
        return {
            "watermark-seq": str(mark.seq),
            "watermark-time": watermark.time_text(mark.time),
            "stream-created": mark.created,
        }
