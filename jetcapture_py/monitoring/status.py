"""The `status` command: the state of a capture from outside, once or repeatedly, as text or JSON.

The consumer on the server and the watermark in the archive tell of all replicas, also when none is running. A replica
that listens on this machine adds its facts.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from textwrap import wrap
from typing import Any, Self
from urllib.parse import urlsplit

from rich.console import Console
from rich.live import Live
from rich.text import Text

from jetcapture_py.archive import watermark
from jetcapture_py.archive.watermark import MARGIN, Watermark
from jetcapture_py.config.model import Config, NatsConfig
from jetcapture_py.config.several import CAPTURES_AT_ONCE, CaptureId, ConfigFiles
from jetcapture_py.config.units import format_time
from jetcapture_py.errors import JetcaptureError, SourceError
from jetcapture_py.jetstream.connection import Api, ApiError, UnavailableError
from jetcapture_py.jetstream.consumer import (
    ConsumerState,
    filters_of,
    first_time,
    get_consumer,
    has_progressed,
)
from jetcapture_py.jetstream.read_session import ReadSession, StreamState
from jetcapture_py.pages import words
from jetcapture_py.pages.words import duration
from jetcapture_py.store import configured_store, notes_of, read_watermark
from jetcapture_py.text import MAX_LOGGED, escaped, one_line, plural

EVERY = 2.0
"""Seconds between the lines of `--watch`."""
TIMEOUT = 5.0
"""Seconds that the server may take to answer."""
REPLICA_TIMEOUT = 2.0
MAX_REPLICA_BYTES = 8 << 20
MAX_TREND = 180
"""Samples that `--watch` keeps."""
MAX_LINES = 5
"""Lines of a list: open blocks, reasons, objects."""
_COUNTS = ("pending", "unacked", "max_ack_pending", "redelivered", "delivered", "ack_floor", "waiting_pulls")
_LEVELS = "▁▂▃▄▅▆▇█"
_NAME = 13
"""Width of the column of names, with the blanks after them."""
_STYLES = (
    (re.compile(r"\S+ / \S+ at "), "bold"),
    (re.compile(r"this replica: (?:Ready|Healthy)"), "bold green"),
    (re.compile(r"this replica: |problem |  error: |cannot |NATS "), "bold red"),
    (re.compile(r"  warning: |quarantine "), "yellow"),
)
"""Beginnings of lines, and how a terminal shows them."""
_CURVE = 45
"""Characters of a curve; each is the highest value of its part of the time."""
_ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  addresses to ask, not to listen on

Trend = Mapping[str, Sequence[float]]
"""Values over time by name, oldest first."""


def run(files: ConfigFiles, *, watch: bool, as_json: bool) -> int:
    """Print the status of each capture; return 1 if there are problems, else 0. Raises ConfigError, SourceError."""
    found = files.chosen()
    configs = dict(sorted(found.configs.items(), key=lambda item: item[0].name))
    try:
        if files.shows_one(found):
            (config,) = configs.values()
            return asyncio.run(_watch(config, as_json=as_json) if watch else once(config, as_json=as_json))
        return asyncio.run(_several(configs, found.problems, watch=watch, as_json=as_json))
    except KeyboardInterrupt:
        return 0


async def once(config: Config, *, as_json: bool = False) -> int:
    """Print the status of one capture; return the exit code. Raises SourceError."""
    async with Observed(config) as observed:
        status = await observed.status()
    Console(soft_wrap=True).print(await _shown(config, status, "", {}, as_json=as_json))
    return 1 if status.problems else 0


async def _watch(config: Config, *, as_json: bool) -> int:
    """Repeat until interrupted, also while the server is unreachable."""
    console = Console()
    redraws = console.is_terminal and not console.is_dumb_terminal and not as_json
    console.soft_wrap = not redraws  # where a display is redrawn, Rich cuts off what it does not wrap
    live = Live(console=console, auto_refresh=False) if redraws else None
    earlier: deque[CaptureStatus] = deque(maxlen=MAX_TREND)
    task = asyncio.current_task()
    async with Observed(config) as observed:
        with live or contextlib.nullcontext():
            while task is None or not task.cancelling():  # nats-py may swallow a cancellation
                status, problem = None, ""
                try:
                    status = await observed.status()
                    earlier.append(status)
                except SourceError as error:
                    problem = str(error)
                width = console.width if redraws else None
                shown = await _shown(config, status, problem, _trend(earlier), as_json=as_json, width=width)
                if live is not None:
                    live.update(shown, refresh=True)
                else:
                    console.print(shown)
                await asyncio.sleep(EVERY)
    return 0


async def _shown(
    config: Config,
    status: CaptureStatus | None,
    problem: str,
    trend: Trend,
    *,
    as_json: bool,
    width: int | None = None,
) -> Text:
    """Return the status, or the `problem` in place of one, with the facts of a replica on this machine."""
    replica = await asyncio.to_thread(ask_replica, config)
    if as_json:
        fields = {"problems": [problem]} if status is None else status.fields()
        return Text(json.dumps({**fields, "replica": replica}, default=format_time))
    return styled(lines(status, problem, replica, trend), width)


# ------------------------------------------------------------------ many captures


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What is known of one of many captures."""

    name: str
    stream: str
    status: CaptureStatus | None
    problems: Sequence[str]
    replica: Mapping[str, Any] | None

    def record(self) -> str:
        fields = {"problems": self.problems} if self.status is None else self.status.fields()
        about = {"capture": self.name, "stream": self.stream}
        return json.dumps({**about, **fields, "replica": self.replica}, default=format_time)

    def cells(self) -> Sequence[str]:
        status, rate, quarantined = self.status, "", ""
        if self.replica is not None:
            with contextlib.suppress(LookupError, TypeError, ValueError):  # it may be of another version
                rate = words.rate(self.replica["samples"]["received"][-1])
                quarantined = words.short(self.replica["quarantined"])
        name, problem = escaped(self.name), one_line("; ".join(self.problems), MAX_LOGGED)
        if status is None:
            return name, "", "", "", rate, quarantined, "", problem
        stored = status.watermark and status.watermark.last_stored
        ago = "" if not stored else f"{words.age((datetime.now(UTC) - stored).total_seconds())} ago"
        lag = "unknown" if status.lag is None else words.age(status.lag)
        pending, unacked = words.short(status.state.pending), words.short(status.state.unacked)
        return name, lag, pending, unacked, rate, quarantined, ago, problem


