"""Restore a stream from a backup through the JetStream API, `STREAM.RESTORE` (ADR-24).

The server answers with a subject to which the backup is published in chunks. It acknowledges each chunk once written,
and gives up after five seconds of silence. It creates the stream after reading the beginning of the backup, and keeps
the incomplete stream when a restore fails. This module then deletes it, unless somebody else has created it.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import nats.errors

from jetcapture_py.errors import ApiError, DeniedError, MissingStreamError, SourceError, UnavailableError
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.jetstream.wire.client import Connection, Denial, refusal
from jetcapture_py.text import one_line

CHUNK = 512 << 10
"""Bytes in a message: few enough for a slow connection to send one within the five seconds."""
WINDOW = 4 << 20
"""Bytes sent and not acknowledged."""
KEEP_ALIVE = 1.0
"""Seconds without a chunk after which an empty one is sent."""
PADDING = b"\xfe\x01\x00\x00\x00"
"""A Snappy frame that readers skip."""
BROKEN = b"\x02\x00\x00\x00"
"""A Snappy frame that no reader accepts."""

_SUBJECT = "$JS.SNAPSHOT.RESTORE"
_ACK_TIMEOUT = 60.0
_FINISH_TIMEOUT = 600.0
_ABORT_TIMEOUT = 10.0
_ABORT_PAUSE = 0.5
_CREATION_TIMEOUT = 10.0
_CREATION_PAUSE = 0.05
_EXISTS = (10130, 10058)
_OLDEST = (2, 15)
_VERSION = re.compile(r"(\d+)\.(\d+)")


class _ExistsError(SourceError):
    """Somebody else has created the stream."""


class StreamRestore:
    """One restore."""

    def __init__(self, session: ReadSession, stream: str) -> None:
        self.stream = stream
        self._session = session
        self._inbox = session.connection.new_inbox()
        self._to = ""
        self._sent: dict[str, int] = {}  # sizes of the unacknowledged chunks
        self._answered = asyncio.Event()
        self._failure: SourceError | None = None
        self._result: dict[str, Any] | None = None
        self._over = False  # the server has ended the restore
        self._subjects: list[str] = []
        self._created: str | None = None  # creation time by the stream's leader; "" without permission

    @property
    def _connection(self) -> Connection:
        return self._session.connection

    async def check(self) -> None:
        """Check that the server can restore, and that the stream does not exist. Raises SourceError."""
        version = self._connection.server_version
        number = _VERSION.match(version)
        if number is None or (int(number[1]), int(number[2])) < _OLDEST:
            raise SourceError(
                f"the server is nats-server {version}: an exact restore needs 2.15 or later; jetcapture spark replay "
                "publishes the messages again, with new sequences and timestamps"
            )
        info, _ = await self._looked_up()
        if info is not None:
            raise self._exists()

    async def begin(self, config: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Create the stream; `config` and `state` are those of the JetStream API. Raises SourceError."""
        fed = config.get("mirror") or config.get("sources")
        self._subjects = sorted(config.get("subjects") or ([] if fed else [self.stream]))
        self._connection.denial_listeners.append(self._on_denial)
        self._session.on_trouble = lambda: self._fail("the connection was lost during the restore")
        self._subscription = await self._connection.subscribe(f"{self._inbox}.*", cb=self._on_answer)
        try:
            answer = await self._session.api.request(
                f"STREAM.RESTORE.{self.stream}", {"config": {**config, "name": self.stream}, "state": state}
            )
        except ApiError as error:
            if error.err_code in _EXISTS:
                raise self._exists() from error
            raise
        self._to = str(answer["deliver_subject"])

    async def create(self, head: bytes) -> None:
        """Send the beginning of the backup, so that the server creates the stream. Raises SourceError."""
        await self.send(head)
        try:
            async with asyncio.timeout(_CREATION_TIMEOUT):
                await self._await_stream()
        except TimeoutError:
            await self.finish()  # the server says only at the end why it did not create the stream
            raise SourceError(f"the server did not create stream {self.stream}") from None

    async def _await_stream(self) -> None:
        """Wait until the server has created the stream, and remember its creation time to recognize it."""
        while self._created is None:
            await self.send(PADDING)
            while self._sent:
                await self._answer(_ACK_TIMEOUT)
            info, allowed = await self._looked_up()
            if not allowed:
                self._created = ""
            elif info is None:
                await asyncio.sleep(_CREATION_PAUSE)
            elif sorted(info["config"].get("subjects") or ()) == self._subjects:
                self._created = str(info["created"])
            else:
                self._failure = self._exists()
                raise self._failure

    async def _looked_up(self) -> tuple[dict[str, Any] | None, bool]:
        """Return the result of `_info`, and whether the user has permission. Raises SourceError."""
        try:
            return await self._info(), True
        except DeniedError:
            return None, False

    async def _info(self) -> dict[str, Any] | None:
        """Return the stream's state and configuration; None if it does not exist. Raises SourceError."""
        try:
            return await self._session.api.request(f"STREAM.INFO.{self.stream}")
        except MissingStreamError:
            return None

    async def send(self, data: bytes) -> None:
        """Send a piece of the backup; wait while too much is unacknowledged. Raises SourceError."""
        size = min(CHUNK, self._connection.max_payload)
        view = memoryview(data)
        for start in range(0, len(data), size):
            chunk = view[start : start + size]
            while self._sent and sum(self._sent.values()) + len(chunk) > WINDOW:
                await self._answer(_ACK_TIMEOUT)
            await self._publish(data if len(chunk) == len(data) else bytes(chunk))

    async def keep_alive(self) -> None:
        """Keep the restore alive with an empty chunk. Raises SourceError."""
        if not self._sent:
            await self.send(PADDING)
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
        """Abort an unfinished restore and delete its stream; return why that failed, or None.

        A stream that somebody else has created stays.
        """
        if not self._to:
            return None
        clock = asyncio.get_running_loop().time
        deadline = clock() + _ABORT_TIMEOUT
        if self._created is None and self._failure is None:
            with suppress(SourceError, TimeoutError):
                async with asyncio.timeout(_ABORT_TIMEOUT / 2):
                    await self._await_stream()
        while not self._over and clock() < deadline:
            self._answered.clear()
            with suppress(TimeoutError, OSError, nats.errors.Error):
                for chunk in (BROKEN, b""):
                    await self._connection.publish(self._to, chunk, f"{self._inbox}.end")
                async with asyncio.timeout(_ABORT_PAUSE):
                    while not self._over:
                        await self._answered.wait()
                        self._answered.clear()
        reason: str | None = "the server did not answer"
        while self._over and clock() < deadline:
            try:
                reason = None if isinstance(self._failure, _ExistsError) else await self._delete()
                break
            except UnavailableError as error:
                reason = str(error)
                await asyncio.sleep(_ABORT_PAUSE)
        self._to = ""
        await self._leave()
        return reason

    async def _delete(self) -> str | None:
        """Delete the stream if this restore has created it; return why not, or None. Raises UnavailableError."""
        try:
            info = await self._info()
            if info is None:
                return None
            if not self._created:
                return "somebody else may have created it"
            if info["created"] != self._created:
                return "somebody else has created it, or another server of the cluster leads it now"
            await self._session.api.request(f"STREAM.DELETE.{self.stream}")
        except MissingStreamError:
            return None
        except ApiError as error:
            return str(error)
        return None

    async def _leave(self) -> None:
        with suppress(ValueError):
            self._connection.denial_listeners.remove(self._on_denial)
        with suppress(OSError, nats.errors.Error):
            await self._subscription.unsubscribe()

    async def _publish(self, chunk: bytes) -> None:
        self._check()
        self._sent[name := uuid.uuid4().hex] = len(chunk)
        try:
            await self._connection.publish(self._to, chunk, f"{self._inbox}.{name}")
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
        if message.data:
            self._over = True
            answer = json.loads(message.data)
            if answer.get("error", {}).get("err_code") in _EXISTS:  # somebody else has just created it
                self._failure = self._exists()
            elif "error" in answer:
                text = str(answer["error"].get("description", "unknown"))
                self._fail(f"the server could not restore stream {self.stream}: {one_line(text)}")
            else:
                self._result = answer
        elif message.headers and message.headers.get("Status") == "503":
            self._over = True
            self._fail(f"the server gave up restoring stream {self.stream}: it heard nothing for five seconds")
        self._sent.pop(message.subject.rpartition(".")[2], 0)
        self._answered.set()

    def _on_denial(self, denial: Denial) -> None:
        if denial.subject.startswith(f"{_SUBJECT}.{self.stream}.".lower()):
            self._fail(f"NATS refused: {refusal(f'{_SUBJECT}.{self.stream}.*')}")

    def _fail(self, text: str) -> None:
        self._failure = self._failure or SourceError(text)
        self._answered.set()

    def _exists(self) -> _ExistsError:
        return _ExistsError(
            f"stream {self.stream} already exists: restore under another name with --as; only if an interrupted "
            f"restore left it behind, delete it first: nats stream rm {self.stream}"
        )
