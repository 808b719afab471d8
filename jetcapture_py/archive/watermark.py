"""The watermark: up to which position and time of the stream everything is stored.

    {store.url}/_watermark/{stream}/{consumer}.json

Only the replicas of one capture write a file. It follows the consumer's ack floor, because a message is acknowledged
only once it is stored. Readers take the minimum of a stream's files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Self

import msgspec

from jetcapture_py.archive import metadata
from jetcapture_py.archive.incarnations import Origin, Sample, check_created, moment
from jetcapture_py.archive.layout import STREAM_TIME
from jetcapture_py.config.subjects import covers, overlaps
from jetcapture_py.config.units import format_time, microseconds_of, moment_of
from jetcapture_py.errors import JetcaptureError

DIRECTORY = "_watermark"
MARGIN = timedelta(seconds=5)
"""Maximum clock difference between the leaders of the stream and of the consumer."""
READER_MARGIN = timedelta(minutes=5)
"""Maximum delay of a reader's clock against the servers'."""
NEVER = datetime(1970, 1, 1, tzinfo=UTC)
"""The time of a new capture."""
END = 1 << 62
"""After every sequence."""
Subjects = tuple[str, ...]
"""Sorted filter subjects; none for all."""


class Filters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry of the history of a consumer's filter subjects, as configured."""

    after: int
    """Sequence after which they alone apply, up to the next entry's `after`."""
    subjects: Subjects
    consumer: str = ""
    """When the consumer was created, as the server wrote it; "" if unknown."""
    doubtful: tuple[int, int | None] | None = None
    """First and last sequence of messages that may have been skipped, or selected by the earlier filters; the last
    one is None while the server has delivered nothing since the change."""

    @property
    def first(self) -> int:
        """First sequence they may have selected."""
        return self.after + 1 if self.doubtful is None else self.doubtful[0]

    @property
    def certain_after(self) -> int:
        """Sequence after which they are certain."""
        return self.after if self.doubtful is None else self.doubtful[1] or END


class StreamMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a stream, by which it is recognized."""

    seq: int
    time: metadata.Time
    stream_created: str
    """The stream's creation time on the server then; "" if unknown."""

    def __post_init__(self) -> None:
        check_created(self.stream_created)

    @classmethod
    def of(cls, sample: Sample | None) -> Self | None:
        """Convert a sample."""
        if sample is None:
            return None
        return cls(seq=sample.seq, time=moment_of(sample.time), stream_created=sample.created)


