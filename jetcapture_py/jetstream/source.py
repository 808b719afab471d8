"""Receive from a durable pull consumer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import NamedTuple

import nats.errors
import pyarrow as pa

from jetcapture_py.archive.incarnations import Origin
from jetcapture_py.config.model import Config
from jetcapture_py.config.shares import MAX_RECEIVED_BYTES, RECEIVE_SHARE
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.consumer import Consumer, ConsumerState
from jetcapture_py.jetstream.link import FLUSH_TIMEOUT_S, Link
from jetcapture_py.jetstream.pulls import Pulls
from jetcapture_py.jetstream.wire.inbox import Inbox, Received
from jetcapture_py.ledger import Ledger

ENOUGH_MESSAGES = 4096
LINGER_S = 0.05
"""Seconds that a batch waits for `ENOUGH_MESSAGES` after its first message."""
FRESH_S = 0.25
"""Seconds to cache the consumer's state while a pull is open; deleting the consumer would end the pull immediately."""
CHECK_EVERY_S = 0.1
"""Seconds between two requests to a consumer that does not respond."""


class Look(NamedTuple):
    """The last look-up of the consumer: its time, and the other replicas' share.

    Attributes:
        connection: The connection's count of reconnects.
        asked: Time of the request, by the monotonic clock.
        unacked: Messages delivered to other replicas and not acknowledged.
        pulls: Open pulls of other replicas.
    """

    connection: int = 0
    asked: float = float("-inf")
    unacked: int = 0
    pulls: int = 0


class PullSource:
    """The consumer's messages.

    Attributes:
        link: The connection.
        consumer: The consumer, once found.
        pulls: Its pulls.
        looked: The last look-up of it.
        arrived: Set when messages arrive, and when pulling stops; whoever waits for it clears it first.
        ended: Whether nothing can arrive any more.

    `ledger` limits the memory for messages.
    """

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self.config, self._ledger = config, ledger
        self.link = Link(config, self._link_changed)
        self.consumer: Consumer
        self._inbox = Inbox(self._on_data)
        self.pulls = Pulls(config, self._inbox, ledger)
        self._inbox.on_status = self.pulls.on_status
        self.looked = Look()
        self._ready, self._enough, self.arrived = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.ended = False

    # ------------------------------------------------------------------ opening and closing

    async def open(self) -> None:
        """Connect, find or create the consumer, subscribe. Raises SourceError."""
        await self.link.open()
        await self.attach()

    async def attach(self) -> None:
        """Find or create the consumer, get its state, and subscribe. Raises SourceError."""
        try:
            self.consumer = Consumer(self.link, self.config.source)
            await self.consumer.attach()
            await self.pulls.open(self.consumer)
        except BaseException:
            await self.link.close()
            raise

    async def stop(self, *, wait: bool = True) -> bool:
        """Stop pulling and unsubscribe; return whether every pull has ended. With `wait`, first receive the messages of
        open pulls.

        An open pull cannot be canceled. Messages sent for it after unsubscribing are dropped, and in a cluster they may
        be redelivered only after `ack_wait`. So the subscriptions stay until every pull is filled or has expired. A
        second call does not wait.
        """
        connection = self.reconnects
        if not self.pulls.stopped:
            self.pulls.stop()
            self.arrived.set()
            while wait and self.connected and not self.ended and self.pulls.active:
                overdue = await self.pulls.overdue()
                if overdue and await self.refresh():  # the server responds, so it has ended them
                    self.pulls.end(overdue)
        lost = not self.connected or connection != self.reconnects  # pulls end with their connection
        ended = not lost and not self.pulls.active
        client = self.link.client
        try:
            for slot in self.pulls.slots:
                await client.stop_receiving(slot.sid)
            await client.flush(FLUSH_TIMEOUT_S)
        except (nats.errors.Error, OSError, TimeoutError):
            pass  # not connected: nothing more can arrive
        self.pulls.end(self.pulls.slots)
        self.halt()
        return ended

    def halt(self) -> None:
        """Stop pulling and wake all waiters."""
        self.ended = True
        self.pulls.stop()
        for waited in (self._ready, self._enough, self.arrived):
            waited.set()

    def _link_changed(self) -> None:
        if self.failure is not None:
            self.halt()
        elif not self.connected:
            self.pulls.broken()
        self.pulls.wake()

    @property
    def state(self) -> ConsumerState:
        """The consumer's last known state."""
        return self.consumer.state

    @property
    def origin(self) -> Origin:
        """The stream; without a creation time if it may not be read."""
        return self.consumer.origin

    @property
    def stream(self) -> str:
        """The stream's name."""
        return self.config.source.stream

    @property
    def connected(self) -> bool:
        return self.link.connected

    @property
    def reconnects(self) -> int:
        return self.link.reconnects

    @property
    def failure(self) -> SourceError | None:
        """The error that ended receiving and acknowledging; None without one."""
        return self.link.failure

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
        return time.monotonic() - self.pulls.last_data

    async def receive(self) -> Received | None:
        """Return the next messages; None once stopped and everything received has been returned.

        If payloads may be missing, look the consumer up first: with `headers_only`, the capture ends.
        """
        await self._ready.wait()
        if self.waiting < ENOUGH_MESSAGES and not self.ended:
            self._enough.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
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
        if self.waiting >= ENOUGH_MESSAGES:
            self.flush()

    # ------------------------------------------------------------------ the consumer

    async def refresh(self) -> bool:
        """Request the consumer's state; return False if nobody answers or the consumer was recreated."""
        connection, asked, pulls = self.reconnects, time.monotonic(), self.pulls.active
        if not await self.consumer.refresh() or self.failure is not None:
            return False
        self.pulls.looked_up()
        unacked = 0 if self.pulls.terms.exclusive else self.state.unacked - self.unacked
        others = self.state.waiting_pulls - max(pulls, self.pulls.active)
        self.looked = Look(connection, asked, max(0, unacked), max(0, others))
        return True

    async def look_again(self) -> bool:
        """Wait until the consumer was looked up; return False after a permanent failure."""
        while self.failure is None:
            if self.connected and await self.refresh():
                return True
            await asyncio.sleep(CHECK_EVERY_S)
        return False

    def is_fresh(self) -> bool:
        """Whether the consumer was looked up less than `FRESH_S` ago and has not failed since."""
        fresh = self.looked.connection == self.reconnects and time.monotonic() - self.looked.asked < FRESH_S
        return fresh and self.failure is None and self.pulls.active > 0

    def doubt(self) -> None:
        """Require a look-up of the consumer before the next ack."""
        self.looked = self.looked._replace(asked=float("-inf"))
