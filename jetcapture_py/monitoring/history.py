"""The last quarter of an hour of a capture, and the times when its readiness changed.

Samples are differences of the capture's counters; nothing is done per message.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from jetcapture_py.monitoring.health import Health, health
from jetcapture_py.pages.words import utc

if TYPE_CHECKING:
    from jetcapture_py.capture.pipeline import Capture

EVERY = 5.0
"""Seconds between samples."""
SAMPLES = 180
"""Number of samples: a quarter of an hour."""
MAX_PAST = 10


class HistorySample(NamedTuple):
    """The state at one moment, and the changes since the previous sample."""

    time: float
    """Seconds since the epoch."""
    seconds: float
    """Seconds since the previous sample."""
    received: int
    stored: int
    quarantined: int
    lag: float
    """Seconds."""
    pending: int
    """Messages of the consumer, over all replicas."""
    unacked: int
    """Messages of the consumer, over all replicas."""
    memory: int
    """Bytes."""
    other_pulls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PastFailure:
    """A failure that has ended."""

    began: datetime
    ended: datetime
    text: str
    """The check that failed, and its last reason."""


class History:
    """The history of one `capture`."""

    def __init__(self, capture: Capture, clock: Callable[[], float] = time.time) -> None:
        self.capture, self._clock = capture, clock
        self._sampled = clock()
        self._counts = self._counted()
        self.started = self.since = utc(self._sampled)
        """The start of the process, and the last change of readiness."""
        self.ready = False
        self.samples: deque[HistorySample] = deque(maxlen=SAMPLES)
        self.past: deque[PastFailure] = deque(maxlen=MAX_PAST)
        """Failures that have ended, newest first."""
        self._failing: dict[str, tuple[datetime, str]] = {}

    def observe(self) -> Health:
        """Record the health, and take a sample if due. Call it in the capture's event loop."""
        at, now = self._clock(), health(self.capture)
        self._record(now, utc(at))
        if not 0 <= at - self._sampled < EVERY:  # the clock may be set back
            self._sample(at)
        return now

    def failing_since(self, check: str) -> datetime:
        """Return the time when a check began to fail."""
        began, _ = self._failing.get(check, (utc(self._clock()), ""))
        return began

    def lasting(self, condition: Callable[[HistorySample], bool], seconds: float) -> bool:
        """Return whether all samples of the last `seconds` meet a condition; False while there are too few."""
        count = int(seconds / EVERY)
        last = list(self.samples)[-count:]
        return len(last) == count and all(map(condition, last))

    def _record(self, now: Health, at: datetime) -> None:
        if now.ready != self.ready:
            self.ready, self.since = now.ready, at
        failing = {check: text for check, text in now.trouble.items() if check not in now.expected}
        for check in [check for check in self._failing if check not in failing]:
            began, text = self._failing.pop(check)
            self.past.appendleft(PastFailure(began=began, ended=at, text=f"{check}: {text}"))
        for check, text in failing.items():
            began, _ = self._failing.get(check, (at, ""))
            self._failing[check] = began, text

    def _counted(self) -> tuple[int, int, int]:
        stats = self.capture.stats
        return self.capture.source.fetched, stats.stored_messages, stats.quarantine.messages

    def _sample(self, at: float) -> None:
        capture, before, seconds = self.capture, self._counts, max(at - self._sampled, 1e-3)
        self._sampled, self._counts = at, self._counted()
        if not capture.opened:
            return
        consumer = capture.source.state
        received, stored, quarantined = (now - then for now, then in zip(self._counts, before, strict=True))
        self.samples.append(
            HistorySample(
                time=at,
                seconds=seconds,
                received=received,
                stored=stored,
                quarantined=quarantined,
                lag=capture.marks.observer.lag(consumer).total_seconds(),
                pending=consumer.pending,
                unacked=consumer.unacked,
                memory=capture.ledger.held,
                other_pulls=capture.source.looked.pulls,
            )
        )
