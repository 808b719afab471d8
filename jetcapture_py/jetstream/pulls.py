"""Keep a few pulls open at the consumer, within the available credit.

A pull slot is a subscription with at most one open pull, so the number of messages that the pull may still bring is
always known. Without credit there is no pull: that is the backpressure.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from jetcapture_py.config.model import Config
from jetcapture_py.config.shares import DRAIN_SHARE
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.connection import Api
from jetcapture_py.jetstream.consumer import Consumer
from jetcapture_py.jetstream.imported import OneAnswerError, PullAnswers
from jetcapture_py.jetstream.pull_limits import Ask, PullLimits
from jetcapture_py.jetstream.pull_status import PullStatus, Reaction, parse_status, undelivered
from jetcapture_py.jetstream.wire.client import Connection
from jetcapture_py.jetstream.wire.inbox import Inbox
from jetcapture_py.log import event
from jetcapture_py.log_limit import LogLimit

log = logging.getLogger("jetcapture.source")

SLOTS = 10
"""Number of pull slots; by default, together they ask for `source.max_ack_pending` messages."""
HEARTBEAT = 5.0
"""Seconds of silence after which the server confirms that a pull is alive."""
SILENCE = 12.5
"""Seconds of silence after which a pull is abandoned."""
EXPIRES = 2.0
"""Expiry of a pull in seconds, and thus how long a drain may have to wait for it."""
BRIEF = 0.2
"""The same for a pull that asks for more than is left, in a run that ends when nothing is left."""
GRACE = 10.0
"""Seconds that the server may take to report that a pull has expired."""
PAUSE = 0.5
"""Seconds between two attempts."""


@dataclass(slots=True, eq=False)
class PullSlot:
    """A subscription to the inbox and its open pull, which asked for `batch` messages and `max_bytes`.

    A pull for a `single` message waits for one that is too large for other pulls.
    """

    subject: str
    sid: int
    inbox: Inbox
    pull: int = 0
    active: bool = False
    single: bool = False
    batch: int = 0
    max_bytes: int = 0
    start: int = 0
    start_bytes: int = 0
    statuses: int = 0
    heard: float = 0.0
    expires: float = 0.0
    not_before: float = 0.0

    @property
    def left(self) -> int:
        """Messages that the pull may still deliver."""
        return max(0, self.batch - (self.inbox.by_sid[self.sid][0] - self.start)) if self.active else 0

    @property
    def brought(self) -> int:
        """Bytes that the pull has delivered, as the server counts them."""
        return self.inbox.by_sid[self.sid][1] - self.start_bytes

    @property
    def left_bytes(self) -> int:
        """Bytes that the pull may still deliver."""
        return max(0, self.max_bytes - self.brought) if self.left else 0

    def begin(self, ask: Ask, batch: int, now: float, expires: float) -> str:
        """Record a new pull; return its reply subject."""
        self.pull += 1
        self.active, self.batch, self.max_bytes, self.single = True, batch, ask.max_bytes, ask.batch == 1
        self.start, self.start_bytes = self.inbox.by_sid[self.sid]
        self.heard, self.expires, self.statuses = now, now + expires + GRACE, 0
        return f"{self.subject}.{self.pull}"


class Pulls:
    """The pulls of one consumer into `inbox`.

    `used` returns the bytes held and received, `wake` is set when there may be something to do, and `fail` is called
    when pulls can never succeed. `answered` is when the server last served or confirmed a pull.
    """

    def __init__(
        self,
        config: Config,
        inbox: Inbox,
        *,
        used: Callable[[], int],
        wake: asyncio.Event,
        fail: Callable[[SourceError], None],
    ) -> None:
        self.slots: list[PullSlot] = []
        self.limits = PullLimits(config.limits.memory, SLOTS)
        self.starved = False  # whether memory alone keeps it from pulling
        self.held = False  # whether pulling waits for the recovery after a lost connection
        self.stopped = False
        self.catching_up = False  # whether the run ends when nothing is left to deliver
        self.answered = self.last_data = self._opened = 0.0
        self._last_total = 0  # messages received here when nothing is left, as far as known
        self._config, self._inbox, self._used, self._wake, self._fail = config, inbox, used, wake, fail
        self._expires = min(EXPIRES, config.drain_timeout / DRAIN_SHARE)
        self._log_limit = LogLimit()
        self._answers = PullAnswers(SLOTS + 1)

    async def open(self, client: Connection, api: Api, consumer: Consumer) -> None:
        """Subscribe; nothing is pulled yet."""
        self._client, self._api, self._consumer = client, api, consumer
        self._clock = asyncio.get_running_loop().time
        self.answered = self._opened = self._clock()
        self.record_pending()
        for _ in range(SLOTS):
            subject = client.new_inbox()
            self.slots.append(PullSlot(subject, await client.receive_into(self._inbox, f"{subject}.*"), self._inbox))

    @property
    def active(self) -> int:
        """Open pulls."""
        return sum(slot.active for slot in self.slots)

    @property
    def in_flight(self) -> int:
        """Bytes that open pulls may still deliver."""
        return sum(max(1, slot.left_bytes) for slot in self.slots if slot.active)

    @property
    def consuming(self) -> bool:
        """Whether the server has recently served or confirmed a pull."""
        return self._clock() - max(self.answered, self.last_data) < SILENCE

    @property
    def stuck(self) -> str | None:
        """Why nothing is delivered although the server answers, in one line; None if nothing is wrong."""
        return self.limits.stuck(self._clock())

    def record_pending(self) -> None:
        """Record how much is left to deliver, after the consumer's state was looked up."""
        self._last_total = self._inbox.total + self._consumer.state.pending

    def broken(self) -> None:
        """Drop all pulls after the connection was lost; pulling pauses until `held` is False again."""
        self.held = True
        for slot in self.slots:
            slot.active, slot.not_before = False, 0.0

    def overdue(self) -> list[PullSlot]:
        """Return open pulls that should have expired."""
        return [slot for slot in self.slots if slot.active and self._clock() > slot.expires]

    # ------------------------------------------------------------------ pulling

    async def renew(self) -> None:
        """Abandon silent pulls, and pull in every free slot while there is credit."""
        now = self._clock()
        for slot in self.slots:
            if slot.active and (now > slot.expires or now - max(slot.heard, self.last_data) > SILENCE):
                event(log, logging.WARNING, "pull.silent", seconds=round(now - slot.heard, 1))
                self._end(slot, silent=True)
        for slot in self.slots[: self._consumer.state.max_waiting or SLOTS]:  # the server ignores excess pulls
            if not (slot.active or self.held or self.stopped) and self._client.is_connected and now >= slot.not_before:
                await self._issue(slot, now)

    async def _issue(self, slot: PullSlot, now: float) -> None:
        """Pull if there is credit."""
        ask = self._credit(now)
        self.starved = not ask and not self.active
        if not ask:
            return
        state, source = self._consumer.state, self._config.source
        batch = ask.batch or min(source.batch, state.max_batch or source.batch)
        expires = self._expiry(batch, now)
        expires = min(expires, state.max_expires) if state.max_expires else expires
        await self._api.pull(
            source.stream,
            source.consumer,
            slot.begin(ask, batch, now, expires),
            batch=batch,
            max_bytes=ask.max_bytes if ask.limited else 0,
            expires=expires,
            heartbeat=min(HEARTBEAT, expires / 2),
        )

    def _expiry(self, batch: int, now: float) -> float:
        """Return how long to keep a pull open: longer, the longer nothing arrives, if it asks for more than is left."""
        left = self._last_total - self._inbox.total - sum(slot.left for slot in self.slots)
        if not self.catching_up or batch <= left:
            return self._expires
        return min(self._expires, max(BRIEF, now - max(self.last_data, self._opened)))

    def _credit(self, now: float) -> Ask | None:
        """Return the size of the next pull, or None without credit."""
        self.limits.received(self._inbox.largest, now)
        self._inbox.largest = 0
        in_flight = self.in_flight
        used, ceiling = self._used() + in_flight, self._consumer.state.max_bytes
        free = self._config.limits.memory - used
        return self.limits.next(free=free, held=used > 0, in_flight=in_flight, ceiling=ceiling, now=now)

    # ------------------------------------------------------------------ receiving

    def on_data(self) -> None:
        """Handle received messages. A pull that delivers all it asked for ends without a status."""
        self.last_data = self._clock()
        ended = self._inbox.empty if self._api.imported else ()
        for slot in self.slots:
            if slot.active and (not slot.left_bytes or slot.sid in ended):
                self._end(slot)
                self._wake.set()
                if slot.single:
                    self.limits.single_received(slot.brought, self._consumer.state.max_bytes)
        self._inbox.empty.clear()

    def _end(self, slot: PullSlot, *, silent: bool = False) -> None:
        """Record the end of a pull; fail if the API is imported in a way that lets only one answer pass."""
        slot.active = False
        answers = self._inbox.by_sid[slot.sid][0] - slot.start + slot.statuses
        if self._api.imported and self._answers.ended(answers, silent=silent):
            self._fail(OneAnswerError(self._config.source.stream))

    def on_status(self, subject: bytes, block: bytes) -> None:
        """Handle a status."""
        to, _, pull = subject.decode("utf-8", "replace").rpartition(".")
        for slot in self.slots:
            if slot.subject == to:
                self._heard(slot, pull, parse_status(block), undelivered(block))

    def _heard(self, slot: PullSlot, pull: str, status: PullStatus, undelivered: int | None) -> None:
        slot.heard = self._clock()
        slot.statuses += pull == str(slot.pull)
        if status.reaction in (Reaction.ALIVE, Reaction.PULL_AGAIN):
            self.answered = slot.heard
            if slot.single and slot.active:
                self.limits.single_idle(ended=status.reaction is Reaction.PULL_AGAIN)
        if status.reaction is not Reaction.ALIVE and slot.active and pull == str(slot.pull):
            slot.batch -= undelivered or 0
            if undelivered is None or slot.left <= 0:
                self._end(slot)
            self._react(slot, status)
            self._wake.set()

    def _react(self, slot: PullSlot, status: PullStatus) -> None:
        if status.reaction is Reaction.FATAL:
            where = f"consumer {self._config.source.consumer} of stream {self._config.source.stream}"
            self._fail(SourceError(f"{where} no longer accepts pulls: {status.code} {status.text}"))
        elif status.reaction is Reaction.TOO_LARGE:
            if not slot.brought:
                self._too_small(slot)
        elif status.reaction is not Reaction.PULL_AGAIN:
            slot.not_before = self._clock() + PAUSE
            event(log, logging.WARNING, "pull.ended", code=status.code, reason=status.text)

    def _too_small(self, slot: PullSlot) -> None:
        """Handle a pull that brought nothing because the next message is larger."""
        now, ceiling = self._clock(), self._consumer.state.max_bytes
        if self.limits.too_small(slot.max_bytes, ceiling, now) and (times := self._log_limit.due(now)):
            event(log, logging.WARNING, "pull.too_small", max_bytes=slot.max_bytes, times=times)
