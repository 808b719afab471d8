"""Status of a capture from outside: the consumer on the server, and the watermark in the archive.

No replica is asked, so it covers all of them, and works when none is running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Self

from jetcapture_py.archive.layout import parse_path
from jetcapture_py.archive.watermark import MARGIN, Watermark
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import format_time
from jetcapture_py.errors import JetcaptureError, SourceError
from jetcapture_py.jetstream.admin import ConsumerState, filters_of, first_time, get_consumer
from jetcapture_py.jetstream.connection import ApiError, UnavailableError
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.pages.words import duration
from jetcapture_py.store import NoteStore, configured_store, read_watermark
from jetcapture_py.text import escaped, plural

TIMEOUT = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStatus:
    """The status by the consumer's state and the archive. Sequences are the stream's, times UTC."""

    stream: str
    consumer: str
    time: datetime
    """When the server was asked, by its clock."""
    lag: float | None
    """Age in seconds of the oldest message that is not stored; None without permission to ask for it."""
    pending: int
    """Messages not delivered yet."""
    unacked: int
    """Messages delivered and not stored yet."""
    max_ack_pending: int
    redelivered: int
    """Unacknowledged messages that were delivered more than once."""
    delivered: int
    """Last sequence delivered."""
    ack_floor: int
    """Sequence up to which everything is stored."""
    waiting_pulls: int
    """Open pulls at the server."""
    watermark_seq: int | None
    """The archive's watermark; None without one."""
    watermark_time: datetime | None
    last_object: str | None
    """Path of the object stored last; None if unknown."""
    last_stored: datetime | None
    """When it was stored, by its writer's clock."""
    problems: tuple[str, ...]
    """One line per failed read."""

    def fields(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {
            name: format_time(value) if isinstance(value, datetime) else value for name, value in asdict(self).items()
        }

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """Yield name, value and meaning of each line."""
        lag = "unknown" if self.lag is None else duration(self.lag)
        yield "lag", lag, "age of the oldest message that is not stored"
        yield "pending", f"{self.pending:,}", "not delivered yet"
        yield "unacked", f"{self.unacked:,} of {self.max_ack_pending:,}", "delivered and not stored yet"
        yield "redelivered", f"{self.redelivered:,}", "unacked messages delivered more than once"
        yield "delivered", f"{self.delivered:,}", "last sequence delivered"
        yield "ack floor", f"{self.ack_floor:,}", "everything up to this sequence is stored"
        yield "pulls", f"{self.waiting_pulls:,}", "open at the server; 0: no replica is pulling"
        if self.watermark_time is None:
            yield "watermark", "none", ""
        else:
            age = duration((self.time - self.watermark_time).total_seconds())
            yield "watermark", f"{self.watermark_time:%Y-%m-%d %H:%M:%S}", f"{age} ago, sequence {self.watermark_seq:,}"
        if self.last_object is not None and self.last_stored is not None:
            name = parse_path(self.last_object)
            rows = "" if name is None else f"{name.rows:,} rows, "
            age = duration((datetime.now(UTC) - self.last_stored).total_seconds())
            yield (
                "last stored",
                f"{self.last_stored:%Y-%m-%d %H:%M:%S}",
                f"{age} ago, {rows}{escaped(self.last_object)}",
            )
        for problem in self.problems:
            yield "problem", problem, ""


class Observed:
    """A connection for repeated status requests. Raises SourceError when it fails or the consumer is gone."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._store = configured_store(config.store)

    async def __aenter__(self) -> Self:
        name = f"jetcapture status {self._config.source.stream}"
        self._session = ReadSession(self._config.nats, name, timeout=TIMEOUT)
        await self._session.open()
        self._api = self._session.api
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def status(self) -> CaptureStatus:
        """Return the current status."""
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
            mark = await asyncio.to_thread(self._watermark)
        except JetcaptureError as error:
            problems.append(f"watermark: {error}")
        if mark is not None and mark.time > state.asked + MARGIN:
            problems.append(
                "watermark: its time is in the future: a server's clock was wrong; a running capture will correct it"
            )
        if mark is not None and mark.created:
            problems += await self._stream_problems(mark, state)
        path, stored = mark.last_object if mark is not None and mark.last_object is not None else (None, None)
        problems += self._stalled(state, lag, stored)
        return CaptureStatus(
            stream=source.stream,
            consumer=source.consumer,
            time=state.asked.astimezone(UTC),
            lag=lag,
            pending=state.pending,
            unacked=state.unacked,
            max_ack_pending=state.max_ack_pending,
            redelivered=state.redelivered,
            delivered=state.delivered,
            ack_floor=state.ack_floor,
            waiting_pulls=state.waiting_pulls,
            watermark_seq=None if mark is None else mark.seq,
            watermark_time=None if mark is None else mark.time,
            last_object=path,
            last_stored=stored,
            problems=tuple(problems),
        )

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
        if info["created"] != mark.created:
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

    def _watermark(self) -> Watermark | None:
        if not isinstance(self._store, NoteStore) or "{key}" in self._config.store.url:
            return None
        return read_watermark(self._store, self._config.source.stream)
