"""Counters of a capture since its start, and the last objects and quarantine reasons."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.inferred import column_of
from jetcapture_py.capture.blocks import StoredBlock
from jetcapture_py.log import LogLimit, event
from jetcapture_py.text import one_line, without_credentials
from jetcapture_py.transform.prepare import Prepared

log = logging.getLogger("jetcapture.capture")

SUMMARY_EVERY = 60.0
"""Seconds between log lines about quarantined messages, after the first one."""
MAX_LOGGED_REASONS = 5
MAX_OBJECTS = 10
MAX_REASONS = 20
MAX_STAGES = 20
"""Maximum stages counted by name, because a custom decoder may name any. Further ones count as `other`."""
_MAX_EXAMINED = 20
"""Maximum rows of a batch whose rescued values are looked at."""
_MAX_EXAMPLE = 80
_MAX_COLUMNS = 1000
_AGAIN = 3600.0
"""Seconds after which a rescued value of the same column is logged again."""
_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_NEW_REASONS = 5
"""Maximum reasons kept of one batch. Error texts may contain values, so a batch can have one per message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentObject:
    """A stored object."""

    path: str
    """Path in the archive."""
    location: str
    """Location as the store knows it, without credentials."""
    link: str | None
    """The location, if a browser can open it."""
    messages: int
    rows: int
    bytes: int
    sealed_by: str
    acknowledged: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineReason:
    """Messages that were quarantined for the same reason."""

    stage: str
    error: str
    messages: int
    seq: int
    """Sequence of the last one."""
    subject: str
    """Subject of the last one."""
    time: datetime
    """When the last one was quarantined."""


