"""One compaction of a stream or its quarantine: plan, merge in threads, and remove replaced objects.

At all times, even if it is killed, every message is in the archive, and a reader that follows the deduplication rule
of `layout` counts it once:

- New objects appear atomically, next to their sources. While both exist, their sequence ranges overlap, so readers
  compare their messages. The objects written for one unit are disjoint, so later they are read without comparing.
- Sources are removed last: after all new objects have been written, read back and compared with the sources, and after
  a grace period for readers that listed objects earlier, which begins when the younger of both was stored. Only objects
  that were listed and read are removed (see `store.removal`), not those that the capture stores meanwhile; if these
  overlap the new objects, readers compare them.
- If killed while writing, it leaves more copies than before. The next run keeps new objects that are complete in their
  range and continues with the rest. The next run also removes sources whose grace period has passed since.
- Two compactions at once, even with different targets, may each consider the other's objects redundant. They cannot
  both remove them, because an object is only replaced by objects with more rows (see `compaction.plan`).

Large objects without overlap are left unchanged, so a second run does nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.inventory import Inventory, PathSet
from jetcapture_py.compaction.memory import MemoryBudget, merging
from jetcapture_py.compaction.plan import TARGET_SIZE, Source, units
from jetcapture_py.compaction.summary import Summary, summarize
from jetcapture_py.compaction.unit import CHANGED, CompactionSpec, Merged, Outcome, Skipped, compact_unit
from jetcapture_py.config.maintain import CompactConfig
from jetcapture_py.config.units import format_time
from jetcapture_py.errors import JetcaptureError, StoreError, VanishedError
from jetcapture_py.reading.selection import Selection
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.store.removal import remove
from jetcapture_py.table.commit import Committed
from jetcapture_py.text import plural

_NICE = 10
"""Nice value of the merging threads: on a shared core, they get about a tenth of the time."""
_AHEAD = 8
"""Maximum units per core that wait to be compacted."""
_MIN_ROWS = 1 << 18
"""An object may always have this many rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionSettings:
    """The buckets to compact, and the size of the results."""

    target: int = TARGET_SIZE
    """Bytes of an object."""
    after: float = 3600.0
    """Seconds since a bucket's end."""
    grace: float = 3600.0
    """Seconds that a replaced object stays after both it and its replacement were written."""
    quarantine: bool = False
    """The stream's quarantine in place of its messages."""
    selection: Selection = field(default_factory=Selection)
    """Buckets that start in this range; keys exclude objects in bundles."""
    incomplete: bool = False
    """Also compact buckets that the watermark has not passed."""
    dry_run: bool = False
    """Change nothing."""

    @classmethod
    def of(cls, config: CompactConfig) -> CompactionSettings:
        """Return the settings of the section `maintain.compact`."""
        return cls(target=config.target, after=config.after, grace=config.grace)

    def __post_init__(self) -> None:
        """Raise JetcaptureError for settings that exclude one another."""
        if self.target <= 0:
            raise JetcaptureError("the target size must be above 0")
        if self.quarantine and self.selection.keys is not None:
            raise JetcaptureError("the quarantine is not divided by key")


