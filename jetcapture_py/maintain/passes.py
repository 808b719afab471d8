"""One pass over one capture's archive: compact it, update its table, and remove replaced and expired objects.

Passes are coordinated only by the names of objects. So any number of them may run at once, on any machine, and each may
be killed at any moment. State passed to the next one only saves work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from jetcapture_py.archive import layout, stream_config, watermark
from jetcapture_py.archive.removed import expired_path
from jetcapture_py.compaction.inventory import PathSet
from jetcapture_py.compaction.summary import Summary, report, total, waiting_line
from jetcapture_py.compaction.unit import Merged
from jetcapture_py.config.maintain import CompactConfig, MaintainConfig
from jetcapture_py.config.model import Config
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.maintain.compact import Compaction, CompactionSettings, compact_in_threads
from jetcapture_py.maintain.expire import Expiry, ExpirySummary
from jetcapture_py.reading.plan import no_archive
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.table.catalog import table_names
from jetcapture_py.table.commit import Committed, TableResult, commit, named_paths
from jetcapture_py.table.latest import LatestResult, latest_config, update_latest
from jetcapture_py.table.plan import CommitRequest
from jetcapture_py.verify.proof import own_suffix

MESSAGES, QUARANTINE = "messages", "quarantine"
"""The parts of an archive."""
Progress = Callable[[str, int, int], object]
"""Called with a part, the number of objects still to be merged, and their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRequest:
    """The settings of a pass."""

    compact: CompactionSettings | None
    """None for no compaction."""
    keep: float | None = None
    """Seconds that buckets are kept; None for ever."""
    dry_run: bool = False
    stop: threading.Event | None = None
    """Once set, no further objects are merged."""
    tell: Callable[[str], object] = lambda _: None
    """Called with messages for people."""
    progress: Progress = lambda *_: None

    @classmethod
    def of(cls, config: Config) -> PassRequest:
        """Return the request of the section `maintain`."""
        given = config.maintain or MaintainConfig()
        compact = None if given.compact is None else CompactionSettings.of(given.compact)
        return cls(compact=compact, keep=given.keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The effect of a pass or its dry run on an archive."""

    stream: str
    """The stream's name."""
    seconds: float
    """Duration of the pass in seconds."""
    compacted: Mapping[str, Summary]
    """Compaction summaries by part."""
    waiting: int
    """Number of replaced objects left for a later pass."""
    removed: int
    """Number of removed objects that compaction had replaced."""
    tables: Mapping[str, TableResult]
    """Results of tables by part."""
    table_errors: Sequence[str] = ()
    """Errors of tables. Objects that they may still reference are not removed."""
    latest: LatestResult | None = None
    """Result of the table of newest rows; None without one."""
    expired: ExpirySummary | None = None
    """Effect of expiry; None without the setting `keep`."""
    pending: Mapping[str, Sequence[Merged]] = field(default_factory=dict, repr=False)
    """Verified results of compaction that await removal, by part, so that the next pass need not verify them again."""

    @property
    def errors(self) -> list[str]:
        """All errors; another pass may succeed."""
        compacted = (error for summary in self.compacted.values() for error in summary.errors)
        stuck = (table.error for table in self.tables.values() if table.error)
        return [*compacted, *self.table_errors, *stuck, *(self.expired.errors if self.expired else ())]

    def as_dict(self) -> Mapping[str, object]:
        """Return the result as plain values."""
        plain = asdict(replace(self, tables={}, pending={}))
        del plain["pending"]
        return {**plain, "tables": {part: table.as_dict() for part, table in self.tables.items()}}

    @property
    def summary(self) -> str:
        parts = [
            total(summary) if part == MESSAGES else f"{part}: {total(summary)}"
            for part, summary in self.compacted.items()
            if part == MESSAGES or summary.objects_before
        ]
        parts += [line for table in self.tables.values() for line in table.lines()]
        parts += [] if self.latest is None else [self.latest.line()]
        if self.expired is not None:
            parts.append(self.expired.line())
        return "; ".join(parts)

    def lines(self) -> Iterator[str]:
        """Yield the result as text; for a dry run also one line per group of objects."""
        for part, summary in self.compacted.items():
            if part == MESSAGES or summary.objects_before:
                yield from report(self.stream if part == MESSAGES else f"{self.stream} ({part})", summary)
        for table in self.tables.values():
            yield from table.lines()
        if self.latest is not None:
            yield self.latest.line()
        if self.waiting:
            yield waiting_line(self.waiting)
        if self.expired is not None:
            yield f"{self.stream}: {self.expired.line()}"


def run_pass(config: Config, archive: ArchiveFiles, request: PassRequest, previous: Pass | None = None) -> Pass:
    """Make one pass. A later one removes replaced objects that readers may still need.

    Raises JetcaptureError if the archive cannot be listed, or has nothing of the stream.
    """
    started, stream = time.monotonic(), config.source.stream
    _refuse_nothing(archive, stream)
    compactions = _compact(config, archive, request, previous)
    expiry = _record_expired(config, archive, request)
    tables, errors = _commit_tables(config, archive, request, compactions, expiry)

    latest, latest_errors = None, list[str]()
    if (given := latest_config(config)) is not None:
        try:
            latest = update_latest(config, archive, given, dry_run=request.dry_run)
        except JetcaptureError as error:
            latest_errors.append(str(error))

    def named(part: str) -> PathSet:
        """Return the paths in a part's current table, which another pass may have changed."""
        absent = request.dry_run or part not in tables
        return PathSet() if absent else named_paths(config, archive, quarantine=part == QUARANTINE)

    for part, compaction in compactions.items():
        if part not in errors:
            compaction.remove(tables.get(part), partial(named, part))
    expired = None
    if expiry is not None:
        in_tables = [paths for table in tables.values() for paths in (table.paths, table.dropped)]
        expired = expiry.remove([*in_tables, *(named(part) for part in (tables if expiry.due else ()))], errors)
        if expired.objects and not request.dry_run:
            archive.remove_empty(stream)
    return Pass(
        stream=stream,
        seconds=time.monotonic() - started,
        compacted={part: compaction.summary() for part, compaction in compactions.items()},
        waiting=sum(len(outcome.removable) for compaction in compactions.values() for outcome in compaction.waiting),
        removed=sum(compaction.removed for compaction in compactions.values()),
        tables={part: table.result for part, table in tables.items()},
        table_errors=[*errors.values(), *latest_errors],
        latest=latest,
        expired=expired,
        pending={part: compaction.waiting for part, compaction in compactions.items()},
    )


def _refuse_nothing(archive: ArchiveFiles, stream: str) -> None:
    """Raise JetcaptureError if no capture of the stream has ever begun here, for example with a wrong URL."""
    if stream in archive.names() or stream in archive.names(layout.QUARANTINE):
        return
    notes = [*archive.notes(stream_config.directory(stream)), *archive.notes(watermark.directory(stream))]
    if not notes and not archive.read_note(expired_path(stream)):
        raise no_archive(archive, stream)


def _compact(
    config: Config, archive: ArchiveFiles, request: PassRequest, previous: Pass | None
) -> dict[str, Compaction]:
    """Compact the parts of the archive one after the other, so that only one listing is in memory."""
    if request.compact is None:
        return {}
    parts = {MESSAGES: replace(request.compact, dry_run=request.dry_run)}
    if request.compact.selection.keys is None:
        parts[QUARANTINE] = replace(parts[MESSAGES], quarantine=True)
    compactions: dict[str, Compaction] = {}
    for part, settings in parts.items():
        waiting = previous.pending.get(part, ()) if previous else ()
        compaction = Compaction(archive, config.source.stream, settings, waiting=waiting, tell=request.tell)
        progress = partial(request.progress, part)
        compact_in_threads(archive, compaction, config.limits.memory, stop=request.stop, progress=progress)
        compactions[part] = compaction
    return compactions


def _record_expired(config: Config, archive: ArchiveFiles, request: PassRequest) -> Expiry | None:
    """Record the expired objects, so that they may be removed."""
    if request.keep is None:
        return None
    expiry = Expiry(
        archive,
        config.source.stream,
        request.keep,
        own_suffix(config),
        memory=config.limits.memory,
        dry_run=request.dry_run,
    )
    expiry.record()
    return expiry


def _commit_tables(
    config: Config,
    archive: ArchiveFiles,
    request: PassRequest,
    compactions: Mapping[str, Compaction],
    expiry: Expiry | None,
) -> tuple[dict[str, Committed], dict[str, str]]:
    """Update the tables; return them and the errors by part."""
    tables: dict[str, Committed] = {}
    errors: dict[str, str] = {}
    compact = request.compact or CompactConfig()
    for quarantine in table_names(config):
        part = QUARANTINE if quarantine else MESSAGES
        commit_request = CommitRequest(
            quarantine=quarantine,
            after=compact.after,
            outcomes=compactions[part].merged if part in compactions else (),
            expired=frozenset(expiry.paths if expiry else ()),
            recent=compact.grace,
            dry_run=request.dry_run,
        )
        try:
            tables[part] = commit(config, archive, commit_request)
        except JetcaptureError as error:
            errors[part] = str(error)
    return tables, errors
