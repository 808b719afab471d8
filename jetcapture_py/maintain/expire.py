"""Expiry: remove the buckets of an archive that are older than `maintain.keep`, and record their messages.

Messages are recorded in `_expired/{stream}.json` before they are removed, so that they are never reported as missing.
If a pass is killed, the next one records and removes the rest; several may run at once. Only whole objects are removed,
oldest bucket first, and only of buckets that the watermark has passed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain

import numpy as np

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Micros, Seqs
from jetcapture_py.archive.incarnations import by_incarnation, in_order
from jetcapture_py.archive.layout import MAX_INTERVAL, ObjectName
from jetcapture_py.archive.removed import Expired, expired_path
from jetcapture_py.archive.watermark import Watermark
from jetcapture_py.compaction.memory import MemoryBudget, searching
from jetcapture_py.compaction.plan import Source, batches
from jetcapture_py.config.units import format_time, moment_of
from jetcapture_py.errors import ConflictError, StoreError, VanishedError
from jetcapture_py.retry import retried_on_conflict
from jetcapture_py.store import change_note
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.store.removal import Removal, remove
from jetcapture_py.text import plural, size
from jetcapture_py.verify.examine import DamagedError, ObjectExaminer

_ROWS = 4_000_000
"""Maximum rows recorded at once."""
_MAX_DENIED = 32
"""Number of objects refused by the store after which the pass ends."""
_STAYS = "it stays, because what it holds cannot be recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpirySummary:
    """The effect of an expiry or its dry run."""

    dry_run: bool
    buckets: int
    """Buckets with removed objects."""
    objects: int
    """Removed objects."""
    rows: int
    """Their rows."""
    bytes: int
    """Their size."""
    until: str | None
    """The latest end of those buckets, RFC 3339; None without any."""
    waiting: int
    """Expired objects that stay for queries of the table until a later pass."""
    errors: tuple[str, ...]
    """Why other objects were not removed; another pass may succeed."""

    def line(self) -> str:
        left = plural(self.waiting, "expired object") + " left for queries of the table until a later pass"
        if not self.objects:
            return left if self.waiting else "nothing has expired"
        verb = "would expire" if self.dry_run else "expired"
        return (
            f"{verb}: {plural(self.objects, 'object')} in "
            f"{plural(self.buckets, 'time slice')} up to {self.until}, "
            f"{plural(self.rows, 'row')}, {size(self.bytes)}{f'; {left}' if self.waiting else ''}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Due:
    """An object whose bucket has expired."""

    file: File
    end: float
    """The bucket's end in seconds since the epoch."""
    created: tuple[str, ...]
    """The stream's creation times in the footer: several after compaction, none if unknown."""
    seqs: Seqs
    times: Micros


