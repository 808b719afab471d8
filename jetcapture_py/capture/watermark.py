"""The watermark of a capture, and its lag.

Both follow from the consumer's ack floor: a message is acknowledged only once it is stored.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

from msgspec.structs import replace

from jetcapture_py.archive.incarnations import Origin
from jetcapture_py.archive.watermark import (
    MARGIN,
    NEVER,
    ConsumerWatermark,
    Filters,
    StreamMessage,
    Stretch,
    Subjects,
    Watermark,
    all_covered,
    path,
    stretches,
    time_text,
    union,
)
from jetcapture_py.config.units import moment_of
from jetcapture_py.errors import JetcaptureError, MissingConsumerError, SourceError
from jetcapture_py.jetstream.connection import Api
from jetcapture_py.jetstream.consumer import ConsumerState, filters_of, is_consumer_of
from jetcapture_py.log import event
from jetcapture_py.store import NoteStore, change_note, removal_of

log = logging.getLogger("jetcapture.capture")

SILENT = 20.0
"""Seconds without an answer after which the server's figures are stale; it is asked every few seconds."""
_MAX_SAMPLES = 4096
_MAX_FILTERS = 100
_MICROSECOND = timedelta(microseconds=1)


def move_watermark(
    store: NoteStore, current: ConsumerWatermark, seen: Sequence[ConsumerState], idle: timedelta
) -> ConsumerWatermark:
    """Merge `current` into the consumer's file, if that changes it; return the file's content."""
    updates: list[WatermarkUpdate] = []

    def change(data: bytes | None) -> bytes | None:
        updates.append(update_watermark(data, current, seen, idle))
        return updates[-1].data

    change_note(store, path(current.stream, current.consumer), change)
    for name, fields in updates[-1].warnings:
        event(log, logging.WARNING, name, **fields)
    return updates[-1].content


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkUpdate:
    """An update of a consumer's file."""

    content: ConsumerWatermark
    """What the file contains afterwards."""
    data: bytes | None
    """Bytes to write; None leaves the file unchanged."""
    warnings: tuple[tuple[str, Mapping[str, object]], ...] = ()
    """Log events with their fields."""


def update_watermark(
    data: bytes | None, current: ConsumerWatermark, seen: Sequence[ConsumerState], idle: timedelta
) -> WatermarkUpdate:
    """Return how `current` changes a file that contains `data`.

    `seen` are consumer states that the file may lack; the last one is that of `current`. If only the time changed, by
    less than `idle`, the file stays unchanged.
    """
    warnings: list[tuple[str, Mapping[str, object]]] = []
    stored: ConsumerWatermark | None = None
    if data is not None:
        try:
            stored = ConsumerWatermark.decode(data, current.stream, path(current.stream, current.consumer))
        except JetcaptureError as error:
            warnings.append(("watermark.failed", {"error": error}))
    wrong = stored is not None and stored.time > seen[-1].asked + MARGIN
    if stored is not None and wrong:
        warnings.append(("watermark.corrected", {"was": time_text(stored.time), "now": time_text(current.time)}))
        stored = replace(stored, time=current.time)
    new = _merged(stored, current, seen, warnings)
    if stored is not None and not wrong and (new == stored or _only_later(new, stored, idle)):
        return WatermarkUpdate(content=stored, data=None, warnings=tuple(warnings))
    return WatermarkUpdate(content=new, data=new.encode(), warnings=tuple(warnings))


def _only_later(new: ConsumerWatermark, old: ConsumerWatermark, idle: timedelta) -> bool:
    same = replace(new, time=old.time, stream_message=old.stream_message, deliveries=old.deliveries) == old
    return same and new.time - old.time < idle


