"""The `status` command: a table of captures over all replicas, from the server and the archive."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jetcapture_py.archive.watermark import MARGIN, NEVER, ConsumerWatermark, Watermark
from jetcapture_py.capture.watermark import abandoned
from jetcapture_py.config.captures import CAPTURES_AT_ONCE, CaptureFiles
from jetcapture_py.config.model import Config, NatsConfig
from jetcapture_py.config.units import format_time
from jetcapture_py.errors import JetcaptureError, SourceError
from jetcapture_py.jetstream.consumer import (
    ConsumerState,
    filters_of,
    get_consumer,
    is_consumer_of,
)
from jetcapture_py.jetstream.read_session import ReadSession, StreamState
from jetcapture_py.store import configured_store, notes_of, read_own_watermark, read_watermark
from jetcapture_py.text import MAX_LOGGED, age, aligned, duration, escaped, one_line, plural
from jetcapture_py.threads import in_thread

EVERY_S = 2.0
TIMEOUT_S = 5.0
"""Seconds to wait for an answer of the server."""
_COUNTS = ("pending", "unacked", "max_ack_pending", "redelivered", "delivered", "ack_floor", "waiting_pulls")
_COLUMNS = ("capture", "lag", "pending", "unacked", "redelivered", "pulls", "watermark", "last stored")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStatus:
    """The status of a capture by its consumer and the archive; only `problems` if the consumer cannot be read."""

    stream: str
    consumer: str = ""
    state: ConsumerState | None = None
    lag: float | None = None
    """Age in seconds of the oldest unstored message; None without permission to read it."""
    watermark: ConsumerWatermark | None = None
    """The consumer's watermark in the archive."""
    problems: tuple[str, ...]
    """Problems and failed reads, one line each."""

    def fields(self) -> dict[str, Any]:
        """Return all fields by name, times as `datetime`."""
        if self.state is None:
            return {"stream": self.stream, "problems": self.problems}
        mark = self.watermark
        return {
            "stream": self.stream,
            "consumer": self.consumer,
            "time": self.state.asked,
            "lag": self.lag,
            **{name: getattr(self.state, name) for name in _COUNTS},
            "watermark_seq": mark and mark.seq,
            "watermark_time": mark and (None if mark.time == NEVER else mark.time),
            "last_stored": mark and mark.last_stored,
            "problems": self.problems,
        }

    def cells(self) -> Sequence[str]:
        """Return the values of all columns but the first."""
        state, mark = self.state, self.watermark
        if state is None:
            return [""] * (len(_COLUMNS) - 1)
        stored = mark and mark.last_stored
        since = ""
        if mark is not None and mark.time > NEVER:
            since = f", {age((state.asked - mark.time).total_seconds())} ago"
        return (
            "unknown" if self.lag is None else duration(self.lag),
            f"{state.pending:,}",
            f"{state.unacked:,} of {state.max_ack_pending:,}",
            f"{state.redelivered:,}",
            f"{state.waiting_pulls:,}",
            "none" if mark is None else f"{mark.seq:,}{since}",
            "" if not stored else f"{age((datetime.now(UTC) - stored).total_seconds())} ago",
        )


def run(files: CaptureFiles, *, watch: bool, as_json: bool) -> int:
    """Print the status of each capture; return 1 if there are problems, else 0. Raises JetcaptureError."""
    selected = files.select()
    wrong = {
        capture.name: CaptureStatus(stream=capture.stream, problems=problems)
        for capture, problems in selected.problems.items()
    }
    configs = {capture.name: config for capture, config in selected.configs.items()}
    try:
        while True:
            statuses = dict(sorted((wrong | asyncio.run(_examined(configs))).items()))
            sys.stdout.writelines(f"{line}\n" for line in (_records(statuses) if as_json else _table(statuses)))
            sys.stdout.flush()
            if not watch:
                return 1 if any(status.problems for status in statuses.values()) else 0
            time.sleep(EVERY_S)
    except KeyboardInterrupt:
        return 0


def _records(statuses: Mapping[str, CaptureStatus]) -> Iterator[str]:
    for name, status in statuses.items():
        yield json.dumps({"capture": name, **status.fields()}, default=format_time)


def _table(statuses: Mapping[str, CaptureStatus]) -> Iterator[str]:
    rows = [_COLUMNS, *((escaped(name), *status.cells()) for name, status in statuses.items())]
    problems = [(), *(status.problems for status in statuses.values())]
    for row, lines in zip(aligned(rows, right=range(1, len(_COLUMNS))), problems, strict=True):
        yield row
        yield from (f"  problem: {one_line(line, MAX_LOGGED)}" for line in lines)


