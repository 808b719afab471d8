"""One pass over one capture's archive: compact it, bring its table up to date, and remove what compaction replaced
and what has expired.

Nothing is coordinated but by the names of objects, so any number of passes may run at once, on any machine, and each
may be killed at any moment. What this module keeps between passes only saves work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from jetcapture_py.archive import layout, stream_config, watermark
from jetcapture_py.archive.removed import expired_path
from jetcapture_py.compaction.summary import Summary, report, total, waiting_line
from jetcapture_py.config.maintain import CompactConfig
from jetcapture_py.config.model import Config
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.maintain.compact import Compaction, CompactionSettings, compact_in_threads
from jetcapture_py.maintain.expire import Expiry, ExpirySummary
from jetcapture_py.maintain.inventory import PathSet
from jetcapture_py.maintain.table import TableResult, commit, named_paths
from jetcapture_py.store.archive import ArchiveFiles, open_archive
from jetcapture_py.verify.proof import own_suffix

Progress = Callable[[str, int, int], object]
"""Gets "messages" or "quarantine", the number of objects that are still to be merged, and their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What a pass did to an archive, or would do."""

    stream: str
    """The stream's name."""
    seconds: float
    """How long the pass took."""
    compacted: Mapping[str, Summary]
    """What compaction did, by what it compacted: "messages" and "quarantine"."""
    waiting: int
    """Replaced objects that a later pass removes."""
    removed: int
    """Objects that compaction replaced and that are removed."""
    tables: Mapping[str, TableResult]
    """What was done to tables, by what they are of: "messages" and "quarantine"."""
    table_errors: Sequence[str] = ()
    """What failed with tables; what they may still name is not removed."""
    expired: ExpirySummary | None = None
    """What has expired; None without the setting `keep`."""

    @property
    def errors(self) -> list[str]:
        """What failed; another pass may succeed."""
        compacted = (error for summary in self.compacted.values() for error in summary.errors)
        stuck = (table.error for table in self.tables.values() if table.error)
        return [*compacted, *self.table_errors, *stuck, *(self.expired.errors if self.expired else ())]

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        tables = {part: table.as_dict() for part, table in self.tables.items()}
        return {**asdict(replace(self, tables={})), "tables": tables}

    @property
    def summary(self) -> str:
        parts = [
            total(summary) if part == "messages" else f"{part}: {total(summary)}"
            for part, summary in self.compacted.items()
            if part == "messages" or summary.objects_before
        ]
        parts += [line for table in self.tables.values() for line in table.lines()]
        if self.expired is not None:
            parts.append(self.expired.line(self.stream).removeprefix(f"{self.stream}: "))
        return "; ".join(parts)

    def lines(self) -> Iterator[str]:
        """Yield the result as text; for a dry run also one line per group of objects."""
        for part, summary in self.compacted.items():
            if part == "messages" or summary.objects_before:
                yield from report(self.stream if part == "messages" else f"{self.stream} ({part})", summary)
        for table in self.tables.values():
            yield from table.lines()
        if self.waiting:
            yield waiting_line(self.waiting)
        if self.expired is not None:
            yield self.expired.line(self.stream)


