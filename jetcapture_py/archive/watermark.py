"""The watermark: up to which position and time of the stream everything is stored.

    {store.url}/_watermark/{stream}.json

It follows the consumer's ack floor, because a message is acknowledged only once it is stored. Any replica may write
it, and none moves it backward, with one exception: a time in the future comes from a clock that was wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from jetcapture_py.archive.incarnations import Origin, Sample
from jetcapture_py.archive.layout import STREAM_TIME
from jetcapture_py.config.subjects import covers, overlaps
from jetcapture_py.config.units import format_time, microseconds_of, moment_of
from jetcapture_py.errors import JetcaptureError

DIRECTORY = "_watermark"
MARGIN = timedelta(seconds=5)
"""Maximum clock difference between the leaders of the stream and of the consumer."""
READER_MARGIN = timedelta(minutes=5)
"""Maximum delay of a reader's clock against the servers'."""
_MAX_FILTERS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The consumer's filter subjects, sorted, none for all, by which it selected the messages after sequence `after`.

    Unless they are `sure`, they had just been changed, and the server may have skipped messages that they match, or
    delivered others by the filters before them.
    """

    after: int
    subjects: tuple[str, ...]
    sure: bool = True
    consumer: str = ""
    """When the consumer was created, as the server writes it; "" if unknown. Another one starts over."""
    until: int | None = None
    """The last sequence that they selected, of a consumer that was created again since; else None."""
    deliveries: int = field(default=0, compare=False)
    """Deliveries that the consumer had made by then; not in the file."""
    repaired: bool = False
    """A repair has stored messages here, so that archived messages do not tell what the consumer selected."""

    def fields(self) -> dict[str, Any]:
        """Return the entry of the watermark's file."""
        optional = {"consumer": self.consumer, "until": self.until, "repaired": self.repaired}
        known = {name: value for name, value in optional.items() if value not in ("", None, False)}
        return {"after": self.after, "subjects": self.subjects, "sure": self.sure, **known}


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """Every message of the stream that the consumer's filters match, up to and with sequence `seq`, and every one
    whose `_nats_timestamp` is not after `time` (UTC), is in the archive or the quarantine.

    A recreated stream counts from 1 again. Times are those of the servers' clocks.
    """

    stream: str
    consumer: str
    created: str
    """First known creation time of the stream; "" if unknown."""
    seq: int
    time: datetime
    deliveries: int = 0
    """Deliveries that the consumer has made, which identify it; 0 if unknown."""
    sample: Sample | None = None
    """A message of the stream, not necessarily one that is stored; None if unknown."""
    last_stored: datetime | None = None
    """When an object was stored last, by its writer's clock; None if unknown."""
    filters: tuple[Filters, ...] = ()
    """The consumer's filters over time, in order, the last ones the present ones.

    Each holds for the messages after its `after`, up to and with that of the next, or its `until`; before the first of
    a consumer they are not known. A change that was undone before any replica saw it is not in them.
    """
    key_rule: str | None = None
    """The rule for keys of the capture that wrote it, as in footers; None if unknown."""
    interval: int = 0
    """Its `block.interval` in seconds; 0 if unknown."""
    bucket_time: str = STREAM_TIME
    """What buckets are made of.

    Unless it is the stream's timestamp, which `time` is about, a message may still join a bucket that ended before
    `time`.
    """
    parts: tuple[Watermark, ...] = ()
    """One of each consumer, if captures of several, with different subjects, store to this archive; else none. This one
    then is `combined` from them."""

    def of(self, consumer: str) -> Watermark:
        """Return the part of a consumer; this one if there is none."""
        return next((part for part in self.parts if part.consumer == consumer), self)

    @property
    def origin(self) -> Origin:
        return Origin(self.created, self.sample)

    def consumer_created(self, created: str, deliveries: int) -> str:
        """Return the consumer's creation time in this watermark if it is the same consumer, else `created`.

        Servers move creation times; a new consumer starts again at 0 `deliveries`.
        """
        known = self.filters[-1].consumer if self.filters else ""
        return known if known and 0 < self.deliveries <= deliveries else created

    def encode(self) -> bytes:
        fields = {"format": 1, "stream": self.stream} | self._fields()
        if self.parts:
            fields["captures"] = [part._fields() for part in self.parts]
        return json.dumps(fields).encode() + b"\n"

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "consumer": self.consumer,
            "stream_created": self.created,
            "seq": self.seq,
            "time": time_text(self.time),
        }
        if self.deliveries:
            fields["deliveries"] = self.deliveries
        if self.sample is not None:
            fields["stream_message"] = {
                "seq": self.sample.seq,
                "time": time_text(moment_of(self.sample.time)),
                "stream_created": self.sample.created,
            }
        if self.last_stored is not None:
            fields["last_stored"] = time_text(self.last_stored)
        if self.key_rule is not None:
            fields["key_rule"] = self.key_rule
        if self.interval:
            fields["interval"] = self.interval
        if self.filters:
            fields["filters"] = [entry.fields() for entry in self.filters]
        if self.bucket_time != STREAM_TIME:
            fields["bucket_time"] = self.bucket_time
        return fields

    def after(self, other: Watermark | None) -> Watermark | None:
        """Merge with `other`, an older one; None if that changes nothing in it."""
        if other is None:
            return self
        same = self.created and self.created == other.created  # without permission to ask for it, it is unknown
        seq = max(self.seq, other.seq) if same else self.seq
        last = _latest(self, other)
        sample = self.sample or (other.sample if same else None)
        merged = replace(self, seq=seq, time=max(self.time, other.time), sample=sample, last_stored=last)
        return None if merged == other else merged


