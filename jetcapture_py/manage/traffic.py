"""Measure a stream's message rate, and decode a sample of its newest messages."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.bundles import bundle_numbers
from jetcapture_py.capture.parts import preparer
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import format_time
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.manage.forecast import Traffic
from jetcapture_py.manage.newest import matching, newest
from jetcapture_py.transform.batch import BatchTooWideError
from jetcapture_py.transform.prepare import Prepared, Preparer

SAMPLE = 2_000
"""Newest messages to decode."""
WINDOWS = (60.0, 600.0, 3_600.0, 86_400.0)
"""Windows, in seconds before now, to measure the rate over; the highest rate counts."""
_SHORTEST = 1.0


@dataclass(slots=True)
class Sample:
    """The decoded sample; `reason` is that of the first quarantined message."""

    keys: Counter[str | None] = field(default_factory=Counter)
    messages: int = 0
    quarantined: int = 0
    size: int = 0
    reason: str = ""
    times: list[int] = field(default_factory=list)

    def add(self, prepared: Prepared) -> None:
        """Count what was prepared."""
        for run in prepared.runs:
            self.keys[run.key] += run.length
        self.messages += prepared.messages
        self.quarantined += prepared.quarantine.num_rows
        self.size += prepared.rows.nbytes + prepared.quarantine.nbytes
        self.times += [time for _, time in prepared.span]
        if prepared.quarantine.num_rows and not self.reason:
            self.reason = prepared.quarantine.column(layout.ERROR)[0].as_py()

    def traffic(self, rate: float, bundles: int) -> Traffic:
        """Return traffic with the sample's keys, or their bundles, and sizes at `rate`."""
        total = max(sum(self.keys.values()), 1)
        counts = list(self.keys.values())
        if bundles:
            numbers = bundle_numbers(pa.array(list(self.keys), pa.string()), bundles)
            counts = [count for count in np.bincount(numbers, counts, bundles).tolist() if count]
        shares = [count / total for count in counts] or [1.0]
        return Traffic(rate=rate, message_bytes=self.size / max(self.messages, 1), shares=shares)


async def sample(session: ReadSession, config: Config) -> Sample:
    """Decode the newest messages as a capture does. Raises ConfigError, SourceError."""
    prepare = preparer(config, None, None)
    found = Sample()
    for name, received in await newest(session, config, SAMPLE):
        await asyncio.to_thread(_prepare, found, replace(prepare, consumer=name, bundles=0), received)
    return found


def _prepare(found: Sample, prepare: Preparer, received: Received) -> None:
    try:
        found.add(prepare(received))
    except BatchTooWideError:
        for part in received.split(len(received) // 2):
            _prepare(found, prepare, part)


async def rates(
    session: ReadSession, stream: str, filters: Sequence[str], answer: dict[str, Any], found: Sample
) -> tuple[float, float]:
    """Return messages per second that the filters match, and of the whole stream, in the busiest window.

    `answer` is that of STREAM.INFO. A work queue drops its messages, and no further consumer may count them, so its
    rate follows from the sample's times.
    """
    state = answer["state"]
    if not state["messages"]:
        return 0.0, 0.0
    if answer["config"].get("retention") == "workqueue":
        span = (max(found.times, default=0) - min(found.times, default=0)) / 1e6
        rate = found.messages / max(span, _SHORTEST)
        return rate, rate
    now = datetime.fromisoformat(answer["ts"])
    age = max((now - datetime.fromisoformat(state["first_ts"])).total_seconds(), _SHORTEST)
    matched = whole = 0.0
    for window in dict.fromkeys(min(each, age) for each in WINDOWS):
        start = {"opt_start_time": format_time(now - timedelta(seconds=window))}
        matched = max(matched, await matching(session, stream, filters, start) / window)
        whole = max(whole, matched if not filters else await matching(session, stream, (), start) / window)
    return matched, whole
