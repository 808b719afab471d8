"""Find messages with copies in objects of different groups: readers compare by group, so they return all of them.

Only objects that share a sequence with another one are read again. Sets of sequences narrow these down to sequences in
different groups; then timestamps show whether they are the same message. This works window by window, so memory is
bounded like that of the sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from jetcapture_py.archive import layout
from jetcapture_py.archive.block_writer import UserWriter
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.config.units import moment_of
from jetcapture_py.errors import StoreError, VanishedError
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.text import plural
from jetcapture_py.verify.examine import DamagedError, in_order, positions
from jetcapture_py.verify.findings import Finding, Kind, SequenceRange, Severity, are, not_checked
from jetcapture_py.verify.ranges import Sequences
from jetcapture_py.verify.scope import Incarnation

MAX_COPIES = 1_000
"""Maximum messages with copies that are listed; all are counted."""
_ATTEMPTS = 3
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An examined object; `whole`: it has every sequence from its first to its last. `bundles` is as in `Held`."""

    file: File
    name: ObjectName
    whole: bool
    bundles: int | None = None


class Finder:
    """Finds copies among `seen` objects; `repeated` are the sequences in more than one of them."""

    def __init__(
        self,
        storage: ArchiveFiles,
        life: Incarnation | None,
        seen: Iterable[Seen],
        repeated: Sequences,
        progress: Callable[[str, int, int], None],
        writer: UserWriter | None = None,
    ) -> None:
        self._storage, self._life, self._repeated, self._progress = storage, life, repeated, progress
        self._writer = writer
        every = list(seen)
        known = {each.name: each.bundles for each in every if each.bundles is not None}
        self._group = layout.groups((each.name for each in every), known)
        self._seen = [each for each in every if repeated.near(each.name.first_seq, each.name.last_seq)]
        self._seen.sort(key=lambda each: (each.name.quarantine, repr(self._group(each.name))))
        self._groups = [self._group(each.name) for each in self._seen]
        self._unread: set[str] = set()
        self._listed: list[SequenceRange] = []
        self._twice = self._quarantined = 0

    def find(self) -> Iterator[Finding]:
        """Yield messages with several copies that are read. Blocks; call it in a thread."""
        if len(set(self._groups)) > 1:
            suspected = self._suspected()
            for first, last in suspected.windows():
                self._judge(first, last, suspected)
        if self._twice:
            yield Finding(
                kind=Kind.READ_TWICE,
                severity=Severity.FAILURE,
                summary=f"{plural(self._twice, 'message', grouped=True)} with copies under different keys or buckets, "
                "which readers return separately",
                action='read_archive(dedupe="full") reads them once',
                count=self._twice,
                ranges=tuple(self._listed),
                range_count=self._twice,
            )
        if self._quarantined:
            yield Finding(
                kind=Kind.QUARANTINE,
                severity=Severity.NOTE,
                summary=f"{plural(self._quarantined, 'message', grouped=True)} {are(self._quarantined)} also in the "
                "archive and read once from each",
                count=self._quarantined,
            )
        if self._unread:
            objects = plural(len(self._unread), "object", grouped=True)
            yield not_checked(f"{objects} that may hold copies: they could not be reread")

    def forked(self) -> Sequences:
        """Return the repeated sequences that have several timestamps: different messages of one stream."""
        found = Sequences()
        for first, last in self._repeated.windows():
            seqs, times, _ = self._gathered(first, last, self._repeated)
            order = np.lexsort((times, seqs))
            seqs, times = seqs[order], times[order]
            found.add(seqs[1:][(seqs[1:] == seqs[:-1]) & (times[1:] != times[:-1])])
        return found

    def _suspected(self) -> Sequences:
        """Return the sequences in objects of different groups."""
        found, archived, quarantined = Sequences(), Sequences(), Sequences()
        looked = enumerate(in_order("copies", self._storage.threads, self._sequences, self._seen), 1)
        for _, members in groupby(looked, key=lambda found: self._group(found[1][0].name)):
            own = Sequences()
            for done, (each, seqs) in members:
                self._progress("copies", done, len(self._seen))
                side = quarantined if each.name.quarantine else archived
                found.add(seqs[side.contains(seqs)])
                own.add(seqs)
            side.update(own)
        for first, last in quarantined.windows():
            seqs = quarantined.within(first, last)
            found.add(seqs[archived.contains(seqs)])
        return found

    def _sequences(self, each: Seen) -> Any:
        """Return an object's sequences that other objects have as well, sorted."""
        if each.whole:
            return self._repeated.within(each.name.first_seq, each.name.last_seq)
        seqs = np.unique(self._positions(each)[0])
        return seqs[self._repeated.contains(seqs)]

    def _positions(self, each: Seen) -> tuple[Any, Any]:
        """Return an object's sequences and timestamps; none if it is gone, as after a compaction."""
        for _ in range(_ATTEMPTS):
            try:
                return positions(self._storage, each.file, each.name, self._life, self._writer)
            except VanishedError:
                return _NONE, _NONE
            except (DamagedError, StoreError):
                continue
        self._unread.add(each.file.path)
        return _NONE, _NONE

    def _judge(self, first: int, last: int, suspected: Sequences) -> None:
        """Compare the suspected messages from `first` to `last` by sequence and timestamp."""
        seqs, times, owners = self._gathered(first, last, suspected)
        if len(seqs):
            self._count(seqs, times, owners)

    def _gathered(self, first: int, last: int, wanted_seqs: Sequences) -> tuple[Any, Any, Any]:
        """Return sequence, timestamp and object's number of these messages from `first` to `last`."""
        seqs, times, owners = [_NONE], [_NONE], [_NONE]
        inside = [
            (number, each)
            for number, each in enumerate(self._seen)
            if wanted_seqs.near(max(first, each.name.first_seq), min(last, each.name.last_seq))
        ]
        read = in_order("copies", self._storage.threads, lambda item: self._positions(item[1]), inside)
        for done, ((number, _), (seq, time)) in enumerate(read, 1):
            self._progress("timestamps", done, len(inside))
            wanted = (seq >= first) & (seq <= last)
            wanted[wanted] = wanted_seqs.contains(seq[wanted])
            seqs.append(seq[wanted])
            times.append(time[wanted])
            owners.append(np.full(int(wanted.sum()), number))
        return np.concatenate(seqs), np.concatenate(times), np.concatenate(owners)

    def _count(self, seqs: Any, times: Any, owners: Any) -> None:
        order = np.lexsort((owners, times, seqs))  # objects are in the order of their groups
        seqs, times, owners = seqs[order], times[order], owners[order]
        numbers = np.cumsum([0, *(after != before for before, after in pairwise(self._groups))])
        aside = np.array([each.name.quarantine for each in self._seen])
        new = np.concatenate([[True], (seqs[1:] != seqs[:-1]) | (times[1:] != times[:-1])])
        once = new | np.concatenate([[True], np.diff(numbers[owners]) != 0])
        starts = np.flatnonzero(new)
        archived, quarantined = (np.add.reduceat(once & (aside[owners] == side), starts) for side in (False, True))
        twice = (archived > 1) | (quarantined > 1)
        self._twice += int(twice.sum())
        self._quarantined += int(((archived > 0) & (quarantined > 0)).sum())
        ends = np.concatenate([starts[1:], [len(seqs)]])
        room = MAX_COPIES - len(self._listed)
        for start, end in zip(starts[twice][:room].tolist(), ends[twice][:room].tolist(), strict=True):
            paths = sorted(self._seen[number].file.path for number in owners[start:end][once[start:end]])
            seq, time = int(seqs[start]), moment_of(int(times[start]))
            self._listed.append(
                SequenceRange(first=seq, last=seq, messages=1, first_time=time, last_time=time, paths=tuple(paths))
            )