class Compaction:
    """One compaction. The caller does the `work` and passes its outcomes to `add`; `remove` comes last.

    `waiting` are outcomes of an earlier compaction whose replaced objects still exist; they need no work. `tell` gets
    messages for people. Raises JetcaptureError, also later, if the archive cannot be listed.
    """

    def __init__(
        self,
        archive: ArchiveFiles,
        stream: str,
        settings: CompactionSettings,
        *,
        waiting: Iterable[Merged] = (),
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._archive = archive
        self._settings = settings
        keys = settings.selection.keys
        directories = [f"{layout.QUARANTINE}/{stream}" if settings.quarantine else stream]
        if keys is not None:
            directories = [f"{stream}/key={layout.escape_key(key)}" for key in keys]
        self._listed = Inventory()
        self.others = 0
        """Objects in other formats, which are skipped."""
        self._objects, self._size = 0, 0
        for file in archive.below(*directories):
            name = file.name
            if name is None:
                continue
            if not name.parquet:
                self.others += 1
                continue
            self._listed.add(name.bucket, file.path, file.size)
            if _begins_within(name.bucket, settings.selection):
                self._objects, self._size = self._objects + 1, self._size + file.size
        if self.others:
            tell(f"left alone, because only Parquet is compacted: {plural(self.others, 'other object')}")
        closed = time.time() - settings.after
        mark = None if settings.incomplete else archive.watermark(stream)
        if mark is not None and mark.time.timestamp() < closed:
            closed = mark.time.timestamp()
            tell(f"skipping time slices that end after the watermark, {format_time(mark.time)}: they are incomplete")
        self.spec = CompactionSpec(target=settings.target, closed=closed, dry_run=settings.dry_run)
        earlier = list(waiting)
        present = PathSet((path for path, _ in self._listed) if earlier else ())
        self.waiting = [
            replace(merged, objects=merged.objects + len(merged.written), written=())
            for merged in earlier
            if not present.isdisjoint(merged.removable)
        ]
        """Merged objects whose replaced ones still exist."""
        self.outcomes: list[Outcome] = [*self.waiting]
        """Results per unit, or per set of a unit's objects with compatible schemas."""
        self._done = PathSet(path for merged in self.waiting for path in (*merged.removable, *merged.holders))
        self._removed: set[str] = set()
        self._errors: list[str] = []

    @property
    def merged(self) -> list[Merged]:
        """The merged objects."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, Merged)]

    @property
    def listed(self) -> int:
        """Number of Parquet objects, including those in unselected or incomplete buckets."""
        return self._listed.files

    def work(self) -> Iterator[Sequence[Source]]:
        """Yield the objects to compact, by unit. Buckets without any are forgotten, so that asking again is cheap."""
        for bucket in sorted(self._listed.buckets):
            chosen = bucket < self.spec.closed and _begins_within(bucket, self._settings.selection)
            work = self._work_in(bucket) if chosen else []
            if not work:
                self._listed.take(bucket)
            yield from work

    def _work_in(self, bucket: int) -> list[Sequence[Source]]:
        named = ((layout.parse_path(path), size) for path, (size,) in self._listed.of(bucket))
        sources = [Source(name, size) for name, size in named if name is not None]
        work = (unit.sources for unit in units(sources, self.spec.target, self.spec.row_bytes))
        return [unit for unit in work if self._done.isdisjoint(source.name.path for source in unit)]

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Add the outcomes of the work."""
        new = list(outcomes)
        self.outcomes += new
        self.waiting += [outcome for outcome in new if isinstance(outcome, Merged) and outcome.removals]

    def remove(self, table: Committed | None = None, named: Callable[[], PathSet] = PathSet) -> None:
        """Remove replaced objects whose grace period has passed, if they and their replacements have not changed.

        Objects in a table stay. Objects that a table has dropped stay for the grace period, because its readers may
        need them. Objects that a table has again when `named` is called are left `waiting` for a later compaction.
        """
        grace, now = self._settings.grace, time.time()
        if table is not None:
            self.waiting = [outcome for outcome in self.waiting if table.paths.isdisjoint(outcome.removable)]
            for outcome in self.waiting:
                dropped = [table.dropped[path] for path in outcome.removable if path in table.dropped]
                outcome.since = max([outcome.since, *dropped])
        due = [outcome for outcome in self.waiting if not grace or outcome.since + grace <= now]
        in_table = named() if due else PathSet()
        ready = [outcome for outcome in due if in_table.isdisjoint(outcome.removable)]
        gone = set(map(id, ready))
        self.waiting = [outcome for outcome in self.waiting if id(outcome) not in gone]
        removals = [(outcome, removal) for outcome in ready for removal in outcome.removals]
        results = remove(self._archive, [removal for _, removal in removals])
        changed: set[int] = set()
        for (outcome, removal), result in zip(removals, results, strict=True):
            if isinstance(result, VanishedError):
                changed.add(id(outcome))
            elif isinstance(result, StoreError):
                self._errors.append(str(result))
            elif result:
                self._removed.add(removal.target.path)
        self.outcomes += [Skipped(CHANGED)] * len(changed)

    @property
    def removed(self) -> int:
        """Number of objects removed by `remove`."""
        return len(self._removed)

    def forget(self) -> None:
        """Free the memory of the listing once all work is done."""
        self._listed = Inventory()

    def summary(self) -> Summary:
        """Summarize the compaction or its dry run."""
        return summarize(self._objects, self._size, self.outcomes, self._removed, self._errors, self.spec.dry_run)


def _begins_within(bucket: int, selection: Selection) -> bool:
    start, end = selection.start, selection.end
    return (start is None or bucket >= start.timestamp()) and (end is None or bucket < end.timestamp())


def compact_in_threads(
    archive: ArchiveFiles,
    compaction: Compaction,
    memory: int,
    *,
    stop: threading.Event | None = None,
    progress: Callable[[int, int], object] = lambda *_: None,
) -> None:
    """Do the work of a compaction with one thread per core and about half of `memory` bytes, and forget its listing.

    After `stop` is set, no further unit is begun. `progress` gets the number of remaining objects and their bytes.
    """
    budget = MemoryBudget(memory)
    row_bytes = compaction.spec.target / max(_MIN_ROWS, budget.rows)
    compaction.spec = replace(compaction.spec, row_bytes=row_bytes)
    left, left_bytes = 0, 0
    for unit in compaction.work():
        left, left_bytes = left + len(unit), left_bytes + _size_of(unit)

    def compact(sources: Sequence[Source]) -> list[Outcome]:
        with budget.taken(merging(sources, _size_of(sources), compaction.spec, local=archive.local)):
            if stop is not None and stop.is_set():
                return []
            return compact_unit(Files(archive), compaction.spec, sources)

    running: dict[Future[list[Outcome]], Sequence[Source]] = {}

    def collect(max_running: int) -> None:
        """Add the outcomes of finished units, until at most this many are left."""
        nonlocal left, left_bytes
        while len(running) > max_running:
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                compaction.add(done.result())
                sources = running.pop(done)
                left, left_bytes = left - len(sources), left_bytes - _size_of(sources)
                progress(left, left_bytes)

    progress(left, left_bytes)
    with ThreadPoolExecutor(_cores(), "compact", initializer=_lower_priority) as threads:
        for unit in compaction.work():
            running[threads.submit(compact, unit)] = unit
            collect(_AHEAD * _cores())
        collect(0)
    compaction.forget()
    pa.default_memory_pool().release_unused()


def _lower_priority() -> None:
    """Lower this thread's priority below others such as a capture. Only Linux has priorities of threads."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), _NICE))


def _size_of(sources: Sequence[Source]) -> int:
    return sum(source.size for source in sources)


def _cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
