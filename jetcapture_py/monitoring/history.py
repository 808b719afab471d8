"""The last quarter of an hour of a capture, and since when it is, or is not, ready.

Samples are differences of counters that the capture keeps anyway; nothing is done per message.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jetcapture_py.monitoring.health import health

if TYPE_CHECKING:
    from jetcapture_py.capture.state import CaptureState

EVERY = 5.0
"""Seconds between samples."""
SAMPLES = 180
"""Samples that are kept: a quarter of an hour."""
MAX_PAST = 10


class HistorySample(NamedTuple):
    """State at `time`, seconds since the epoch; `received`, `stored` (messages) and `quarantined` since the sample
    before. `unacked` and `pending` are the consumer's, over all replicas; `lag` is in seconds, `memory` in bytes.
    """

    time: float
    seconds: float
    received: int
    stored: int
    quarantined: int
    lag: float
    pending: int
    unacked: int
    memory: int
    other_pulls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Times, in seconds since the epoch, at which a check began and ceased to fail, and its last line."""

    began: float
    ended: float
    text: str


class _Counts(NamedTuple):
    time: float
    received: int
    stored: int
    quarantined: int


class History:
    """The history of one capture. `observe` is called once a second, in the capture's event loop."""

    def __init__(self, state: CaptureState, clock: Callable[[], float] = time.time) -> None:
        self._state, self._clock = state, clock
        self.started = self.since = clock()
        """When the process started, and when it last became ready or ceased to be, in seconds since the epoch."""
        self.ready = False
        self.samples: deque[HistorySample] = deque(maxlen=SAMPLES)
        self.past: deque[Incident] = deque(maxlen=MAX_PAST)
        """Failures that have ended, newest first."""
        self._failing: dict[str, tuple[float, str]] = {}
        self._last = self._counts(self.started)

    def observe(self) -> None:
        """Look at the health, and take a sample if it is time."""
        at = self._clock()
        self._look(at)
        if not 0 <= at - self._last.time < EVERY:  # the clock may be set back
            self._sample(at)

    def failing_since(self, line: str) -> float:
        """Return when the check that has this line began to fail, in seconds since the epoch."""
        began, _ = self._failing.get(_check(line), (self._clock(), ""))
        return began

    def lasting(self, condition: Callable[[HistorySample], bool], seconds: float) -> bool:
        """Return whether all samples of the last `seconds` meet a condition; False while there are too few."""
        wanted = int(seconds / EVERY)
        last = [self.samples[-number] for number in range(1, min(wanted, len(self.samples)) + 1)]
        return len(last) == wanted and all(map(condition, last))

    def _look(self, at: float) -> None:
        found = health(self._state)
        if found.ready != self.ready:
            self.ready, self.since = found.ready, at
        now = {_check(line): line for line in found.trouble if self._is_failure(line)}
        for check in [check for check in self._failing if check not in now]:
            began, text = self._failing.pop(check)
            self.past.appendleft(Incident(began=began, ended=at, text=text))
        for check, line in now.items():
            began, _ = self._failing.get(check, (at, ""))
            self._failing[check] = began, line

    def _is_failure(self, line: str) -> bool:
        """Whether a check fails for another reason than that the capture starts or drains."""
        check = _check(line)
        return not (check == "connected" and not self._state.opened) and not (
            check == "consuming" and self._state.draining
        )

    def _counts(self, at: float) -> _Counts:
        stats = self._state.stats
        return _Counts(at, self._state.source.fetched, stats.stored_messages, stats.quarantined)

    def _sample(self, at: float) -> None:
        state, last = self._state, self._last
        self._last = counts = self._counts(at)
        if not state.opened:
            return
        consumer = state.source.state
        self.samples.append(
            HistorySample(
                time=at,
                seconds=max(at - last.time, 1e-3),
                received=counts.received - last.received,
                stored=counts.stored - last.stored,
                quarantined=counts.quarantined - last.quarantined,
                lag=state.observer.lag(consumer).total_seconds(),
                pending=consumer.pending,
                unacked=consumer.unacked,
                memory=state.memory + state.source.waiting_bytes,
                other_pulls=state.source.other_pulls,
            )
        )


def _check(line: str) -> str:
    """Return the name of the check that a line of `Health.trouble` is about."""
    return line.partition(":")[0]