async def _examined(configs: Mapping[str, Config]) -> dict[str, CaptureStatus]:
    """Return the status of each capture by its name, with one connection per login."""
    sessions: dict[NatsConfig, ReadSession] = {}
    failed: dict[NatsConfig, str] = {}
    at_once = asyncio.Semaphore(CAPTURES_AT_ONCE)

    async def examined(config: Config) -> CaptureStatus:
        problem = failed.get(config.nats, "")
        async with at_once:
            try:
                if not problem:
                    return await examine(config, sessions[config.nats])
            except SourceError as error:
                problem = str(error)
        return CaptureStatus(stream=config.source.stream, problems=(problem,))

    async with AsyncExitStack() as stack:
        for nats in dict.fromkeys(config.nats for config in configs.values()):
            session = ReadSession(nats, "jetcapture status", timeout=TIMEOUT_S)
            try:
                sessions[nats] = await stack.enter_async_context(session)
            except SourceError as error:
                failed[nats] = str(error)
        statuses = await asyncio.gather(*map(examined, configs.values()))
    if (task := asyncio.current_task()) is not None and task.cancelling():
        raise asyncio.CancelledError  # nats-py may have swallowed it
    return dict(zip(configs, statuses, strict=True))


# ------------------------------------------------------------------ one capture


async def examine(config: Config, session: ReadSession) -> CaptureStatus:
    """Return the status of a capture. Raises SourceError if its consumer cannot be read."""
    source, problems = config.source, []
    state = await get_consumer(session.api, source.stream, source.consumer)
    try:
        lag = await _lag(config, session, state)
    except SourceError as error:
        lag = None
        problems.append(f"lag: {error}")
    mark = None
    try:
        notes = notes_of(configured_store(config.store), config.store.url)
        if notes is not None:
            mark = await in_thread(read_own_watermark, notes, source.stream, source.consumer)
            if (archived := await in_thread(read_watermark, notes, source.stream)) is not None:
                problems += await _held_back(config, session, archived, state)
    except JetcaptureError as error:
        problems.append(f"watermark: {error}")
    if mark is not None and mark.time > state.asked + MARGIN:
        problems.append(
            "watermark: its time is in the future: a server's clock was wrong; a running capture will correct it"
        )
    if mark is not None and mark.created:
        problems += await _stream_problems(session, mark, state)
    problems += _stalled(config, state, lag, None if mark is None else mark.last_stored)
    return CaptureStatus(
        stream=source.stream,
        consumer=source.consumer,
        state=state,
        lag=lag,
        watermark=mark,
        problems=tuple(problems),
    )


async def _held_back(config: Config, session: ReadSession, archived: Watermark, state: ConsumerState) -> list[str]:
    """Return a line for each other capture that holds the watermark back, for long or for good."""
    store, consumer = config.store, config.source.consumer
    removed = await abandoned(session.api, archived, consumer, store.url, store.options)
    problems = [f"watermark: {line}" for line in removed.values()]
    last = min(archived.counted, key=lambda mark: mark.time)
    idle = (state.asked - last.time).total_seconds()
    if last.consumer not in (consumer, *removed) and idle > config.block.late_after:
        since = "since it began" if last.time == NEVER else f"for {duration(idle)}"
        problems.append(f"watermark: the capture with consumer {last.consumer} has held it back {since}; start it")
    return problems


def _stalled(config: Config, state: ConsumerState, lag: float | None, stored: datetime | None) -> Iterator[str]:
    """Yield a problem if messages have waited for too long and nothing was stored meanwhile."""
    late = config.block.late_after
    created = datetime.fromisoformat(state.created) if state.created else None
    last = max((time for time in (state.last_ack, stored, created) if time is not None), default=None)
    idle = late + 1 if last is None else (state.asked - last).total_seconds()
    if lag is None or min(lag, idle) <= late:
        return
    if state.paused:
        action = "the consumer is paused"
    elif not state.waiting_pulls and not state.unacked:
        action = "no replica is pulling: start one"
    else:
        action = "see the logs and status pages of the replicas"
    messages = plural(state.pending + state.unacked, "message waits", "messages wait")
    times = f"the oldest for {duration(lag)}, and nothing was stored for {duration(idle)}"
    yield f"storing: {messages}, {times}; {action}"


async def _stream_problems(session: ReadSession, mark: ConsumerWatermark, consumer: ConsumerState) -> list[str]:
    """Compare the stream with the watermark; nothing without permission to ask for it."""
    try:
        info = await session.api.request(f"STREAM.INFO.{mark.stream}")
    except SourceError:
        return []
    state, progressed = StreamState.of(info), is_consumer_of(consumer, mark)
    if not await session.is_same(mark.stream, mark.origin, state, progressed=progressed):
        return [f"stream: it was created again at {info['created']}; the archive's watermark is of the earlier one"]
    starts = consumer.config.get("opt_start_seq", 0)  # a consumer may start after the stream's end
    if (last := info["state"]["last_seq"]) < mark.seq and mark.seq >= starts:
        lost = "the server has lost messages; jetcapture verify names them"
        return [f"stream: it ends at {last}, but the archive's watermark is at {mark.seq}: {lost}"]
    return []


async def _lag(config: Config, session: ReadSession, state: ConsumerState) -> float:
    if state.pending == 0 and state.unacked == 0:
        return 0.0
    filters = filters_of(state.config)
    oldest = await session.api.next_match(config.source.stream, state.ack_floor + 1, filters)
    if oldest is None:
        return 0.0
    return max(0.0, (state.asked - datetime.fromisoformat(oldest["time"])).total_seconds())
