"""A capture's connection to NATS, which lasts over reconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import nats.errors

from jetcapture_py.config.model import Config
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.connection import Api, connect, reason_of
from jetcapture_py.jetstream.wire.client import Connection, Denial, denial_in, refusal
from jetcapture_py.log import event
from jetcapture_py.text import one_line

log = logging.getLogger("jetcapture.source")

CONNECT_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 2


class Link:
    """The connection of one capture, and its failure.

    Attributes:
        changed: Called when the connection was lost, is back, or when the capture has failed.
        client: The nats-py client, once connected.
        api: The JetStream API on it.
        reconnects: Number of reconnects.
        problem: Why the last attempt to reconnect failed; "" while connected, and before the first attempt.
        failure: The error that ends the capture; None while it can continue.
    """

    def __init__(self, config: Config, changed: Callable[[], None]) -> None:
        self._config, self.changed = config, changed
        self.client: Connection
        self.api: Api
        self.reconnects = 0
        self.problem = ""
        self.failure: SourceError | None = None
        self._closing = False

    async def open(self) -> None:
        """Connect. Raises SourceError."""
        source = self._config.source
        self.client = await connect(
            self._config.nats,
            f"jetcapture {source.stream}/{source.consumer}",
            on_disconnected=self._disconnected,
            on_reconnected=self._reconnected,
            on_closed=self._closed,
            on_error=self._errored,
            timeout=CONNECT_TIMEOUT_S,
        )
        self.api = Api(self.client, self._config.nats)

    async def close(self) -> None:
        """Flush pending writes and close the connection."""
        self._closing = True
        try:
            if self.connected:
                await self.client.flush(FLUSH_TIMEOUT_S)
            await asyncio.wait_for(self.client.close(), CLOSE_TIMEOUT_S)
        except (nats.errors.Error, OSError, TimeoutError):
            pass  # the server is gone

    @property
    def connected(self) -> bool:
        return bool(self.client.is_connected)

    def fail(self, error: SourceError) -> None:
        """End the capture with this error, unless it has failed already."""
        if self.failure is None:
            self.failure = error
            self.changed()

    async def _disconnected(self) -> None:
        self.problem = ""
        self.changed()
        if not self._closing:
            event(log, logging.WARNING, "nats.disconnected")

    async def _reconnected(self) -> None:
        self.reconnects += 1
        self.problem = ""
        event(log, logging.INFO, "nats.reconnected")
        self.changed()

    async def _closed(self) -> None:
        if not self._closing:
            reason = self.client.last_error
            self.fail(SourceError(f"the NATS connection was closed permanently: {reason or 'by the server'}"))

    async def _errored(self, error: Exception) -> None:
        if not self.connected:
            self.problem = one_line(reason_of(error))
        denial = denial_in(error)
        if denial is not None and (needed := self._needed(denial)) is not None:
            self.fail(SourceError(f"NATS refused: {refusal(needed, subscription=denial.subscription)}"))
        elif denial is None or denial.about(self._config.stored_subject) is None:  # `Announcer` handles that denial
            event(log, logging.WARNING, "nats.error", error=error)

    def _needed(self, denial: Denial) -> str | None:
        """Return the required permission that was denied; None if the denied one is not required."""
        consumer = f"{self._config.source.stream}.{self._config.source.consumer}"
        if denial.subscription:
            return f"{self._config.nats.inbox_prefix}.>"
        if denial.subject.startswith("$js.ack."):
            short = denial.subject.startswith(f"$js.ack.{consumer}.".lower())
            return f"$JS.ACK.{consumer}.>" if short else f"$JS.ACK.*.*.{consumer}.>"
        return denial.about(f"{self.api.prefix}.CONSUMER.MSG.NEXT.{consumer}")
