"""A connection for questions and for reading: requests that are tried again, and short-lived consumers."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self, TypeVar

import nats.errors

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.config.units import format_time
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.connection import (
    MESSAGE_NOT_FOUND,
    NOT_FOUND,
    STREAM_NOT_FOUND,
    Api,
    ApiError,
    UnavailableError,
    connect,
)
from jetcapture_py.jetstream.permissions import denial_in
from jetcapture_py.jetstream.wire.client import Connection

PAUSE = 0.25
"""Seconds between two attempts."""

_CLOSE_TIMEOUT = 1.0
_CERTAIN = 4
"""Consecutive answers before something counts as missing: a server that has just started may be wrong."""
_SHORT_LIVED = {"ack_policy": "none", "mem_storage": True, "inactive_threshold": 30 * 10**9}
"""The server forgets such a consumer by itself, should its reader be killed."""

T = TypeVar("T")


class MissingStreamError(SourceError):
    """The stream does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """A stream as the server describes it. Its messages have sequences `first` to `last`; empty, `first` is `last` + 1.

    `gaps` says whether some of these sequences have no message, `replicated` whether other servers hold copies, and
    `keeps_latest` whether the stream limits the messages of a subject, so that new ones displace old ones.
    """

    created: str
    first: int
    last: int
    gaps: bool
    replicated: bool
    keeps_latest: bool
    retention: str
    mirror: bool

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> StreamState:
        """Read the server's answer to STREAM.INFO."""
        state, config = answer["state"], answer["config"]
        first, last = max(1, int(state["first_seq"])), int(state["last_seq"])
        return cls(
            created=str(answer["created"]),
            first=first,
            last=last,
            gaps=last + 1 - first > state["messages"],
            replicated=config.get("num_replicas", 1) > 1,
            keeps_latest=config.get("max_msgs_per_subject", -1) > 0,
            retention=str(config.get("retention", "limits")),
            mirror="mirror" in config,
        )


class ReadSession:
    """A connection; an async context manager. Raises SourceError when refused, or not served for `timeout` seconds.

    `on_trouble` is called when the connection is lost, and when the user may not pull: nobody will answer.
    """

    def __init__(self, login: NatsConfig, name: str, *, timeout: float, connect_timeout: float | None = None) -> None:
        self.timeout = timeout
        self.on_trouble: Callable[[], None] = lambda: None
        self._login, self._name = login, name
        self._connect_timeout = timeout if connect_timeout is None else connect_timeout
        self._denied = ""

    async def __aenter__(self) -> Self:
        self.connection: Connection = await connect(
            self._login,
            self._name,
            on_disconnected=self._disconnected,
            on_closed=self._disconnected,
            on_error=self._errored,
            timeout=self._connect_timeout,
        )
        self.api = Api(self.connection, self._login)
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, nats.errors.Error, TimeoutError):  # the server may be gone
            await asyncio.wait_for(self.connection.close(), _CLOSE_TIMEOUT)

    async def _disconnected(self) -> None:
        self.on_trouble()

    async def _errored(self, error: Exception) -> None:
        """Handle only denied pulls, which get no answer. Other requests fail by themselves."""
        denial = denial_in(error)
        if denial is not None and (denial.subscription or ".consumer.msg.next." in denial.subject):
            self._denied = str(denial)
            self.on_trouble()

    async def request(self, subject: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer of the JetStream API. Raises SourceError, or ApiError when there is no such message."""
        return await self.retry(lambda: self.api.request(subject, body))

    async def retry(self, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `request` once NATS answers; raise SourceError when it refuses or does not answer."""
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
                missing += error.code == NOT_FOUND
                if error.err_code == MESSAGE_NOT_FOUND:
                    raise
                if missing >= _CERTAIN or (400 <= error.code < 500 and error.code != NOT_FOUND):
                    kind = MissingStreamError if error.err_code == STREAM_NOT_FOUND else SourceError
                    raise kind(f"NATS refused: {error}") from error
                reason: Exception = error
            except UnavailableError as error:
                reason = error
            if self.connection.is_closed:
                raise SourceError(f"the NATS connection was closed permanently: {self.connection.last_error or reason}")
            if clock() > deadline:
                raise SourceError(f"NATS did not respond for {self.timeout:g} s: {reason}")
            await asyncio.sleep(PAUSE)

    async def state(self, stream: str) -> StreamState:
        """Return the current state of the stream."""
        return StreamState.of(await self.request(f"STREAM.INFO.{stream}"))

    async def first_at(self, stream: str, moment: datetime) -> int:
        """The sequence of the first message stored at `moment` or later: where a consumer that starts then stands."""
        config = {"deliver_policy": "by_start_time", "opt_start_time": format_time(moment)}
        name, answer = await self.retry(lambda: self.create_consumer(stream, config))
        await self.delete_consumer(stream, name)
        return int(answer["delivered"]["stream_seq"]) + 1

    async def create_consumer(self, stream: str, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Create a consumer that nobody else knows, with these settings: its name, and the server's answer."""
        name = f"jetcapture-read-{uuid.uuid4().hex}"
        body = {"stream_name": stream, "action": "create", "config": {"name": name, **_SHORT_LIVED, **config}}
        return name, await self.api.request(f"CONSUMER.CREATE.{stream}.{name}", body)

    async def delete_consumer(self, stream: str, name: str) -> None:
        """Delete it, if that is possible now: else the server forgets it by itself."""
        with contextlib.suppress(UnavailableError, ApiError):
            if self.connection.is_connected:
                await self.api.request(f"CONSUMER.DELETE.{stream}.{name}")
