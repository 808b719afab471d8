"""A connection for API requests with retries and for reading through short-lived consumers."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Self, TypeVar

import nats.errors

from jetcapture_py.archive.incarnations import Ends, Origin, is_same_stream
from jetcapture_py.config.model import NatsConfig
from jetcapture_py.config.units import format_time, microseconds_of
from jetcapture_py.errors import ApiError, MissingError, SourceError, UnavailableError
from jetcapture_py.jetstream.connection import Api, connect
from jetcapture_py.jetstream.unreadable import unreadable, unreadable_with_origins
from jetcapture_py.jetstream.wire.client import Connection, denial_in

PAUSE = 0.25
"""Seconds between two attempts."""

_CLOSE_TIMEOUT = 1.0
_CERTAIN = 4
"""Not-found answers before something counts as missing: a server that has just started may be wrong."""
_SHORT_LIVED = {"ack_policy": "none", "mem_storage": True, "inactive_threshold": 30 * 10**9}
"""Settings of a consumer that the server removes if its reader is killed."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """A stream's state."""

    created: str
    """First creation time known to `ReadSession`."""
    server_created: str
    """Creation time, as the server writes it."""
    first: int
    """First sequence; `last` + 1 for an empty stream."""
    last: int
    """Last sequence."""
    first_time: datetime
    """Time of the first message; for an empty stream, its creation time."""
    last_time: datetime
    """Time of the last message, even if it was deleted since."""
    messages: int
    """Number of messages."""
    bytes: int
    """Bytes of all messages."""
    gaps: bool
    """Whether some sequences from `first` to `last` have no message."""
    replicated: bool
    """Whether other servers hold copies."""
    keeps_latest: bool
    """Whether it limits messages per subject, so that new messages replace old ones."""
    retention: str
    """Retention policy in the JetStream API's form."""
    mirror: bool
    """Whether it is a mirror."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> StreamState:
        """Read the server's answer to STREAM.INFO."""
        state, config = answer["state"], answer["config"]
        first, last = max(1, int(state["first_seq"])), int(state["last_seq"])
        return cls(
            created=str(answer["created"]),
            server_created=str(answer["created"]),
            first=first,
            last=last,
            first_time=datetime.fromisoformat(state["first_ts"] if state["messages"] else answer["created"]),
            last_time=datetime.fromisoformat(state["last_ts"]),
            messages=int(state["messages"]),
            bytes=int(state["bytes"]),
            gaps=last + 1 - first > state["messages"],
            replicated=config.get("num_replicas", 1) > 1,
            keeps_latest=config.get("max_msgs_per_subject", -1) > 0,
            retention=str(config.get("retention", "limits")),
            mirror="mirror" in config,
        )

    @property
    def origin(self) -> Origin:
        return Origin(self.created, self.ends.sample)

    @property
    def ends(self) -> Ends:
        """The values that `is_same_stream` compares."""
        first_time, last_time = microseconds_of(self.first_time), microseconds_of(self.last_time)
        return Ends(
            created=self.server_created,
            first=self.first,
            first_time=first_time,
            last=self.last,
            last_time=last_time,
        )


