"""The watermark of a capture, and its lag.

Both follow from the consumer's ack floor: a message is acknowledged only once it is stored.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from time import monotonic

from jetcapture_py.archive.incarnations import Origin
from jetcapture_py.archive.watermark import (
    MARGIN,
    Filters,
    Watermark,
    combined,
    decode,
    divided,
    merge_filters,
    path,
    time_text,
)
from jetcapture_py.config.units import moment_of
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.jetstream.consumer import ConsumerState, filters_of
from jetcapture_py.log import event
from jetcapture_py.store import NoteStore, change_note

log = logging.getLogger("jetcapture.capture")

SILENT = 20.0
"""Seconds without an answer after which the server's figures are old; it is asked every few seconds."""
_MAX_SAMPLES = 4096
_MICROSECOND = timedelta(microseconds=1)


def move_watermark(store: NoteStore, current: Watermark, consumer: ConsumerState, idle: timedelta) -> Watermark:
    """Merge `current` into the watermark's file, if that changes it; return the consumer's watermark in the file."""
    updates: list[WatermarkUpdate] = []

    def change(data: bytes | None) -> bytes | None:
        updates.append(update_watermark(data, current, consumer, idle))
        return updates[-1].data

    change_note(store, path(current.stream), change)
    for name, fields in updates[-1].warnings:
        event(log, logging.WARNING, name, **fields)
    return updates[-1].content


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkUpdate:
    """An update of the watermark's file."""

    content: Watermark
    """The watermark in the file afterwards."""
    data: bytes | None
    """What to write; None leaves the file as it is."""
    warnings: tuple[tuple[str, Mapping[str, object]], ...] = ()
    """Log events with their fields."""


def update_watermark(data: bytes | None, current: Watermark, state: ConsumerState, idle: timedelta) -> WatermarkUpdate:
    """Return how `current`, the watermark by the consumer's `state`, changes a file that contains `data`.

    A file of which only the time changed, by less than `idle`, stays unchanged. The content of an update is the part of
    this consumer.
    """
    warnings: list[tuple[str, Mapping[str, object]]] = []
    stored: Watermark | None = None
    if data is not None:
        try:
            stored = decode(data, current.stream)
        except JetcaptureError as error:
            warnings.append(("watermark.failed", {"error": error}))
    others: list[Watermark] = []
    if stored is not None and divided(stored, current):
        parts = {part.consumer: part for part in stored.parts or (stored,)}
        stored = parts.pop(current.consumer, None)
        others += parts.values()
    wrong = stored is not None and stored.time > state.asked + MARGIN
    if stored is not None and wrong:
        warnings.append(("watermark.corrected", {"was": time_text(stored.time), "now": time_text(current.time)}))
        stored = replace(stored, time=current.time)
    current = replace(current, filters=_joined(stored, current, state, warnings))
    new = current.after(stored)
    if stored is not None and not wrong and (new is None or _only_later(new, stored, idle)):
        return WatermarkUpdate(content=stored, data=None, warnings=tuple(warnings))
    new = new or stored or current
    return WatermarkUpdate(content=new, data=combined([*others, new]).encode(), warnings=tuple(warnings))


def _only_later(new: Watermark, old: Watermark, idle: timedelta) -> bool:
    return (
        replace(new, time=old.time, sample=old.sample, deliveries=old.deliveries) == old and new.time - old.time < idle
    )


def _joined(
    stored: Watermark | None, current: Watermark, state: ConsumerState, warnings: list[tuple[str, Mapping[str, object]]]
) -> tuple[Filters, ...]:
    """Return the filters of both; add a warning if they were changed."""
    if stored is None or (stored.created and current.created and stored.created != current.created):
        stored = replace(current, seq=0, filters=())
    for entry in current.filters:
        if stored.filters and (before := stored.filters[-1].subjects) != entry.subjects:
            seq = max(stored.seq, stored.filters[-1].after)
            warnings.append(("watermark.filters", {"seq": seq, "before": before, "now": entry.subjects}))
        delivered = state.delivered if entry is current.filters[-1] else entry.after
        stored = replace(stored, filters=merge_filters(stored, entry, delivered))
    return stored.filters


class Observer:
    """Translates the ack floor into time, using the messages that this replica has received.

    A message after sequence s has no earlier timestamp than that of s, so when everything up to s is stored, so is
    everything before that timestamp.
    """

    def __init__(self, stream: str, consumer: str) -> None:
        self._stream, self._consumer = stream, consumer
        self._samples: list[tuple[int, int]] = []
        self._seen: list[Filters] = []  # filters that are not in the watermark yet
        self.overtaken: tuple[int, int] | None = None
        """Sequence and timestamp of a message, if a later one had a lower sequence: the server may have lost it."""

    def began(self, state: ConsumerState) -> None:
        """Record the consumer's position and filters before anything is pulled: its filters until then are unknown."""
        self._seen = [_filters(state)]

    def recorded(self) -> None:
        """Forget the filters seen: the watermark has them."""
        self._seen.clear()

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
        """Start over: the stream gives sequences of received messages to new ones."""
        self._samples.clear()
        self.overtaken = None

    def lag(self, state: ConsumerState) -> timedelta:
        """Return the age of the oldest message that is not stored, as far as this replica knows.

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

    def watermark(self, state: ConsumerState, origin: Origin) -> Watermark | None:
        """Return the watermark that the consumer's state allows, None if it allows none.

        None for a consumer with `max_deliver`: its floor moves past messages that were never acknowledged.
        """
        now = _filters(state)
        if not self._seen or self._seen[-1].subjects != now.subjects:
            self._seen.append(now)
        if state.config.get("max_deliver", -1) > 0:
            return None
        if state.pending == 0 and state.unacked == 0:
            time = state.asked - MARGIN
            if self._samples and self._samples[-1][0] <= state.ack_floor:  # later messages have a later timestamp
                time = max(time, min(moment_of(self._samples[-1][1]), state.asked))
        else:
            later = bisect_right(self._samples, state.ack_floor, key=lambda sample: sample[0])
            if not later:
                return None
            del self._samples[: later - 1]
            earliest = min(timestamp for _, timestamp in self._samples)  # not the first one after a clock went back
            time = min(moment_of(earliest) - _MICROSECOND, state.asked)
        return Watermark(
            stream=self._stream,
            consumer=self._consumer,
            created=origin.created,
            deliveries=state.deliveries,
            sample=origin.sample,
            seq=state.ack_floor,
            time=time,
            filters=tuple(self._seen),
        )


def _filters(state: ConsumerState) -> Filters:
    """Return the consumer's filters; those before its last delivered message are unknown."""
    subjects = tuple(sorted(filters_of(state.config)))
    return Filters(after=state.delivered, subjects=subjects, consumer=state.created, deliveries=state.deliveries)
