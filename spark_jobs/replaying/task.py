"""A replay's Spark task: compute message ids, provenance and due times as columns, then publish."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.errors import SourceError
from jetcapture_py.reading.convert import rfc3339
from jetcapture_py.transform.frames import unescaped
from spark_jobs.publishing.instructions import instructs, without_instructions
from spark_jobs.publishing.publish import DUE, EXTRA, LINES, publish_batches

STREAM, SEQ, TIMESTAMP, ROW, RAW_HEADERS = "stream", "seq", "timestamp", "row", "raw_headers"
"""Optional columns besides `subject`, `payload` and `headers`; timestamps in microseconds."""
ESCAPED = "escaped"
"""Optional column: whether the subject is made of one that is not UTF-8, and has its bytes as escapes."""
MISSING = "missing"
"""Optional column that describes, for rows without a subject, the part that is null and the row."""
FROM_STREAM, FROM_SEQ, FROM_TIME = "Jetcapture-Stream", "Jetcapture-Sequence", "Jetcapture-Timestamp"
FROM_ROW, REPLAY = "Jetcapture-Row", "Jetcapture-Replay"
RESULT = "published long, duplicates long"

_PROVENANCE = (FROM_STREAM, FROM_SEQ, FROM_TIME, FROM_ROW, REPLAY)
_VERSION = b"NATS/1.0"
_SECOND = 1_000_000

_Batches = Iterable[pa.RecordBatch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Gaps between rows: the difference of their timestamps divided by `speed` (None: no gap), at most `max_gap`
    seconds, and long enough for at most `rate` messages per second."""

    speed: float | None = None
    max_gap: float | None = None
    rate: float | None = None

    def gaps(self, timestamps: Any) -> Any:
        """Return the gap before each timestamp except the first, in microseconds, as a float array."""
        gaps = np.zeros(max(0, len(timestamps) - 1))
        if self.speed is not None:
            gaps = np.maximum(np.diff(timestamps), 0) / self.speed
            if self.max_gap is not None:
                gaps = np.minimum(gaps, self.max_gap * _SECOND)
        return gaps if self.rate is None else np.maximum(gaps, _SECOND / self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Settings of a publishing task.

    `recreated`: the stream was recreated and its sequences started again, so message ids include the timestamp:
    `<stream>:<seq>:<replay id>@<microseconds>`. `apart`: publish every row of a message, not only the first. `stored`
    as in `Publisher.publish_batch`. `kept` names headers to publish although they are instructions to a server.
    """

    login: NatsConfig
    replay_id: str
    window: int
    recreated: bool = False
    apart: bool = False
    stored: bool = False
    pace: Pace | None = None
    kept: tuple[str, ...] = ()

    def function(self) -> Callable[[_Batches], Iterator[pa.RecordBatch]]:
        """Return the function for `mapInArrow`; its result has the columns of `RESULT`."""

        def publish(batches: _Batches) -> Iterator[pa.RecordBatch]:
            published, duplicates = self.publish(batches)
            yield pa.RecordBatch.from_pydict({"published": [published], "duplicates": [duplicates]})

        return publish

    def publish(self, batches: _Batches) -> tuple[int, int]:
        """Publish all rows; return the counts of `publish_batches`."""
        prepare = _Preparation(self)
        return publish_batches(map(prepare, batches), self.login, self.window, stored=self.stored)


class _Preparation:
    """Turns one task's batches into the columns of `publish_batches`, in order."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._last: dict[str, Any] | None = None  # identity of the last row
        self._timestamp: int | None = None
        self._due = 0.0

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if ROW in batch.schema.names and not self._task.apart:
            batch = self._first_rows(batch)
        given = dict(zip(batch.schema.names, batch.columns, strict=True))
        if self._task.stored and ROW in given:
            without = pc.and_(given["payload"].is_null(), pc.greater(given[ROW], 0))
            if (row := pc.index(without, True).as_py()) >= 0:
                text = "its payload is in its first row, which is not among the rows to publish"
                raise SourceError(f"message {given[SEQ][row].as_py()}: {text}")
        if MISSING in given and given[MISSING].null_count < batch.num_rows:
            raise SourceError(f"a row has no subject: {given[MISSING].drop_null()[0]}")
        subjects = unescaped(given["subject"], given[ESCAPED]) if ESCAPED in given else given["subject"]
        columns = {"subject": subjects, "payload": given["payload"]}
        if "headers" in given:
            columns["headers"] = without_instructions(given["subject"], given["headers"], self._task.kept)
        if RAW_HEADERS in given:
            lines = [None if raw is None else _lines(raw, self._task.kept) for raw in given[RAW_HEADERS].to_pylist()]
            columns[LINES] = pa.array(lines, pa.binary())
        if STREAM in given:
            columns |= self._identity(given, batch.num_rows)
        if self._task.pace is not None:
            columns[DUE] = self._dues(given.get(TIMESTAMP), batch.num_rows)
        return pa.RecordBatch.from_pydict(columns)

    def _first_rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Keep the first row of each message: its other rows follow it and have the same payload."""
        if not batch.num_rows:
            return batch
        names = [name for name in ("subject", STREAM, SEQ, TIMESTAMP) if name in batch.schema.names]
        new = np.zeros(batch.num_rows, bool)
        new[0] = self._last is None
        for name in names:
            column = batch.column(name)
            if self._last is not None:
                new[0] |= self._last[name] != column[0].as_py()
            changed = pc.fill_null(pc.not_equal(column.slice(1), column.slice(0, len(column) - 1)), True)  # noqa: FBT003
            new[1:] |= changed.to_numpy(zero_copy_only=False)
        self._last = {name: batch.column(name)[-1].as_py() for name in names}
        return batch.filter(pa.array(new))

    def _identity(self, given: dict[str, pa.Array], rows: int) -> dict[str, pa.Array]:
        """Compute message ids and provenance headers."""
        task = self._task
        seqs = given[SEQ].cast(pa.string())
        replay = pa.repeat(pa.scalar(task.replay_id), rows)
        found = {EXTRA + FROM_STREAM: given[STREAM], EXTRA + FROM_SEQ: seqs}
        parts = [given[STREAM], seqs, replay]
        if TIMESTAMP in given:
            found[EXTRA + FROM_TIME] = rfc3339(given[TIMESTAMP])
            if task.recreated:
                parts[2] = pc.binary_join_element_wise(replay, given[TIMESTAMP].cast(pa.string()), "@")
        if task.apart and ROW in given:
            found[EXTRA + FROM_ROW] = given[ROW].cast(pa.string())
            parts.append(found[EXTRA + FROM_ROW])
        found[EXTRA + REPLAY] = replay
        found["id"] = pc.binary_join_element_wise(*parts, ":", null_handling="skip")
        return found

    def _dues(self, timestamps: pa.Array | None, rows: int) -> pa.Array:
        """Return when each row is due, in microseconds after the task's first row."""
        task, times = self._task, np.zeros(rows)
        if timestamps is not None:
            times = timestamps.to_numpy(zero_copy_only=False).astype(np.float64)
        if task.pace is None or not rows:
            return pa.array(times, pa.float64())
        before = times[:1] if self._timestamp is None else np.array([self._timestamp])
        gaps = task.pace.gaps(np.concatenate([before, times]))
        if self._timestamp is None:
            gaps[0] = 0
        dues = self._due + np.cumsum(gaps)
        self._timestamp, self._due = times[-1], float(dues[-1])
        return pa.array(dues)


def _lines(raw: bytes, kept: tuple[str, ...]) -> bytes:
    """Return the lines of an unparsable header block without instructions to the server and provenance."""
    first, *others = raw.split(b"\r\n")
    lines = [line for line in (*(() if first.startswith(_VERSION) else (first,)), *others) if line]
    names = (line.partition(b":")[0].decode("utf-8", "replace") for line in lines)
    return b"".join(
        line + b"\r\n"
        for line, name in zip(lines, names, strict=True)
        if not instructs(name, kept) and name not in _PROVENANCE
    )
