"""Collect the facts of a report from the objects' footers and verify's scan of the sequences.

The archive is examined by the code of `jetcapture verify`, without reading the stream. A recreated stream starts again
at sequence 1, so each incarnation has its own scan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from heapq import nlargest
from sys import intern

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Micros, Seqs
from jetcapture_py.archive.incarnations import Incarnation, in_order, moment
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.removed import Erased
from jetcapture_py.archive.watermark import Watermark
from jetcapture_py.errors import JetcaptureError, StoreError, VanishedError
from jetcapture_py.reading.arrow import read_planned
from jetcapture_py.reading.plan import ReadRequest, no_archive
from jetcapture_py.reading.reasons import COLUMNS, ReasonCounter, ReasonSummary
from jetcapture_py.reading.selection import Selection, no_watermark
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.verify.examine import ObjectContents, ObjectExaminer
from jetcapture_py.verify.findings import Finding, Kind, Progress, ignore
from jetcapture_py.verify.ranges import Sequences
from jetcapture_py.verify.scan import ArchiveScan, examine_all, examined
from jetcapture_py.verify.scope import Removed

MAX_HOLES = 25
MAX_INCARNATIONS = 6

_ALWAYS = (1 << 63) - 1
_UNKNOWN_INTERVAL = 3600
"""Length of a bucket in seconds if no footer has it: directories are hourly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The part of the archive to describe. Coverage is that of the whole stream."""

    selection: Selection = field(default_factory=Selection)
    """Buckets that overlap `start` to `end`; keys do not apply to the quarantine."""
    complete: bool = False
    """Exclude buckets that may still grow: those that end after the watermark's time, and those of event time."""

    def has(self, stored: StoredObject, mark: Watermark | None) -> bool:
        """Whether an object is in it."""
        if self.complete and (stored.name.event_time or mark is None or stored.end > mark.time.timestamp()):
            return False
        chosen = self.selection
        keys = None if stored.name.quarantine else chosen.keys
        buckets = Selection(event_start=chosen.start, event_end=chosen.end, keys=keys)
        return buckets.may_hold_name(stored.name, stored.interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """An object, by its name, listing and footer; text formats have no footer."""

    name: ObjectName
    size: int
    """Bytes."""
    modified: float | None
    """Seconds since the epoch; None if the store does not tell."""
    messages: int
    created: tuple[str, ...] = ()
    """Creation times of its messages' incarnations; none if unknown."""
    interval: int = _UNKNOWN_INTERVAL
    """Length of its bucket in seconds."""
    sealed_by: str = ""
    """Why its block was sealed."""
    oldest: int | None = None
    """Earliest `_nats_timestamp` in microseconds."""
    newest: int | None = None
    """Latest `_nats_timestamp` in microseconds."""
    deliveries: int = 1
    """Maximum deliveries of a message."""

    @classmethod
    def of(cls, file: File, contents: ObjectContents) -> StoredObject:
        """Describe an examined object."""
        details = contents.details
        oldest, newest = (details and details.times) or (None, None)
        return cls(
            name=contents.name,
            size=file.size,
            modified=file.modified,
            messages=contents.messages + contents.older,
            created=tuple(map(intern, details.created)) if details else (),
            interval=contents.interval or _UNKNOWN_INTERVAL,
            sealed_by=details.sealed_by if details else "",
            oldest=oldest,
            newest=newest,
            deliveries=(details and details.delivered) or 1,
        )

    @property
    def end(self) -> int:
        """The end of its bucket, in seconds since the epoch."""
        return self.name.bucket + self.interval

    @property
    def early(self) -> float:
        """Seconds by which its first message was before the bucket's start; 0 or less: not early."""
        return 0 if self.oldest is None else self.name.bucket - self.oldest / 1e6

    @property
    def late(self) -> float:
        """Seconds by which its last message was after the bucket's end; negative: not late."""
        return -1 if self.newest is None else self.newest / 1e6 - self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """Sequences in neither the archive nor the quarantine."""

    first: int
    last: int
    """Inclusive."""
    after: int | None
    """Time of the nearest message before it by the footers, in microseconds; None if unknown."""
    before: int | None
    """Time of the nearest message after it by the footers, in microseconds; None if unknown."""
    open: bool
    """Whether it is beyond the watermark, where messages may still arrive."""

    @property
    def missing(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The stored sequences of one incarnation of the stream."""

    created: str
    """Creation time as sent by the server; "" if unknown."""
    first: int
    """First stored sequence."""
    last: int
    """Last stored sequence."""
    oldest: int | None
    """Time of the oldest message in microseconds; None if unknown."""
    newest: int | None
    """Time of the newest message in microseconds; None if unknown."""
    settled: int | None
    """Sequence up to which nothing more will be stored; None if unknown."""
    present: int
    """Stored sequences."""
    removed: int
    """Sequences that are not stored because they have expired or were erased."""
    accounted: Sequences
    """Present and removed sequences."""
    holes: int
    """All holes."""
    open_holes: int
    """Holes beyond `settled`."""
    open_missing: int
    """Sequences in holes beyond `settled`."""
    largest: Sequence[Hole]
    """The largest holes, by sequence."""
    forked: int
    """Sequences with several messages: the server lost the earlier ones."""

    @property
    def missing(self) -> int:
        """Number of missing sequences."""
        return self.last - self.first + 1 - self.present - self.removed


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts about one archive."""

    stream: str
    url: str
    """The archive's URL without credentials."""
    generated: datetime
    """Time of the examination, in UTC."""
    scope: Scope
    objects: Sequence[StoredObject]
    """The objects of decoded messages in `scope`."""
    quarantine: Sequence[StoredObject]
    """The objects of the quarantine in `scope`."""
    copies: Mapping[ObjectName, int]
    """Number of an object's messages that others also have; for the quarantine, including archive objects."""
    mark: Watermark | None
    """The stream's watermark; None without one."""
    incarnations: Sequence[Coverage]
    """Coverage of the whole stream, newest incarnation first."""
    older_incarnations: int
    """Number of older incarnations, which were not examined."""
    reasons: Sequence[ReasonSummary]
    """The reasons of the quarantine, the most frequent first."""
    read_twice: Sequence[Finding] = ()
    """Copies under different keys or buckets, which readers return separately."""
    unread: int = 0
    """Number of damaged or unreadable objects; their messages count as not stored."""
    expired: int = 0
    """Number of expired messages."""
    expired_until: datetime | None = None
    """The latest end of an expired bucket, UTC."""
    erased: int = 0
    """Number of erased messages."""

    def messages(self, objects: Iterable[StoredObject]) -> int:
        """Return the number of distinct messages in these objects."""
        return sum(stored.messages - self.copies.get(stored.name, 0) for stored in objects)


def collect(
    archive: ArchiveFiles,
    stream: str,
    scope: Scope,
    *,
    own_suffix: str = "",
    progress: Progress = ignore,
) -> Facts:
    """Examine the archive. Raises JetcaptureError without an archive, VanishedError if objects vanish meanwhile.

    `own_suffix` is the suffix of a user's format.
    """
    mark = archive.watermark(stream)  # read before the listing, which then has all objects that the watermark covers
    if scope.complete and mark is None:
        raise no_watermark(archive, stream)
    erased = archive.erased(stream)
    created = "" if mark is None else mark.created
    guess = Incarnation(created=created, since=0, mirror=False) if created else None
    whole, objects, copies = ArchiveScan(), list[StoredObject](), Counter[ObjectName]()
    reader = ObjectExaminer(archive, guess, erased)
    for file, contents in examine_all(reader, stream, whole.unusable, own_suffix=own_suffix, progress=progress):
        objects.append(StoredObject.of(file, contents))
        if guess is not None:
            whole.add(file, contents, 0)
    if not objects:
        raise no_archive(archive, stream)
    if scope.selection.keys is not None and any(stored.name.bundle for stored in objects):
        raise JetcaptureError(
            f"{archive.shown} has bundles, whose objects hold many keys: a report cannot select keys; omit --key"
        )
    lives = _lives(objects)
    if guess is not None and [life.created for life in lives] == [created]:
        copies += whole.find_copies(reader, progress).by_object
        scans = [(lives[0], whole)]
    else:
        whole.examined.clear()
        scans = [(life, _scan(archive, life, objects, erased, copies)) for life in lives[:MAX_INCARNATIONS]]
    removed = [Removed.read(archive, stream, life) for life, _ in scans]
    expired = archive.expired(stream)
    coverage = [
        _coverage(life, scan, gone, _settled(life, mark), _of_life(life, objects))
        for (life, scan), gone in zip(scans, removed, strict=True)
        if len(scan.sequences)
    ]
    chosen = [stored for stored in objects if scope.has(stored, mark)]
    in_both = Sequences.union(*(scan.copies.in_both for _, scan in scans))
    quarantine = [stored for stored in chosen if stored.name.quarantine]
    return Facts(
        stream=stream,
        url=archive.shown,
        generated=datetime.now(UTC),
        scope=scope,
        objects=[stored for stored in chosen if not stored.name.quarantine],
        quarantine=quarantine,
        copies=copies,
        mark=mark,
        incarnations=coverage,
        older_incarnations=len(lives[MAX_INCARNATIONS:]),
        reasons=_reasons(archive, stream, quarantine, in_both) if quarantine else (),
        read_twice=[
            finding for _, scan in scans for finding in scan.copies.findings if finding.kind is Kind.READ_TWICE
        ],
        unread=whole.unusable.damaged.count + whole.unusable.unread.count,
        expired=0 if expired is None else expired.messages,
        expired_until=None if expired is None else expired.until,
        erased=len(erased),
    )


def _lives(objects: Iterable[StoredObject]) -> list[Incarnation]:
    """Return the stream's incarnations, newest first. The oldest one owns all earlier messages, as of a mirror."""
    newest = in_order(created for stored in objects for created in stored.created)[::-1] or [""]
    bounds = [_ALWAYS, *map(moment, newest[:-1]), 0]
    return [
        Incarnation(created=created, since=since, until=until, mirror=False)
        for created, until, since in zip(newest, bounds[:-1], bounds[1:], strict=True)
    ]


def _of_life(life: Incarnation, objects: Iterable[StoredObject]) -> list[StoredObject]:
    """Return the objects that may have messages of an incarnation."""
    return [stored for stored in objects if not stored.created or life.created in stored.created]


def _scan(
    archive: ArchiveFiles,
    life: Incarnation,
    objects: Iterable[StoredObject],
    erased: Erased,
    copies: Counter[ObjectName],
) -> ArchiveScan:
    """Examine the objects of one of several incarnations. Raises VanishedError, StoreError."""
    reader, scan = ObjectExaminer(archive, life, erased), ArchiveScan()

    def examine(stored: StoredObject) -> tuple[File, ObjectContents | StoreError | str | None]:
        file = archive.at(stored.name.path, stored.size)
        return file, examined(reader, file, stored.name, deep=False)

    for file, contents in archive.map(examine, _of_life(life, objects)):
        if contents is None:
            raise VanishedError(f"{archive.shown}/{file.path} is gone")
        if isinstance(contents, ObjectContents):
            scan.add(file, contents, 0)
    copies += scan.find_copies(reader).by_object
    return scan


def _settled(life: Incarnation, mark: Watermark | None) -> int | None:
    """Return the sequence up to which this incarnation is complete."""
    if mark is None:
        return None
    if not life.created or not mark.created or life.created == mark.created:
        return mark.seq
    return _ALWAYS if moment(life.created) < moment(mark.created) else None


def _coverage(
    life: Incarnation, scan: ArchiveScan, gone: Removed, settled: int | None, objects: Iterable[StoredObject]
) -> Coverage:
    first, last = scan.sequences.first or 0, scan.sequences.last or 0
    accounted = Sequences.union(scan.sequences, gone.expired, gone.erased)
    present, limit = len(scan.sequences), _ALWAYS if settled is None else settled
    times = _Times.of(stored for stored in objects if len(stored.created) <= 1)
    settled_holes, settled_largest, _ = _holes(accounted.gaps(first, min(last, limit)))
    open_holes, open_largest, open_missing = _holes(accounted.gaps(max(first, limit + 1), last))
    largest = nlargest(MAX_HOLES, settled_largest + open_largest)
    return Coverage(
        created=life.created,
        first=first,
        last=last,
        oldest=times.oldest,
        newest=times.newest,
        settled=settled,
        present=present,
        removed=accounted.count(first, last) - present,
        accounted=accounted,
        holes=settled_holes + open_holes,
        open_holes=open_holes,
        open_missing=open_missing,
        largest=[times.hole(-start, end, limit) for _, start, end in sorted(largest, key=lambda hole: -hole[1])],
        forked=len(scan.forked),
    )


def _holes(gaps: Iterable[tuple[Seqs, Seqs]]) -> tuple[int, list[tuple[int, int, int]], int]:
    """Return the number of holes; size, negative start and end of the largest; and the number of sequences in all."""
    holes = missing = 0
    largest: list[tuple[int, int, int]] = []
    for starts, ends in gaps:
        sizes = ends - starts + 1
        holes += len(starts)
        missing += int(sizes.sum())
        order = np.argsort(-sizes, kind="stable")[:MAX_HOLES]
        some = zip(sizes[order].tolist(), (-starts[order]).tolist(), ends[order].tolist(), strict=True)
        largest = nlargest(MAX_HOLES, [*largest, *some])
    return holes, largest, missing


@dataclass(frozen=True, slots=True)
class _Times:
    """Message times by sequence, from each object's first and last message, with running extremes."""

    seqs: Seqs
    up_to: Micros
    """The latest time of a message at the sequence or before."""
    since: Micros
    """The earliest time of a message at the sequence or after."""

    @classmethod
    def of(cls, objects: Iterable[StoredObject]) -> _Times:
        ends = [
            end
            for stored in objects
            if stored.oldest is not None and stored.newest is not None
            for end in ((stored.name.first_seq, stored.oldest), (stored.name.last_seq, stored.newest))
        ]
        seqs, times = np.array(sorted(ends), np.int64).reshape(-1, 2).T
        return cls(seqs, np.maximum.accumulate(times), np.minimum.accumulate(times[::-1])[::-1])

    @property
    def oldest(self) -> int | None:
        return int(self.since[0]) if len(self.seqs) else None

    @property
    def newest(self) -> int | None:
        return int(self.up_to[-1]) if len(self.seqs) else None

    def hole(self, first: int, last: int, limit: int) -> Hole:
        before, after = np.searchsorted(self.seqs, first) - 1, np.searchsorted(self.seqs, last, "right")
        return Hole(
            first=first,
            last=last,
            after=int(self.up_to[before]) if before >= 0 else None,
            before=int(self.since[after]) if after < len(self.seqs) else None,
            open=first > limit,
        )


def _reasons(
    archive: ArchiveFiles, stream: str, quarantine: Iterable[StoredObject], in_both: Sequences
) -> list[ReasonSummary]:
    """Return the reasons in these quarantine objects, without messages that are also archived."""
    counter = ReasonCounter()
    objects = {stored.name: archive.at(stored.name.path, stored.size) for stored in quarantine}
    request = ReadRequest(files=archive, stream=stream, columns=COLUMNS, quarantine=True)
    for batch in read_planned(lambda: request.plan(objects)):  # not for damaged ones
        table = pa.Table.from_batches([batch]).sort_by(layout.SEQ)
        archived = in_both.contains(table[layout.SEQ].cast(pa.int64()).to_numpy())
        counter.add(table.filter(pc.invert(pa.array(archived))))
    return counter.summaries()
