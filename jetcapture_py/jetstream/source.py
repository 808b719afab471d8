"""Receives from a durable pull consumer: overlapping pulls, credit, heartbeats, statuses, acknowledgements.

A few *lanes* each have a subscription of their own and at most one pull under way, so it is always known how much
every pull may still bring. No credit, no pull: that is the backpressure. All replicas share the consumer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import nats.errors
import pyarrow as pa
from nats.aio.subscription import Subscription

from jetcapture_py.config.model import Config
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream import acks
from jetcapture_py.jetstream.acks import AckResult
from jetcapture_py.jetstream.admin import ConsumerState
from jetcapture_py.jetstream.connection import FORBIDDEN, NOT_FOUND, Api, ApiError, UnavailableError, connect
from jetcapture_py.jetstream.consumer import Consumer
from jetcapture_py.jetstream.deliveries import Deliveries
from jetcapture_py.jetstream.payload_check import PayloadCheck
from jetcapture_py.jetstream.permissions import Denial, denial_in, refusal
from jetcapture_py.jetstream.pull_limits import Ask, PullLimits
from jetcapture_py.jetstream.pull_slot import PullSlot
from jetcapture_py.jetstream.pull_status import PullStatus, Reaction, parse_status, undelivered
from jetcapture_py.jetstream.wire.client import Connection
from jetcapture_py.jetstream.wire.inbox import Inbox, Received
from jetcapture_py.log import event
from jetcapture_py.log_limit import LogLimit

log = logging.getLogger("jetcapture.source")

LANES = 10
"""Together they ask for as much as a consumer may leave unacknowledged by default."""
HEARTBEAT = 5.0
"""Seconds of silence after which the server confirms that a pull is alive."""
SILENCE = 12.5
"""Seconds of silence after which a pull is given up."""
EXPIRES = 2.0
"""Seconds that a pull stays open without messages, and so what a drain may wait for it to end..."""
DRAIN_SHARE = 4
"""...which is at most this fraction of `drain_timeout`."""
GRACE = 10.0
"""Seconds that the server may take to say that a pull has expired."""
ENOUGH = 4096
MOST_AT_ONCE = 256 << 20
"""Most bytes that are handed on at once; an Arrow column of byte strings must stay below 2 GiB."""
LINGER = 0.05
"""A batch is handed on when it has `ENOUGH` messages, or so many seconds after its first one."""
PAUSE = 0.5
FRESH = 0.25
"""Seconds for which an answer about the consumer counts, while a pull is under way: deletion would end that at once."""
NEVER = (0, float("-inf"))
CONNECT_PATIENCE = 20.0
DROPPED = (
    "the server probably dropped this client as a slow consumer: nothing was read for its write_deadline, or more than "
    "its max_pending was waiting"
)


class Source:
    """The consumer's messages; `memory` is the budget in bytes.

    `held` says how many bytes the rest of the pipeline holds, `unacked` how many messages this process does, and
    `replies` gives the ack subjects of these.
    """

    def __init__(
        self,
        config: Config,
        *,
        held: Callable[[], int],
        unacked: Callable[[], int],
        replies: Callable[[], pa.BinaryArray],
    ) -> None:
        self.config = config
        self.stream, self.consumer = config.source.stream, config.source.consumer
        self.memory = config.limits.memory
        self.failure: SourceError | None = None
        self.reconnects = 0
        self.starved = False  # whether nothing is pulled because of memory alone
        self.lost = 0
        """Messages that connections took with them, as far as that is known."""
        self._held, self._unacked, self._replies = held, unacked, replies
        self._others = 0
        self._limits = PullLimits(self.memory, LANES)
        self._said_large = LogLimit()
        self._may_get = True  # whether nobody has forbidden us to ask for a message
        self._stock_due = False  # whether a reconnect is to be followed up before the next pull
        self._inbox = Inbox(self._on_data)
        self._inbox.on_status = self._on_status
        self._lanes: list[PullSlot] = []
        self._subscriptions: list[Subscription] = []
        self._wake = asyncio.Event()
        self._ready = asyncio.Event()
        self._enough = asyncio.Event()
        self._stopping = self._ended = self._closing = False
        self._expires = min(EXPIRES, config.drain_timeout / DRAIN_SHARE)
        self._last_data = self._answered = 0.0
        self._known = NEVER  # at which connection, and when, the consumer was last found to be the same

    # ------------------------------------------------------------------ life

    async def open(self) -> None:
        """Connect, find or create the consumer, subscribe. Raises SourceError."""
        self._loop = asyncio.get_running_loop()
        self._client: Connection = await connect(
            self.config.nats,
            f"jetcapture {self.stream}/{self.consumer}",
            on_disconnected=self._disconnected,
            on_reconnected=self._reconnected,
            on_closed=self._closed,
            on_error=self._errored,
            patience=CONNECT_PATIENCE,
        )
        self._api = Api(self._client, self.config.nats.domain)
        try:
            await self._attach()
        except BaseException:
            await self.close()
            raise

    async def _attach(self) -> None:
        """Have the consumer, know its state, and subscribe."""
        self._consumer = Consumer(self._api, self.config.source, self.fail)
        await self._consumer.attach()
        self._answered = self._loop.time()
        self.payloads = PayloadCheck(
            self.stream,
            self.consumer,
            self._floor_again,
            self.give_back,
            self._is_empty,
            limited=self.state.config.get("max_deliver", -1) > 0,
        )
        self._deliveries = Deliveries(self.stream, self.consumer, self.state)
        for _ in range(LANES):
            subject = self._client.new_inbox()
            subscription = await self._client.subscribe(f"{subject}.*")
            self._subscriptions.append(subscription)
            self._client.register(subscription._id, self._inbox)
            self._lanes.append(PullSlot(subject, subscription._id, self._inbox))
        if not self._client.fast:
            event(
                log,
                logging.WARNING,
                "receive.slow_path",
                reason="unknown version of nats-py",
            )

    async def stop(self) -> bool:
        """Pull no more, receive what open pulls still bring, and unsubscribe; return whether every pull ended.

        An open pull cannot be cancelled. Without its subscription, what the server still sends for it is dropped, and
        comes back only after `ack_wait` where it has to pass through another server of a cluster. So the subscriptions
        stay until every pull is filled or has expired. A second call does not wait.
        """
        connection = self.reconnects
        if not self._stopping:
            self._stopping = True
            self._wake.set()
            await self._pulls_end()
        lost = not self.connected or self._stock_due or connection != self.reconnects  # pulls end with their connection
        ended = not lost and not any(lane.active for lane in self._lanes)
        try:
            while self._subscriptions:
                await self._subscriptions.pop().unsubscribe()
            await self._client.flush(2)
        except (nats.errors.Error, OSError, TimeoutError):
            pass  # not connected: nothing more can come
        self.halt()
        return ended

    async def _pulls_end(self) -> None:
        """Wait until no pull is open, or nothing can come any more."""
        while self.connected and not self._ended and any(lane.active for lane in self._lanes):
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), PAUSE)
            overdue = [lane for lane in self._lanes if lane.active and self._loop.time() > lane.expires]
            if overdue and await self.refresh():  # the consumer answers, so it has ended them
                for lane in overdue:
                    lane.active = False

    async def close(self) -> None:
        """Flush what was written and close the connection."""
        self._closing = True
        try:
            if self._client.is_connected:
                await self._client.flush(2)
            await asyncio.wait_for(self._client.close(), 5)
        except (nats.errors.Error, OSError, TimeoutError):
            pass  # the server is gone: there is nobody to say good-bye to

    def halt(self) -> None:
        """Pull no more, and let nobody wait for more."""
        self._stopping = self._ended = True
        for waited in (self._wake, self._ready, self._enough):
            waited.set()

    @property
    def state(self) -> ConsumerState:
        """The consumer as the server described it last."""
        return self._consumer.state

    @property
    def stream_created(self) -> str:
        """When the stream was created, RFC 3339; "" when we are not allowed to ask."""
        return self._consumer.stream_created

    @property
    def connected(self) -> bool:
        """Whether the connection is up."""
        return bool(self._client.is_connected)

    @property
    def consuming(self) -> bool:
        """Whether the server has served, or at least confirmed, a pull lately; while none is due, its answers count."""
        return self._loop.time() - max(self._answered, self._last_data) < SILENCE

    def fail(self, error: SourceError) -> None:
        """No more messages will come, and this is why."""
        if self.failure is None:
            self.failure = error
            self.halt()

    async def _disconnected(self) -> None:
        self._stock_due = True
        for lane in self._lanes:
            lane.active, lane.not_before = False, 0.0  # pulls die with their connection
        self._last_server = self._client.server_id
        if not self._closing:
            event(log, logging.WARNING, "nats.disconnected")

    async def _reconnected(self) -> None:
        self.reconnects += 1
        event(log, logging.INFO, "nats.reconnected")
        self._wake.set()

    async def _closed(self) -> None:
        if not self._closing:
            reason = self._client.last_error
            self.fail(SourceError(f"the NATS connection was closed permanently: {reason or 'by the server'}"))

    async def _errored(self, error: Exception) -> None:
        denial = denial_in(error)
        if denial is None or (needed := self._needed(denial)) is None:
            event(log, logging.WARNING, "nats.error", error=error)
        else:
            self.fail(SourceError(f"NATS refused: {refusal(needed, subscription=denial.subscription)}"))

    def _needed(self, denial: Denial) -> str | None:
        """What must be allowed for this to work at all, if the denial is about that: without it nothing ever comes."""
        mine = f"{self.stream}.{self.consumer}"
        if denial.subscription:
            return f"{self.config.nats.inbox_prefix}.>"
        if denial.subject.startswith("$js.ack."):
            short = denial.subject.startswith(f"$js.ack.{mine}.".lower())
            return f"$JS.ACK.{mine}.>" if short else f"$JS.ACK.*.*.{mine}.>"
        return denial.about(f"{self._api.prefix}.CONSUMER.MSG.NEXT.{mine}")

    # ------------------------------------------------------------------ receiving

    @property
    def fetched(self) -> int:
        """Messages received since the start."""
        return self._inbox.total

    @property
    def waiting(self) -> int:
        """Messages received and not taken yet."""
        return len(self._inbox.rows)

    @property
    def waiting_bytes(self) -> int:
        """What those hold in memory."""
        return self._inbox.rows.memory

    def waiting_replies(self) -> pa.BinaryArray:
        """Their ack subjects."""
        return self._inbox.rows.replies

    def idle_for(self) -> float:
        """Seconds since the last message came."""
        return self._loop.time() - self._last_data

    async def receive(self) -> Received | None:
        """The next messages; None once stopped, and everything that the server had sent by then was handed out."""
        await self._ready.wait()
        if self.waiting < ENOUGH and not self._ended:
            self._enough.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._enough.wait(), LINGER)
        received = self._inbox.take_run(min(self.memory // 8, MOST_AT_ONCE))
        if received:
            self._deliveries.received(self.fetched - self.waiting, received.last_reply(), self._loop.time())
        if not self._ended and not self.waiting:
            self._ready.clear()
        return received if received or not self._ended else None

    def hand_on(self) -> None:
        """Let nobody wait until there are more messages than there are now."""
        self._enough.set()

    def _on_data(self) -> None:
        self._last_data = self._loop.time()
        for lane in self._lanes:
            if lane.active and not lane.left_bytes:  # the server says nothing when a pull ends so, by count or by bytes
                lane.active = False
                self._wake.set()
                if lane.single:
                    self._limits.single_received(lane.brought, self.state.max_bytes)
        self._ready.set()
        if self.waiting >= ENOUGH:
            self.hand_on()

    def _on_status(self, subject: bytes, block: bytes) -> None:
        to, _, pull = subject.decode("utf-8", "replace").rpartition(".")
        for lane in self._lanes:
            if lane.subject == to:
                self._heard(lane, pull, parse_status(block), undelivered(block))

    def _heard(self, lane: PullSlot, pull: str, status: PullStatus, undelivered: int | None) -> None:
        lane.heard = self._loop.time()
        if status.reaction in (Reaction.ALIVE, Reaction.PULL_AGAIN):
            self._answered = lane.heard
            if lane.single and lane.active:
                self._limits.single_idle(ended=status.reaction is Reaction.PULL_AGAIN)
        if status.reaction is not Reaction.ALIVE and lane.active and pull == str(lane.pull):
            lane.batch -= undelivered or 0
            lane.active = undelivered is not None and lane.left > 0
            self._react(lane, status)
            self._wake.set()

    def _react(self, lane: PullSlot, status: PullStatus) -> None:
        if status.reaction is Reaction.FATAL:
            where = f"consumer {self.consumer} of stream {self.stream}"
            self.fail(SourceError(f"{where} no longer accepts pulls: {status.code} {status.text}"))
        elif status.reaction is Reaction.TOO_LARGE:
            if not lane.brought:
                self._too_small(lane)
        elif status.reaction is not Reaction.PULL_AGAIN:
            lane.not_before = self._loop.time() + PAUSE
            event(log, logging.WARNING, "pull.ended", code=status.code, reason=status.text)

    def _too_small(self, lane: PullSlot) -> None:
        """The lane's pull brought nothing because the next message is larger."""
        now = self._loop.time()
        if self._limits.too_small(lane.max_bytes, self.state.max_bytes, now) and (times := self._said_large.due(now)):
            event(log, logging.WARNING, "pull.too_small", max_bytes=lane.max_bytes, times=times)

    # ------------------------------------------------------------------ pulling

    async def pull(self) -> None:
        """Keep the lanes busy as far as there is credit, until stopped."""
        while not self._stopping:
            self._wake.clear()
            if self._stock_due and self._client.is_connected:
                await self._take_stock()
            now = self._loop.time()
            for lane in self._lanes:
                if lane.active and (now > lane.expires or now - max(lane.heard, self._last_data) > SILENCE):
                    event(log, logging.WARNING, "pull.silent", seconds=round(now - lane.heard, 1))
                    lane.active = False
            for lane in self._lanes[: self.state.max_waiting or LANES]:  # the server is silent about those beyond
                if not (lane.active or self._stopping) and now >= lane.not_before and self._may_pull:
                    await self._issue(lane, now)
            try:
                await asyncio.wait_for(self._wake.wait(), PAUSE)
            except TimeoutError:
                continue

    @property
    def _may_pull(self) -> bool:
        return self._client.is_connected and not self._stock_due

    def wake_pulls(self) -> None:
        """Memory has been freed: there may be credit again."""
        if any(not lane.active for lane in self._lanes):
            self._wake.set()

    async def _issue(self, lane: PullSlot, now: float) -> None:
        """Pull, if there is credit."""
        ask = self._credit(now)
        self.starved = not ask and not any(other.active for other in self._lanes)
        if not ask:
            return
        state = self.state
        batch = ask.batch or min(self.config.source.batch, state.max_batch or self.config.source.batch)
        expires = min(self._expires, state.max_expires) if state.max_expires else self._expires
        heartbeat = min(HEARTBEAT, expires / 2)
        lane.pull += 1
        lane.active, lane.batch, lane.max_bytes, lane.single = True, batch, ask.max_bytes, ask.batch == 1
        lane.start, lane.start_bytes = lane.inbox.by_sid[lane.sid]
        lane.heard = now
        lane.expires = now + expires + GRACE
        reply = f"{lane.subject}.{lane.pull}"
        size = ask.max_bytes if ask.limited else 0
        await self._api.pull(
            self.stream, self.consumer, reply, batch=batch, max_bytes=size, expires=expires, heartbeat=heartbeat
        )

    def _credit(self, now: float) -> Ask | None:
        """What a further pull may ask for."""
        self._limits.received(self._inbox.largest, now)
        self._inbox.largest = 0
        in_flight = self.in_flight
        used = self._held() + self.waiting_bytes + in_flight
        ceiling = self.state.max_bytes
        return self._limits.next(free=self.memory - used, held=used > 0, in_flight=in_flight, ceiling=ceiling, now=now)

    @property
    def in_flight(self) -> int:
        """Bytes in flight: what open pulls may still deliver."""
        return sum(max(1, lane.left_bytes) for lane in self._lanes if lane.active)

    @property
    def in_flight_limit(self) -> int:
        """The most that this may be, but for a single large message."""
        return self._limits.limit

    @property
    def stuck(self) -> str | None:
        """Why nothing is delivered just now although the server answers, in one line; None when nothing is wrong."""
        return self._limits.stuck(self._loop.time())

    async def _take_stock(self) -> None:
        """Find out what the lost connection took with it, before anything is pulled, and have it delivered again.

        Otherwise that would come back only after `ack_wait`. Nothing is given back that is held here.
        """
        while not await self.refresh():  # whoever leads the consumer answers this and pulls alike
            if self._stopping or not self._client.is_connected:
                return
            await asyncio.sleep(PAUSE)
        self._stock_due = False
        if self.waiting:
            self._deliveries.received(self.fetched, self._inbox.rows.last_reply(), self._loop.time())
        lost = self._deliveries.after_reconnect(self.state, self._replies(), self._loop.time())
        await self.give_back(lost.replies)
        if not lost.messages:
            return
        self.lost += lost.messages
        size = lost.messages * self._inbox.total_bytes // max(1, self.fetched)
        much = self._limits.lost(size, self._loop.time())
        event(
            log,
            logging.WARNING,
            "messages.lost_in_flight",
            messages=lost.messages,
            given_back=len(lost.replies),
            in_flight_limit=self.in_flight_limit,
            reason=DROPPED if much and self._client.server_id == self._last_server else "the connection was lost",
        )

    # ------------------------------------------------------------------ the consumer

    async def refresh(self) -> bool:
        """Ask the server for the consumer's state; False when nobody answers just now, or it is another one."""
        asked = self.reconnects, self._loop.time()
        pulls = self._open_pulls
        if not await self._consumer.refresh() or self.failure is not None:
            return False
        self._known = asked
        held = self._unacked()
        self._others = max(0, self.state.unacked - held)
        pulls = max(pulls, self._open_pulls)
        self._deliveries.looked_up(self.state, held=held, pulls=pulls, now=self._loop.time())
        if not self._open_pulls:
            self._answered = self._loop.time()
        return True

    @property
    def _open_pulls(self) -> int:
        return sum(lane.active for lane in self._lanes)

    async def _is_empty(self, seq: int) -> bool | None:
        """Whether the message has no payload in the stream; None where we may not ask, or nobody answers.

        False for one that is gone: what it had is not known, and it does not come again.
        """
        if not self._may_get:
            return None
        try:
            answer = await self._api.request(f"STREAM.MSG.GET.{self.stream}", {"seq": seq})
        except UnavailableError:
            return None
        except ApiError as error:
            self._may_get = error.code != FORBIDDEN
            return False if error.code == NOT_FOUND else None
        return not answer["message"].get("data")

    async def _floor_again(self) -> int | None:
        """The ack floor, from an answer about the consumer that was asked for now; None once nothing can come."""
        return self.state.ack_floor if await self._found(again=True) else None

    @property
    def unacked_limit(self) -> int:
        """How many messages this replica may hold: the consumer's limit less what other replicas hold."""
        return max(1, self.state.max_ack_pending - self._others)

    async def ack(self, replies: pa.BinaryArray) -> AckResult:
        """Acknowledge stored messages in bulk, the last one confirmed by the server.

        The consumer is asked for before, until it answers: nobody would take the acks. And were it another one, of a
        stream that was created again, the same sequences would be other messages.
        """
        if not await self._found():
            return AckResult.REFUSED
        result = await acks.acknowledge(self._client, replies, lambda: self.reconnects)
        if result is not AckResult.CONFIRMED:
            self._known = NEVER
        return result

    async def _found(self, *, again: bool = False) -> bool:
        """Wait until the consumer is found, or was a moment ago and not `again`; False once nothing more can come."""
        while self.failure is None:
            if self.connected and ((not again and self._is_known()) or await self.refresh()):
                return True
            await asyncio.sleep(PAUSE / 5)
        return False

    def _is_known(self) -> bool:
        """Whether the consumer was there a moment ago, and the server has not said since that it is gone."""
        connection, asked = self._known
        fresh = connection == self.reconnects and self._loop.time() - asked < FRESH
        return fresh and self.failure is None and self._open_pulls > 0

    async def keep_alive(self, replies: pa.BinaryArray) -> None:
        """Tell the server that these messages are still being worked on."""
        await acks.publish(self._client, replies, b"+WPI")

    async def give_back(self, replies: pa.BinaryArray) -> None:
        """Have these messages delivered again, to whoever pulls next."""
        await acks.publish(self._client, replies, b"-NAK")
