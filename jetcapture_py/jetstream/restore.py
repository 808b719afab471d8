"""Restore a stream from a backup through the JetStream API, `STREAM.RESTORE` (ADR-24).

The server answers with a subject to which the backup is published in chunks. It acknowledges each once it is written,
and gives up when it hears nothing for five seconds. It keeps what it has until then, so a restore that fails deletes
the stream.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import nats.errors

from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.connection import FORBIDDEN, STREAM_NOT_FOUND, ApiError, UnavailableError
from jetcapture_py.jetstream.permissions import Denial, refusal
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.text import one_line

CHUNK = 256 << 10
WINDOW = 4 << 20
"""Bytes sent and not acknowledged."""
KEEP_ALIVE = 1.0
"""Seconds without a chunk after which one without content is sent."""

_SUBJECT = "$JS.SNAPSHOT.RESTORE"
_ACK_TIMEOUT = 60.0
_FINISH_TIMEOUT = 600.0
_ABORT_TIMEOUT = 10.0
_ABORT_PAUSE = 0.5
_EXISTS = (10130, 10058)
_OLDEST = (2, 15)
_VERSION = re.compile(r"(\d+)\.(\d+)")


class StreamRestore:
    """One restore. `padding` is a piece of a backup without content, `broken` one that the server cannot read."""

    def __init__(self, session: ReadSession, stream: str, *, padding: bytes, broken: bytes) -> None:
        self.stream = stream
        self._session, self._connection = session, session.connection
        self._padding, self._broken = padding, broken
        self._inbox = self._connection.new_inbox()
        self._to = ""
        self._sent: dict[int, int] = {}  # bytes of each chunk that is not acknowledged
        self._pending = self._next = 0
        self._answered = asyncio.Event()
        self._failure: SourceError | None = None
        self._result: dict[str, Any] | None = None

    async def check(self) -> None:
        """Check that the server can restore, and that the stream does not exist. Raises SourceError."""
        version = self._connection.server_version
        found = _VERSION.match(version)
        if found is None or (int(found[1]), int(found[2])) < _OLDEST:
            raise SourceError(
                f"the server is nats-server {version}: an exact restore needs 2.15 or later; jetcapture spark replay "
                "publishes the messages again, with new sequences and timestamps"
            )
        try:
            await self._session.api.request(f"STREAM.INFO.{self.stream}")
        except ApiError as error:
            if error.err_code == STREAM_NOT_FOUND or error.code == FORBIDDEN:
                return
            raise SourceError(f"the server refused the request for stream {self.stream}: {error}") from error
        except UnavailableError as error:
            raise SourceError(str(error)) from error
        raise self._exists()

    async def begin(self, config: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Create the stream; `config` and `state` are those of the JetStream API. Raises SourceError."""
        self._connection.denials.listeners.append(self._on_denial)
        self._session.on_trouble = self._on_lost
        self._subscription = await self._connection.subscribe(f"{self._inbox}.*", cb=self._on_answer)
        try:
            answer = await self._session.api.request(
                f"STREAM.RESTORE.{self.stream}", {"config": {**config, "name": self.stream}, "state": state}
            )
        except ApiError as error:
            if error.err_code in _EXISTS:
                raise self._exists() from error
            raise SourceError(f"NATS refused to restore stream {self.stream}: {error}") from error
        except UnavailableError as error:
            raise SourceError(f"NATS did not start to restore stream {self.stream}: {error}") from error
        self._to = str(answer["deliver_subject"])

    async def send(self, data: bytes) -> None:
        """Send a piece of the backup; wait while too much is not acknowledged. Raises SourceError."""
        size = min(CHUNK, self._connection.max_payload)
        view = memoryview(data)
        for start in range(0, len(data), size):
            chunk = view[start : start + size]
            while self._pending and self._pending + len(chunk) > WINDOW:
                await self._answer(_ACK_TIMEOUT)
            await self._publish(bytes(chunk))

    async def keep_alive(self) -> None:
        """Tell the server that more will come. Raises SourceError."""
        if not self._sent:
            await self.send(self._padding)
        self._check()

    async def finish(self) -> dict[str, Any]:
        """End the backup, and return the stream's state and configuration as in STREAM.INFO. Raises SourceError."""
        while self._sent:
            await self._answer(_ACK_TIMEOUT)
        await self._publish(b"")
        while self._result is None:
            await self._answer(_FINISH_TIMEOUT)
        self._to = ""
        await self._leave()
        return self._result

    async def abort(self) -> str | None:
        """End a restore that has begun and did not finish, and delete its stream; return why that failed, or None."""
        if not self._to:
            return None
        with suppress(SourceError, TimeoutError, OSError, nats.errors.Error):
            await self._connection.publish(self._to, self._broken, f"{self._inbox}.end")
        self._to, reason = "", "the server did not answer"
        clock = asyncio.get_running_loop().time
        deadline = clock() + _ABORT_TIMEOUT
        deleted = 0
        while clock() < deadline and deleted < 2:
            try:
                await self._session.api.request(f"STREAM.DELETE.{self.stream}")
                deleted += 1
            except ApiError as error:
                if error.err_code != STREAM_NOT_FOUND:
                    reason = str(error)
                    break
                deleted += 1  # again: the server may just be about to create it
            except UnavailableError as error:
                reason = str(error)
            await asyncio.sleep(_ABORT_PAUSE)
        await self._leave()
        return None if deleted == 2 else reason

    async def _leave(self) -> None:
        with suppress(ValueError):
            self._connection.denials.listeners.remove(self._on_denial)
        with suppress(OSError, nats.errors.Error):
            await self._subscription.unsubscribe()

    async def _publish(self, chunk: bytes) -> None:
        self._check()
        self._sent[self._next] = len(chunk)
        self._pending += len(chunk)
        reply = f"{self._inbox}.{self._next}"
        self._next += 1
        try:
            await self._connection.publish(self._to, chunk, reply)
        except (OSError, nats.errors.Error) as error:
            raise SourceError(f"the restore was interrupted: {one_line(error)}") from error

    async def _answer(self, timeout: float) -> None:
        """Wait for an answer. Raises SourceError."""
        self._answered.clear()
        self._check()
        try:
            async with asyncio.timeout(timeout):
                await self._answered.wait()
        except TimeoutError:
            raise SourceError(f"the server did not answer for {timeout:g} s while it restored {self.stream}") from None
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _on_answer(self, message: Any) -> None:
        number = message.subject.rpartition(".")[2]
        if message.data:
            answer = json.loads(message.data)
            if answer.get("error", {}).get("err_code") in _EXISTS:  # somebody has just created it: leave it alone
                self._to, self._failure = "", self._exists()
            elif "error" in answer:
                text = str(answer["error"].get("description", "unknown"))
                self._fail(f"the server could not restore stream {self.stream}: {one_line(text)}")
            else:
                self._result = answer
        elif message.headers and message.headers.get("Status") == "503":
            self._fail(f"the server gave up restoring stream {self.stream}: it heard nothing for five seconds")
        if number.isdigit():
            self._pending -= self._sent.pop(int(number), 0)
        self._answered.set()

    def _on_denial(self, denial: Denial) -> None:
        if denial.subject.startswith(f"{_SUBJECT}.{self.stream}.".lower()):
            self._fail(f"NATS refused: {refusal(f'{_SUBJECT}.{self.stream}.*')}")

    def _on_lost(self) -> None:
        self._fail("the connection was lost during the restore")

    def _fail(self, text: str) -> None:
        self._failure = self._failure or SourceError(text)
        self._answered.set()

    def _exists(self) -> SourceError:
        return SourceError(
            f"stream {self.stream} exists: a restore creates its stream; choose another name, or remove what an "
            f"interrupted restore has left with: nats stream rm {self.stream}"
        )
