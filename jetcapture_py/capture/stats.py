"""Counters of the process, and the current state of storing."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

from jetcapture_py.errors import FullStoreError, JetcaptureError, PermanentStoreError
from jetcapture_py.text import one_line

SLOW = 60.0
"""Seconds without an answer after which the store counts as hanging."""


class Histogram:
    """A histogram of durations in seconds; `total` is their sum."""

    BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

    def __init__(self) -> None:
        self.total = 0.0
        self._counts = [0] * (len(self.BOUNDS) + 1)

    def add(self, seconds: float) -> None:
        """Count one more."""
        self.total += seconds
        self._counts[bisect_left(self.BOUNDS, seconds)] += 1

    def cumulative(self) -> list[int]:
        """Return the cumulative count for each bound, and for infinity."""
        return list(accumulate(self._counts))


class Storing:
    """Attempts to store: durations of successful puts, `errors` by kind, and the current trouble.

    `last_success` is in seconds since the epoch, None before the first object. A *turn* is a group stored together.
    """

    def __init__(self) -> None:
        self.seconds = Histogram()
        self.errors: Counter[str] = Counter()
        self.retries = 0
        self.last_success: float | None = None
        self._asked: dict[object, float] = {}
        self._failing: dict[object, tuple[str, bool]] = {}  # why, and whether the store is full

    def began(self, turn: object, now: float) -> None:
        """An attempt starts."""
        self._asked[turn] = now

    def succeeded(self, seconds: float) -> None:
        """An object is stored."""
        self.seconds.add(seconds)
        self.last_success = time.time()

    def failed(self, turn: object, errors: list[Exception]) -> None:
        """Objects of this turn were not stored, and will be retried."""
        for error in errors:
            self.errors["permanent" if isinstance(error, PermanentStoreError) else "temporary"] += 1
        first = errors[0]
        reason = one_line(str(first) if isinstance(first, JetcaptureError) else first)
        self._failing[turn] = reason, isinstance(first, FullStoreError)
        self._asked.pop(turn, None)

    def ended(self, turn: object) -> None:
        """The turn ended: everything is stored, or given up."""
        self._asked.pop(turn, None)
        self._failing.pop(turn, None)

    def trouble(self, now: float) -> str | None:
        """Return in one line why objects are not being stored; None when they are, or when there are none."""
        for reason, _ in tuple(self._failing.values()):  # copied at once: other threads may ask
            return reason
        waited = now - min(tuple(self._asked.values()), default=now)
        return f"the store has not answered for {waited:.0f} s" if waited > SLOW else None

    @property
    def full(self) -> bool:
        """Whether objects are not stored because the store has no space left."""
        return any(full for _, full in tuple(self._failing.values())[:1])


@dataclass(slots=True)
class Stats:
    """Counters since the start: messages, rows, bytes of stored objects, blocks by seal reason, errors and retries."""

    received: int = 0
    redelivered: int = 0
    strays: int = 0
    quarantined: int = 0
    stored_messages: int = 0
    stored_rows: int = 0
    stored_bytes: int = 0
    stored_blocks: int = 0
    acked: int = 0
    sealed_by: Counter[str] = field(default_factory=Counter)
    unconfirmed_acks: int = 0
    on_stored_failures: Counter[str] = field(default_factory=Counter)
    stream_losses: Counter[str] = field(default_factory=Counter)
    storing: Storing = field(default_factory=Storing)

    def fields(self) -> dict[str, Any]:
        """All counters by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "storing"}
        counts = {
            "sealed_by": dict(self.sealed_by),
            "on_stored_failures": self.on_stored_failures.total(),
            "stream_losses": self.stream_losses.total(),
        }
        return {**values, **counts, "store_errors": self.storing.errors.total()}