def _merged(
    stored: ConsumerWatermark | None,
    current: ConsumerWatermark,
    seen: Sequence[ConsumerState],
    warnings: list[tuple[str, Mapping[str, object]]],
) -> ConsumerWatermark:
    """Merge the file into `current`; add a warning for each change of filters."""
    first = (Filters(after=seen[0].delivered, subjects=_subjects(seen[0]), consumer=seen[0].created),)
    if stored is None or (stored.created and current.created and stored.created != current.created):
        time = NEVER if stored is None else stored.time  # messages of a recreated stream are later
        before = replace(current, seq=0, time=time, deliveries=0, filters=first)
    else:
        before = replace(stored, filters=stored.filters or first)
    for state in seen:
        last = before.filters[-1]
        if (subjects := _subjects(state)) != last.subjects:
            seq = max(before.seq, last.after)
            warnings.append(("watermark.filters", {"seq": seq, "before": last.subjects, "now": subjects}))
        before = observed(before, state)
    same = current.created and current.created == before.created  # unknown without permission to ask for it
    stored_at = [mark.last_stored for mark in (stored, current) if mark is not None and mark.last_stored is not None]
    return replace(
        current,
        seq=max(current.seq, before.seq) if same else current.seq,
        time=max(current.time, before.time),
        stream_message=current.stream_message or (before.stream_message if same else None),
        last_stored=max(stored_at, default=None),
        filters=before.filters[-_MAX_FILTERS:],
    )


def observed(mark: ConsumerWatermark, state: ConsumerState) -> ConsumerWatermark:
    """Return the watermark with the filters of the consumer's state.

    After a change, the server does not report how far it had searched with the earlier filters. A recreated consumer
    may have started after messages that the earlier one had not acknowledged. If it started before the watermark and
    selects more messages there, the watermark starts over. Its time starts over whenever more is selected, because it
    may have passed messages that are delivered only now.
    """
    *earlier, last = mark.filters
    subjects, same = _subjects(state), is_consumer_of(state, mark)
    if same and subjects == last.subjects:
        return replace(mark, filters=tuple(_closed(mark.filters, state.delivered)))
    decided, begins = max(mark.seq, last.after), state.delivered
    start = mark.seq if same and mark.seq < begins else begins  # of a consumer that was created again before
    certain, before = decided, mark.filters
    if not all_covered(subjects, last.subjects):
        mark = replace(mark, time=NEVER)
    if begins < decided and not _had_selected(before, start, decided, subjects):
        mark, joint = replace(mark, seq=0, time=NEVER), () if same else _joint(before, begins, decided, subjects)
        if joint:
            before = (*(entry for entry in before if entry.after <= begins), *joint)
        else:
            certain = start
    after = max(decided, begins)
    doubtful = (certain + 1, None if same else after) if same or certain < after else None
    new = Filters(after=after, subjects=subjects, consumer=last.consumer if same else state.created, doubtful=doubtful)
    if subjects == last.subjects and doubtful is None and before is mark.filters:
        return replace(mark, deliveries=state.deliveries, filters=(*earlier, replace(last, consumer=state.created)))
    return replace(mark, deliveries=state.deliveries, filters=(*before, new))


def _closed(filters: Sequence[Filters], delivered: int) -> Iterator[Filters]:
    """Yield the filters. A delivery after the last change ends its doubtful range."""
    *earlier, last = filters
    if not earlier:  # of replicas that start together, the first one knows best
        yield replace(last, after=min(last.after, delivered))
        return
    for entry in filters:
        if entry.doubtful is not None and entry.doubtful[1] is None and delivered > last.after:
            yield replace(entry, doubtful=(entry.doubtful[0], delivered))
        else:
            yield entry


def _certain(filters: Sequence[Filters], after: int, last: int) -> Sequence[Stretch]:
    """Return the stretches after a sequence, up to and with `last`; none if any is unknown or doubtful."""
    parts = [part for part in stretches(filters) if part.first <= last and part.last > after]
    return () if after < filters[0].after or any(part.doubtful for part in parts) else parts


def _had_selected(filters: Sequence[Filters], after: int, last: int, subjects: Subjects) -> bool:
    """Whether the filters certainly covered `subjects` in this range."""
    parts = _certain(filters, after, last)
    return bool(parts) and all(all_covered(subjects, part.candidates[0]) for part in parts)


def _joint(filters: Sequence[Filters], after: int, last: int, subjects: Subjects) -> Sequence[Filters]:
    """Return the union of the filters and `subjects`; nothing if uncertain."""
    consumer, joint = filters[-1].consumer, []
    for part in _certain(filters, after, last):
        both = union((part.candidates[0], subjects))
        if not both and () not in (part.candidates[0], subjects):  # patterns that overlap
            return ()
        joint.append(Filters(after=max(part.first - 1, after), subjects=both, consumer=consumer))
    return joint


