"""Read one range of a stream completely and in order, even across server restarts.

The range comes from a short-lived consumer without acknowledgements; the stream's own consumers are not touched. After
any failure it is abandoned, and a new one continues after the last message received. Nothing is returned before the
consumer's delivery count confirms that everything before it has arrived.

A consumer silently skips removed messages. So a reader that must detect losses asks for the stream's first sequence
after every gap: if the stream now starts after the start of the gap, messages were removed before they were read.
Messages missing inside the stream are not a loss: they were deleted one by one, or replaced by newer ones.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import nats.errors
import pyarrow as pa

from jetcapture_py.archive.incarnations import Origin
from jetcapture_py.errors import MissingStreamError, SourceError, UnavailableError
from jetcapture_py.jetstream.acks import AckPosition, first_delivery, position
from jetcapture_py.jetstream.pulls import PullStatus, Reaction, parse_status
from jetcapture_py.jetstream.read_session import PAUSE, ReadSession, StreamState
from jetcapture_py.jetstream.wire.inbox import Inbox, Received

BATCH = 50_000
"""Maximum messages per pull."""
PULL_BYTES = 16 << 20
"""Maximum bytes per pull; a larger message is pulled alone and without a limit."""
WAITING = 24 << 20
"""Bytes of received messages above which they are returned, and pulling pauses until some have been taken."""
ENOUGH = 16_384
"""Number of received messages from which on they are returned, regardless of size."""
HEARTBEAT, SILENCE, EXPIRES = 1.0, 3.0, 30.0
"""Seconds: heartbeat interval of a pull, timeout without a heartbeat, and expiry of the pull."""
_CHECK_INTERVAL = 0.05
"""Minimum seconds between requests for the stream's first sequence; with `subjects`, gaps are frequent."""

FEW_AT_ONCE, AT_ONCE = 4, 50
"""Messages that are requested at once, one by one: at first, and at most."""
NOBODY = "none"
"""The consumer's name in the ack subjects of messages that no consumer delivered."""

Check = Callable[[StreamState, int | None], None]
"""Raises an error if this is another stream, or if messages of the range from this sequence on are gone (None: any)."""


async def requested(session: ReadSession, stream: str, seqs: Iterable[int]) -> list[dict[str, Any]]:
    """Return the stored messages with these sequences in the API's form, all requested at once.

    Raises SourceError.
    """
    messages = await asyncio.gather(*(session.message(stream, seq=seq) for seq in seqs))
    return [message for message in messages if message is not None]


