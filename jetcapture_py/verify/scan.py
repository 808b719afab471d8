"""Examine every object of a stream's archive in parallel, and collect sequences in sets of bounded size.

Then find messages with copies in objects of different groups: readers compare by group, so they return every copy.
Only objects that share a sequence with another one are read again: their timestamps show whether it is the same
message. This works window by window, so memory stays bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Int64s, Micros, Seqs
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.config.units import moment_of
from jetcapture_py.errors import StoreError, VanishedError
from jetcapture_py.store.archive import ASIDE, ArchiveFiles, File
from jetcapture_py.text import one_line, plural
from jetcapture_py.verify.examine import DamagedError, ObjectContents, ObjectExaminer
from jetcapture_py.verify.findings import (
    FileList,
    Finding,
    Kind,
    Progress,
    SequenceRange,
    Severity,
    are,
    file_findings,
    ignore,
    not_checked,
)
from jetcapture_py.verify.ranges import Sequences

MAX_COPIES = 1_000
"""Maximum messages with copies to list; all are counted."""
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Copies:
    """The result of comparing objects that share sequences."""

    findings: tuple[Finding, ...] = ()
    forked: Sequences = field(default_factory=Sequences)
    """Sequences with several timestamps: different messages of one stream."""
    in_both: Sequences = field(default_factory=Sequences)
    """Messages in quarantine that are also in the archive."""
    by_object: Counter[ObjectName] = field(default_factory=Counter)
    """Number of an object's messages that others also have; the archive comes before the quarantine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedObject:
    """An object with messages of the current incarnation."""

    file: File
    name: ObjectName
    bundles: int | None = None
    """The number of bundles in its footer, if it is in one."""


