"""Publish a partition of a replay's prepared messages, each once, at a pace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.errors import SourceError
from spark_jobs.publishing.prepare import ID, PAYLOAD, ROW, SEQ, SUBJECT, TIME
from spark_jobs.publishing.publish import DUE, publish_batches

RESULT = "published long, duplicates long"
_SECOND = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Gaps between rows: the difference of their timestamps divided by `speed` (None: no gap), at most `max_gap`
    seconds, and long enough for at most `rate` messages per second."""

    speed: float | None = None
    max_gap: float | None = None
    rate: float | None = None

    def gaps(self, timestamps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the gap before each timestamp except the first, in microseconds."""
        gaps = np.zeros(max(0, len(timestamps) - 1))
        if self.speed is not None:
            gaps = np.maximum(np.diff(timestamps), 0) / self.speed
            if self.max_gap is not None:
                gaps = np.minimum(gaps, self.max_gap * _SECOND)
        return gaps if self.rate is None else np.maximum(gaps, _SECOND / self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Publishes prepared messages in order. `apart`: every row of a message, not only the first."""

    login: NatsConfig
    window: int
    apart: bool = False
    pace: Pace | None = None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Publish a partition, for `mapInArrow`; the result has the columns of `RESULT`."""
        messages = batches if self.apart else _first_rows(batches)
        messages = messages if self.pace is None else _timed(messages, self.pace)
        published, duplicates = publish_batches(messages, self.login, self.window)
        yield pa.RecordBatch.from_pydict({"published": [published], "duplicates": [duplicates]})


def _first_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Keep the first row of each message: its other rows follow it and have the same payload."""
    last: list[object] | None = None
    for batch in batches:
        if not len(batch) or batch.column(ROW).null_count == len(batch):
            yield batch
            continue
        names = (SUBJECT, ID, TIME)
        new = np.zeros(len(batch), bool)
        for column in map(batch.column, names):
            same = pc.fill_null(pc.equal(column.slice(1), column.slice(0, len(column) - 1)), True)  # noqa: FBT003  TIME
            new[1:] |= ~same.to_numpy(zero_copy_only=False)
        new[0] = last != [batch.column(name)[0].as_py() for name in names]
        last = [batch.column(name)[-1].as_py() for name in names]
        firsts = batch.filter(pa.array(new))
        without = pc.and_(firsts.column(PAYLOAD).is_null(), pc.greater(firsts.column(ROW), 0))
        if (row := pc.index(without, True).as_py()) >= 0:
            text = "its payload is in its first row, which is not among the rows to publish"
            raise SourceError(f"message {firsts.column(SEQ)[row]}: {text}")
        yield firsts


def _timed(batches: Iterable[pa.RecordBatch], pace: Pace) -> Iterator[pa.RecordBatch]:
    """Add each row's due time, in microseconds after the first one."""
    before: npt.NDArray[np.int64] | None = None
    due = 0.0
    for batch in batches:
        times = pc.fill_null(batch.column(TIME), 0).to_numpy(zero_copy_only=False)
        if len(times):
            gaps = pace.gaps(np.concatenate([times[:1] if before is None else before, times]))
            gaps[0] = 0 if before is None else gaps[0]
            dues = due + np.cumsum(gaps)
            before, due = times[-1:], float(dues[-1])
            yield batch.append_column(DUE, pa.array(dues))