_COLUMNS = ("capture", "lag", "pending", "unacked", "rate", "quarantine", "last stored", "problem")


def _table(rows: Iterable[_Row]) -> Iterator[str]:
    cells = [_COLUMNS, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *numbers, problem in cells:
        aligned = (number.rjust(width) for number, width in zip(numbers, widths[1:-1], strict=True))
        yield "  ".join([first.ljust(widths[0]), *aligned, problem]).rstrip()


class _Statuses:
    """The status of many captures, with one connection for each section `nats`."""

    def __init__(self, configs: Mapping[CaptureId, Config], refused: Mapping[CaptureId, Sequence[str]]) -> None:
        self._configs, self._refused = configs, refused
        self._observed: dict[CaptureId, Observed] = {}
        self._failed: dict[NatsConfig, str] = {}
        self._sessions: dict[NatsConfig, ReadSession] = {}
        self._at_once = asyncio.Semaphore(CAPTURES_AT_ONCE)

    async def __aenter__(self) -> Self:
        for capture, config in self._configs.items():
            if config.nats not in self._sessions and config.nats not in self._failed:
                session = ReadSession(config.nats, "jetcapture status", timeout=TIMEOUT)
                try:
                    await session.open()
                    self._sessions[config.nats] = session
                except SourceError as error:
                    self._failed[config.nats] = str(error)
            if config.nats in self._sessions:
                self._observed[capture] = Observed(config, self._sessions[config.nats])
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in self._sessions.values():
            await session.close()

    async def rows(self) -> list[_Row]:
        """Return what is known now, by name."""
        listen = {config.http.listen for config in self._configs.values() if config.http is not None}
        replicas: dict[tuple[str, str], dict[str, Any]] = {}
        for address in listen:
            replicas.update(await asyncio.to_thread(_captures_at, address))
        rows = await asyncio.gather(*(self._row(capture, replicas) for capture in self._configs))
        wrong = [
            _Row(name=capture.name, stream=capture.stream, status=None, problems=problems, replica=None)
            for capture, problems in self._refused.items()
        ]
        return sorted([*rows, *wrong], key=lambda row: row.name)

    async def _row(self, capture: CaptureId, replicas: Mapping[tuple[str, str], dict[str, Any]]) -> _Row:
        config = self._configs[capture]
        source, status, problems = config.source, None, [self._failed.get(config.nats, "")]
        if capture in self._observed:
            async with self._at_once:
                try:
                    status = await self._observed[capture].status()
                    problems = list(status.problems)
                except SourceError as error:
                    problems = [str(error)]
        replica = None if config.http is None else replicas.get((source.stream, source.consumer))
        return _Row(name=capture.name, stream=source.stream, status=status, problems=problems, replica=replica)


async def _several(
    configs: Mapping[CaptureId, Config], refused: Mapping[CaptureId, Sequence[str]], *, watch: bool, as_json: bool
) -> int:
    console = Console()
    redraws = watch and console.is_terminal and not console.is_dumb_terminal and not as_json
    console.soft_wrap = not redraws
    live = Live(console=console, auto_refresh=False) if redraws else None
    task = asyncio.current_task()
    async with _Statuses(configs, refused) as statuses:
        with live or contextlib.nullcontext():
            while True:
                rows = await statuses.rows()
                shown = Text("\n".join([row.record() for row in rows] if as_json else _table(rows)), no_wrap=redraws)
                if live is not None:
                    live.update(shown, refresh=True)
                else:
                    console.print(shown)
                if not watch or (task is not None and task.cancelling()):  # nats-py may swallow a cancellation
                    return 1 if any(row.problems for row in rows) else 0
                await asyncio.sleep(EVERY)


def _trend(statuses: Collection[CaptureStatus]) -> Trend:
    if len(statuses) < 2:
        return {}
    return {
        "lag": [status.lag or 0.0 for status in statuses],
        "pending": [status.state.pending for status in statuses],
        "unacked": [status.state.unacked for status in statuses],
    }


# ------------------------------------------------------------------ the server and the archive


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStatus:
    """The status by the consumer's state and the archive."""

    stream: str
    consumer: str
    state: ConsumerState
    lag: float | None
    """Age in seconds of the oldest message that is not stored; None without permission to ask for it."""
    watermark: Watermark | None
    """The consumer's watermark in the archive."""
    problems: tuple[str, ...]
    """One line per failed read, or thing that is wrong."""

    def fields(self) -> dict[str, Any]:
        """Return all fields by name, times as `datetime`."""
        mark = self.watermark
        return {
            "stream": self.stream,
            "consumer": self.consumer,
            "time": self.state.asked,
            "lag": self.lag,
            **{name: getattr(self.state, name) for name in _COUNTS},
            "watermark_seq": mark and mark.seq,
            "watermark_time": mark and mark.time,
            "last_stored": mark and mark.last_stored,
            "problems": self.problems,
        }

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """Yield name, value and meaning of each line."""
        state, mark = self.state, self.watermark
        lag = "unknown" if self.lag is None else duration(self.lag)
        yield "lag", lag, "age of the oldest message that is not stored"
        yield "pending", f"{state.pending:,}", "not delivered yet"
        yield "unacked", f"{state.unacked:,} of {state.max_ack_pending:,}", "delivered and not stored yet"
        yield "redelivered", f"{state.redelivered:,}", "unacked messages delivered more than once"
        yield "delivered", f"{state.delivered:,}", "last sequence delivered"
        yield "ack floor", f"{state.ack_floor:,}", "everything up to this sequence is stored"
        yield "pulls", f"{state.waiting_pulls:,}", "open at the server; 0: no replica is pulling"
        if mark is None:
            yield "watermark", "none", ""
        else:
            age = duration((state.asked - mark.time).total_seconds())
            yield "watermark", words.moment(mark.time), f"{age} ago, sequence {mark.seq:,}"
        if mark is not None and mark.last_stored is not None:
            age = duration((datetime.now(UTC) - mark.last_stored).total_seconds())
            yield "last stored", words.moment(mark.last_stored), f"{age} ago"
        for problem in self.problems:
            yield "problem", problem, ""


class Observed:
    """Repeated status requests through a connection, by default one of its own.

    Raises SourceError when it fails or the consumer is gone.
    """

    def __init__(self, config: Config, session: ReadSession | None = None) -> None:
        self._config = config
        self._notes = notes_of(configured_store(config.store), config.store.url)
        self._given = session
        name = f"jetcapture status {config.source.stream}"
        self._session = session or ReadSession(config.nats, name, timeout=TIMEOUT)

    async def __aenter__(self) -> Self:
        if self._given is None:
            await self._session.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._given is None:
            await self._session.close()

    @property
    def _api(self) -> Api:
        return self._session.api

    async def status(self) -> CaptureStatus:
        source, problems = self._config.source, []
        try:
            state = await get_consumer(self._api, source.stream, source.consumer)
        except UnavailableError as error:
            raise SourceError(str(error)) from error
        try:
            lag = await self._lag(state)
        except UnavailableError as error:
            lag = None
            problems.append(f"lag: {error}")
        mark = None
        try:
            if self._notes is not None and (
                whole := await asyncio.to_thread(read_watermark, self._notes, source.stream)
            ):
                mark = whole.of(source.consumer)
                problems += self._held_back(whole, state)
        except JetcaptureError as error:
            problems.append(f"watermark: {error}")
        if mark is not None and mark.time > state.asked + MARGIN:
            problems.append(
                "watermark: its time is in the future: a server's clock was wrong; a running capture will correct it"
            )
        if mark is not None and mark.created:
            problems += await self._stream_problems(mark, state)
        problems += self._stalled(state, lag, None if mark is None else mark.last_stored)
        return CaptureStatus(
            stream=source.stream,
            consumer=source.consumer,
            state=state,
            lag=lag,
            watermark=mark,
            problems=tuple(problems),
        )

    def _held_back(self, mark: Watermark, state: ConsumerState) -> Iterator[str]:
        """Yield a problem if a capture of other subjects has held the watermark back for long."""
        last = min(mark.parts, key=lambda part: part.time, default=mark)
        age = (state.asked - last.time).total_seconds()
        if mark.parts and last.consumer != self._config.source.consumer and age > self._config.block.late_after:
            remedy = f"start it, or delete {watermark.path(mark.stream)} if it was removed for good"
            yield f"watermark: the capture with consumer {last.consumer} has held it back for {duration(age)}; {remedy}"

    def _stalled(self, state: ConsumerState, lag: float | None, stored: datetime | None) -> Iterator[str]:
        """Yield a problem if messages have waited for too long and nothing was stored meanwhile."""
        late = self._config.block.late_after
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
        messages = plural(state.pending + state.unacked, "message waits", "messages wait", grouped=True)
        times = f"the oldest for {duration(lag)}, and nothing was stored for {duration(idle)}"
        yield f"storing: {messages}, {times}; {action}"

    async def _stream_problems(self, mark: Watermark, consumer: ConsumerState) -> list[str]:
        """Compare the stream with the watermark; nothing without permission to ask for it."""
        try:
            info = await self._api.request(f"STREAM.INFO.{mark.stream}")
        except (ApiError, UnavailableError):
            return []
        state, progressed = StreamState.of(info), has_progressed(consumer, mark)
        if not await self._session.is_same(mark.stream, mark.origin, state, progressed=progressed):
            return [f"stream: it was created again at {info['created']}; the archive's watermark is of the earlier one"]
        starts = consumer.config.get("opt_start_seq", 0)  # a consumer may start after the stream's end
        if (last := info["state"]["last_seq"]) < mark.seq and mark.seq >= starts:
            lost = "the server has lost messages; jetcapture verify names them"
            return [f"stream: it ends at {last}, but the archive's watermark is at {mark.seq}: {lost}"]
        return []

    async def _lag(self, state: ConsumerState) -> float:
        if state.pending == 0 and state.unacked == 0:
            return 0.0
        filters = filters_of(state.config)
        oldest = await first_time(self._api, self._config.source.stream, state.ack_floor + 1, filters)
        return 0.0 if oldest is None else max(0.0, (state.asked - oldest).total_seconds())


# ------------------------------------------------------------------ a replica on this machine


def ask_replica(config: Config) -> dict[str, Any] | None:
    """Return the facts of a replica of this capture at `http.listen`; None if none answers there.

    Something else may listen there, so the answer is not trusted to be ours before it names the stream and consumer.
    """
    ours = config.source.stream, config.source.consumer
    return None if config.http is None else _captures_at(config.http.listen).get(ours)


def _captures_at(listen: str) -> Mapping[tuple[str, str], dict[str, Any]]:
    """Return the facts of the captures of a process on this machine, by stream and consumer."""
    address = urlsplit(f"//{listen}")
    host = address.hostname or ""
    connection = http.client.HTTPConnection(_ANY.get(host, host), address.port or 80, timeout=REPLICA_TIMEOUT)
    try:
        connection.request("GET", "/status.json")
        answer = connection.getresponse()
        captures = json.loads(answer.read(MAX_REPLICA_BYTES))["captures"] if answer.status == 200 else ()
        return {(facts["stream"], facts["consumer"]): facts for facts in captures}
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, RecursionError):
        return {}
    finally:
        connection.close()