class CopyFinder:
    """Re-reads the sequences `repeated`, which are in more than one of the `objects`."""

    def __init__(
        self, reader: ObjectExaminer, objects: Iterable[ExaminedObject], repeated: Sequences, progress: Progress
    ) -> None:
        self._reader, self._repeated, self._progress = reader, repeated, progress
        examined = list(objects)
        bundles = {item.name: item.bundles for item in examined if item.bundles is not None}
        group = layout.groups((item.name for item in examined), bundles)
        self._objects = [item for item in examined if repeated.near(item.name.first_seq, item.name.last_seq)]
        self._objects.sort(key=lambda item: (item.name.quarantine, repr(group(item.name))))
        groups = [group(item.name) for item in self._objects]
        self._groups = np.cumsum([0, *(after != before for before, after in pairwise(groups))])
        self._unread: set[str] = set()
        self._listed: list[SequenceRange] = []
        self._twice = 0
        self._copies = Copies()

    def find(self) -> Copies:
        """Compare the objects. Blocks; call it in a thread."""
        if self._reader.incarnation is not None or self._groups[-1] > 0:
            for first, last in self._repeated.windows():
                self._compare(*self._read(first, last))
        return replace(self._copies, findings=tuple(self._findings()))

    def _findings(self) -> Iterator[Finding]:
        if self._twice:
            yield Finding(
                kind=Kind.READ_TWICE,
                severity=Severity.FAILURE,
                summary=f"{plural(self._twice, 'message')} with copies under different keys or time slices, "
                "which readers return separately",
                action='read_archive(dedupe="full") reads them once',
                count=self._twice,
                ranges=tuple(self._listed),
                range_count=self._twice,
            )
        if both := len(self._copies.in_both):
            count = plural(both, "message")
            yield Finding(
                kind=Kind.QUARANTINE,
                severity=Severity.NOTE,
                summary=f"{count} {are(both)} also in the archive, and count as archived",
                action="jetcapture quarantine redecode removes them from the quarantine",
                count=both,
            )
        if self._unread:
            objects = plural(len(self._unread), "object")
            yield not_checked(f"{objects} that may hold copies: they could not be reread")

    def _positions(self, item: ExaminedObject) -> tuple[Seqs, Micros]:
        """Return an object's sequences and timestamps; none if it has vanished, as after a compaction."""
        for _ in range(_ATTEMPTS):
            try:
                return self._reader.positions(item.file, item.name)
            except VanishedError:
                return _NONE, _NONE
            except (DamagedError, StoreError):
                continue
        self._unread.add(item.file.path)
        return _NONE, _NONE

    def _read(self, first: int, last: int) -> tuple[Seqs, Micros, Int64s]:
        """Return sequence, timestamp and object's number of the repeated messages from `first` to `last`."""
        numbers = [
            number
            for number, item in enumerate(self._objects)
            if self._repeated.near(max(first, item.name.first_seq), min(last, item.name.last_seq))
        ]
        seqs, times, owners = [_NONE], [_NONE], [_NONE]
        read = self._reader.storage.map(self._positions, (self._objects[number] for number in numbers))
        for done, (number, (seq, time)) in enumerate(zip(numbers, read, strict=True), 1):
            self._progress("copies", done, len(numbers))
            inside = (seq >= first) & (seq <= last)
            inside[inside] = self._repeated.contains(seq[inside])
            seqs.append(seq[inside])
            times.append(time[inside])
            owners.append(np.full(len(seqs[-1]), number))
        return np.concatenate(seqs), np.concatenate(times), np.concatenate(owners)

    def _compare(self, seqs: Seqs, times: Micros, owners: Int64s) -> None:
        """Count the messages with copies in several groups."""
        if not len(seqs):
            return
        order = np.lexsort((owners, times, seqs))  # objects are in the order of their groups
        seqs, times, owners = seqs[order], times[order], owners[order]
        again, other = seqs[1:] == seqs[:-1], times[1:] != times[:-1]
        self._copies.forked.add(seqs[1:][again & other])
        aside = np.array([item.name.quarantine for item in self._objects])
        new = np.concatenate([[True], ~again | other])
        once = new | np.concatenate([[True], np.diff(self._groups[owners]) != 0])
        for number, count in enumerate(np.bincount(owners[~new]).tolist()):
            if count:
                self._copies.by_object[self._objects[number].name] += count
        starts = np.flatnonzero(new)
        archived, quarantined = (np.add.reduceat(once & (aside[owners] == side), starts) for side in (False, True))
        twice = (archived > 1) | (quarantined > 1)
        self._twice += int(twice.sum())
        self._copies.in_both.add(seqs[starts[(archived > 0) & (quarantined > 0)]])
        ends = np.concatenate([starts[1:], [len(seqs)]])
        room = MAX_COPIES - len(self._listed)
        for start, end in zip(starts[twice][:room].tolist(), ends[twice][:room].tolist(), strict=True):
            paths = sorted(self._objects[number].file.path for number in owners[start:end][once[start:end]])
            seq, time = int(seqs[start]), moment_of(int(times[start]))
            self._listed.append(
                SequenceRange(first=seq, last=seq, messages=1, first_time=time, last_time=time, paths=tuple(paths))
            )


MAX_LISTINGS = 10
"""Maximum listings; listing repeats while objects disappear, because compaction moves their messages to others."""
_DEEP_THREADS = 4
_MAX_EXAMPLE = 100
"""Characters of an example."""
_ATTEMPTS = 3


@dataclass(slots=True)
class UnusableFiles:
    """Files of the archive whose messages are not counted."""

    damaged: FileList = field(default_factory=FileList)
    unread: FileList = field(default_factory=FileList)
    """Objects that the store failed to return."""
    foreign: FileList = field(default_factory=FileList)
    unstable: bool = False
    """Some objects vanished in every listing."""

    def findings(self) -> Iterator[Finding]:
        yield from file_findings(
            Kind.DAMAGED,
            Severity.FAILURE,
            self.damaged,
            "objects that are not counted until they are restored",
            "jetcapture verify --repair stores their messages again, as far as the stream has them",
        )
        if self.unread.count:
            objects, first = plural(self.unread.count, "object"), self.unread.paths[0]
            summary = f"{objects}, whose messages count as missing: {first.path}: {first.reason}"
            finding = not_checked(summary, Severity.FAILURE)
            yield replace(finding, count=self.unread.count, paths=tuple(self.unread.paths))
        summary = "files that are not objects of this archive"
        yield from file_findings(Kind.FOREIGN, Severity.WARNING, self.foreign, summary)
        if self.unstable:
            summary = "some objects: they vanished during every listing (is a compaction running?)"
            yield not_checked(summary, Severity.FAILURE)