def divided(there: Watermark, now: Watermark) -> bool:
    """Whether the watermark in the file is, or becomes with `now`, one of several consumers with different subjects.

    A consumer that may select the same messages as the one before takes its place instead, and so does any consumer of
    a recreated stream.
    """
    if there.parts:
        return True
    if there.created and now.created and there.created != now.created:
        return False
    if there.consumer == now.consumer or not there.filters or not now.filters:
        return False
    theirs, own = (mark.filters[-1].subjects or (">",) for mark in (there, now))
    return not any(overlaps(one, another) for one in theirs for another in own)


def combined(marks: Sequence[Watermark]) -> Watermark:
    """Return what holds for all of several consumers: the minimum of their positions and times.

    Those are left out whose messages another one, which has got as far, selects as well.
    """
    parts: list[Watermark] = []
    for index, mark in enumerate(marks):
        if not any(_replaces(other, mark) for other in (*parts, *marks[index + 1 :])):
            parts.append(mark)
    if len(parts) == 1:
        return replace(parts[0], parts=())
    created = max((part.created for part in parts), key=lambda text: (bool(text), text and _time(text)))
    slowest = min(parts, key=lambda part: (part.created == created, part.seq))
    newest = max(parts, key=lambda part: (part.created == created, part.time))
    return replace(
        slowest,
        created=created,
        seq=slowest.seq if slowest.created == created else 0,
        sample=newest.sample,
        time=min(part.time for part in parts),
        last_stored=_latest(*parts),
        filters=_union([part.filters if part.created == created else part.filters[-1:] for part in parts]),
        bucket_time=next((part.bucket_time for part in parts if part.bucket_time != STREAM_TIME), STREAM_TIME),
        parts=tuple(sorted(parts, key=lambda part: part.consumer)),
    )


def _latest(*marks: Watermark) -> datetime | None:
    """Return when the last object of any of several captures was stored; None if unknown."""
    return max((mark.last_stored for mark in marks if mark.last_stored is not None), default=None)


def _replaces(mark: Watermark, other: Watermark) -> bool:
    """Whether all that `other` promises, and will ever promise, `mark` does."""
    if mark.created != other.created or not mark.filters or not other.filters:
        return False
    last = mark.filters[-1]
    own, theirs = last.subjects or (">",), other.filters[-1].subjects or (">",)
    beyond = last.sure and last.after <= other.seq <= mark.seq and other.time <= mark.time
    return beyond and all(any(covers(pattern, subject) for pattern in own) for subject in theirs)


def _union(histories: Sequence[tuple[Filters, ...]]) -> tuple[Filters, ...]:
    """Return the subjects that any of several consumers selected, over time."""
    union = []
    for after in sorted({entry.after for history in histories for entry in history}):
        then = [
            next((entry for entry in reversed(history) if entry.after <= after), history[0])
            for history in histories
            if history
        ]
        every = not all(entry.subjects for entry in then)
        subjects = () if every else tuple(sorted({subject for entry in then for subject in entry.subjects}))
        union.append(Filters(after=after, subjects=subjects, sure=all(entry.sure for entry in then)))
    return tuple(union[-_MAX_FILTERS:])


