"""Gaps: messages that the stream has and the archive lacks, and sequences that neither has."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jetcapture_py.archive.arrays import Nanos, Seqs
from jetcapture_py.archive.removed import Erased
from jetcapture_py.config.units import moment_of
from jetcapture_py.text import plural
from jetcapture_py.verify.findings import MAX_LISTED, Finding, Kind, SequenceRange, Severity
from jetcapture_py.verify.ranges import Sequences


class HoleFinder:
    """Compares the stream's messages with the archive: ranges up to the ack floor `floor`, counts beyond it.

    `archived` sequences are stored or have expired. A rewound stream may have a later message at a sequence with a
    tombstone. The watermark covers messages up to the sequence `seq`, and up to the `time` in microseconds.
    """

    def __init__(self, archived: Sequences, tombstones: Erased, floor: int, *, seq: int = 0, time: int = 0) -> None:
        self.archived, self._tombstones = archived, tombstones
        self._floor, self._promised_seq, self._promised_time = floor, seq, time
        self.missing = Sequences()
        """Messages missing from the archive."""
        self.doubtful = Sequences()
        """Messages possibly skipped near a change of the consumer's filters."""
        self.ranges = 0
        """Ranges of missing messages up to the ack floor."""
        self.listed: list[SequenceRange] = []
        self._current: list[int] = []  # first, last, messages, first and last timestamp in nanoseconds

    @property
    def count(self) -> int:
        """Number of missing messages up to the ack floor."""
        return self.missing.count(0, self._floor)

    @property
    def promised(self) -> int:
        """Number of missing messages beyond the ack floor that the watermark covers by its sequence."""
        return self.missing.count(self._floor + 1, self._promised_seq)

    @property
    def overdue(self) -> Seqs:
        """Missing messages beyond both that the watermark covers by its time."""
        return self.missing.within(max(self._floor, self._promised_seq) + 1, self.missing.last or 0)

    def compare(self, seqs: Seqs, times: Nanos, first: int, last: int, *, doubtful: bool = False) -> None:
        """Compare the stream's messages from `first` to `last` with the archive. Call it in the order of sequences.

        `doubtful`: the consumer may have skipped them.
        """
        inside = (seqs >= first) & (seqs <= last)
        seqs, times = seqs[inside], times[inside]
        absent = ~(self.archived.contains(seqs) | self.missing.contains(seqs))
        absent[absent] = ~self._tombstones.contains(seqs[absent], times[absent] // 1000)
        promised = (seqs <= max(self._floor, self._promised_seq)) | (times // 1000 <= self._promised_time)
        if doubtful:
            self.doubtful.add(seqs[absent & promised])
            return
        self.missing.add(seqs[absent & promised])
        absent &= seqs <= self._floor
        edges = np.flatnonzero(np.diff(np.concatenate([[False], absent, [False]]).astype(np.int8)))
        for start, end in zip(edges[::2].tolist(), (edges[1::2] - 1).tolist(), strict=True):
            if start or not self._current:
                self.close()
                self._current = [int(seqs[start]), 0, 0, int(times[start]), 0]
            self._current[1] = int(seqs[end])
            self._current[2] += end - start + 1
            self._current[4] = int(times[end])
        if len(absent) and not absent[-1]:
            self.close()

    def close(self) -> None:
        if self._current:
            first, last, messages, first_time, last_time = self._current
            self.ranges += 1
            if len(self.listed) < MAX_LISTED:
                self.listed.append(
                    SequenceRange(
                        first=first,
                        last=last,
                        messages=messages,
                        first_time=moment_of(first_time // 1000),
                        last_time=moment_of(last_time // 1000),
                    )
                )
            self._current = []

    def findings(self, *, stored: bool) -> Iterator[Finding]:
        """Yield the holes up to the ack floor, if any; `stored`: the archive has messages of the stream."""
        if count := self.count:
            cause = "objects were removed, or another capture of this consumer stores what it receives elsewhere; "
            yield Finding(
                kind=Kind.HOLES,
                severity=Severity.FAILURE,
                summary="messages in the stream that are missing from the archive",
                action=f"{cause if stored else ''}jetcapture verify --repair stores them again",
                count=count,
                ranges=tuple(sorted(self.listed, key=lambda hole: hole.first)),
                range_count=self.ranges,
            )


def find_gaps(sequences: Sequences, first: int, last: int) -> Iterator[Finding]:
    """Yield the ranges from `first` to `last` that are not in the archive, if any."""
    listed: list[SequenceRange] = []
    ranges = total = 0
    for starts, ends in sequences.gaps(first, last) if first <= last else ():
        ranges += len(starts)
        total += int((ends - starts + 1).sum())
        room = MAX_LISTED - len(listed)
        pairs = zip(starts[:room].tolist(), ends[:room].tolist(), strict=True)
        listed += [SequenceRange(first=start, last=end) for start, end in pairs]
    if ranges:
        yield Finding(
            kind=Kind.GAPS,
            severity=Severity.WARNING,
            summary=f"{plural(total, 'sequence')} that the archive skips and the stream cannot show; "
            "deleted messages and messages of other subjects also leave such gaps",
            count=total,
            ranges=tuple(listed),
            range_count=ranges,
        )
