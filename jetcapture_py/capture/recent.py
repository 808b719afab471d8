"""What was stored and quarantined last, for people: a bounded number of objects and of reasons."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout

MOST_OBJECTS = 10
MOST_REASONS = 20
_NEW_REASONS = 5
"""Reasons that are kept of one batch; each message may have one of its own, with a value in it."""


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
        self.objects: deque[RecentObject] = deque(maxlen=MOST_OBJECTS)
        self._reasons: dict[tuple[str, str], QuarantineReason] = {}  # least recently seen first

    @property
    def reasons(self) -> Sequence[QuarantineReason]:
        """The reasons, the last seen one first."""
        return tuple(reversed(self._reasons.values()))

    def quarantined(self, rows: pa.RecordBatch, now: datetime) -> None:
        """Count the reasons of quarantined messages."""
        if not rows.num_rows:
            return
        both = pc.binary_join_element_wise(
            rows.column(layout.STAGE), rows.column(layout.ERROR), "\n", null_handling="replace"
        )
        counted = pc.value_counts(both)
        most = pc.top_k_unstable(counted.field("counts"), _NEW_REASONS)
        for found in counted.take(most).to_pylist():
            stage, _, error = found["values"].partition("\n")
            last = pc.filter(rows.select([layout.SEQ, layout.SUBJECT]), pc.equal(both, found["values"]))
            row = last.slice(last.num_rows - 1).to_pylist()[0]
            before = self._reasons.pop((stage, error), None)
            self._reasons[stage, error] = QuarantineReason(
                stage=stage,
                error=error,
                messages=found["counts"] + (before.messages if before else 0),
                seq=row[layout.SEQ],
                subject=row[layout.SUBJECT],
                time=now,
            )
        while len(self._reasons) > MOST_REASONS:
            del self._reasons[next(iter(self._reasons))]
