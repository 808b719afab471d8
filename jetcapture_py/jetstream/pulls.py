"""Keep a few pulls open at the consumer, within the available credit.

A pull slot is a subscription with at most one open pull, so the number of messages that it may still deliver is always
known. Without credit there is no pull: that is the backpressure. Sizes are bytes as the server counts them
against a pull's `max_bytes`: subject, ack subject, headers and payload. Times are seconds of a monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from jetcapture_py.config.model import Config
from jetcapture_py.config.shares import DRAIN_SHARE, MAX_PULLED_BYTES, MIN_PULLED_BYTES, PULLED_SHARE
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.consumer import Consumer
from jetcapture_py.jetstream.wire.inbox import Inbox
from jetcapture_py.ledger import Ledger
from jetcapture_py.log import event


class Reaction(Enum):
    """Reaction to a status that the server sends for a pull (ADR-37, ADR-42)."""

    ALIVE = auto()
    """Idle heartbeat: the pull continues."""
    PULL_AGAIN = auto()
    """The pull has ended normally; pull again immediately."""
    PULL_LATER = auto()
    """The pull has ended with a temporary error; pull again after a pause."""
    TOO_LARGE = auto()
    """The pull has ended because the next message exceeds its remaining bytes; if it brought nothing, ask for more."""
    ADAPT = auto()
    """The pull asked for more than the consumer allows; read the consumer's limits and ask for less."""
    OTHER_CLIENT = auto()
    """The consumer is pinned to another client or to none (ADR-42)."""
    FATAL = auto()
    """Pulls can never succeed."""


@dataclass(frozen=True, slots=True)
class PullStatus:
    """A status frame.

    Attributes:
        code: The status code.
        text: The server's text.
        reaction: The reaction to it.
        undelivered: Messages of the pull that will not be delivered; None if the status does not say. The others may
            still follow: a replicated consumer sends a message only after its replicas know of the delivery.
        undelivered_bytes: Size of `undelivered` in bytes.
    """

    code: int
    text: str
    reaction: Reaction
    undelivered: int | None = None
    undelivered_bytes: int | None = None


_CONFLICTS = (
    ("message size exceeds maxbytes", Reaction.TOO_LARGE),
    ("batch completed", Reaction.PULL_AGAIN),
    ("server shutdown", Reaction.PULL_LATER),
    ("leadership change", Reaction.PULL_LATER),
    ("exceeded maxwaiting", Reaction.PULL_LATER),
    ("exceeded maxrequest", Reaction.ADAPT),
    ("consumer deleted", Reaction.FATAL),
    ("consumer is push based", Reaction.FATAL),
)
_CODES = {
    100: Reaction.ALIVE,
    404: Reaction.PULL_AGAIN,
    408: Reaction.PULL_AGAIN,
    400: Reaction.FATAL,
    412: Reaction.FATAL,
    423: Reaction.OTHER_CLIENT,
    503: Reaction.PULL_LATER,
}


_UNDELIVERED = re.compile(rb"\r\nNats-Pending-(Messages|Bytes): *([0-9]{1,12})(?=\r\n)", re.IGNORECASE)


def parse_status(block: bytes) -> PullStatus:
    """Parse a header block whose first line is such as `NATS/1.0 408 Request Timeout`.

    Unknown statuses count as temporary errors.
    """
    line = block.split(b"\r\n", 1)[0].decode("utf-8", "replace")
    _, _, rest = line.partition(" ")
    code, _, text = rest.strip().partition(" ")
    number = int(code) if code.isascii() and code.isdigit() and len(code) == 3 else 0
    reaction = _CODES.get(number, Reaction.PULL_LATER)
    if number == 409:
        lowered = text.lower()
        reaction = next((reaction for start, reaction in _CONFLICTS if lowered.startswith(start)), reaction)
    left = {match[1].lower(): int(match[2]) for match in _UNDELIVERED.finditer(block)}
    return PullStatus(number, text, reaction, left.get(b"messages"), left.get(b"bytes"))


