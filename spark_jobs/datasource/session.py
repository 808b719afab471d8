"""A NATS connection for synchronous code.

It runs in a separate thread, so that it answers the server while Spark is busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Self, TypeVar

import nats.errors

from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.connection import Api, ApiError, UnavailableError, connect
from jetcapture_py.jetstream.permissions import denial_in
from jetcapture_py.jetstream.wire.client import Connection
from spark_jobs.datasource.options import ReadOptions

PAUSE = 0.25
"""Seconds between two attempts."""

_CLOSE_TIMEOUT = 1.0
_NOT_FOUND = 404
_NO_MESSAGE = 10037
_NO_STREAM = 10059
_CERTAIN = 4
"""Consecutive answers before something counts as missing: a server that has just started may be wrong."""

T = TypeVar("T")


class MissingStreamError(SourceError):
    """The stream does not exist."""


class Session:
    """A connection in a separate thread. Raises SourceError when no server answers within `options.timeout`."""

    def __init__(self, options: ReadOptions, name: str) -> None:
        self.timeout = options.timeout
        self.on_disconnected: Callable[[], None] = lambda: None
        self._denied = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nats", daemon=True)
        self._thread.start()
        try:
            self.connection: Connection = self.run(
                connect(
                    options.nats,
                    name,
                    on_disconnected=self._disconnected,
                    on_reconnected=self._quiet,
                    on_closed=self._disconnected,
                    on_error=self._errored,
                    patience=options.timeout,
                )
            )
        except BaseException:
            self._end()
            raise
        self.api = Api(self.connection, options.nats.domain)

    async def _disconnected(self) -> None:
        self.on_disconnected()

    async def _quiet(self) -> None:
        """Ignore reconnects: pending requests notice them."""

    async def _errored(self, error: Exception) -> None:
        """Handle only denied pulls, which get no answer. Other requests fail by themselves."""
        denial = denial_in(error)
        if denial is not None and (denial.subscription or ".consumer.msg.next." in denial.subject):
            self._denied = str(denial)
            self.on_disconnected()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, run in the connection's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def ask(self, subject: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer of the JetStream API. Raises SourceError, or ApiError when there is no such message."""
        return self.run(self.request(subject, body))

    async def request(self, subject: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The same, in the connection's thread."""
        return await self.patiently(lambda: self.api.request(subject, body))

    async def patiently(self, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
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
                missing += error.code == _NOT_FOUND
                if error.err_code == _NO_MESSAGE:
                    raise
                if missing >= _CERTAIN or (400 <= error.code < 500 and error.code != _NOT_FOUND):
                    kind = MissingStreamError if error.err_code == _NO_STREAM else SourceError
                    raise kind(f"NATS refused: {error}") from error
                reason: Exception = error
            except UnavailableError as error:
                reason = error
            if self.connection.is_closed:
                raise SourceError(f"the NATS connection was closed permanently: {self.connection.last_error or reason}")
            if clock() > deadline:
                raise SourceError(f"NATS did not respond for {self.timeout:g} s: {reason}")
            await asyncio.sleep(PAUSE)

    def close(self) -> None:
        """Close the connection and end the thread."""
        try:
            self.run(self._close())
        finally:
            self._end()

    async def _close(self) -> None:
        with contextlib.suppress(OSError, nats.errors.Error, TimeoutError):  # the server is gone
            await asyncio.wait_for(self.connection.close(), _CLOSE_TIMEOUT)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
