"""The watermark: up to which position and time of the stream everything is stored.

    {store.url}/_watermark/{stream}.json

It follows the consumer's ack floor, because a message is acknowledged only once it is stored. Any replica may write
it, and none moves it backward. Two that write at the same moment may: what is written then is older, but true.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from jetcapture_py.admin import ConsumerState
from jetcapture_py.errors import JetcaptureError

DIRECTORY = "_watermark"
MARGIN = timedelta(seconds=5)
"""How far behind the stream's leader the consumer's may be."""
_MOST_SAMPLES = 4096
_MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """Every message of the stream that the consumer's filters match, up to and with sequence `seq`, and every one
    whose `_nats_timestamp` is not after `time` (UTC), is in the archive or the quarantine.

    `created` is when the stream was created, as the server writes it, "" where unknown: a recreated stream counts
    from 1 again. Times are those of the servers' clocks. `last_object` is the path of the object that was stored last,
    and when that was by its writer's clock, None where unknown.
    """

    stream: str
    consumer: str
    created: str
    seq: int
    time: datetime
    last_object: tuple[str, datetime] | None = None

    def encode(self) -> bytes:
        """The file's content."""
        fields = {
            "format": 1,
            "stream": self.stream,
            "consumer": self.consumer,
            "stream_created": self.created,
            "seq": self.seq,
            "time": _text(self.time),
        }
        if self.last_object is not None:
            fields |= {"last_object": self.last_object[0], "last_stored": _text(self.last_object[1])}
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


def _text(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def path(stream: str) -> str:
    """The file's path, relative to the archive's root."""
    return f"{DIRECTORY}/{stream}.json"


def decode(data: bytes) -> Watermark:
    """Read the file's content. Raises JetcaptureError when it is none."""
    try:
        fields = json.loads(data)
        last = (str(fields["last_object"]), _time(fields["last_stored"])) if "last_object" in fields else None
        return Watermark(
            stream=str(fields["stream"]),
            consumer=str(fields["consumer"]),
            created=str(fields["stream_created"]),
            seq=int(fields["seq"]),
            time=_time(fields["time"]),
            last_object=last,
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise JetcaptureError(f"the watermark is damaged: {error!r}") from error


def read(fs: Any, root: str, stream: str) -> Watermark | None:
    """The watermark of `stream` in the archive at `root` of an fsspec file system; None when there is none."""
    try:
        data: bytes = fs.cat_file(f"{root.rstrip('/')}/{path(stream)}")
    except FileNotFoundError:
        return None
    except Exception as error:  # each fsspec backend has errors of its own
        raise JetcaptureError(f"cannot read the watermark of {stream}: {error}") from error
    return decode(data)


class Observer:
    """Knows what the ack floor means in time, from the messages that this replica has received.

    A message after sequence s has no earlier timestamp than that of s, so when everything up to s is stored, so is
    everything before that timestamp.
    """

    def __init__(self, stream: str, consumer: str) -> None:
        self._stream, self._consumer = stream, consumer
        self._samples: list[tuple[int, int]] = []

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
            time = _EPOCH + timedelta(microseconds=self._samples[0][1]) - _MICROSECOND
        return Watermark(stream=self._stream, consumer=self._consumer, created=created, seq=state.ack_floor, time=time)