@dataclass(slots=True)
class Expiry:
    """One expiry of a stream and its quarantine; `keep` is in seconds.

    First `record` the expired objects. Then it is safe to remove them from tables; `remove` comes last.
    """

    archive: ArchiveFiles
    stream: str
    keep: float
    own_suffix: str = ""
    """Suffix of objects in a user's format."""
    memory: int = 1 << 30
    """`limits.memory`, in bytes."""
    dry_run: bool = False
    due: list[File] = field(default_factory=list)
    """The recorded objects to remove, oldest bucket first."""
    _denied: int = 0
    _ends: dict[str, float] = field(default_factory=dict)
    _errors: list[str] = field(default_factory=list)
    _budget: MemoryBudget = field(init=False)

    def __post_init__(self) -> None:
        self._budget = MemoryBudget(self.memory)

    def record(self) -> None:
        """Find expired objects and record them, unless this is a dry run.

        Raises JetcaptureError, also if the store refuses to read many objects.
        """
        mark = self.archive.watermark(self.stream)
        closed = time.time() - self.keep
        closed = closed if mark is None else min(closed, mark.time.timestamp())
        files = chain.from_iterable(map(self.archive.below, (self.stream, f"{layout.QUARANTINE}/{self.stream}")))
        named = ((file, file.name) for file in files if file.name is not None)
        older = [(file, name) for file, name in named if name.bucket < closed]
        if count := sum(name.suffix == self.own_suffix for _, name in older):
            several = f"{plural(count, 'expired object')} in a format of your own"
            self._errors.append(f"{self.stream}: {several} left, not searched: remove them yourself")
        older = [(file, name) for file, name in older if name.parquet or name.text]
        older.sort(key=lambda pair: (pair[1].bucket, pair[0].path))
        creations = _creations(self.archive, self.stream, mark) if older and not self.dry_run else ()
        for batch in batches(older, lambda pair: pair[1].rows, _ROWS):
            objects = [due for due in self.archive.map(self._examined, batch) if due is not None and due.end <= closed]
            if objects and not self.dry_run:
                self._write(objects, creations)
            self.due += [due.file for due in objects]
            self._ends |= {due.file.path: due.end for due in objects}

    @property
    def paths(self) -> frozenset[str]:
        """Paths of the recorded objects."""
        return frozenset(file.path for file in self.due)

    def remove(self, in_tables: Sequence[Container[str]] = (), held: Collection[str] = ()) -> ExpirySummary:
        """Remove the recorded objects, oldest bucket first; return the effect.

        Paths in any of `in_tables`, which queries of a table may read, stay for a later pass. So do all "messages" or
        the "quarantine" if they are `held`.
        """

        def in_table(file: File) -> bool:
            return any(file.path in paths for paths in in_tables)

        due = [file for file in self.due if not in_table(file) and _part(file) not in held]
        waiting, errors, removed = len(self.due) - len(due), [*self._errors], due
        if not self.dry_run:
            results = remove(self.archive, [Removal(target=file) for file in due])
            errors += [str(result) for result in results if isinstance(result, StoreError)]
            removed = [file for file, result in zip(due, results, strict=True) if not isinstance(result, StoreError)]
        names = [file.name for file in removed if file.name is not None]
        end = max((self._ends[file.path] for file in removed), default=None)
        return ExpirySummary(
            dry_run=self.dry_run,
            buckets=len({name.bucket for name in names}),
            objects=len(names),
            rows=sum(name.rows for name in names),
            bytes=sum(file.size for file in removed),
            until=None if end is None else format_time(datetime.fromtimestamp(end, UTC)),
            waiting=waiting,
            errors=tuple(errors),
        )

    def _examined(self, pair: tuple[File, ObjectName]) -> _Due | None:
        """Read an object's messages; None if it is gone or unreadable, which counts as an error."""
        file, name = pair
        try:
            # of Parquet, only two columns are read
            size = 0 if name.parquet else searching(Source(name, file.size), local=self.archive.local)
            with self._budget.taken(size):
                info, seqs, times = ObjectExaminer(self.archive, None).identities(file, name)
        except VanishedError:
            return None
        except StoreError as error:
            self._denied += 1
            if self._denied > _MAX_DENIED:  # the store is unavailable
                raise
            self._errors.append(f"{error}; {_STAYS}")
            return None
        except DamagedError as error:
            advice = "repair it with jetcapture verify --repair, or remove it by hand"
            self._errors.append(f"{self.archive.shown}/{file.path}: {error}; {_STAYS}: {advice}")
            return None
        end = name.bucket + MAX_INTERVAL if info is None else info.end  # other formats do not record it
        created = () if info is None else info.details.created
        return _Due(file=file, end=end, created=created, seqs=seqs, times=times)

    def _write(self, objects: Sequence[_Due], creations: Iterable[str]) -> None:
        """Add the objects' messages to the record, and check that it has them. Raises JetcaptureError."""
        messages = _by_incarnation(objects, creations)
        until = datetime.fromtimestamp(max(due.end for due in objects), UTC)
        path = expired_path(self.stream)
        nothing = Expired(stream=self.stream, until=datetime.fromtimestamp(0, UTC))

        def change(data: bytes | None) -> bytes | None:
            before = after = nothing if data is None else Expired.decode(data, self.stream, path)
            for created, (seqs, oldest) in messages.items():
                after = after.with_messages(created, seqs, oldest, until)
            return None if before == after else after.encode()

        def written() -> None:
            change_note(self.archive.store, path, change)
            if change(self.archive.read_note(path)) is not None:  # stores without conditional writes may lose it
                raise ConflictError(f"{path} was overwritten each time; nothing was removed")

        retried_on_conflict(written)


def _part(file: File) -> str:
    """Return the part of the archive that a file belongs to."""
    return "quarantine" if file.name is not None and file.name.quarantine else "messages"


def _creations(archive: ArchiveFiles, stream: str, mark: Watermark | None) -> Iterable[str]:
    """Return the creation times of the stream's incarnations in the archive's metadata files."""
    files = mark.files if mark is not None else ()
    return [*(config.created for config in archive.stream_configs(stream)), *(file.created for file in files)]


def _by_incarnation(objects: Sequence[_Due], creations: Iterable[str]) -> Mapping[str, tuple[Seqs, datetime]]:
    """Return sequences and the oldest message's timestamp by the incarnation's creation time.

    Objects without a footer do not record their incarnations; "" has messages older than every known one.
    """
    known = ["", *in_order([*creations, *(created for due in objects for created in due.created)])]
    parts: dict[str, list[tuple[Seqs, Micros]]] = {}
    for due in objects:
        for created, mask in by_incarnation(in_order(due.created) or known, due.times):
            parts.setdefault(created, []).append((due.seqs[mask], due.times[mask]))
    return {
        created: (
            np.unique(np.concatenate([seqs for seqs, _ in several])),
            moment_of(min(int(times.min()) for _, times in several)),
        )
        for created, several in parts.items()
    }