@dataclass(slots=True)
class Totals:
    """Totals over all objects."""

    objects: int = 0
    size: int = 0
    """Bytes."""
    messages: int = 0
    """All copies of the current incarnation's messages."""
    older: int = 0
    """Messages of earlier incarnations."""
    by_name: int = 0
    """Objects in unreadable formats."""
    rescued: int = 0
    """Rows with values that did not fit their columns, of all incarnations, including copies."""
    erased: int = 0
    """Erased messages of all incarnations that are still in objects, including copies."""

    def add(self, contents: ObjectContents) -> None:
        self.objects += 1
        self.size += contents.size
        self.messages += contents.messages
        self.older += contents.older
        self.by_name += contents.by_name
        self.erased += contents.erased
        self.rescued += 0 if contents.details is None else contents.details.rescued


@dataclass(slots=True, kw_only=True)
class ArchiveScan:
    """Contents of the archive."""

    sequences: Sequences = field(default_factory=Sequences)
    """Sequences of the current incarnation's messages."""
    quarantined: Sequences = field(default_factory=Sequences)
    """Sequences in quarantine."""
    repeated: Sequences = field(default_factory=Sequences)
    """Sequences in several objects."""
    forked: Sequences = field(default_factory=Sequences)
    """Sequences with several timestamps, if the incarnation is known."""
    examined: list[ExaminedObject] = field(default_factory=list)
    """Objects with messages of the current incarnation."""
    copies: Copies = field(default_factory=Copies)
    """Result of `find_copies`."""
    totals: Totals = field(default_factory=Totals)
    newest: int = 0
    """Latest timestamp, in microseconds, in objects that end at or before the bound; 0 without one."""
    unerased: FileList = field(default_factory=FileList)
    """Objects with erased messages."""
    unusable: UnusableFiles = field(default_factory=UnusableFiles)
    rescued: File | None = None
    """An object that has rescued values."""
    layouts: Counter[int | None] = field(default_factory=Counter)
    """Objects outside the quarantine by number of bundles: 0 under keys, None if unknown."""

    def add(self, file: File, contents: ObjectContents, bound: int) -> None:
        """Add an object; `newest` counts objects that end at or before the sequence `bound`."""
        name = contents.name
        self.totals.add(contents)
        if contents.details is not None and contents.details.rescued:
            self.rescued = file
        if contents.erased:
            self.unerased.add(file.path, plural(contents.erased, "message"))
        if name.quarantine:
            contents.add_to(self.quarantined)
        else:
            self.layouts[contents.bundles if name.bundle else 0] += 1
        if contents.messages:
            self.examined.append(ExaminedObject(file=file, name=name, bundles=contents.bundles))
            if contents.range is None:
                self.forked.add(contents.seqs[1:][contents.seqs[1:] == contents.seqs[:-1]])
            self.repeated.add(contents.add_to(self.sequences))
            if name.last_seq <= bound:
                self.newest = max(self.newest, contents.newest)

    def find_copies(self, reader: ObjectExaminer, progress: Progress = ignore) -> Copies:
        """Compare messages in several objects. Call it after adding all objects."""
        self.copies = CopyFinder(reader, self.examined, self.repeated, progress).find()
        if reader.incarnation is None:
            self.forked = Sequences()
        else:
            self.forked.update(self.copies.forked)
        return self.copies

    def rescued_example(self, storage: ArchiveFiles) -> str | None:
        """Read what was rescued of one row; None without any, or if it cannot be read any more."""
        if self.rescued is not None:
            with suppress(StoreError), storage.parquet(self.rescued) as parquet:
                for batch in parquet.iter_batches(columns=[layout.RESCUED], use_threads=False):
                    if batch.num_rows > batch.column(0).null_count:
                        return one_line(batch.column(0).drop_null()[0].as_py(), _MAX_EXAMPLE)
        return None

    def findings(self) -> Iterator[Finding]:
        """Yield findings about the objects, and about skipped checks."""
        totals, copies = self.totals, self.copies
        yield from self.unusable.findings()
        yield from copies.findings
        if duplicates := totals.messages - len(self.sequences) - len(self.forked) - len(copies.in_both):
            twice = any(finding.kind is Kind.READ_TWICE for finding in copies.findings)
            dropped = "readers drop those under one key and time slice" if twice else "readers drop them"
            summary = f"{plural(duplicates, 'further copy', 'further copies')}; {dropped}"
            yield Finding(kind=Kind.DUPLICATES, severity=Severity.NOTE, summary=summary, count=duplicates)
        if totals.by_name:
            objects = plural(totals.by_name, "object")
            yield not_checked(f"{objects} in a format of your own: only their names were checked")
        if totals.older:
            messages = plural(totals.older, "message")
            yield not_checked(f"{messages} of earlier incarnations of the stream: it no longer has them")

    def layout_counts(self) -> dict[str, int]:
        """Count objects outside the quarantine by layout, as text."""
        names: dict[int | None, str] = {0: "under keys"}
        for number in sorted(filter(None, self.layouts)):
            names[number] = f"in {plural(number, 'bundle')}"
        names[None] = "in an unknown number of bundles"
        return {name: self.layouts[number] for number, name in names.items() if number in self.layouts}