class Quarantine:
    """Recent quarantine reasons. Logs the first quarantined messages at once, then a summary every minute."""

    def __init__(self) -> None:
        self.stages: Counter[str] = Counter()
        """Messages by the stage that failed, such as decode or key."""
        self._reasons: dict[tuple[str, str], QuarantineReason] = {}  # least recently seen first
        self._unlogged = 0  # messages that are not logged yet
        self._logged: Counter[str] = Counter()
        self._first: dict[str, Any] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def messages(self) -> int:
        """Messages quarantined since the start."""
        return self.stages.total()

    @property
    def reasons(self) -> Sequence[QuarantineReason]:
        """The reasons, the last seen one first."""
        return tuple(reversed(self._reasons.values()))

    def add(self, rows: pa.RecordBatch) -> None:
        """Count quarantined messages and their most frequent reasons; log the first ones immediately."""
        if not rows.num_rows:
            return
        if not self._unlogged:
            row = rows.slice(0, 1).to_pylist()[0]
            self._first = {"first_seq": row[layout.SEQ]}
            self._first |= {"first_stage": row[layout.STAGE], "first_error": row[layout.ERROR]}
        self._unlogged += rows.num_rows
        for stage in pc.value_counts(rows.column(layout.STAGE)).to_pylist():
            known = stage["values"] in self.stages or len(self.stages) < MAX_STAGES
            self.stages[stage["values"] if known else "other"] += stage["counts"]
        self._logged.update(self._counted(rows))
        if len(self._logged) > MAX_REASONS * _NEW_REASONS:  # error texts that contain a value
            self._logged = Counter(dict(self._logged.most_common(MAX_REASONS)))
        if self._timer is None:
            self._tick()

    def end(self) -> None:
        """Log the messages that are not logged yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._summarize()

    def _counted(self, rows: pa.RecordBatch) -> Mapping[str, int]:
        """Count the reasons of quarantined messages; return the most frequent ones, `stage: error`, of these rows."""
        both = pc.binary_join_element_wise(
            rows.column(layout.STAGE), rows.column(layout.ERROR), "\n", null_handling="replace"
        )
        counts = pc.value_counts(both)
        now, most_frequent = datetime.now(UTC), pc.top_k_unstable(counts.field("counts"), _NEW_REASONS)
        reasons = {}
        for reason in counts.take(most_frequent).to_pylist():
            stage, _, error = reason["values"].partition("\n")
            last = pc.filter(rows.select([layout.SEQ, layout.SUBJECT]), pc.equal(both, reason["values"]))
            row = last.slice(last.num_rows - 1).to_pylist()[0]
            reasons[f"{stage}: {error}"] = reason["counts"]
            before = self._reasons.pop((stage, error), None)
            self._reasons[stage, error] = QuarantineReason(
                stage=stage,
                error=error,
                messages=reason["counts"] + (before.messages if before else 0),
                seq=row[layout.SEQ],
                subject=row[layout.SUBJECT],
                time=now,
            )
        while len(self._reasons) > MAX_REASONS:
            del self._reasons[next(iter(self._reasons))]
        return reasons

    def _tick(self) -> None:
        """Log a summary and schedule the next one. After a minute without messages, the next one is logged at once."""
        again = asyncio.get_running_loop().call_later
        self._timer = again(SUMMARY_EVERY, self._tick) if self._unlogged else None
        self._summarize()

    def _summarize(self) -> None:
        if not self._unlogged:
            return
        reasons = dict(self._logged.most_common(MAX_LOGGED_REASONS))
        if other := self._unlogged - sum(reasons.values()):
            reasons["other"] = other
        event(log, logging.WARNING, "messages.quarantined", messages=self._unlogged, **self._first, reasons=reasons)
        self._unlogged = 0
        self._logged.clear()


class Rescued:
    """Messages with values that did not fit their columns. Logs the first value of each column, once an hour."""

    def __init__(self) -> None:
        self.messages = 0
        """Their rows since the start."""
        self.example: str | None = None
        """The last value logged, with its path."""
        self._limits: dict[str, LogLimit] = {}

    def add(self, rows: pa.RecordBatch) -> None:
        """Count the rows of a batch that have such values, and look at some of them."""
        at = rows.schema.get_field_index(layout.RESCUED)
        if at < 0 or not (count := len(rows.column(at)) - rows.column(at).null_count):
            return
        self.messages += count
        some = rows.select([layout.SEQ, layout.RESCUED]).filter(rows.column(at).is_valid()).slice(0, _MAX_EXAMINED)
        for row in some.to_pylist():
            try:
                values = _raw(row[layout.RESCUED])
            except RecursionError:  # nested hundreds of levels deep: it is counted
                continue
            for path, value in islice(values.items(), _MAX_COLUMNS):
                column = column_of(path)
                if column not in self._limits and len(self._limits) == _MAX_COLUMNS:
                    continue
                if self._limits.setdefault(column, LogLimit(_AGAIN)).due(time.monotonic()):
                    start = bytes(memoryview(value)[: 4 * _MAX_EXAMPLE]).decode(errors="replace")
                    self.example = f"{one_line(path, _MAX_EXAMPLE)} = {one_line(start, _MAX_EXAMPLE)}"
                    event(
                        log,
                        logging.WARNING,
                        "column.rescued",
                        column=column,
                        example=self.example,
                        seq=row[layout.SEQ],
                        messages=self.messages,
                    )


@dataclass(slots=True)
class Stats:
    """Messages received, stored and acknowledged since the capture's start."""

    received: int = 0
    redelivered: int = 0
    strays: int = 0
    stored_messages: int = 0
    stored_rows: int = 0
    stored_bytes: int = 0
    stored_blocks: int = 0
    acked: int = 0
    unconfirmed_acks: int = 0
    objects: deque[RecentObject] = field(default_factory=lambda: deque(maxlen=MAX_OBJECTS))
    """The last objects, newest first."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    rescued: Rescued = field(default_factory=Rescued)
    _stray_limit: LogLimit = field(default_factory=LogLimit)

    def count_prepared(self, prepared: Prepared) -> None:
        """Count a batch put into blocks."""
        self.received += prepared.messages
        self.redelivered += prepared.redelivered
        self.strays += prepared.strays
        self.quarantine.add(prepared.quarantine)
        self.rescued.add(prepared.rows)
        if frames := self._stray_limit.due(time.monotonic(), prepared.strays):
            event(log, logging.WARNING, "receive.strays", frames=frames)

    def count_stored(self, stored: Sequence[StoredBlock]) -> None:
        """Count and log stored blocks."""
        objects = [(stored_block, stored_block.name) for stored_block in stored if stored_block.name is not None]
        if not objects:
            return
        now, counts = datetime.now(UTC), Counter[str](blocks=len(objects))
        for stored_block, name in objects:
            counts.update(messages=stored_block.messages, rows=name.rows, bytes=stored_block.bytes)
        self.stored_blocks += counts["blocks"]
        self.stored_messages += counts["messages"]
        self.stored_rows += counts["rows"]
        self.stored_bytes += counts["bytes"]
        for stored_block, name in objects[-MAX_OBJECTS:]:
            shown = without_credentials(stored_block.location)
            can_be_opened = shown == stored_block.location and shown.startswith(("http://", "https://"))
            self.objects.appendleft(
                RecentObject(
                    path=name.path,
                    location=shown,
                    link=shown if can_be_opened else None,
                    messages=stored_block.messages,
                    rows=name.rows,
                    bytes=stored_block.bytes,
                    sealed_by=stored_block.block.sealed_by,
                    acknowledged=now,
                )
            )
        reasons = ",".join(sorted({stored_block.block.sealed_by for stored_block, _ in objects}))
        path = {"object": objects[0][1].path} if len(objects) == 1 else {}
        event(log, logging.INFO, "blocks.stored", **counts, sealed_by=reasons, **path)

    def fields(self) -> dict[str, int]:
        counts = {counter.name: getattr(self, counter.name) for counter in fields(self)}
        return {name: count for name, count in counts.items() if isinstance(count, int)} | {
            "quarantined": self.quarantine.messages
        }
