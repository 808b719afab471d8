"""Measure a stream's message rate, and decode a sample of its newest messages."""

from __future__ import annotations

import asyncio
import re
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
from jetcapture_py.config.template import parse_template, part_name
from jetcapture_py.config.units import format_time
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.manage.forecast import Traffic
from jetcapture_py.manage.newest import Part, matching, newest
from jetcapture_py.plugins import is_reference
from jetcapture_py.transform.batch import BatchTooWideError
from jetcapture_py.transform.prepare import Prepared, Preparer

SAMPLE = 2_000
"""Newest messages to decode."""
WINDOWS = (60.0, 600.0, 3_600.0, 86_400.0)
"""Windows, in seconds before now, to measure the rate over; the highest rate counts."""
_SHORTEST = 1.0
_DIGITS = re.compile(r"\d+")


@dataclass(slots=True)
class Sample:
    """The decoded sample.

    Attributes:
        keys: Rows by key.
        messages: How many messages were decoded.
        rows: How many rows they gave.
        size: Bytes of rows and quarantine.
        times: Times of first and last messages, in microseconds since the epoch.
        reasons: Quarantined messages by stage and reason, with zeros in place of digits.
        examples: The first reason of each of these.
        columns: Columns that have a value in some row.
        missing: Placeholders of the key that no message has, if none has a key.
        untimed: Whether no message has the time of `block.time`, so that all take the fallback.
    """

    keys: Counter[str | None] = field(default_factory=Counter)
    messages: int = 0
    rows: int = 0
    size: int = 0
    times: list[int] = field(default_factory=list)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str], str] = field(default_factory=dict)
    columns: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    untimed: bool = False

    def add(self, prepared: Prepared) -> None:
        """Count what was prepared."""
        for run in prepared.runs:
            self.keys[run.key] += run.length
        self.messages += prepared.messages
        self.rows += prepared.rows.num_rows
        self.size += prepared.rows.nbytes + prepared.quarantine.nbytes
        self.times += [time for _, time in prepared.span]
        self.columns |= {
            name
            for name, column in zip(prepared.rows.schema.names, prepared.rows.columns, strict=True)
            if column.null_count < len(column)
        }
        wrong = prepared.quarantine
        for row in wrong.select([layout.STAGE, layout.ERROR]).to_pylist() if wrong.num_rows else ():
            stage, error = row[layout.STAGE], row[layout.ERROR]
            reason = stage, _DIGITS.sub("0", error)
            self.reasons[reason] += 1
            self.examples.setdefault(reason, error)

    @property
    def quarantined(self) -> int:
        """How many messages go to the quarantine."""
        return self.reasons.total()

    @property
    def keyless(self) -> bool:
        """Whether no row has a key."""
        return set(self.keys) == {None}

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
    parts = await newest(session, config, SAMPLE)
    return await asyncio.to_thread(_sample, config, parts)


def _sample(config: Config, parts: Sequence[Part]) -> Sample:
    """Decode messages. Where none has a key or a time, decode them again to learn what is missing."""
    made = _decoded(config, parts)
    if made.keyless and not is_reference(config.key):
        for name in filter(None, map(part_name, parse_template(config.key))):
            if _decoded(config.model_copy(update={"key": f"{{{name}}}"}), parts).keyless:
                made.missing.append(name)
    if config.block.time_fallback is not None and made.rows:
        strict = config.block.model_copy(update={"time_fallback": None})
        made.untimed = not _decoded(config.model_copy(update={"block": strict}), parts).rows
    return made


def _decoded(config: Config, parts: Sequence[Part]) -> Sample:
    prepare = preparer(config, None, None)
    made = Sample()
    for name, received in parts:
        _prepare(made, replace(prepare, consumer=name, bundles=0), received)
    return made


def _prepare(made: Sample, prepare: Preparer, received: Received) -> None:
    try:
        made.add(prepare(received))
    except BatchTooWideError:
        for part in received.split(len(received) // 2):
            _prepare(made, prepare, part)


async def rates(
    session: ReadSession, stream: str, filters: Sequence[str], answer: dict[str, Any], found: Sample
) -> tuple[float, float]:
    """Return messages per second that the filters match, and of the whole stream, in the busiest window.

    `answer` is that of STREAM.INFO. Streams with retention interest or workqueue drop their messages, and no further
    consumer may count them, so their rate follows from the sample's times.
    """
    state = answer["state"]
    if not state["messages"]:
        return 0.0, 0.0
    if answer["config"].get("retention", "limits") != "limits":
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
