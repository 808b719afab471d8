"""What the server says of a stream and of the capture's consumer on it, for a proof."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import nats.errors

from jetcapture_py.config.model import Config
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.admin import filters_of
from jetcapture_py.jetstream.connection import Api, ApiError, UnavailableError, connect
from jetcapture_py.jetstream.permissions import denial_in

PATIENCE = 10.0
"""Seconds for which a server may be without an answer, or a range without progress."""
PAUSE = 0.25

MARGIN = timedelta(seconds=5)
"""After a consumer was created: which of these messages it began with is known to the server alone."""

_CERTAIN = 4
"""Consecutive answers before something counts as missing: a server that has just started may be wrong."""
_NOT_FOUND = 404
_OWN = {"ack_policy": "none", "mem_storage": True, "inactive_threshold": 30 * 10**9}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """The server's description of a stream with sequences `first` to `last`; if empty, `first` is `last` + 1."""

    created: str
    first: int
    last: int
    retention: str
    mirror: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerPosition:
    """The capture's consumer: what it selects, where it started, and up to where every message is acknowledged.

    `asked` is the server's time of the answer.
    """

    ack_floor: int
    filters: tuple[str, ...]
    deliver_policy: str
    start_sequence: int
    start_time: str
    created: str
    max_deliver: int
    asked: datetime


class Server:
    """A connection for one proof; a context manager. All it does raises SourceError when it is not served."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.stream, self.consumer = config.source.stream, config.source.consumer
        self.denied = ""  # what is not allowed of a pull
        self.wake: Callable[[], None] = lambda: None
        self.disturbed = 0  # times that the connection was lost

    async def __aenter__(self) -> Self:
        self.connection = await connect(
            self._config.nats,
            f"jetcapture verify {self.stream}/{self.consumer}",
            on_disconnected=self._disconnected,
            on_reconnected=self._quiet,
            on_closed=self._disconnected,
            on_error=self._errored,
            patience=PATIENCE / 2,
        )
        self.api = Api(self.connection, self._config.nats.domain)
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):  # the server is gone
            await asyncio.wait_for(self.connection.close(), 2)

    async def _disconnected(self) -> None:
        self.disturbed += 1

    async def _quiet(self) -> None:
        """Ignore reconnects: pending requests notice them."""

    async def _errored(self, error: Exception) -> None:
        denial = denial_in(error)
        if denial is not None and ".consumer.msg.next." in denial.subject:  # of a request, its answer tells
            self.denied = str(denial)
            self.wake()

    # ------------------------------------------------------------------ questions

    async def state(self) -> StreamState:
        """Return the current state of the stream."""
        answer = await self._ask(f"STREAM.INFO.{self.stream}")
        state, config = answer["state"], answer["config"]
        return StreamState(
            created=str(answer["created"]),
            first=max(1, int(state["first_seq"])),
            last=int(state["last_seq"]),
            retention=str(config.get("retention", "limits")),
            mirror="mirror" in config,
        )

    async def position(self) -> ConsumerPosition:
        """The capture's consumer now."""
        answer = await self._ask(f"CONSUMER.INFO.{self.stream}.{self.consumer}")
        config = answer["config"]
        return ConsumerPosition(
            ack_floor=int(answer.get("ack_floor", {}).get("stream_seq", 0)),
            filters=filters_of(config),
            deliver_policy=str(config.get("deliver_policy", "all")),
            start_sequence=int(config.get("opt_start_seq", 0)),
            start_time=str(config.get("opt_start_time", "")),
            created=str(answer["created"]),
            max_deliver=int(config.get("max_deliver", -1)),
            asked=datetime.fromisoformat(answer["ts"]) if "ts" in answer else datetime.now(UTC),
        )

    async def first_at(self, moment: datetime) -> int:
        """The sequence of the first message stored at `moment` or later: where a consumer that starts then stands."""
        start = moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
        name, answer = await self.create({"deliver_policy": "by_start_time", "opt_start_time": start})
        await self.delete(name)
        return int(answer["delivered"]["stream_seq"]) + 1

    async def create(self, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Have a consumer of our own with these settings: its name, and the server's answer."""
        name = f"jetcapture-verify-{uuid.uuid4().hex}"
        body = {"stream_name": self.stream, "action": "create", "config": {"name": name, **_OWN, **config}}
        return name, await self._ask(f"CONSUMER.CREATE.{self.stream}.{name}", body)

    async def delete(self, name: str) -> None:
        """Without an answer, or leave, the server forgets it by itself."""
        with contextlib.suppress(UnavailableError, ApiError):
            if self.connection.is_connected:
                await self.api.request(f"CONSUMER.DELETE.{self.stream}.{name}")

    async def _ask(self, subject: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return await self._patiently(lambda: self.api.request(subject, body))

    async def _patiently(self, request: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, Any]:
        clock = asyncio.get_running_loop().time
        deadline, missing = clock() + PATIENCE, 0
        while True:
            try:
                return await request()
            except ApiError as error:
                missing += error.code == _NOT_FOUND
                if missing >= _CERTAIN or (400 <= error.code < 500 and error.code != _NOT_FOUND):
                    raise SourceError(f"NATS refused: {error}") from error
                reason: Exception = error
            except UnavailableError as error:
                reason = error
            if clock() > deadline:
                raise SourceError(str(reason))
            await asyncio.sleep(PAUSE)


def start_of(position: ConsumerPosition) -> tuple[int, datetime | None, str]:
    """Where the consumer started: a sequence, or a time from which on; and what of before cannot be proven."""
    policy = position.deliver_policy
    if policy == "all":
        return 1, None, ""
    if policy == "by_start_sequence":
        return max(1, position.start_sequence), None, ""
    if policy == "by_start_time":
        return 1, datetime.fromisoformat(position.start_time), ""
    note = (
        f"messages from before the consumer was created at {position.created} (deliver_policy {policy}), and those of "
        f"the {MARGIN.seconds} s after it in front of the first one stored: which the consumer began with is not known"
    )
    return 1, datetime.fromisoformat(position.created), note