def next_at_once(count: int, messages: Iterable[dict[str, Any]]) -> int:
    """Return how many messages to request next: few large ones, because a server drops slow receivers."""
    largest = max((len(message.get("data", "")) for message in messages), default=0)
    return max(1, min(2 * count, AT_ONCE, PULL_BYTES // max(largest, 1)))


def received_of(stream: str, messages: Sequence[dict[str, Any]]) -> Received:
    """Convert API messages to received ones, as if a consumer `NOBODY` had delivered them."""
    return Received.of(
        [message["subject"].encode() for message in messages],
        [first_delivery(stream, NOBODY, message["seq"], nanoseconds(message["time"])) for message in messages],
        [base64.b64decode(message.get("hdrs", "")) for message in messages],
        [base64.b64decode(message.get("data", "")) for message in messages],
    )


def nanoseconds(text: str) -> int:
    """Parse a time of the JetStream API to nanoseconds since the epoch."""
    return int(pa.scalar(text).cast(pa.timestamp("ns", "UTC")).value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRange:
    """Messages of a stream with sequences from `first` to `end` (exclusive), on `subjects` (empty: all).

    `per_subject` keeps only messages that are the last of their subject when they are read; `headers_only` omits
    payloads.
    """

    stream: str
    first: int
    end: int
    subjects: tuple[str, ...] = ()
    per_subject: bool = False
    headers_only: bool = False


class RangeReader:
    """Reads `range_`. May return messages beyond its end, and, with `per_subject`, messages twice.

    With an `origin`, it ends without an error when that stream is gone or was recreated. With a `check` as well, it
    calls that with the stream's current state as soon as messages may have been lost, and raises its errors.
    """

    def __init__(
        self, session: ReadSession, range_: StreamRange, *, origin: Origin | None = None, check: Check | None = None
    ) -> None:
        self._session, self._range = session, range_
        self._losses = Losses(session, range_, origin, check)
        self._consumer: RangeConsumer | None = None
        self._wake = asyncio.Event()
        self._finished = False
        self._last = range_.first - 1  # sequence of the last received message
        self._restart()

    def _restart(self) -> None:
        """Begin with another consumer."""
        self._at = AckPosition(self._last, 0, 0)  # of the consumer's last message
        self._may_end = False  # the server may have nothing left to send
        self._trouble = ""
        self._heard = self._came = 0.0  # times of the last answer and of the last message

    async def messages(self) -> AsyncGenerator[tuple[str, Received]]:
        """Yield the messages in chunks: pairs of consumer name and messages.

        Raises SourceError if expected messages do not arrive for the session's timeout.
        """
        clock = asyncio.get_running_loop().time
        self._session.on_trouble = lambda: self._disturb("the connection was lost")
        troubled: float | None = None
        try:
            while not self._finished:
                try:
                    await self._session.retry(self._attach)
                    while (consumer := self._consumer) is not None and await self._receive(consumer):
                        received = consumer.inbox.take(WAITING)
                        await self._ask_for_more(consumer)  # which arrives meanwhile
                        yield consumer.name, received
                except MissingStreamError:
                    if not self._losses.may_be_missing:
                        raise
                    self._finish()
                if (consumer := self._consumer) is None:
                    continue
                await self._leave()
                if consumer.inbox.rows:
                    yield consumer.name, consumer.inbox.take(1 << 62)
                troubled = clock() if troubled is None or consumer.inbox.total else troubled
                if clock() > troubled + self._session.timeout and not self._finished:
                    raise self._nothing_came(self._trouble)
        finally:
            await self._leave()

    async def _attach(self) -> None:
        """Create a consumer that starts after the last message, and subscribe."""
        self._restart()
        range_ = self._range
        config: dict[str, Any] = {"headers_only": range_.headers_only, "filter_subjects": range_.subjects}
        if range_.per_subject:
            config |= {"deliver_policy": "last_per_subject", "filter_subjects": range_.subjects or (">",)}
        else:
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": self._last + 1}
        name, answer = await self._session.create_consumer(range_.stream, config)
        inbox = Inbox(self._on_data)
        inbox.on_status = self._on_status
        limit = answer["config"].get("max_batch") or BATCH
        self._consumer = RangeConsumer(self._session, range_.stream, name, inbox, max_batch=min(BATCH, limit))
        self._may_end = not answer["num_pending"]
        self._at = AckPosition(self._last, 0, answer["num_pending"])
        if not await self._losses.begin(self._last) or (range_.per_subject and self._may_end):
            self._finish()
        else:
            await self._consumer.subscribe()

    async def _leave(self) -> None:
        """Delete the consumer; messages received from it stay in its inbox."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await consumer.close()

    def _nothing_came(self, reason: str) -> SourceError:
        seconds = f"{self._session.timeout:g} s"
        return SourceError(f"no message from stream {self._range.stream} for {seconds}: {reason}")

    # ------------------------------------------------------------------ one consumer

    async def _receive(self, consumer: RangeConsumer) -> bool:
        """Pull until enough messages wait; False once the range is finished, or after a failure."""
        clock = asyncio.get_running_loop().time
        self._heard = self._came = clock()  # the caller may have been busy until now
        reads, late = self._session.connection.parser.reads, False
        while not self._finished and not self._trouble:
            self._wake.clear()
            await self._losses.check(at_once=self._complete)
            if self._may_end:
                await self._check_end(consumer)
            if self._complete and not self._losses.unchecked:
                self._finish()
            await self._ask_for_more(consumer)
            if self._enough(consumer):
                return True
            if self._session.connection.parser.reads != reads:  # perhaps part of a large message, which delays
                reads, self._heard = self._session.connection.parser.reads, clock()  # heartbeats
            if consumer.credit > 0 and clock() > self._heard + SILENCE:
                self._disturb("the server stopped responding")
            late_before, late = late, clock() > self._came + self._session.timeout
            if late and late_before and not (self._finished or self._trouble):  # twice: we may have been suspended
                raise self._nothing_came("the server answers, but sends no message")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), PAUSE)
        return False

    @staticmethod
    def _enough(consumer: RangeConsumer) -> bool:
        rows = consumer.inbox.rows
        return len(rows) >= ENOUGH or rows.memory > WAITING

    @property
    def _complete(self) -> bool:
        """Whether the end of the range has been reached."""
        return self._last >= self._range.end - 1

    async def _ask_for_more(self, consumer: RangeConsumer) -> None:
        """Pull at most the rest of the range: what follows belongs to other readers."""
        if consumer.inbox.rows.memory <= WAITING and not (self._trouble or self._finished):
            await consumer.pull(None if self._range.per_subject else self._range.end - 1 - self._last)

    async def _check_end(self, consumer: RangeConsumer) -> None:
        """Finish if the server has nothing left to send: a gap at the end of the range, or messages deleted since."""
        self._may_end = False
        if self._at.pending:
            try:
                info = await self._session.api.request(f"CONSUMER.INFO.{self._range.stream}.{consumer.name}")
            except SourceError as error:
                self._disturb(str(error))
                return
            if info["num_pending"] and not await self._losses.nothing_after(self._last):
                # the next messages are gone: the server skips only one of them per heartbeat, or still counts them
                if asyncio.get_running_loop().time() > self._came + self._losses.patience:
                    await self._losses.check_after(self._last)
                    self._disturb("expected messages were removed from the stream")
                return
            if info["delivered"]["consumer_seq"] != consumer.inbox.total:
                self._disturb("messages sent by the server did not arrive")
                return
        if await self._losses.more_elsewhere(self._last):
            self._at = self._at._replace(pending=1)
        else:
            await self._losses.check_after(self._last)
            self._finish()

    def _finish(self) -> None:
        self._finished = True
        self._wake.set()

    def _disturb(self, reason: str) -> None:
        self._trouble = self._trouble or reason
        self._wake.set()

    def _on_data(self) -> None:
        consumer = self._consumer
        if consumer is None:
            return
        inbox = consumer.inbox
        self._heard = self._came = asyncio.get_running_loop().time()
        ack = position(inbox.rows.last_reply(), self._range.stream, consumer.name)
        if ack is None or ack.delivery > inbox.total:
            if ack is not None:
                inbox.rows, _ = inbox.rows.split(len(inbox.rows) - (inbox.total - self._at.delivery))
                self._disturb("messages sent by the server did not arrive")
            self._at = self._at._replace(delivery=inbox.total)
        else:
            if ack.seq - ack.delivery != self._at.seq - self._at.delivery and self._losses.skipped(self._last):
                self._wake.set()
            self._last, self._at, self._may_end = max(ack.seq, self._last), ack, not ack.pending
        if self._may_end or self._complete or self._enough(consumer) or consumer.is_due:
            self._wake.set()
        if inbox.empty and self._session.api.imported:
            self._disturb("an empty message ended the pull")

    def _on_status(self, _subject: bytes, block: bytes) -> None:
        self._heard = asyncio.get_running_loop().time()
        status = parse_status(block)
        if status.reaction not in (Reaction.ALIVE, Reaction.PULL_AGAIN, Reaction.TOO_LARGE):
            self._disturb(f"{status.code} {status.text}")
        elif self._consumer is not None:
            self._consumer.ended(status)
        self._may_end |= status.reaction is Reaction.ALIVE
        self._wake.set()


class RangeConsumer:
    """A short-lived consumer, the subscription to its `inbox`, and its open pulls."""

    def __init__(self, session: ReadSession, stream: str, name: str, inbox: Inbox, *, max_batch: int) -> None:
        self._session, self._stream = session, stream
        self.name, self.inbox = name, inbox
        self._max_batch = max_batch
        self._subject = session.connection.new_inbox()
        self._sid: int | None = None
        self._granted = 0  # messages requested by pulls
        self._too_large = False  # the next message exceeds the bytes of a pull

    async def subscribe(self) -> None:
        """Receive into the inbox. Raises UnavailableError."""
        try:
            self._sid = await self._session.connection.receive_into(self.inbox, f"{self._subject}.*")
        except nats.errors.Error as error:
            raise UnavailableError(str(error)) from error

    async def close(self) -> None:
        """Unsubscribe and delete the consumer."""
        if self._sid is not None:
            self._session.connection.forget(self._sid)
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._session.connection.stop_receiving(self._sid)
        await self._session.delete_consumer(self._stream, self.name)

    @property
    def credit(self) -> int:
        """Messages that open pulls may still deliver."""
        return self._granted - self.inbox.total

    @property
    def is_due(self) -> bool:
        """Whether another pull is due."""
        return self.credit <= self._max_batch // 2

    async def pull(self, rest: int | None) -> None:
        """Pull if due; with the open pulls, at most `rest` messages."""
        batch, size = self._max_batch, PULL_BYTES
        if rest is not None:
            batch = min(batch, rest - self.credit)
        if batch <= 0 or not self.is_due:
            return
        if self._too_large:
            if self.credit:
                return  # wait until the open pulls have been refused as well
            self._too_large, batch, size = False, 1, 0
        self._granted += batch
        reply = f"{self._subject}.1"
        await self._session.api.pull(
            self._stream, self.name, reply, batch=batch, max_bytes=size, expires=EXPIRES, heartbeat=HEARTBEAT
        )

    def ended(self, status: PullStatus) -> None:
        """Record the end of the pull with this status."""
        self._granted -= status.undelivered or 0
        if status.reaction is Reaction.TOO_LARGE:
            self._too_large |= (status.undelivered_bytes or 0) >= PULL_BYTES  # nothing of the pull was delivered


class Losses:
    """Detects messages of a range that were removed before they were read. See `RangeReader`."""

    def __init__(self, session: ReadSession, range_: StreamRange, origin: Origin | None, check: Check | None) -> None:
        self._session, self._range, self._origin, self._check = session, range_, origin, check
        self._floor = 0  # the stream's first sequence at the start of a `per_subject` read
        self._gap: int | None = None  # the last message before a gap that has not been checked yet
        self._checked_at = 0.0
        self._replicated = False
        if origin is not None:
            session.know(range_.stream, origin)

    @property
    def may_be_missing(self) -> bool:
        """Whether a missing stream counts as empty."""
        return self._origin is not None and self._check is None

    @property
    def unchecked(self) -> bool:
        """Whether a gap has not been checked yet."""
        return self._gap is not None

    @property
    def patience(self) -> float:
        """Seconds to wait for a message that the server counts but does not send."""
        if self._range.per_subject:
            return SILENCE
        # with an origin, the session's timeout says how long a read waits
        return self._session.timeout / 2 if self._origin is None else inf

    async def begin(self, last: int) -> bool:
        """Check the stream of an existing consumer that starts after `last`; return whether it is the one to read."""
        if self._origin is None:
            return True
        stream = self._range.stream  # only now that the consumer exists: earlier, it might be another stream
        state = await self._session.identified(stream, await self._session.api.request(f"STREAM.INFO.{stream}"))
        if self._range.per_subject:
            self._inspect(state, None)
            self._floor = self._floor or state.first
        else:
            self._inspect(state, last if self._gap is None else self._gap)
        self._gap = None
        self._replicated = state.replicated
        return state.created == self._origin.created

    def _inspect(self, state: StreamState, read_to: int | None) -> None:
        """Raise an error if messages after `read_to` are gone; None for those after the range only."""
        if self._check is not None:
            replaced = self._range.per_subject and state.keeps_latest  # by newer messages
            self._check(state, None if read_to is None or replaced else max(read_to + 1, self._floor))

    def skipped(self, last: int) -> bool:
        """Record a gap after `last`; return whether it is a new one to check."""
        if self._gap is not None or self._check is None or self._range.per_subject:
            return False
        self._gap = last
        return True

    async def check(self, *, at_once: bool = True) -> None:
        """Raise an error if messages were lost in the gap. Unless `at_once`, limit the rate of checks."""
        clock = asyncio.get_running_loop().time
        if self._gap is not None and (at_once or clock() > self._checked_at + _CHECK_INTERVAL):
            read_to, self._gap = self._gap, None  # before awaiting, because another gap may appear meanwhile
            self._inspect(await self._session.state(self._range.stream), read_to)
            self._checked_at = clock()

    async def check_after(self, last: int) -> None:
        """Check the gap after the last message received."""
        if self._check is not None and self._gap is None:
            self._gap = last
        await self.check()

    async def more_elsewhere(self, last: int) -> bool:
        """Whether the stream's leader has further messages of the range that the consumer's server still lacks."""
        return self._replicated and not self._range.per_subject and await self._has_more(last)

    async def nothing_after(self, last: int) -> bool:
        """Whether the stream has no further message of the range, whatever `num_pending` says."""
        try:
            return not await self._has_more(last)
        except SourceError:  # no permission
            return False

    async def _has_more(self, last: int) -> bool:
        following = await self._session.next_match(self._range.stream, last + 1, self._range.subjects)
        return following is not None and following < self._range.end
