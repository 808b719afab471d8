"""Remember the last stored objects and the reasons for quarantine, a bounded number of each, and log them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.log import event

log = logging.getLogger("jetcapture.capture")

SUMMARY_EVERY = 60.0
"""Seconds between log lines about quarantined messages, after the first one."""
MAX_LOGGED_REASONS = 5
MAX_OBJECTS = 10
MAX_REASONS = 20
_NEW_REASONS = 5
"""Maximum reasons kept of one batch. Error texts may contain values, so a batch can have one per message."""


class RecentObject(NamedTuple):
    """An object: its `path` in the archive, its `location` as the store knows it, and when it was `acknowledged`."""

    path: str
    location: str
    messages: int
    rows: int
    bytes: int
    sealed_by: str
    acknowledged: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineReason:
    """Messages quarantined at `stage` with `error`, and the last one of them."""

    stage: str
    error: str
    messages: int
    seq: int
    subject: str
    time: datetime


class Recent:
    """The last objects, newest first, and the last reasons for the quarantine, since the process started."""

    def __init__(self) -> None:
        self.objects: deque[RecentObject] = deque(maxlen=MAX_OBJECTS)
        self._reasons: dict[tuple[str, str], QuarantineReason] = {}  # least recently seen first

    @property
    def reasons(self) -> Sequence[QuarantineReason]:
        """The reasons, the last seen one first."""
        return tuple(reversed(self._reasons.values()))

    def quarantined(self, rows: pa.RecordBatch, now: datetime) -> Mapping[str, int]:
        """Count the reasons of quarantined messages; return the most frequent ones, `stage: error`, of these rows."""
        both = pc.binary_join_element_wise(
            rows.column(layout.STAGE), rows.column(layout.ERROR), "\n", null_handling="replace"
        )
        counted = pc.value_counts(both)
        most = pc.top_k_unstable(counted.field("counts"), _NEW_REASONS)
        reasons = {}
        for found in counted.take(most).to_pylist():
            stage, _, error = found["values"].partition("\n")
            last = pc.filter(rows.select([layout.SEQ, layout.SUBJECT]), pc.equal(both, found["values"]))
            row = last.slice(last.num_rows - 1).to_pylist()[0]
            reasons[f"{stage}: {error}"] = found["counts"]
            before = self._reasons.pop((stage, error), None)
            self._reasons[stage, error] = QuarantineReason(
                stage=stage,
                error=error,
                messages=found["counts"] + (before.messages if before else 0),
                seq=row[layout.SEQ],
                subject=row[layout.SUBJECT],
                time=now,
            )
        while len(self._reasons) > MAX_REASONS:
            del self._reasons[next(iter(self._reasons))]
        return reasons


class QuarantineLog:
    """Logs that messages are quarantined: when it begins, then a summary a minute while it goes on."""

    def __init__(self) -> None:
        self._messages = 0
        self._reasons: Counter[str] = Counter()
        self._first: dict[str, Any] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, rows: pa.RecordBatch, reasons: Mapping[str, int]) -> None:
        """Count quarantined messages and their most frequent reasons; log the first ones immediately."""
        if not self._messages:
            row = rows.slice(0, 1).to_pylist()[0]
            self._first = {"first_seq": row[layout.SEQ]}
            self._first |= {"first_stage": row[layout.STAGE], "first_error": row[layout.ERROR]}
        self._messages += rows.num_rows
        self._reasons.update(reasons)
        if len(self._reasons) > MAX_REASONS * _NEW_REASONS:  # texts with a value in them
            self._reasons = Counter(dict(self._reasons.most_common(MAX_REASONS)))
        if self._timer is None:
            self._tick()

    def end(self) -> None:
        """Log what has not been logged yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._summarize()

    def _tick(self) -> None:
        """Log a summary, and the next one in a while; after a while without any, the next message begins anew."""
        again = asyncio.get_running_loop().call_later
        self._timer = again(SUMMARY_EVERY, self._tick) if self._messages else None
        self._summarize()

    def _summarize(self) -> None:
        if not self._messages:
            return
        reasons = dict(self._reasons.most_common(MAX_LOGGED_REASONS))
        if other := self._messages - sum(reasons.values()):
            reasons["other"] = other
        event(log, logging.WARNING, "messages.quarantined", messages=self._messages, **self._first, reasons=reasons)
        self._messages = 0
        self._reasons.clear()
