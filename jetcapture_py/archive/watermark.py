"""The watermark: up to which position and time of the stream everything is stored.

    {store.url}/_watermark/{stream}.json

It follows the consumer's ack floor, because a message is acknowledged only once it is stored. Any replica may write
it, and none moves it backward, with one exception: a time in the future comes from a clock that was wrong.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from jetcapture_py.errors import JetcaptureError
from jetcapture_py.jetstream.admin import ConsumerState, filters_of

DIRECTORY = "_watermark"
MARGIN = timedelta(seconds=5)
"""How far apart the clocks of the stream's leader and the consumer's may be."""
READER_MARGIN = timedelta(minutes=5)
"""How far the clock of a machine that reads the archive may be behind the servers'."""
_MOST_SAMPLES = 4096
_MOST_FILTERS = 100
_MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The consumer's filter subjects, sorted, none for all, by which it selected the messages after sequence `after`.

    Unless they are `sure`, they had just been changed, and the server may have skipped messages that they match.
    """

    after: int
    subjects: tuple[str, ...]
    sure: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """Every message of the stream that the consumer's filters match, up to and with sequence `seq`, and every one
    whose `_nats_timestamp` is not after `time` (UTC), is in the archive or the quarantine.

    `created` is when the stream was created, as the server writes it, "" where unknown: a recreated stream counts
    from 1 again. Times are those of the servers' clocks. `last_object` is the path of the object that was stored last,
    and when that was by its writer's clock, None where unknown.

    `filters` are the consumer's over time, in order, the last ones the present ones. Each holds for the messages after
    its `after`, up to and with that of the next; before the first they are not known. A change that was undone before
    any replica saw it is not in them.
    """

    stream: str
    consumer: str
    created: str
    seq: int
    time: datetime
    last_object: tuple[str, datetime] | None = None
    filters: tuple[Filters, ...] = ()

    def encode(self) -> bytes:
        """The file's content."""
        fields: dict[str, Any] = {
            "format": 1,
            "stream": self.stream,
            "consumer": self.consumer,
            "stream_created": self.created,
            "seq": self.seq,
            "time": _text(self.time),
        }
        if self.last_object is not None:
            fields |= {"last_object": self.last_object[0], "last_stored": _text(self.last_object[1])}
        if self.filters:
            fields["filters"] = [asdict(each) for each in self.filters]
        return json.dumps(fields).encode() + b"\n"

    def after(self, other: Watermark | None) -> Watermark | None:
        """This one, with what `other` knew beyond it; None when it says nothing new."""
        if other is None:
            return self
        same = self.created and self.created == other.created  # without permission to ask for it, it is unknown
        seq = max(self.seq, other.seq) if same else self.seq
        objects = [found for found in (self.last_object, other.last_object) if found is not None]
        last = max(objects, key=lambda found: found[1], default=None)
        merged = replace(self, seq=seq, time=max(self.time, other.time), last_object=last)
        return None if merged == other else merged


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What becomes of the file: `data` is to be written, None leaves it as it is; `there` is what it says afterwards.

    `warnings` are events, with their fields, of what was wrong with it or has changed.
    """

    there: Watermark
    data: bytes | None
    warnings: tuple[tuple[str, Mapping[str, object]], ...] = ()


def move(data: bytes | None, found: Watermark, state: ConsumerState, idle: timedelta) -> Move:
    """What `found`, which is what the consumer's `state` says, makes of the file that has `data` in it now.

    Where only the time is new, and by less than `idle`, it stays as it is.
    """
    warnings: list[tuple[str, Mapping[str, object]]] = []
    there: Watermark | None = None
    if data is not None:
        try:
            there = decode(data, found.stream)
        except JetcaptureError as error:
            warnings.append(("watermark.failed", {"error": error}))
    wrong = there is not None and there.time > state.asked + MARGIN
    if there is not None and wrong:
        warnings.append(("watermark.corrected", {"was": _text(there.time), "now": _text(found.time)}))
        there = replace(there, time=found.time)
    if there is not None:
        found = replace(found, filters=_joined(there, found, state, warnings))
    new = found.after(there)
    if there is not None and not wrong and (new is None or _only_later(new, there, idle)):
        return Move(there=there, data=None, warnings=tuple(warnings))
    new = new or there or found
    return Move(there=new, data=new.encode(), warnings=tuple(warnings))


def _only_later(new: Watermark, old: Watermark, idle: timedelta) -> bool:
    return replace(new, time=old.time) == old and new.time - old.time < idle


def _joined(
    there: Watermark, found: Watermark, state: ConsumerState, warnings: list[tuple[str, Mapping[str, object]]]
) -> tuple[Filters, ...]:
    """The filters of both.

    When filters are changed, the server does not say how far it has looked for messages, only which one it delivered
    last. What comes after a message that was delivered later was selected by the new filters.
    """
    other_life = there.created and found.created and there.created != found.created
    if not there.filters or not found.filters or other_life:
        return found.filters
    last, own = there.filters[-1], found.filters[-1]
    if last.subjects != own.subjects:
        warnings.append(("watermark.filters", {"seq": there.seq, "before": last.subjects, "now": own.subjects}))
        stored = max(there.seq, last.after)
        places = sorted({stored, max(stored, state.delivered)})
        new = tuple(Filters(after=place, subjects=own.subjects, sure=False) for place in places)
    elif not last.sure and state.delivered > last.after:
        new = (Filters(after=state.delivered, subjects=own.subjects),)
    elif len(there.filters) == 1:
        return (min(last, own, key=lambda each: each.after),)
    else:
        new = ()
    return (*there.filters, *new)[-_MOST_FILTERS:]


def _text(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def path(stream: str) -> str:
    """The file's path, relative to the archive's root."""
    return f"{DIRECTORY}/{stream}.json"


def decode(data: bytes, stream: str | None = None) -> Watermark:
    """Read the file's content. Raises JetcaptureError when it is none, or that of another stream than `stream`."""
    try:
        fields = json.loads(data)
        last = (str(fields["last_object"]), _time(fields["last_stored"])) if "last_object" in fields else None
        filters = [
            Filters(after=int(each["after"]), subjects=tuple(each["subjects"]), sure=bool(each.get("sure", True)))
            for each in fields.get("filters", ())
        ]
        found = Watermark(
            stream=str(fields["stream"]),
            consumer=str(fields["consumer"]),
            created=str(fields["stream_created"]),
            seq=int(fields["seq"]),
            time=_time(fields["time"]),
            last_object=last,
            filters=tuple(filters),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise JetcaptureError(f"the watermark is damaged: {error!r}") from error
    if stream is not None and found.stream != stream:
        raise JetcaptureError(f"the watermark is wrong: it is that of stream {found.stream}, not of {stream}")
    return found


def read(fs: Any, root: str, stream: str) -> Watermark | None:
    """The watermark of `stream` in the archive at `root` of an fsspec file system; None when there is none.

    Raises JetcaptureError when it cannot be read, or cannot be true.
    """
    try:
        data: bytes = fs.cat_file(f"{root.rstrip('/')}/{path(stream)}")
    except FileNotFoundError:
        return None
    except Exception as error:  # each fsspec backend has errors of its own
        raise JetcaptureError(f"cannot read the watermark of {stream}: {error}") from error
    found = decode(data, stream)
    if found.time > datetime.now(UTC) + READER_MARGIN:
        raise JetcaptureError(
            f"the watermark of {stream} says that everything up to {_text(found.time)} is stored, which is in the "
            "future: a server's clock was wrong, or this machine's is; a running capture corrects it"
        )
    return found


class Observer:
    """Knows what the ack floor means in time, from the messages that this replica has received.

    A message after sequence s has no earlier timestamp than that of s, so when everything up to s is stored, so is
    everything before that timestamp.
    """

    def __init__(self, stream: str, consumer: str) -> None:
        self._stream, self._consumer = stream, consumer
        self._samples: list[tuple[int, int]] = []
        self._began = 0

    def began(self, state: ConsumerState) -> None:
        """Note where the consumer stands before anything is pulled: which filters it had until then is not known."""
        self._began = state.delivered

    def saw(self, seq: int, timestamp: int) -> None:
        """A message was received: its sequence, and its timestamp in microseconds since the epoch."""
        if self._samples and seq <= self._samples[-1][0]:
            return
        self._samples.append((seq, timestamp))
        if len(self._samples) > _MOST_SAMPLES:
            del self._samples[: -_MOST_SAMPLES // 2 : 2]

    def lag(self, state: ConsumerState) -> timedelta:
        """How long the oldest message that is not stored yet has been in the stream, as far as this replica knows.

        Nothing when everything is stored. Of messages that it has not received, only those that it has say how old
        they may be; the largest value of all replicas is the right one.
        """
        if (state.pending == 0 and state.unacked == 0) or not self._samples:
            return timedelta()
        place = bisect_right(self._samples, state.ack_floor, key=lambda sample: sample[0])
        oldest = self._samples[min(place, len(self._samples) - 1)][1]
        return max(timedelta(), state.asked - _EPOCH - timedelta(microseconds=oldest))

    def watermark(self, state: ConsumerState, created: str) -> Watermark | None:
        """What the consumer's state says, if it says anything.

        Nothing for a consumer with `max_deliver`: its floor passes messages that were never acknowledged.
        """
        if state.config.get("max_deliver", -1) > 0:
            return None
        if state.pending == 0 and state.unacked == 0:
            time = state.asked - MARGIN
        else:
            place = bisect_right(self._samples, state.ack_floor, key=lambda sample: sample[0])
            if not place:
                return None
            del self._samples[: place - 1]
            earliest = min(timestamp for _, timestamp in self._samples)  # not the first where a clock has gone back
            time = min(_EPOCH + timedelta(microseconds=earliest) - _MICROSECOND, state.asked)
        return Watermark(
            stream=self._stream,
            consumer=self._consumer,
            created=created,
            seq=state.ack_floor,
            time=time,
            filters=(Filters(after=self._began, subjects=tuple(sorted(filters_of(state.config)))),),
        )