class Maintenance:
    """The passes over one capture's archive.

    `compact` is in place of the configuration's settings of that name. `tell` gets messages for people.
    """

    def __init__(
        self,
        config: Config,
        *,
        compact: CompactionSettings | None = None,
        dry_run: bool = False,
        tell: Callable[[str], object] = lambda _: None,
        progress: Progress = lambda *_: None,
    ) -> None:
        self.config = config
        self._compact = compact or _compaction_settings(config, dry_run=dry_run)
        self._keep = config.maintain.keep if config.maintain and compact is None else None
        self._expiry: Expiry | None = None
        self._dry_run = dry_run
        self._tables: dict[str, TableResult] = {}
        self._table_errors: list[str] = []
        self._held: set[str] = set()
        self._in_tables: list[Container[str]] = []
        self._tell, self._progress = tell, progress
        self._compactions: Mapping[str, Compaction] = {}

    def run(self, stop: threading.Event | None = None) -> PassResult:
        """Make one pass. A later one removes replaced objects that readers may still need.

        After `stop` is set, no further objects are merged. Raises JetcaptureError if the archive cannot be listed, or
        has nothing of the stream.
        """
        started = time.monotonic()
        _refuse_nothing(open_archive(self.config.store.url, self.config.store.options), self.config.source.stream)
        self._compactions = self._compacted(stop)
        for compaction in self._compactions.values():
            compaction.forget()  # not another listing beside it
        self._expiry = self._expired()
        self._tabulate()
        for part, compaction in self._compactions.items():
            if part not in self._held:
                compaction.remove(named=partial(self._named, part))
        if self._expiry is not None:
            parts = self._tables if self._expiry.due else ()
            self._expiry.remove([*self._in_tables, *(self._named(part) for part in parts)], self._held)
            if self._expiry.removed and not self._dry_run:
                self._expiry.archive.remove_empty(self.config.source.stream)
        compactions = self._compactions
        return PassResult(
            stream=self.config.source.stream,
            seconds=time.monotonic() - started,
            compacted={part: compaction.summary() for part, compaction in compactions.items()},
            waiting=sum(len(each.removable) for compaction in compactions.values() for each in compaction.waiting),
            removed=sum(compaction.removed for compaction in compactions.values()),
            tables=self._tables,
            table_errors=self._table_errors,
            expired=None if self._expiry is None else self._expiry.summary(),
        )

    def _named(self, part: str) -> PathSet:
        """Return the paths in a part's table as it is now: another pass may have changed it."""
        if self._dry_run or part not in self._tables:
            return PathSet()
        archive = open_archive(self.config.store.url, self.config.store.options)
        return named_paths(self.config, archive, quarantine=part == "quarantine")

    def _expired(self) -> Expiry | None:
        """Record what has expired, which may be removed after that."""
        if self._keep is None:
            return None
        config = self.config
        archive = open_archive(config.store.url, config.store.options)
        memory, suffix = config.limits.memory, own_suffix(config)
        expiry = Expiry(archive, config.source.stream, self._keep, suffix, memory=memory, dry_run=self._dry_run)
        expiry.record()
        return expiry

    def _tabulate(self) -> None:
        """Bring the tables up to date, and keep the objects that they name, or queries of them may read."""
        self._tables, self._table_errors, self._held, self._in_tables = {}, [], set(), []
        given = self.config.maintain.table if self.config.maintain else None
        if given is None:
            return
        archive = open_archive(self.config.store.url, self.config.store.options)
        compact = self._compact or CompactConfig()
        expired = self._expiry.paths if self._expiry else frozenset()
        for part in ("messages", "quarantine") if given.quarantine else ("messages",):
            compaction = self._compactions.get(part)
            try:
                table = commit(
                    self.config,
                    archive,
                    after=compact.after,
                    quarantine=part == "quarantine",
                    outcomes=compaction.merged if compaction else (),
                    expired=expired,
                    dry_run=self._dry_run,
                    recent=compact.grace,
                )
            except JetcaptureError as error:
                self._table_errors.append(str(error))
                self._held.add(part)
                continue
            self._tables[part] = table.result
            self._in_tables += [table.paths, table.dropped]
            if compaction is not None:
                compaction.keep(table.paths, table.dropped)

    def _compacted(self, stop: threading.Event | None) -> dict[str, Compaction]:
        """Compact the messages and the quarantine, which have parts of their own in what is returned."""
        if self._compact is None:
            return {}
        config = self.config
        archive = open_archive(config.store.url, config.store.options)
        parts = {"messages": self._compact}
        if self._compact.selection.keys is None:
            parts["quarantine"] = replace(self._compact, quarantine=True)
        waiting = {part: compaction.waiting for part, compaction in self._compactions.items()}
        self._compactions = {}  # not two listings at once
        compactions = {}
        for part, settings in parts.items():
            compactions[part] = Compaction(
                archive, config.source.stream, settings, waiting=waiting.get(part, ()), tell=self._tell
            )
            compact_in_threads(
                archive,
                compactions[part],
                config.limits.memory,
                stop=stop,
                progress=partial(self._progress, part),
            )
        return compactions


def _refuse_nothing(archive: ArchiveFiles, stream: str) -> None:
    """Raise JetcaptureError if no capture of the stream has ever begun here, as with a wrong URL or name."""
    if stream in archive.names() or stream in archive.names(layout.QUARANTINE):
        return
    notes = [*archive.notes(stream_config.directory(stream)), *archive.notes(watermark.directory(stream))]
    if not notes and not archive.read_note(expired_path(stream)):
        raise JetcaptureError(f"no archive of stream {stream} under {archive.shown}{archive.known_streams()}")


def _compaction_settings(config: Config, *, dry_run: bool) -> CompactionSettings | None:
    given = config.maintain.compact if config.maintain else None
    if given is None:
        return None
    return CompactionSettings(target=given.target, after=given.after, grace=given.grace, dry_run=dry_run)
