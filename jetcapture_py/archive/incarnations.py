"""Distinguish the incarnations of a stream: is this the archive's stream, and to which one does a message belong?

The same messages at the same sequences are the same stream, also after a restore. `created` is only a hint: servers
move it although nothing was created again (a restart, an edit and another restart, before 2.14.6), and the servers of a
cluster may differ. If it differs, a common message decides; without one, the consumer's progress; without a consumer,
`created`. The same stream keeps its first known `created` in watermarks, footers, notes and checkpoints.

An archive may have several incarnations of a stream, by their `created`. Messages belong to the last one that was
created before them, the oldest has all earlier ones, and footers take precedence: clocks may go backward. An
incarnation whose messages begin after all those of the one before may continue it, as a restored stream or a mirror
does: then messages of both are one stream's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from jetcapture_py.archive.arrays import Mask, Micros, Seqs
from jetcapture_py.config.units import microseconds_of

Bounds = tuple[int, int]
"""First and last sequence, inclusive."""
Link = tuple[int, int]
"""An incarnation's creation time in microseconds, and its last sequence from earlier incarnations; 0 for none."""
_FOREVER = (1 << 63) - 1
C = TypeVar("C", str, int)
"""An incarnation's creation time: the server's text, or microseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A message by which a stream is recognized."""

    seq: int
    time: int
    """Its timestamp, in microseconds since the epoch."""
    created: str = ""
    """The stream's creation time on the server then; "" if unknown."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The identity of a stream as recorded by an archive or a checkpoint."""

    created: str
    """First known creation time; "" if unknown."""
    sample: Sample | None = None
    """One of its messages; None if unknown."""

    def continues(self, other: Origin) -> bool:
        """Whether the records alone show that both are the same stream."""
        if self.created == other.created:
            return True
        if self.sample is None or other.sample is None:
            return False
        if self.sample.seq == other.sample.seq:
            return self.sample.time == other.sample.time
        common = {self.created, self.sample.created} & {other.created, other.sample.created}
        return bool(common - {""})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The server's view of a stream; times in microseconds since the epoch."""

    created: str
    first: int
    """First sequence; `last` + 1 for an empty stream."""
    first_time: int
    last: int
    last_time: int
    """Time of the last message, even if it was deleted since."""

    @property
    def sample(self) -> Sample | None:
        """The last message; None if the stream never had one."""
        return Sample(self.last, self.last_time, self.created) if self.last else None


async def is_same_stream(
    origin: Origin, now: Ends, time_of: Callable[[int], Awaitable[int | None]], *, progressed: bool = False
) -> bool:
    """Whether a stream is the same as `origin`.

    `time_of` returns the timestamp of the message at a sequence; None without a message, permission or answer. Then the
    order of timestamps decides, which misses different messages after a restore to an earlier sequence.
    `progressed`: the stream still has the consumer recorded with `origin`, and it has not started again.
    """
    sample = origin.sample
    if now.created == origin.created or (sample is not None and now.created == sample.created):
        return True
    if sample is None:
        return progressed
    if now.last < sample.seq:
        return False  # it was created again, rewound, or restored to an earlier sequence
    if now.last == sample.seq:
        return now.last_time == sample.time
    if now.first > sample.seq:  # no common message; one older than `created` shows that a server moved it
        born = moment(now.created)
        return progressed or (now.first <= now.last and sample.time <= now.first_time < born)
    if (time := await time_of(sample.seq)) is not None:
        return time == sample.time
    return now.first_time <= sample.time <= now.last_time


@dataclass(frozen=True, slots=True)
class Progress:
    """A consumer's progress."""

    delivered: int
    acknowledged: int

    def continues(self, before: Progress) -> bool:
        """Whether this may be a later state of the same consumer. A new consumer starts again."""
        return self.delivered >= before.delivered and self.acknowledged >= before.acknowledged


def moment(created: str) -> int:
    """Return a creation time in microseconds since the epoch. Raises ValueError."""
    return microseconds_of(datetime.fromisoformat(created))


def check_created(created: str) -> None:
    """Raise ValueError or TypeError unless `created` is a creation time or "" (unknown)."""
    if created:
        moment(created)


def in_order(created: Iterable[str]) -> list[str]:
    """Return the distinct creation times, oldest first, without ""."""
    return sorted(filter(None, {*created}), key=moment)


def owners(begins: Sequence[int], times: Micros) -> npt.NDArray[np.intp]:
    """Return the index of each message's incarnation, given their start times, oldest first, in microseconds."""
    return np.maximum(np.searchsorted(np.array(begins, np.int64), times, "right") - 1, 0)


def by_incarnation(created: Sequence[C], times: Micros) -> Iterator[tuple[C, Mask]]:
    """Yield each incarnation with messages, oldest first, and the mask of its messages.

    The first of `created` may be "": its creation time is unknown.
    """
    numbers = owners([birth if isinstance(birth, int) else moment(birth) if birth else 0 for birth in created], times)
    for number in np.unique(numbers).tolist() if created else ():
        yield created[number], numbers == number