def survey(
    reader: ObjectExaminer,
    stream: str,
    bound: int,
    *,
    own_suffix: str = "",
    deep: bool = False,
    progress: Progress = ignore,
) -> ArchiveScan:
    """Examine every object of the stream; `own_suffix` is the suffix of a user's format.

    Blocks; call it in a thread. Raises StoreError if listing fails.
    """
    scan = ArchiveScan()
    for file, contents in examine_all(
        reader, stream, scan.unusable, own_suffix=own_suffix, deep=deep, progress=progress
    ):
        scan.add(file, contents, bound)
    scan.find_copies(reader, progress)
    return scan


def examine_all(
    reader: ObjectExaminer,
    stream: str,
    unusable: UnusableFiles,
    *,
    own_suffix: str = "",
    deep: bool = False,
    progress: Progress = ignore,
) -> Iterator[tuple[File, ObjectContents]]:
    """Yield the contents of every object, the quarantine last; `unusable` gets the other files.

    Raises StoreError if listing fails.
    """
    places, storage = set[str](), reader.storage
    threads = max(2, min(storage.threads, _DEEP_THREADS)) if deep else storage.threads
    for _ in range(MAX_LISTINGS):
        files = [file for file in storage.files(stream) if file.place not in places]
        places.update(file.place for file in files)
        objects = [
            (file, file.name)
            for file in files
            # any file can be named like an object of a user's format
            if file.name is not None and (file.name.parquet or file.name.text or file.name.suffix == own_suffix)
        ]
        # by sequence to keep the set of sequences dense
        objects.sort(key=lambda pair: (pair[1].quarantine, pair[1].first_seq))
        others = {file.path for file in files} - {file.path for file, _ in objects}
        for path in sorted(others):
            name = path.rpartition("/")[2]
            # of a killed process, or moved aside: nothing reads it
            if not (name.startswith(".") and name.endswith((".tmp", ASIDE))):
                unusable.foreign.add(path)
        gone = False
        results = storage.map(lambda pair: examined(reader, *pair, deep=deep), objects, threads=threads)
        for done, ((file, _), result) in enumerate(zip(objects, results, strict=True), 1):
            if isinstance(result, ObjectContents):
                yield file, result
            elif result is None:
                gone = True
            elif isinstance(result, StoreError):
                unusable.unread.add(file.path, str(result))
            else:
                unusable.damaged.add(file.path, result)
            progress("objects", done, len(objects))
        if not gone:
            return
    unusable.unstable = True


def examined(
    reader: ObjectExaminer, file: File, name: ObjectName, *, deep: bool
) -> ObjectContents | StoreError | str | None:
    """Return an object's contents, its damage, the store's error, or None if it is gone.

    Damage is checked twice, because a redelivery may have rewritten the object with the same messages in different
    bytes.
    """
    result: str | StoreError = ""
    for attempt in range(_ATTEMPTS):
        try:
            return reader.examine(reader.storage.again(file) if attempt else file, name, deep=deep)
        except VanishedError:
            return None
        except DamagedError as error:
            if result == str(error):
                break
            result = str(error)
        except StoreError as error:
            result = error
    return result
