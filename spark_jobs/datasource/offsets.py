"""Find the stream sequences where a read starts and ends, and divide a range among tasks.

An offset is the next sequence to read: `{"stream": "ORDERS", "created": "2026-…", "message": [100, …], "seq": 101}`
means that everything before sequence 101 has been read. The stream is recognized by its creation time, or else by one
of its messages: sequence, timestamp in microseconds, and the stream's creation time on the server then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Any

from pyspark.sql.datasource import InputPartition

from jetcapture_py.archive.incarnations import Origin, Sample
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.read_session import StreamState
from spark_jobs.datasource.options import ReadOptions
from spark_jobs.datasource.session import Session

GAP_SEARCH_TIME = 0.1
"""Seconds after which a limited batch is no longer extended over further gaps."""
_MIN_TASK_SIZE = 20_000
"""Minimum sequences per task, unless the user sets the number of tasks."""

LAST_PER_SUBJECT = "last_per_subject"


@dataclass(frozen=True, slots=True)
class StreamPartition(InputPartition):
    """One task's range: sequences `first` to `end` (exclusive) of the stream of `origin`.

    `per_subject` keeps only messages that are the last of their subject when they are read. `subjects` are a capture's
    filter subjects, empty for all.
    """

    first: int
    end: int
    origin: Origin
    per_subject: bool = False
    subjects: tuple[str, ...] = ()


class Positions:
    """Finds sequences in the stream of `options`. Raises SourceError when the server refuses or does not answer."""

    def __init__(self, session: Session, options: ReadOptions) -> None:
        self._session = session
        self._options = options
        self._stream = options.stream
        self.subjects = options.subjects

    def state(self) -> StreamState:
        """Return the current state of the stream."""
        return self._session.run(self._session.reads.state(self._stream))

    def know(self, origin: Origin) -> None:
        """Compare the stream with this origin from now on."""
        self._session.reads.know(self._stream, origin)

    def offset(self, state: StreamState, seq: int) -> dict[str, Any]:
        """Return an offset, with a message that a query has read, if any."""
        sample = state.ends.sample
        if sample is not None and state.first < seq <= state.last:
            time = self._session.run(self._session.reads.time_of(self._stream, seq - 1))
            sample = (
                replace(sample, seq=state.first, time=state.ends.first_time)
                if time is None
                else replace(sample, seq=seq - 1, time=time)
            )
        message = {} if sample is None else {"message": [sample.seq, sample.time, sample.created]}
        return {"stream": self._stream, "created": state.created, **message, "seq": seq}

    def first(self, state: StreamState) -> int:
        """Resolve `startingOffsets` or `startingTimestamp` to a sequence."""
        if self._options.starting_timestamp is not None:
            return self._at(self._options.starting_timestamp)
        start = self._options.starting_offsets
        if isinstance(start, int):
            return start
        if start in ("latest", "new"):
            return state.last + 1
        if start == "last":
            return self.last_match(state) or state.last + 1
        return state.first

    def end(self, state: StreamState) -> int:
        """Resolve `endingOffsets` or `endingTimestamp` to an exclusive sequence, at most the stream's end."""
        end = self._options.ending_offsets
        if self._options.ending_timestamp is not None:
            end = self._at(self._options.ending_timestamp)
        return min(end, state.last + 1) if isinstance(end, int) else state.last + 1

    def last_match(self, state: StreamState) -> int:
        """Return the sequence of the last matching message, 0 without one."""
        subjects = self._options.subjects or (">",)
        if ">" in subjects and not state.gaps:
            return state.last if state.first <= state.last else 0
        subjects = _EVERY_SUBJECT if ">" in subjects else subjects
        messages = [
            self._session.run(self._session.reads.message(self._stream, last_by_subj=subject)) for subject in subjects
        ]
        return max(0 if message is None else int(message["seq"]) for message in messages)

    def next_match(self, seq: int) -> int | None:
        """Return the sequence of the first matching message at or after `seq`; None without one."""
        return self._session.run(self._session.reads.next_match(self._stream, seq, self._options.subjects))

    def limited(self, first: int, end: int, limit: int, state: StreamState) -> int:
        """Return the end of a batch from `first` on: at most `end`, and at most `limit` existing sequences later.

        Gaps are found by requesting the next message after one sequence, then after two more, four more and so on until
        there is a gap. After `GAP_SEARCH_TIME`, the rest of `limit` counts as one run of sequences.
        """
        if end - first <= limit or not (state.gaps or self._options.subjects):
            return min(end, first + limit)
        deadline = time.monotonic() + GAP_SEARCH_TIME
        at, step = self.next_match(first), 1
        while at is not None and at < end and limit > 0:
            step = min(step, limit) if time.monotonic() < deadline else limit
            limit -= step
            after = at + step
            at = self.next_match(after)
            step = 2 * step if at == after else 1
        return end if at is None else min(at, end)

    def _at(self, moment: datetime) -> int:
        """Return the sequence of the first message stored at `moment` or later."""
        return self._session.run(self._session.reads.first_at(self._stream, moment))