RECOVERY_S = 60.0
"""Seconds after which a reduced limit doubles."""
REMEMBERED_S = 30.0
"""Seconds of a period; pulls are sized for the largest message of the last one to two periods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Size of one pull. `batch` 0 means as configured; without `limited`, `max_bytes` is only an estimate."""

    max_bytes: int
    batch: int = 0
    limited: bool = True


class PullLimits:
    """Sizes the pulls of `slots` pull slots that share `memory` bytes: small enough for the server's buffers.

    A pull asks for its share of `limit`, or for the size of the largest recent message. `alone`: the next message
    is larger, so the next pull asks for it alone, without a limit, once no other pull is open. `starved`: there was not
    enough memory for the last pull.
    """

    def __init__(self, memory: int, slots: int) -> None:
        self.limit = MAX_PULLED_BYTES
        self.memory, self._slots = memory, slots
        self._reduced_at = 0.0
        self._largest = self._largest_before = 0
        self._largest_since = 0.0
        self.alone = self.starved = False

    def broken(self, now: float) -> None:
        """Record a lost connection: a server drops a client that is too slow for its pulls."""
        self.limit, self._reduced_at = max(MIN_PULLED_BYTES, self.limit // 2), now

    def next(self, *, free: int, held: bool, in_flight: int, ceiling: int, largest: int, now: float) -> Ask | None:
        """Return the size of the next pull, or None if there must be none now.

        `free` bytes of memory are left; `held`: some memory is in use (if not, one message must always fit). Open pulls
        may still bring `in_flight` bytes. `ceiling` is the consumer's limit for a pull's bytes, 0 without a limit, and
        `largest` the server's for a message.
        """
        while self.limit < MAX_PULLED_BYTES and now - self._reduced_at >= RECOVERY_S:
            self.limit = min(MAX_PULLED_BYTES, self.limit * 2)
            self._reduced_at += RECOVERY_S
        ask = Ask(max_bytes=largest, batch=1, limited=False) if self.alone else Ask(max_bytes=self._usual(ceiling))
        if in_flight and (self.alone or in_flight + ask.max_bytes > self.limit):
            return None
        self.starved = held and ask.max_bytes > free
        if self.starved:
            return None
        self.alone = False
        return ask

    def _usual(self, ceiling: int) -> int:
        share = min(self.limit, self.memory // PULLED_SHARE) // self._slots
        size = max(share, self._largest, self._largest_before)
        return min(size, ceiling) if ceiling else size

    def received(self, largest: int, now: float) -> None:
        """Record the size of the largest message received since the last call, 0 for none."""
        if now - self._largest_since >= REMEMBERED_S:
            self._largest_before, self._largest, self._largest_since = self._largest, 0, now
        self._largest = max(self._largest, largest)


log = logging.getLogger("jetcapture.source")

SLOTS = 10
"""Number of pull slots; by default, together they ask for `source.max_ack_pending` messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullTiming:
    """Seconds.

    Attributes:
        expires: Expiry of a pull, and thus how long a drain may have to wait for it.
        brief: Expiry of a pull for more messages than are left, in a run that ends when nothing is left.
        tiny: Expiry of a pull that can deliver nothing.
        heartbeat: Silence after which the server confirms that a pull is alive.
        silence: Silence after which a pull is abandoned.
        grace: Maximum delay of the server's report that a pull has expired.
        pause: Pause between two attempts.
        idle: Time without a message after which only one pull is kept open, until the next message.
    """

    expires: float = 2.0
    brief: float = 0.2
    tiny: float = 1.0
    heartbeat: float = 5.0
    silence: float = 12.5
    grace: float = 10.0
    pause: float = 0.5
    idle: float = 5.0


TIMING = PullTiming()


@dataclass(frozen=True, slots=True, kw_only=True)
class PullTerms:
    """Terms of all pulls.

    Attributes:
        slots: Maximum number of open pulls.
        one: Whether each pull asks for one message, whatever is held, to learn when this replica is pinned.
        exclusive: Whether other replicas receive nothing.
        group: The consumer's priority group, "" for none (ADR-42).
        id: The pin id of this client; "" for none.
        refused: Receives the pin id once another client is pinned.
    """

    slots: int = SLOTS
    one: bool = False
    exclusive: bool = False
    group: str = ""
    id: str = ""
    refused: asyncio.Queue[str] | None = None


@dataclass(slots=True, eq=False)
class PullSlot:
    """A subscription to the inbox and its open pull.

    Attributes:
        subject: Subscribed reply subject, without the pull's number.
        sid: Id of the subscription.
        inbox: Receives its messages.
        pull: Number of the pull.
        active: Whether the pull is open.
        begin_bytes: Bytes that the subscription had received before the pull.
        end: Messages that the subscription will have received once the pull is filled.
        end_bytes: Bytes that it will have received then.
        sent: When the last pull on its subject was requested.
        heard: When the server last answered, or the pull was requested.
        expires: When the pull should have expired.
        not_before: When the next pull is due.
    """

    subject: str
    sid: int
    inbox: Inbox
    pull: int = 0
    active: bool = False
    begin_bytes: int = 0
    end: int = 0
    end_bytes: int = 0
    sent: float = 0.0
    heard: float = 0.0
    expires: float = 0.0
    not_before: float = 0.0

    @property
    def left(self) -> int:
        """Messages that the pull may still deliver."""
        return max(0, self.end - self.inbox.by_sid[self.sid][0]) if self.active else 0

    @property
    def left_bytes(self) -> int:
        """Bytes that the pull may still deliver."""
        return max(0, self.end_bytes - self.inbox.by_sid[self.sid][1]) if self.left else 0

    @property
    def brought(self) -> bool:
        """Whether the pull has delivered anything."""
        return self.inbox.by_sid[self.sid][1] > self.begin_bytes

    def begin(self, ask: Ask, batch: int, now: float, expires: float) -> None:
        """Record a new pull."""
        self.pull += 1
        messages, self.begin_bytes = self.inbox.by_sid[self.sid]
        self.end, self.end_bytes = messages + batch, self.begin_bytes + ask.max_bytes
        self.active, self.sent, self.heard = True, now, now
        self.expires = now + expires + TIMING.grace

    def reply(self, pull: int, client: str) -> str:
        """Return the reply subject of the pull with this number and this pin id."""
        return f"{self.subject}.{pull}-{client}" if client else f"{self.subject}.{pull}"


class Pulls:
    """The pulls of one consumer into `inbox`.

    Attributes:
        terms: Their terms.
        limits: Their sizes.
        stopped: Whether no more pulls are made.
        answered: When the server last served or confirmed a pull.
        last_data: When messages last arrived; at first, when the consumer was opened.
    """

    def __init__(self, config: Config, inbox: Inbox, ledger: Ledger) -> None:
        self._config, self._inbox, self._ledger = config, inbox, ledger
        self._consumer: Consumer
        self._wake = asyncio.Event()
        self.terms = PullTerms()
        self.slots: list[PullSlot] = []
        self.limits = PullLimits(config.limits.memory, SLOTS)
        self.stopped = False
        self.answered = self.last_data = 0.0
        self._last_total: int | None = None  # messages received here when nothing is left, if the run then ends

    async def open(self, consumer: Consumer) -> None:
        """Subscribe; nothing is pulled yet."""
        self._consumer, client = consumer, consumer.link.client
        self.answered = self.last_data = time.monotonic()
        for _ in range(SLOTS):
            subject = client.new_inbox()
            self.slots.append(PullSlot(subject, await client.receive_into(self._inbox, f"{subject}.*"), self._inbox))

    @property
    def active(self) -> int:
        """Open pulls."""
        return sum(slot.active for slot in self.slots)

    @property
    def starved(self) -> bool:
        """Whether only memory prevents another pull."""
        return self.limits.starved and not self.active and not self.terms.one

    @property
    def consuming(self) -> bool:
        """Whether the server has recently served or confirmed a pull."""
        return time.monotonic() - max(self.answered, self.last_data) < TIMING.silence

    def catch_up(self) -> None:
        """Use short pulls once nothing is left to deliver, because the run then ends."""
        self._last_total = self._inbox.total + self._consumer.state.pending

    def looked_up(self) -> None:
        """Record that the consumer has answered with its state."""
        if self._last_total is not None:
            self.catch_up()
        if not self.active:
            self.answered = time.monotonic()

    def broken(self) -> None:
        """Drop all pulls after the connection was lost."""
        self.limits.broken(time.monotonic())
        for slot in self.slots:
            slot.active, slot.not_before = False, 0.0
        self._count()

    def end(self, slots: Sequence[PullSlot]) -> None:
        """Record that these pulls cannot deliver anything any more."""
        for slot in slots:
            slot.active = False
        self._count()

    def stop(self) -> None:
        """Make no more pulls."""
        self.stopped = True
        self._wake.set()

    async def overdue(self) -> list[PullSlot]:
        """Wait until something has changed; return open pulls that should have expired."""
        self._wake.clear()
        await self._changed(TIMING.pause)
        return [slot for slot in self.slots if slot.active and time.monotonic() > slot.expires]

    def _count(self) -> None:
        self._ledger["asked"] = sum(max(1, slot.left_bytes) for slot in self.slots if slot.active)

    # ------------------------------------------------------------------ pulling

    async def run(self) -> None:
        """Keep pulls open while there is credit, until stopped."""
        while not self.stopped:
            self._wake.clear()
            await self._renew()
            await self._changed(self._rest())

    async def _changed(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def wake(self) -> None:
        """Renew the pulls at once."""
        self._wake.set()

    def wake_for_more(self) -> None:
        """Pull again after memory has been freed, if there are too few pulls."""
        if self.active < self._wanted(time.monotonic()):
            self._wake.set()

    async def _renew(self) -> None:
        """Abandon silent pulls, and pull in every free slot while there is credit."""
        now = time.monotonic()
        for slot in self.slots:
            if slot.active and (now > slot.expires or now - max(slot.heard, self.last_data) > TIMING.silence):
                event(log, logging.WARNING, "pull.silent", seconds=round(now - slot.heard, 1))
                slot.active = False
        self._count()
        for slot in self.slots[: self._wanted(now)]:
            if not (slot.active or self.stopped) and self._consumer.link.connected and now >= slot.not_before:
                await self._issue(slot, now)

    def _wanted(self, now: float) -> int:
        """Return how many pulls should be open."""
        slots = min(self.terms.slots, 1) if self._is_idle(now) else self.terms.slots
        return min(slots, self._consumer.state.max_waiting or SLOTS)  # it ignores excess pulls

    def _is_idle(self, now: float) -> bool:
        quiet = now - self.last_data > TIMING.idle
        return quiet and self._last_total is None and not self._consumer.state.pending

    def _rest(self) -> float:
        """Return the seconds until `_renew` has something to do, unless a message or status arrives earlier."""
        now = time.monotonic()
        open_slots = [slot for slot in self.slots if slot.active]
        if len(open_slots) < self._wanted(now) or not self._consumer.link.connected:
            return TIMING.pause
        due = (min(slot.expires, max(slot.heard, self.last_data) + TIMING.silence) for slot in open_slots)
        return max(TIMING.pause, min(due, default=now + TIMING.silence) - now)

    async def _issue(self, slot: PullSlot, now: float) -> None:
        one = self.terms.one
        ask = Ask(max_bytes=self.limits.limit // SLOTS, batch=1, limited=False) if one else self._credit(now)
        if not ask:
            return
        state, source = self._consumer.state, self._config.source
        batch = ask.batch or min(source.batch, state.max_batch or source.batch)
        expires = self._allowed(self._expiry(batch, now))
        slot.begin(ask, batch, now, expires)
        self._count()
        await self._send(slot, slot.pull, batch=batch, max_bytes=ask.max_bytes if ask.limited else 0, expires=expires)

    async def _send(self, slot: PullSlot, pull: int, *, batch: int, max_bytes: int, expires: float) -> None:
        source, terms = self._config.source, self.terms
        await self._consumer.link.api.pull(
            source.stream,
            source.consumer,
            slot.reply(pull, terms.id),
            batch=batch,
            max_bytes=max_bytes,
            expires=expires,
            heartbeat=min(TIMING.heartbeat, expires / 2),
            group=terms.group,
            pin=terms.id,
        )

    async def keep_up(self, every: float) -> None:
        """Pull again with this id, unless there was a pull in the last `every` seconds.

        This pull can deliver nothing, because every message has more than one byte.
        """
        now, slot = time.monotonic(), self.slots[0]
        late = now - max(slot.sent for slot in self.slots) >= every
        if late and self.terms.id and self._consumer.link.connected and not self.stopped:
            slot.sent = now
            await self._send(slot, 0, batch=1, max_bytes=1, expires=self._allowed(TIMING.tiny))

    def _allowed(self, expires: float) -> float:
        return min(expires, self._consumer.state.max_expires or expires)

    def _expiry(self, batch: int, now: float) -> float:
        """Return a pull's expiry. A pull for more than is left stays open longer the longer nothing arrives."""
        usual = min(TIMING.expires, self._config.drain_timeout / DRAIN_SHARE)
        if self._last_total is None:
            return usual
        left = self._last_total - self._inbox.total - sum(slot.left for slot in self.slots)
        return usual if batch <= left else min(usual, max(TIMING.brief, now - self.last_data))

    def _credit(self, now: float) -> Ask | None:
        """Return the size of the next pull, or None without credit."""
        self.limits.received(self._inbox.largest, now)
        self._inbox.largest = 0
        self.limits.memory = self._ledger.memory.part
        return self.limits.next(
            free=self._ledger.free,
            held=self._ledger.total > 0,
            in_flight=self._ledger["asked"],
            ceiling=self._consumer.state.max_bytes,
            largest=self._consumer.link.client.max_payload,
            now=now,
        )

    # ------------------------------------------------------------------ receiving

    def on_data(self) -> None:
        """Handle received messages. A pull that delivers all it asked for ends without a status."""
        now = time.monotonic()
        if self._is_idle(now):
            self._wake.set()  # to make more pulls
        self.last_data = now
        ended = self._inbox.empty if self._consumer.link.api.imported else ()
        for slot in self.slots:
            if slot.active and (not slot.left_bytes or slot.sid in ended):
                slot.active = False
                self._wake.set()
        self._inbox.empty.clear()
        self._count()

    def on_status(self, subject: bytes, block: bytes) -> None:
        """Handle a status of the server."""
        to, _, token = subject.decode("utf-8", "replace").rpartition(".")
        for slot in self.slots:
            if slot.subject == to:
                self._heard(slot, token, parse_status(block))

    def _heard(self, slot: PullSlot, token: str, status: PullStatus) -> None:
        slot.heard = time.monotonic()
        pull, _, client = token.partition("-")
        if status.reaction in (Reaction.ALIVE, Reaction.PULL_AGAIN):
            self.answered = slot.heard
        if status.reaction is Reaction.OTHER_CLIENT and self.terms.refused is not None:
            self.terms.refused.put_nowait(client)
            self._wake.set()
        if status.reaction is not Reaction.ALIVE and slot.active and pull == str(slot.pull):
            slot.end -= status.undelivered or 0
            if status.undelivered is None or slot.left <= 0:
                slot.active = False
            self._react(slot, status)
            self._count()
            self._wake.set()

    def _react(self, slot: PullSlot, status: PullStatus) -> None:
        if status.reaction is Reaction.FATAL:
            where = f"consumer {self._config.source.consumer} of stream {self._config.source.stream}"
            self._consumer.link.fail(SourceError(f"{where} no longer accepts pulls: {status.code} {status.text}"))
        elif status.reaction is Reaction.TOO_LARGE:
            self.limits.alone |= not slot.brought
        elif status.reaction is Reaction.OTHER_CLIENT and self.terms.refused is not None:
            pass  # another pull, without the id, waits for its turn
        elif status.reaction is not Reaction.PULL_AGAIN:
            slot.not_before = time.monotonic() + TIMING.pause
            event(log, logging.WARNING, "pull.ended", code=status.code, reason=status.text)