# ------------------------------------------------------------------ text


def lines(status: CaptureStatus | None, problem: str, replica: Mapping[str, Any] | None, trend: Trend) -> Iterator[str]:
    """Yield the lines; without `status`, `problem` says why. The replica's facts are those of /status.json."""
    if status is None:
        yield problem
    else:
        yield f"{status.stream} / {status.consumer} at {words.moment(status.state.asked)} UTC"
        for name, value, meaning in status.lines():
            yield f"{name:<13}{value:<22}{meaning}".rstrip()
    if replica is not None:
        try:
            text = list(_replica(replica))
        except (LookupError, TypeError, ValueError, AttributeError):  # it may be of another version
            text = ["cannot read the replica's answer; it may run another version"]
        yield from ("", *text)
    elif trend:
        yield ""
        for name, values in trend.items():
            yield f"{name:<13}{curve(values)}".rstrip()


def styled(found: Iterable[str], width: int | None = None) -> Text:
    """Return lines with colors for a terminal; a line longer than `width` is broken and indented below its value."""
    text = Text()
    for line in found:
        style = next((style for beginning, style in _STYLES if beginning.match(line)), "")
        parts = [line]
        if width is not None and len(line) > width:
            parts = wrap(line, width, subsequent_indent=" " * min(_NAME, width // 3), drop_whitespace=True)
        for part in parts:
            shown = Text(part, style)
            if part is line and not style:
                shown.stylize("dim", 0, _NAME)
            shown.highlight_regex(f"[{_LEVELS}]+", "cyan")
            text.append_text(shown).append("\n")
    text.rstrip()
    return text


def curve(values: Sequence[float], width: int = _CURVE) -> str:
    """Return values as a line of blocks, the highest one full, 0 the lowest."""
    if not values:
        return ""
    parts = [values[len(values) * at // width : len(values) * (at + 1) // width] for at in range(width)]
    bins = [max(part) for part in parts if part] if len(values) > width else list(values)
    top = max(bins)
    return "".join(_LEVELS[min(int(value / top * len(_LEVELS)), len(_LEVELS) - 1) if top > 0 else 0] for value in bins)


def _replica(facts: Mapping[str, Any]) -> Iterator[str]:
    now, samples = _time(facts["time"]), facts["samples"]
    yield f"this replica: {words.visible(facts['summary'])}; {words.visible(facts['host'])}, process {facts['pid']}"
    for notice in facts["notices"]:
        yield f"  {notice['level']}: {words.visible(notice['text'])} {words.visible(notice['action'])}".rstrip()
    figures = (
        ("received", samples["received"], words.rate),
        ("stored", samples["stored"], words.rate),
        ("lag", samples["lag"], words.age),
        ("pending", samples["pending"], words.short),
        ("unacked", samples["unacked"], words.short),
        ("memory", samples["memory"], words.size),
    )
    for name, values, show in figures:
        if values:
            shape = curve(values)
            yield f"{name:<13}{show(values[-1]):<14}{shape:<{_CURVE}}  15 min, at most {show(max(values))}"
    memory, limit = facts["memory"], facts["memory_limit"]
    yield f"{'memory':<13}{words.size(memory)} of {words.size(limit)}, {words.share(memory, limit)}"
    yield from _blocks(facts)
    for stored in facts["objects"][:MAX_LINES]:
        ago = words.age((now - _time(stored["acknowledged"])).total_seconds())
        content = f"{stored['rows']:,} rows, {words.size(stored['bytes'])}"
        yield f"{'stored':<13}{ago + ' ago':<18}{content:<26}{words.visible(stored['location'], 4000)}"
    if facts["quarantined"]:
        messages = plural(facts["quarantined"], "message", grouped=True)
        yield f"{'quarantine':<13}{messages} since {words.moment(_time(facts['started']))} UTC"
        for reason in facts["quarantine"][:MAX_LINES]:
            text = f"{words.visible(reason['stage'])}: {words.visible(reason['error'])}"
            last = f"last: sequence {reason['seq']:,}, {words.visible(reason['subject'], 80)}"
            yield f"  {reason['messages']:>9,}  {text}; {last}"
    for past in facts["past"][:MAX_LINES]:
        began, ended = _time(past["began"]), _time(past["ended"])
        length = words.age((ended - began).total_seconds())
        yield f"{'earlier':<13}{words.clock(began, now)} for {length}: {words.visible(past['text'])}"


def _blocks(facts: Mapping[str, Any]) -> Iterator[str]:
    rows, size = facts["open_rows"], words.size(facts["open_bytes"])
    yield f"{'open blocks':<13}{facts['open_blocks']:,} of {facts['open_blocks_limit']:,}, {rows:,} rows, {size}"
    lists = [("oldest", facts["oldest"]), ("largest", facts["largest"])]
    for name, blocks in lists if facts["open_blocks"] > len(facts["oldest"]) else [("", facts["oldest"])]:
        for block in blocks[:MAX_LINES]:
            figures = f"{words.age(block['age']):<13}{block['rows']:>9,} rows  {words.size(block['bytes']):>10}"
            yield f"  {name:<9}{figures}  {_key(block)}"


def _key(block: Mapping[str, Any]) -> str:
    if block["quarantine"]:
        return "(quarantine)"
    if block["bundle"]:
        return f"bundle {words.visible(block['bundle'])}"
    return words.visible(block["key"], 80) if block["key"] else "(no key)"


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