class ConsumerWatermark(metadata.SmallFile, frozen=True, kw_only=True, rename={"created": "stream_created"}):
    """Every message of the stream that the consumer's filters matched, up to and with sequence `seq`, and every one
    whose `_nats_timestamp` is not after `time` (UTC), is in the archive or the quarantine, but for doubtful ones.

    Messages that were removed from the stream while a capture held them may be archived later.
    A recreated stream counts from 1 again. Times are by the servers' clocks.
    """

    consumer: str
    created: str
    """First known creation time of the stream; "" if unknown."""
    seq: int
    time: metadata.Time
    """`NEVER` until known."""
    deliveries: int = 0
    """The consumer's deliveries so far, which identify it; 0 if unknown."""
    stream_message: StreamMessage | None = None
    """A message to recognize the stream by, not necessarily stored; None if unknown."""
    last_stored: metadata.Time | None = None
    """Time of the last stored object, by its writer's clock; None if unknown."""
    filters: tuple[Filters, ...] = ()
    """History of the consumer's filters, oldest first.

    Filters before the first entry's `after` are unknown. A change that was undone before any replica saw it is missing.
    """
    key_rule: str | None = None
    """The rule for keys of the capture, as in footers; None if unknown."""
    interval: int = 0
    """Its `block.interval` in seconds; 0 if unknown."""
    bucket_time: str = STREAM_TIME
    """Source of the buckets' time. Unless it is the stream's timestamp, a message may still join a bucket that ended
    before `time`.
    """

    def __post_init__(self) -> None:
        self.time.astimezone(UTC)
        check_created(self.created)

    @property
    def sample(self) -> Sample | None:
        """The stream's message."""
        message = self.stream_message
        return None if message is None else Sample(message.seq, microseconds_of(message.time), message.stream_created)

    @property
    def origin(self) -> Origin:
        return Origin(self.created, self.sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """The watermark of a stream: the minimum of its captures' files."""

    stream: str
    created: str
    """First known creation time of the newest incarnation of the stream; "" if unknown."""
    seq: int
    """0 while a capture has not begun with this incarnation."""
    time: datetime
    sample: Sample | None = None
    """A message of this incarnation; None if unknown."""
    last_stored: datetime | None = None
    """Time of the last stored object; None if unknown."""
    bucket_time: str = STREAM_TIME
    """Source of the buckets' time; an event time if any capture uses one."""
    filters: tuple[tuple[int, Subjects], ...] = ()
    """Subjects the captures together select after each sequence, in order; empty if unknown."""
    counted: tuple[ConsumerWatermark, ...] = ()
    """The files that decide the minimum."""
    files: tuple[ConsumerWatermark, ...] = ()
    """All files."""

    @property
    def origin(self) -> Origin:
        return Origin(self.created, self.sample)

    def of(self, consumer: str) -> ConsumerWatermark | None:
        """Return a consumer's file; None without one."""
        return next((mark for mark in self.files if mark.consumer == consumer), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A range of sequences under the same filters."""

    first: int
    last: int
    candidates: tuple[Subjects, ...]
    """Filters that may have applied; one, unless doubtful."""
    doubtful: bool = False
    """Whether matching messages may have been skipped."""


def stretches(filters: Sequence[Filters]) -> Iterator[Stretch]:
    """Yield the stretches from sequence 1 on. The first known filters also count for the sequences before them."""
    doubts = [(entry.first, entry.certain_after) for entry in filters if entry.doubtful is not None]
    cuts = {1, *(entry.after + 1 for entry in filters[1:]), *(first for first, _ in doubts)}
    cuts |= {last + 1 for _, last in doubts}
    for first, end in pairwise([*sorted(cut for cut in cuts if cut <= END), END + 1]):
        candidates = []
        for entry in reversed(filters):
            if first >= entry.first or entry is filters[0]:
                candidates.append(entry.subjects)
            if first > entry.after:
                break
        doubtful = any(low <= first <= high for low, high in doubts)
        yield Stretch(first=first, last=end - 1, candidates=tuple(dict.fromkeys(candidates)), doubtful=doubtful)


def union(filters: Iterable[Subjects]) -> Subjects:
    """Return filter subjects that match everything that any of these filters matches.

    All subjects if patterns overlap without one covering the other.
    """
    every = {subject for subjects in filters for subject in subjects or (">",)}
    widest = [one for one in every if not any(covers(other, one) for other in every if other != one)]
    ambiguous = any(overlaps(one, other) for one in widest for other in widest if one != other)
    return () if ambiguous or ">" in widest else tuple(sorted(widest))


def all_covered(subjects: Subjects, by: Subjects) -> bool:
    """Whether filters `by` cover filters `subjects`."""
    return all(any(covers(pattern, subject) for pattern in by or (">",)) for subject in subjects or (">",))


def minimum(files: Sequence[ConsumerWatermark]) -> Watermark | None:
    """Return the watermark of a stream from its captures' files; None without any.

    A file is ignored if another one is as far and covers its filters from there on. A file of an earlier incarnation
    counts as position 0 of the newest one.
    """
    if not files:
        return None
    newest = max(files, key=lambda mark: (bool(mark.created), mark.created and moment(mark.created)))
    present = [mark for mark in files if mark.origin.continues(newest.origin)]

    def position(mark: ConsumerWatermark) -> int:
        return mark.seq if mark in present else 0

    def has_all_of(mark: ConsumerWatermark, other: ConsumerWatermark) -> bool:
        if mark not in present or not mark.filters or not other.filters or mark.time < other.time:
            return False
        last = mark.filters[-1]
        begins = position(other)
        theirs = [part for part in stretches(other.filters) if part.last > begins]
        as_far = last.certain_after <= begins <= position(mark)
        return as_far and all(all_covered(one, last.subjects) for part in theirs for one in part.candidates)

    counted: list[ConsumerWatermark] = []
    for index, mark in enumerate(files):
        if not any(has_all_of(other, mark) for other in (*counted, *files[index + 1 :])):
            counted.append(mark)
    times = [mark.created for mark in present if mark.created]
    samples = [mark.sample for mark in present if mark.sample is not None]
    return Watermark(
        stream=newest.stream,
        created=min(times, key=moment, default=""),
        seq=min(map(position, counted)),
        time=min(mark.time for mark in counted),
        sample=max(samples, key=lambda sample: sample.time, default=None),
        last_stored=max((mark.last_stored for mark in files if mark.last_stored is not None), default=None),
        bucket_time=next((mark.bucket_time for mark in counted if mark.bucket_time != STREAM_TIME), STREAM_TIME),
        filters=_together([mark.filters if mark in present else mark.filters[-1:] for mark in counted]),
        counted=tuple(counted),
        files=tuple(files),
    )


def _together(histories: Sequence[tuple[Filters, ...]]) -> tuple[tuple[int, Subjects], ...]:
    """Merge the filters of several consumers: pairs of a sequence and the subjects selected after it."""
    parts = [list(stretches(history)) for history in histories if history]
    result: list[tuple[int, Subjects]] = []
    for first in sorted({part.first for history in parts for part in history}):
        covering = [next(part for part in history if part.first <= first <= part.last) for history in parts]
        subjects = union(candidate for part in covering for candidate in part.candidates)
        if not result or result[-1][1] != subjects:
            result.append((first - 1, subjects))
    return tuple(result)


def time_text(time: datetime) -> str:
    """Write a time as RFC 3339 in UTC, with microseconds."""
    return format_time(time, precision="microseconds")


def directory(stream: str) -> str:
    """The directory of a stream's files, relative to the archive's root."""
    return f"{DIRECTORY}/{stream}"


def path(stream: str, consumer: str) -> str:
    """The file's path, relative to the archive's root."""
    return f"{directory(stream)}/{consumer}.json"


def read(
    stream: str, paths: Iterable[str], contents: Callable[[list[str]], Iterable[bytes | None]], *, future: bool = True
) -> Watermark | None:
    """Read the watermark of `stream` from its files; None without any. `contents` reads files, None for a removed one.

    Raises JetcaptureError for a file that is damaged, of another stream, or, unless `future`, in the future.
    """
    marks = []
    for path_, data in metadata.present(paths, contents):
        marks.append(mark := ConsumerWatermark.decode(data, stream, path_))
        if not future and mark.time > datetime.now(UTC) + READER_MARGIN:
            raise JetcaptureError(
                f"{path_} says that everything up to {time_text(mark.time)} is stored, which is in the future: a "
                "server's clock was wrong, or this machine's is; a running capture corrects it"
            )
    return minimum(marks)