def bounds_by_incarnation(created: Sequence[C], seqs: Seqs, times: Micros) -> dict[C, Bounds]:
    """Return the first and last sequence of each incarnation with messages, oldest first."""
    parts = ((birth, seqs[mask]) for birth, mask in by_incarnation(created, times))
    return {birth: (int(part.min()), int(part.max())) for birth, part in parts}


def continued(created: Sequence[C], bounds: Mapping[C, Bounds], anew: Collection[C] = frozenset()) -> Sequence[C]:
    """Return the newest of the incarnations `created` and the earlier ones that it continues, oldest first.

    `bounds` covers the incarnations with messages. Those in `anew` continue no other.
    """
    start, first = len(created) - 1, None
    while start > 0 and created[start] not in anew:
        first = bounds[created[start]][0] if created[start] in bounds else first
        before = bounds.get(created[start - 1])
        if first is not None and before is not None and first <= before[1]:
            break
        start -= 1
    return created[max(start, 0) :]


def span(created: Collection[str], chosen: Sequence[str]) -> tuple[int, int] | None:
    """Return the time range (end exclusive) of the messages of `chosen`, consecutive incarnations, oldest first, in an
    object with messages of `created`; None for all of them. Microseconds since the epoch."""
    if {*created} <= {*chosen}:
        return None
    began, ended = moment(chosen[0]), moment(chosen[-1])
    births = [moment(birth) for birth in created]
    later = [birth for birth in births if birth > ended]
    return began if min(births) < began else -1 << 62, min(later, default=1 << 62)


class LineageEntry(NamedTuple):
    """An incarnation as a part of a stream's lineage."""

    created: str
    last: int
    """The last of its sequences in the stream."""
    restored: int
    """The last sequence from earlier incarnations; 0 for none."""


def lineage(created: Iterable[str], restored: Callable[[str], int]) -> tuple[LineageEntry, ...]:
    """Return the incarnations that make up the newest one, newest first.

    `restored` returns an incarnation's last sequence from earlier incarnations; 0 for none. Their messages after it are
    a fork, and not part of the stream.
    """
    entries, last = list[LineageEntry](), _FOREVER
    for birth in created:
        entries.append(LineageEntry(birth, last, min(last, restored(birth))))
        last = entries[-1].restored
        if not last:
            break
    return tuple(entries)


def are_of(links: Iterable[Link], seqs: Seqs, times: Micros) -> Mask:
    """Return a mask of the stream's messages: earlier incarnations count up to the last sequence that was restored."""
    mask = np.ones(len(seqs), np.bool_)
    for since, restored in links:
        mask &= (times >= since) | (seqs <= restored)
    return mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """An incarnation of the stream, the current one unless it has an end.

    A recreated stream counts from 1 again, so only messages of this incarnation can be compared with the stream.
    """

    created: str
    """Creation time as sent by the server."""
    since: int
    """Creation time in microseconds since the epoch."""
    mirror: bool
    """Whether the stream mirrors another one, so that messages may be older than it."""
    restored: int = 0
    """The last sequence stored before the stream was created, because it was restored from a backup; 0 without any."""
    oldest: int = 0
    """Timestamp of the stream's first message in microseconds."""
    until: int = _FOREVER
    """Messages from this time on, in microseconds, are of a later incarnation."""

    @classmethod
    def of(cls, created: str, *, mirror: bool, restored: int = 0, oldest: int = 0) -> Incarnation:
        """Parse a creation time. Raises ValueError."""
        return cls(created=created, since=moment(created), mirror=mirror, restored=restored, oldest=oldest)

    def includes(self, seqs: Seqs, times: Micros) -> Mask:
        """Return a mask of this incarnation's messages."""
        if self.mirror:
            return np.ones(len(seqs), np.bool_)
        links = [(self.since, self.restored), *([(self.oldest, 0)] if self.restored else [])]
        return are_of(links, seqs, times) & (times < self.until)

    def holds(self, created: str, low: int | None, high: int | None) -> bool | None:
        """Whether all (True) or none (False) of an object's messages are of it; None: some or unknown.

        `created` is the footer's entry, "" without one; compaction joins several with commas. `low` and `high`
        are the object's earliest and latest timestamp. They decide if the footer does not, as for objects of several
        incarnations that compaction has merged. The footer takes precedence: a server's clock may go backward.
        """
        if created == self.created:
            return True
        if self.mirror:
            return created == "" or self.created in created.split(",")
        if low is None or high is None or low < self.since <= high or low < self.until <= high:
            return None
        if self.restored and self.oldest <= high < self.since:
            return None
        return self.since <= low < self.until
