"""What a cell of the matrix runs with: a stream of its own on a shared server, and the archive of it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from jetcapture_py.archive import layout
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.model import Config
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.manage.check import check
from jetcapture_py.verify.proof import verify
from tests.integration.security import leaves
from tests.support.running import CONSUMER, capture_all, config, rows, running, until

COUNT = 10
"""Messages that a cell publishes, unless it says otherwise."""
_MISSING = 10037  # no message at that sequence


@dataclass(kw_only=True)
class Site:
    """Addresses of running servers; those that a site lacks are empty. `authority` is the file that verifies `wss`."""

    url: str
    version: tuple[int, int]
    secure_websocket: str = ""
    authority: str = ""
    leaf: str = ""
    bare_leaf: str = ""


class ServerRefusedError(Exception):
    """The server answered a request of the JetStream API with an error."""


class StreamMessage(NamedTuple):
    """A message as the stream has it."""

    seq: int
    subject: str
    headers: list[tuple[str, list[str]]] | None
    payload: bytes
    time: datetime


Selection = Callable[[list[StreamMessage]], list[StreamMessage]]


def everything(messages: list[StreamMessage]) -> list[StreamMessage]:
    return messages


@dataclass(kw_only=True)
class Stage:
    """One cell's part of a site. `seen` are the messages that the stream has had, by sequence.

    `client` is for the test's own requests, `login` (further settings of the section `nats`) for the capture.
    """

    client: Client
    site: Site
    number: int
    directory: Path
    login: Mapping[str, Any] = field(default_factory=dict)
    stream: str = ""
    seen: dict[int, StreamMessage] = field(default_factory=dict)
    selects: Selection = everything

    def __post_init__(self) -> None:
        self.stream = self.stream or f"S{self.number}"

    @property
    def prefix(self) -> str:
        return f"s{self.number}"

    @property
    def archive(self) -> Path:
        return self.directory / "archive"

    @property
    def expected(self) -> list[StreamMessage]:
        return self.selects([self.seen[seq] for seq in sorted(self.seen)])

    # ------------------------------------------------------------------ the stream

    async def ask(self, subject: str, body: Any = None) -> dict[str, Any]:
        payload = b"" if body is None else json.dumps(self.own(body)).encode()
        subject = f"$JS.API.{subject.format(stream=self.stream, consumer=CONSUMER)}"
        answer: dict[str, Any] = json.loads((await self._answer(subject, payload)).data)
        if "error" in answer:
            raise ServerRefusedError(answer["error"].get("description", "unknown"))
        return answer

    async def _answer(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> Msg:
        deadline = time.monotonic() + 60
        while True:
            try:
                return await self.client.request(subject, payload, 5, headers=dict(headers) if headers else None)
            except nats.errors.Error:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    def own(self, value: Any) -> Any:
        """`value` with `{p}` in its texts replaced by the subjects' first token, and `{s}` by the stream."""
        if isinstance(value, str):
            return value.replace("{p}", self.prefix).replace("{s}", self.stream)
        if isinstance(value, Mapping):
            return {name: self.own(item) for name, item in value.items()}
        return [self.own(item) for item in value] if isinstance(value, list | tuple) else value

    async def create(self, stream: str = "{s}", **settings: Any) -> None:
        if not {"mirror", "sources", "subjects"} & settings.keys():
            settings["subjects"] = ["{p}.>"]
        name = self.own(stream)
        await self.ask(f"STREAM.CREATE.{name}", {"name": name, "num_replicas": 1, **settings})

    async def update(self, **changes: Any) -> None:
        settings = (await self.ask("STREAM.INFO.{stream}"))["config"] | changes
        present = {name: value for name, value in settings.items() if value is not None}
        await self.ask("STREAM.UPDATE.{stream}", present)

    async def consumer(self, name: str = CONSUMER, **settings: Any) -> None:
        """Create a consumer; one with an empty `durable_name` is ephemeral."""
        settings = {"name": name, "durable_name": name, "ack_policy": "explicit", **settings}
        await self.ask(f"CONSUMER.CREATE.{{stream}}.{name}", {"stream_name": self.stream, "config": settings})

    async def state(self) -> dict[str, Any]:
        state: dict[str, Any] = (await self.ask("STREAM.INFO.{stream}"))["state"]
        return state

    async def consumer_state(self) -> dict[str, Any]:
        return await self.ask("CONSUMER.INFO.{stream}.{consumer}")

    async def send(self, subject: str, payload: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        answer = await self._answer(self.own(subject), payload, headers)
        if b'"error"' in answer.data:
            raise ServerRefusedError(json.loads(answer.data)["error"]["description"])

    async def fill(self, count: int = COUNT) -> None:
        """Publish messages on five subjects; some have headers, some are empty, and some are both empty and bare."""
        for number in range(count):
            headers = {"Number": str(number), "Note": "ä b"} if number % 2 else None
            await self.send(f"{{p}}.{number % 5}", b"" if number % 7 == 6 else b"payload %d" % number, headers)

    async def look(self) -> None:
        """Add what the stream has now to `seen`, message by message, without a consumer."""
        state = await self.state()
        for seq in range(max(1, state["first_seq"]), state["last_seq"] + 1):
            if seq in self.seen:
                continue
            request = json.dumps({"seq": seq}).encode()
            answer = json.loads((await self._answer(f"$JS.API.STREAM.MSG.GET.{self.stream}", request)).data)
            if "error" not in answer:
                self.seen[seq] = _message(answer["message"])
            else:
                assert answer["error"]["err_code"] == _MISSING, answer

    async def looked(self, condition: Callable[[list[StreamMessage]], bool], what: str) -> None:
        async def enough() -> bool:
            await self.look()
            return condition(self.expected)

        await until(enough, what)

    async def holds(self, count: int) -> None:
        async def enough() -> bool:
            return int((await self.state())["messages"]) == count

        await until(enough, f"stream {self.stream} holds {count} messages")

    # ------------------------------------------------------------------ the capture

    def config(self, **source: Any) -> Config:
        source = {"stream": self.stream, **self.own(source)}
        return config(self.site.url, self.archive, nats=dict(self.login), source=source)

    async def capture(self, **source: Any) -> None:
        await self.look()
        with leaves():
            await capture_all(self.config(**source))

    @contextlib.asynccontextmanager
    async def capturing(self, **source: Any) -> AsyncIterator[Capture]:
        """A running capture that has received what the stream has, and holds it; it drains at the end of the block."""
        await self.look()
        with leaves():
            async with running(self.config(**source)) as state:
                await self.received(state)
                yield state

    async def received(self, state: Capture) -> None:
        expected = len(self.expected)

        async def all_delivered() -> bool:
            return state.source.fetched >= expected and (await self.consumer_state())["num_pending"] == 0

        await until(all_delivered, f"{expected} messages are received")

    async def refill(self, state: Capture) -> None:
        await self.fill()
        await self.look()
        await self.received(state)

    async def check_archive(self, *, proven: bool = True) -> None:
        """The archive has what the stream had, each message once, nothing waits to be delivered, and verify says so."""
        names = (layout.SEQ, layout.SUBJECT, layout.HEADERS, layout.PAYLOAD, layout.TIMESTAMP)
        stored = [StreamMessage(*(row[name] for name in names)) for row in rows(self.archive)]
        assert stored == self.expected
        if proven:
            report = await verify(self.config())
            assert report.exit_code() == 0, report.as_text()
            state = await self.consumer_state()
            assert (state["num_pending"], state["num_ack_pending"]) == (0, 0), state

    async def check_refused(self, message: str, **source: Any) -> None:
        """A capture ends with exactly this line and stores nothing; `check` has a problem."""
        configuration = self.config(**source)
        with pytest.raises(JetcaptureError) as caught, leaves():
            await capture_all(configuration)
        assert str(caught.value) == message.format(stream=self.stream, consumer=CONSUMER, prefix=self.prefix)
        assert (await check(configuration)).problems, "check finds nothing"
        assert not (self.archive.exists() and rows(self.archive))


def _message(answer: Mapping[str, Any]) -> StreamMessage:
    lines = base64.b64decode(answer.get("hdrs", "")).decode().split("\r\n")[1:-2]
    headers: dict[str, list[str]] = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers.setdefault(name, []).append(value.strip())
    return StreamMessage(
        answer["seq"],
        answer["subject"],
        list(headers.items()) if lines else None,
        base64.b64decode(answer.get("data", "")),
        datetime.fromisoformat(answer["time"]),
    )


@contextlib.asynccontextmanager
async def connected(url: str, **login: Any) -> AsyncIterator[Client]:
    async def quiet(error: Exception) -> None:
        """Whoever asks is told."""

    client = await nats.connect(url, error_cb=quiet, **login)
    try:
        yield client
    finally:
        await client.close()