class Observer:
    """Translates the ack floor into time, using the messages that this replica has received.

    Timestamps never decrease with the sequence. So when everything up to s is stored, so is everything before the
    timestamp of s.
    """

    def __init__(self, stream: str, consumer: str) -> None:
        self._stream, self._consumer = stream, consumer
        self._samples: list[tuple[int, int]] = []
        self.seen: list[ConsumerState] = []
        """Consumer states that may be missing from the file."""
        self.overtaken: tuple[int, int] | None = None
        """Sequence and timestamp of a message, if a newer one had no higher sequence: the server may have lost it."""

    def began(self, state: ConsumerState) -> None:
        """Record the consumer's state before the first pull; its earlier filters are unknown."""
        self.seen = [state]

    def recorded(self) -> None:
        """Forget the states that the file now has."""
        self.seen.clear()

    def saw(self, seq: int, timestamp: int) -> None:
        """Record a received message: its sequence, and its timestamp in microseconds since the epoch."""
        if self._samples and seq <= self._samples[-1][0]:
            if self.overtaken is None and timestamp > self._samples[-1][1]:
                self.overtaken = self._samples[-1]
            return
        self._samples.append((seq, timestamp))
        if len(self._samples) > _MAX_SAMPLES:
            del self._samples[1 : -_MAX_SAMPLES // 2 : 2]  # the oldest one tells the lag

    def forget(self) -> None:
        """Start over, because the stream reuses the sequences of received messages."""
        self._samples.clear()
        self.overtaken = None

    def lag(self, state: ConsumerState) -> timedelta:
        """Return the age of the oldest message that is not stored, as far as this replica can tell.

        Zero when everything is stored. The age of messages received elsewhere is estimated from those received here;
        the maximum over all replicas is exact. While the server does not answer, the lag grows: a message may have come
        right after its last answer.
        """
        silence = monotonic() - state.answered
        since = timedelta(seconds=silence if silence > SILENT else 0)
        if (state.pending == 0 and state.unacked == 0) or not self._samples:
            return since
        later = bisect_right(self._samples, state.ack_floor, key=lambda sample: sample[0])
        oldest = self._samples[min(later, len(self._samples) - 1)][1]
        return max(timedelta(), state.asked - moment_of(oldest)) + since

    def watermark(self, state: ConsumerState, origin: Origin) -> ConsumerWatermark | None:
        """Return the watermark for the consumer's state, without filters.

        None for a consumer with `max_deliver`: its floor moves past messages that were never acknowledged.
        """
        if not self.seen or _subjects(self.seen[-1]) != _subjects(state):
            self.seen.append(state)
        if state.config.get("max_deliver", -1) > 0:
            return None
        time = NEVER
        if state.pending == 0 and state.unacked == 0:
            time = state.asked - MARGIN
            if self._samples and self._samples[-1][0] <= state.ack_floor:  # later messages have a later timestamp
                time = max(time, min(moment_of(self._samples[-1][1]), state.asked))
        elif later := bisect_right(self._samples, state.ack_floor, key=lambda sample: sample[0]):
            del self._samples[: later - 1]
            earliest = min(timestamp for _, timestamp in self._samples)  # not the first one after a clock went back
            time = min(moment_of(earliest) - _MICROSECOND, state.asked)
        return ConsumerWatermark(
            stream=self._stream,
            consumer=self._consumer,
            created=origin.created,
            deliveries=state.deliveries,
            stream_message=StreamMessage.of(origin.sample),
            seq=state.ack_floor,
            time=time,
        )


def _subjects(state: ConsumerState) -> Subjects:
    return tuple(sorted(filters_of(state.config)))


async def abandoned(api: Api, archived: Watermark, own: str, url: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return deleted consumers, except `own`, whose files hold readers back, with a line about each.

    Skips consumers about which the server does not answer.
    """
    lines = {}
    for mark in archived.counted:
        try:
            if mark.consumer != own:
                await api.request(f"CONSUMER.INFO.{mark.stream}.{mark.consumer}")
        except MissingConsumerError:
            remedy = removal_of(url, options, path(mark.stream, mark.consumer))
            lines[mark.consumer] = (
                f"consumer {mark.consumer} does not exist any more, and readers wait for its capture at sequence "
                f"{mark.seq}; if it was removed for good: {remedy}"
            )
        except SourceError:
            continue
    return lines
