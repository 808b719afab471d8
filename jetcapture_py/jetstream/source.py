"""Receive from a durable pull consumer that all replicas share, and acknowledge to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import nats.errors
import pyarrow as pa

from jetcapture_py.archive.incarnations import Origin
from jetcapture_py.config.model import Config
from jetcapture_py.config.shares import MAX_RECEIVED_BYTES, RECEIVE_SHARE
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.connection import Api, connect, reason_of
from jetcapture_py.jetstream.consumer import Consumer, ConsumerState
from jetcapture_py.jetstream.pulls import PAUSE, Pulls
from jetcapture_py.jetstream.wire.client import Connection, Denial, denial_in, refusal
from jetcapture_py.jetstream.wire.inbox import Inbox, Received
from jetcapture_py.ledger import Ledger
from jetcapture_py.log import event
from jetcapture_py.text import one_line

log = logging.getLogger("jetcapture.source")

ENOUGH = 4096
LINGER = 0.05
"""Seconds after its first message that a batch waits to have `ENOUGH` messages."""
FRESH = 0.25
"""Seconds for which the consumer's state is cached while a pull is open, which a deletion would end immediately."""
NEVER = (0, float("-inf"))
CONNECT_TIMEOUT = 20.0
CHECK_EVERY_S = 0.1
"""Seconds between two looks at a consumer that does not respond."""