def merge_filters(there: Watermark, now: Filters, delivered: int) -> tuple[Filters, ...]:
    """Return the history in `there`, continued with the consumer's filters `now`.

    `delivered` is the consumer's last delivered sequence. After a change of filters the server does not report how far
    it has searched. So a change adds one entry after the last position that is stored, and one after the last delivered
    message if that is later; both are unsure. Messages after one delivered later were selected by the new filters.
    """
    if not there.filters:
        return (now,)
    last = there.filters[-1]
    stored = max(there.seq, last.after)
    if last.consumer and now.consumer and last.consumer != now.consumer:
        now = replace(now, consumer=there.consumer_created(now.consumer, now.deliveries))
        if last.consumer != now.consumer:
            return (*there.filters[:-1], replace(last, until=stored), now)[-_MAX_FILTERS:]
    if last.subjects != now.subjects:
        positions = sorted({stored, max(stored, delivered)})
        new = tuple(replace(now, after=position, sure=False) for position in positions)
    elif not last.sure and delivered > last.after:
        new = (replace(now, after=delivered),)
    elif len(there.filters) == 1 or there.filters[-2].until is not None:
        return (*there.filters[:-1], min(last, now, key=lambda entry: entry.after))
    else:
        new = ()
    return (*there.filters, *new)[-_MAX_FILTERS:]


def time_text(time: datetime) -> str:
    """Write a time as RFC 3339 in UTC, with microseconds."""
    return format_time(time, precision="microseconds")


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def path(stream: str) -> str:
    """The file's path, relative to the archive's root."""
    return f"{DIRECTORY}/{stream}.json"


def decode(data: bytes, stream: str | None = None) -> Watermark:
    """Read the file's content. Raises JetcaptureError if damaged, or if it belongs to another stream than `stream`."""
    try:
        fields = json.loads(data)
        found = _decoded(str(fields["stream"]), fields)
        found = replace(found, parts=tuple(_decoded(found.stream, part) for part in fields.get("captures", ())))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise JetcaptureError(f"the watermark is damaged: {error!r}") from error
    if stream is not None and found.stream != stream:
        raise JetcaptureError(f"the watermark belongs to stream {found.stream}, not {stream}")
    return found


def _decoded(stream: str, fields: Mapping[str, Any]) -> Watermark:
    sample = None
    if message := fields.get("stream_message"):
        time = microseconds_of(_time(message["time"]))
        sample = Sample(int(message["seq"]), time, str(message["stream_created"]))
    filters = [
        Filters(
            after=int(entry["after"]),
            subjects=tuple(entry["subjects"]),
            sure=bool(entry.get("sure", True)),
            consumer=str(entry.get("consumer", "")),
            until=None if entry.get("until") is None else int(entry["until"]),
            repaired=bool(entry.get("repaired", False)),
        )
        for entry in fields.get("filters", ())
    ]
    return Watermark(
        stream=stream,
        consumer=str(fields["consumer"]),
        created=str(fields["stream_created"]),
        seq=int(fields["seq"]),
        time=_time(fields["time"]),
        deliveries=int(fields.get("deliveries", 0)),
        sample=sample,
        last_stored=_time(fields["last_stored"]) if "last_stored" in fields else None,
        filters=tuple(filters),
        key_rule=fields.get("key_rule"),
        interval=int(fields.get("interval", 0)),
        bucket_time=str(fields.get("bucket_time", STREAM_TIME)),
    )


def read(data: bytes | None, stream: str, *, future: bool = True) -> Watermark | None:
    """Read the watermark of `stream` from the content of its file; None without one.

    Raises JetcaptureError for one that is damaged, of another stream, or, unless `future`, in the future.
    """
    if data is None:
        return None
    mark = decode(data, stream)
    if not future and mark.time > datetime.now(UTC) + READER_MARGIN:
        raise JetcaptureError(
            f"the watermark of {stream} says that everything up to {time_text(mark.time)} is stored, which is in the "
            "future: a server's clock was wrong, or this machine's is; a running capture corrects it"
        )
    return mark