class ReadSession:
    """A connection; an async context manager, or `open` and `close`.

    Raises SourceError when NATS refuses or does not respond for `timeout` seconds. `on_trouble` is called when open
    pulls will get no answer, because the connection is lost or pulls are denied.
    """

    def __init__(self, login: NatsConfig, name: str, *, timeout: float, connect_timeout: float | None = None) -> None:
        self.timeout = timeout
        self.on_trouble: Callable[[], None] = lambda: None
        self._login, self._name = login, name
        self._connect_timeout = timeout if connect_timeout is None else connect_timeout
        self._denied = ""
        self._retentions: dict[str, str] = {}  # of streams, by name
        self._known: dict[str, tuple[Origin, bool]] = {}
        self._same: dict[str, set[str]] = {}  # creation times that servers have given known streams

    async def open(self) -> None:
        """Connect. Raises SourceError."""
        self.connection: Connection = await connect(
            self._login,
            self._name,
            on_disconnected=self._disconnected,
            on_closed=self._disconnected,
            on_error=self._errored,
            timeout=self._connect_timeout,
        )
        self.api = Api(self.connection, self._login)

    async def close(self) -> None:
        with contextlib.suppress(OSError, nats.errors.Error, TimeoutError):  # the server may be gone
            await asyncio.wait_for(self.connection.close(), _CLOSE_TIMEOUT)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _disconnected(self) -> None:
        self.on_trouble()

    async def _errored(self, error: Exception) -> None:
        """Handle denied pulls, which get no answer. Other denied requests fail with an error."""
        denial = denial_in(error)
        if denial is not None and (denial.subscription or ".consumer.msg.next." in denial.subject):
            self._denied = str(denial)
            self.on_trouble()

    async def request(self, subject: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Call the JetStream API and return its answer. Raises SourceError."""
        return await self.retry(lambda: self.api.request(subject, body))

    async def retry(self, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Retry `request` until NATS answers. Raises SourceError when it refuses or stays silent."""
        clock = asyncio.get_running_loop().time
        deadline, missing = clock() + self.timeout, 0
        while True:
            if self._denied:
                raise SourceError(f"NATS refused: {self._denied}")
            try:
                if not self.connection.is_connected:
                    raise UnavailableError("the connection is lost")
                return await request()
            except ApiError as error:
                missing += isinstance(error, MissingError)
                if missing >= _CERTAIN or (400 <= error.code < 500 and not isinstance(error, MissingError)):
                    raise
                reason: SourceError = error
            except UnavailableError as error:
                reason = error
            if self.connection.is_closed:
                raise SourceError(f"the NATS connection was closed permanently: {self.connection.last_error or reason}")
            if clock() > deadline:
                if isinstance(reason, ApiError):
                    raise reason
                raise SourceError(f"NATS did not respond for {self.timeout:g} s: {reason}")
            await asyncio.sleep(PAUSE)

    async def state(self, stream: str) -> StreamState:
        """Return the current state of the stream. Raises SourceError, also for a stream that cannot be read."""
        return await self.retry(partial(self._state, stream))

    async def _state(self, stream: str) -> StreamState:
        answer = await self.api.request(f"STREAM.INFO.{stream}")
        problem = unreadable(self.api, answer)
        if problem is None and stream not in self._retentions:
            problem = await unreadable_with_origins(self.api, answer)
        if problem is not None:
            raise SourceError(problem)
        state = await self.identified(stream, answer)
        self._retentions[stream] = state.retention
        return state

    async def identified(self, stream: str, answer: Mapping[str, Any]) -> StreamState:
        """Parse an answer to STREAM.INFO; the same stream keeps its first known creation time."""
        state = StreamState.of(answer)
        if stream not in self._known:
            self.know(stream, state.origin)
        origin, progressed = self._known[stream]
        if state.created not in self._same[stream]:
            if not await self.is_same(stream, origin, state, progressed=progressed):
                self.know(stream, state.origin)
                return state
            self._same[stream].add(state.created)
        return replace(state, created=origin.created)

    def know(self, stream: str, origin: Origin, *, progressed: bool = False) -> None:
        """Compare the stream with this origin from now on; `progressed` as in `is_same_stream`."""
        if origin.created and self._known.get(stream) != (origin, progressed):
            self._known[stream], self._same[stream] = (origin, progressed), set()

    async def is_same(self, stream: str, origin: Origin, state: StreamState, *, progressed: bool = False) -> bool:
        """Whether the stream with this state is that of `origin`."""
        return await is_same_stream(origin, state.ends, partial(self.time_of, stream), progressed=progressed)

    async def time_of(self, stream: str, seq: int) -> int | None:
        """Return the timestamp of a message in microseconds; None without message or permission."""
        try:
            message = await self.message(stream, seq=seq)
        except SourceError:
            return None
        return None if message is None else microseconds_of(datetime.fromisoformat(message["time"]))

    async def message(self, stream: str, **which: Any) -> dict[str, Any] | None:
        """Call `Api.message` with retries. Raises SourceError."""
        return await self.retry(partial(self.api.message, stream, **which))

    async def next_match(self, stream: str, seq: int, subjects: Collection[str]) -> int | None:
        """Return the sequence of the first message on `subjects` (empty: all) from `seq` on; None without one."""
        message = await self.retry(partial(self.api.next_match, stream, seq, subjects))
        return None if message is None else int(message["seq"])

    async def first_at(self, stream: str, moment: datetime) -> int:
        """Return the sequence of the first message stored at `moment` or later, from a consumer that starts there."""
        config = {"deliver_policy": "by_start_time", "opt_start_time": format_time(moment)}
        name = _consumer_name()  # the same name for every attempt, so that an unanswered one leaves no consumer behind
        _, answer = await self.retry(lambda: self.create_consumer(stream, config, name))
        await self.delete_consumer(stream, name)
        return int(answer["delivered"]["stream_seq"]) + 1

    async def create_consumer(
        self, stream: str, config: Mapping[str, Any], name: str | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Create a short-lived consumer with these settings; return its name (random by default) and the answer.

        With retention `interest`, the server deletes messages that no other consumer needs, once one has read them or
        ends.
        """
        if stream not in self._retentions:
            await self._state(stream)
        if self._retentions[stream] == "interest":
            raise SourceError(f"stream {stream} cannot be read: with retention interest, reading deletes messages")
        name = name or _consumer_name()
        body = {"stream_name": stream, "action": "create", "config": {"name": name, **_SHORT_LIVED, **config}}
        return name, await self.api.request(f"CONSUMER.CREATE.{stream}.{name}", body)

    async def delete_consumer(self, stream: str, name: str) -> None:
        """Delete a consumer if connected; otherwise the server removes it once it is inactive."""
        with contextlib.suppress(SourceError):
            if self.connection.is_connected:
                await self.api.request(f"CONSUMER.DELETE.{stream}.{name}")


def _consumer_name() -> str:
    return f"jetcapture-read-{uuid.uuid4().hex}"