class PullSource:
    """The consumer's messages.

    `ledger` says how much memory there is for them.
    """

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self.config, self._ledger = config, ledger
        self.stream, self.consumer = config.source.stream, config.source.consumer
        self.failure: SourceError | None = None
        self.reconnects = 0
        self.connection_error = ""
        """Why the last attempt to reconnect failed; "" while connected, and before the first attempt."""
        self.stream_config: Mapping[str, Any] = {}
        """The stream's configuration as the API has it, when it was last asked for; empty if unknown."""
        self.on_denied: Callable[[Denial], bool] = lambda denial: False  # noqa: ARG005  nobody publishes yet
        """Called with a refusal that does not end the capture; returns whether that is dealt with."""
        self.other_unacked = self.other_pulls = 0
        """Of other replicas when the consumer was last looked up: unacknowledged messages, and open pulls."""
        self._inbox = Inbox(self._on_data)
        self._wake, self._ready, self._enough = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.arrived = asyncio.Event()
        """Set when messages arrive, and when pulling stops; whoever waits for it clears it first."""
        self.ended = self._closing = False
        self.looked = NEVER  # connection (count of reconnects) and time of the last check that the consumer is the same
        self.pulls = Pulls(config, self._inbox, ledger, wake=self._wake, fail=self.fail)
        self._inbox.on_status = self.pulls.on_status

    # ------------------------------------------------------------------ opening and closing

    async def open(self) -> None:
        """Connect, find or create the consumer, subscribe. Raises SourceError."""
        await self.connect()
        await self.attach()

    async def connect(self) -> None:
        """Connect to the server. Raises SourceError."""
        self._loop = asyncio.get_running_loop()
        self.client: Connection = await connect(
            self.config.nats,
            f"jetcapture {self.stream}/{self.consumer}",
            on_disconnected=self._disconnected,
            on_reconnected=self._reconnected,
            on_closed=self._closed,
            on_error=self._errored,
            timeout=CONNECT_TIMEOUT,
        )
        self.api = Api(self.client, self.config.nats)

    async def attach(self) -> None:
        """Find or create the consumer, get its state, and subscribe. Raises SourceError."""
        try:
            self._consumer = Consumer(self.api, self.config.source, self.fail)
            await self._consumer.attach()
            self.is_other, self.recognize = self._consumer.is_other, self._consumer.recognize
            self.delivered_all = self._consumer.delivered_all
            await self.pulls.open(self.client, self.api, self._consumer)
        except BaseException:
            await self.close()
            raise

    async def stop(self, *, wait: bool = True) -> bool:
        """Stop pulling, receive what open pulls still deliver if it shall `wait`, and unsubscribe; return whether every
        pull ended.

        An open pull cannot be canceled. Messages sent for it after its subscription is gone are dropped, and in a
        cluster they may be redelivered only after `ack_wait`. So the subscriptions stay until every pull is filled or
        has expired. A second call does not wait.
        """
        connection = self.reconnects
        if not self.pulls.stopped:
            self.pulls.stopped = True
            self._wake.set()
            self.arrived.set()
            if wait:
                await self._pulls_end()
        lost = not self.connected or connection != self.reconnects  # pulls end with their connection
        ended = not lost and not self.pulls.active
        try:
            for slot in self.pulls.slots:
                await self.client.stop_receiving(slot.sid)
            await self.client.flush(2)
        except (nats.errors.Error, OSError, TimeoutError):
            pass  # not connected: nothing more can arrive
        self.pulls.end()
        self.halt()
        return ended

    async def _pulls_end(self) -> None:
        """Wait until no pull is open or nothing more can arrive."""
        while self.connected and not self.ended and self.pulls.active:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), PAUSE)
            overdue = self.pulls.overdue()
            if overdue and await self.refresh():  # the server responds, so it has ended them
                for slot in overdue:
                    slot.active = False

    async def close(self) -> None:
        """Flush pending writes and close the connection."""
        self._closing = True
        try:
            if self.client.is_connected:
                await self.client.flush(2)
            await asyncio.wait_for(self.client.close(), 5)
        except (nats.errors.Error, OSError, TimeoutError):
            pass  # the server is gone

    def halt(self) -> None:
        """Stop pulling and wake all waiters."""
        self.pulls.stopped = self.ended = True
        for waited in (self._wake, self._ready, self._enough, self.arrived):
            waited.set()

    @property
    def state(self) -> ConsumerState:
        """The consumer's last known state."""
        return self._consumer.state

    @property
    def origin(self) -> Origin:
        """The stream; without a creation time if it may not be read."""
        return self._consumer.origin

    @property
    def connected(self) -> bool:
        return bool(self.client.is_connected)

    @property
    def stream_max_age(self) -> float:
        """Seconds after which the stream removes a message; 0 for never, or unknown."""
        return float(self.stream_config.get("max_age", 0)) / 1e9

    def fail(self, error: SourceError) -> None:
        """Stop permanently with this error."""
        if self.failure is None:
            self.failure = error
            self.halt()

    async def _disconnected(self) -> None:
        self.pulls.broken()
        self.connection_error = ""
        if not self._closing:
            event(log, logging.WARNING, "nats.disconnected")

    async def _reconnected(self) -> None:
        self.reconnects += 1
        self.connection_error = ""
        event(log, logging.INFO, "nats.reconnected")
        self._wake.set()

    async def _closed(self) -> None:
        if not self._closing:
            reason = self.client.last_error
            self.fail(SourceError(f"the NATS connection was closed permanently: {reason or 'by the server'}"))

    async def _errored(self, error: Exception) -> None:
        if not self.connected:
            self.connection_error = one_line(reason_of(error))
        denial = denial_in(error)
        if denial is None or (needed := self._needed(denial)) is None:
            if denial is None or not self.on_denied(denial):
                event(log, logging.WARNING, "nats.error", error=error)
        else:
            self.fail(SourceError(f"NATS refused: {refusal(needed, subscription=denial.subscription)}"))

    def _needed(self, denial: Denial) -> str | None:
        """Return the required permission that was denied; None if the denied one is not required."""
        consumer = f"{self.stream}.{self.consumer}"
        if denial.subscription:
            return f"{self.config.nats.inbox_prefix}.>"
        if denial.subject.startswith("$js.ack."):
            short = denial.subject.startswith(f"$js.ack.{consumer}.".lower())
            return f"$JS.ACK.{consumer}.>" if short else f"$JS.ACK.*.*.{consumer}.>"
        return denial.about(f"{self.api.prefix}.CONSUMER.MSG.NEXT.{consumer}")

    # ------------------------------------------------------------------ receiving

    @property
    def fetched(self) -> int:
        """Messages received since the start."""
        return self._inbox.total

    @property
    def waiting(self) -> int:
        """Messages received but not taken yet."""
        return len(self._inbox.rows)

    @property
    def unacked(self) -> int:
        """Messages received by this process and not acknowledged."""
        return self.waiting + self._ledger.unacked

    def waiting_replies(self) -> pa.BinaryArray:
        """Return the ack subjects of the waiting messages."""
        return self._inbox.rows.replies

    def idle_for(self) -> float:
        """Return the seconds since the last message was received."""
        return self._loop.time() - self.pulls.last_data

    async def receive(self) -> Received | None:
        """Return the next messages; None once stopped and everything received has been returned.

        If some may lack their payload, the consumer is looked up first: with `headers_only`, the capture ends.
        """
        await self._ready.wait()
        if self.waiting < ENOUGH and not self.ended:
            self._enough.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER):
                    await self._enough.wait()
        received = self._inbox.take_run(min(self._ledger.memory.part // RECEIVE_SHARE, MAX_RECEIVED_BYTES))
        if not self.ended and not self.waiting:
            self._ready.clear()
        if received.lacks_payload() and not await self.look_again():
            return None
        self._ledger["waiting"] = self._inbox.rows.memory  # the caller holds the others at once
        return received if received or not self.ended else None

    def flush(self) -> None:
        """Return waiting messages at once."""
        self._enough.set()

    def _on_data(self) -> None:
        self._ledger["waiting"] = self._inbox.rows.memory
        self.pulls.on_data()
        self._ready.set()
        self.arrived.set()
        if self.waiting >= ENOUGH:
            self.flush()

    # ------------------------------------------------------------------ pulling

    async def pull(self) -> None:
        """Keep pulls open while there is credit, until stopped."""
        while not self.pulls.stopped:
            self._wake.clear()
            await self.pulls.renew()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.pulls.rest()):
                    await self._wake.wait()

    def wake(self) -> None:
        """Look at once whether to pull."""
        self._wake.set()

    def wake_pulls(self) -> None:
        """Pull again after memory has been freed."""
        self.pulls.wake()

    # ------------------------------------------------------------------ the consumer

    async def refresh(self) -> bool:
        """Request the consumer's state; return False if nobody answers or the consumer was recreated."""
        asked = self.reconnects, self._loop.time()
        pulls = self.pulls.active
        if not await self._consumer.refresh() or self.failure is not None:
            return False
        self.looked = asked
        self.pulls.record_pending()
        others = 0 if self.pulls.terms.exclusive else self.state.unacked - self.unacked
        self.other_unacked = max(0, others)
        self.other_pulls = max(0, self.state.waiting_pulls - max(pulls, self.pulls.active))
        if not self.pulls.active:
            self.pulls.answered = self._loop.time()
        return True

    async def look_again(self) -> bool:
        """Wait until the consumer was looked up; return False after a permanent failure."""
        while self.failure is None:
            if self.connected and await self.refresh():
                return True
            await asyncio.sleep(CHECK_EVERY_S)
        return False

    def is_fresh(self) -> bool:
        """Whether the consumer was looked up less than `FRESH` seconds ago and has not failed since."""
        connection, asked = self.looked
        fresh = connection == self.reconnects and self._loop.time() - asked < FRESH
        return fresh and self.failure is None and self.pulls.active > 0

    def doubt(self) -> None:
        """Look the consumer up before anything else is acknowledged."""
        self.looked = NEVER

    async def stream_subjects(self) -> tuple[str, ...]:
        """Return the stream's subjects; none without permission to read the stream."""
        answer = await self.stream_info() if self.origin.created else None
        return tuple(answer["config"].get("subjects", ())) if answer is not None else ()

    async def stream_info(self) -> dict[str, Any] | None:
        """Return the server's answer to STREAM.INFO; None without permission or answer."""
        if (info := await self._consumer.stream_info()) is not None:
            self.stream_config = info["config"]
        return info

    async def publish(self, subject: str, payload: bytes) -> None:
        """Publish a message that nobody confirms. Raises nats-py's errors."""
        await self.client.publish(subject, payload)