class BatchEnds:
    """Finds the ends of batches. Requests the last matching message only after something was stored."""

    def __init__(self) -> None:
        self._known: tuple[tuple[str, ...], int] | None = None
        self._last = 0

    def end(self, positions: Positions, first: int, end: int, state: StreamState, limit: int | None) -> int:
        """Return the end of a batch from `first` on: at most `end`, and at most `limit` messages later.

        Without matching messages there is no batch, unless the query falls behind by more than half of the stream:
        otherwise, old messages that the stream removes would look like lost unread ones.
        """
        if self._known != (positions.subjects, state.last):
            self._last, self._known = positions.last_match(state), (positions.subjects, state.last)
        if self._last >= first:
            end = max(first, min(self._last + 1, end))
        elif end - first <= (state.last + 1 - state.first) / 2:
            return first
        return end if limit is None else positions.limited(first, max(first, end), limit, state)


_EVERY_SUBJECT = ("*", "*.>")
"""All subjects, as patterns that make the server search for the last message. For `>` it only checks the last sequence,
whose message may have been deleted."""


def check_stream(stream: str, offset: Mapping[str, Any]) -> None:
    """Raise SourceError for an offset of another stream."""
    if offset["stream"] != stream:
        raise SourceError(
            f"the checkpoint is one of stream {offset['stream']}, not of {stream}: give every query a "
            "checkpointLocation of its own, or set the option stream back"
        )


def origin_of(offset: Mapping[str, Any]) -> Origin:
    """Return the stream of an offset."""
    return Origin(str(offset["created"]), Sample(*offset["message"]) if "message" in offset else None)


def check_same(stream: str, expected: str, actual: str) -> None:
    """Raise SourceError if the stream's creation time is not the expected one: it has other messages."""
    if actual != expected:
        raise SourceError(
            f"stream {stream} was deleted and created again, or restored to an earlier sequence: it has other messages "
            "than those that were read; a streaming query needs a new checkpoint"
        )


def check_there(stream: str, first: int, state: StreamState) -> None:
    """Raise SourceError if messages from `first` on were removed, or the stream ends before `first - 1`."""
    if first < state.first:
        raise SourceError(
            f"messages {first} to {state.first - 1} of stream {stream} are gone: it starts at {state.first}; "
            "failOnDataLoss=false continues there"
        )
    if first > state.last + 1:
        raise SourceError(
            f"stream {stream} ends at {state.last}, before {first}: the server has lost messages, or the offset is "
            "wrong; failOnDataLoss=false continues at the end"
        )


def split(first: int, end: int, origin: Origin, parts: int | None) -> list[StreamPartition]:
    """Divide the range into equal parts: `parts` of them, or up to one per core while each is large enough."""
    size = end - first
    if size <= 0:
        return []
    if parts is None:
        parts = min(os.cpu_count() or 1, -(-size // _MIN_TASK_SIZE))
    parts = min(parts, size)
    bounds = [first + size * part // parts for part in range(parts + 1)]
    return [StreamPartition(low, high, origin) for low, high in pairwise(bounds)]
