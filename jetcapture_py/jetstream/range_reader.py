"""Read one range of a stream completely and in order, even across server restarts.

The range comes from a short-lived consumer without acknowledgements; the stream's own consumers are not touched. After
any failure it is abandoned, and a new one continues after the last message received. Nothing is returned before the
consumer's delivery count confirms that everything before it has arrived.

A consumer silently skips messages that are gone. So a reader that has to notice it asks for the stream's first sequence
after every gap: if the stream now starts after the start of the gap, messages were removed before they were read.
Messages missing inside the stream are not a loss: they were deleted one by one, or replaced by newer ones.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import nats.errors
import pyarrow as pa

from jetcapture_py.archive.incarnations import Origin
from jetcapture_py.errors import MissingStreamError, SourceError, UnavailableError
from jetcapture_py.jetstream.acks import first_delivery, position
from jetcapture_py.jetstream.pulls import Reaction, parse_status
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
"""Raises an error if this is another stream, or messages of the range from a sequence on are gone; None for any."""


async def requested(session: ReadSession, stream: str, seqs: Iterable[int]) -> list[dict[str, Any]]:
    """Return the stored messages with these sequences, all requested at once, as the API has them.

    Raises SourceError.
    """
    messages = await asyncio.gather(*(session.message(stream, seq=seq) for seq in seqs))
    return [message for message in messages if message is not None]


def next_at_once(count: int, messages: Iterable[dict[str, Any]]) -> int:
    """Return how many to request after `count` brought these: few large ones, because a server drops slow receivers."""
    largest = max((len(message.get("data", "")) for message in messages), default=0)
    return max(1, min(2 * count, AT_ONCE, PULL_BYTES // max(largest, 1)))


def received_of(stream: str, messages: Sequence[dict[str, Any]]) -> Received:
    """Return messages of the API as if a consumer `NOBODY` had delivered them."""
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

    With an `origin`, it ends without an error where that stream is gone or was created again. With a `check` as well,
    it raises what that raises, for the present state of the stream, as soon as messages may have been lost.
    """

    def __init__(
        self, session: ReadSession, range_: StreamRange, *, origin: Origin | None = None, check: Check | None = None
    ) -> None:
        self._session, self._range = session, range_
        self._connection, self._api = session.connection, session.api
        self._inbox = Inbox(self._on_data)
        self._inbox.on_status = self._on_status
        self._ready, self._wake = asyncio.Event(), asyncio.Event()
        self._finished = False
        self._failure: BaseException | None = None
        self._last = range_.first - 1  # of what was received
        self._left: deque[tuple[str, Received]] = deque()  # from earlier consumers
        self._origin, self._check = origin, check
        self._floor = 0  # the stream's first sequence at the start of a `per_subject` read
        self._gap: int | None = None  # the last message before a gap that has not been checked yet
        self._checked_at = 0.0
        self._replicated = False
        if origin is not None:
            session.know(range_.stream, origin)
        self._forget()

    def _forget(self) -> None:
        """Reset the state of the current consumer."""
        self._consumer, self._subject, self._trouble = "", "", ""
        self._sid: int | None = None
        self._max_batch = BATCH
        self._granted = 0  # messages requested by pulls
        self._before = self._checked = self._inbox.total
        self._skipped = 0  # sequences without a message up to the last one
        self._inbox.empty.clear()
        self._idle = self._drained = self._too_large = False

    async def messages(self) -> AsyncGenerator[tuple[str, Received]]:
        """Yield the messages in chunks: pairs of consumer name and messages.

        Raises SourceError if expected messages do not arrive for the session's timeout.
        """
        self._session.on_trouble = lambda: self._disturb("the connection was lost")
        receiving = asyncio.create_task(self._receive())
        try:
            while (taken := await self._next()) is not None:
                yield taken
        finally:
            if not self._finished:
                receiving.cancel()
            await asyncio.wait([receiving])
            await self._leave()

    async def _next(self) -> tuple[str, Received] | None:
        """Wait for enough messages and return those of one consumer; None at the end."""
        await self._ready.wait()
        if self._failure is not None:
            raise self._failure
        taken = self._left.popleft() if self._left else (self._consumer, self._inbox.take(WAITING))
        if not self._finished and not self._enough:
            self._ready.clear()
        self._wake.set()  # there may be credit again
        return taken if taken[1] else None

    @property
    def _enough(self) -> bool:
        return bool(self._left) or len(self._inbox.rows) >= ENOUGH or self._full

    @property
    def _full(self) -> bool:
        """Whether pulling pauses. Messages are returned at the same limit, so the two sides cannot deadlock."""
        return self._inbox.rows.memory > WAITING

    # ------------------------------------------------------------------ what is gone

    async def _identify(self, origin: Origin, answer: dict[str, Any]) -> None:
        """Check the stream of a new consumer, of which the server has given this answer."""
        stream = self._range.stream  # only now that the consumer exists: before, it might be another one
        state = await self._session.identified(stream, await self._api.request(f"STREAM.INFO.{stream}"))
        if self._range.per_subject:
            self._inspect(state, None)
            self._floor = self._floor or state.first
        else:
            self._inspect(state, self._last if self._gap is None else self._gap)
        self._gap = None
        self._replicated = state.replicated
        if state.created != origin.created or (self._range.per_subject and not answer["num_pending"]):
            self._finish()

    def _inspect(self, state: StreamState, read_to: int | None) -> None:
        """Raise an error if messages after `read_to` are gone; None for those after the range only."""
        if self._check is not None:
            replaced = self._range.per_subject and state.keeps_latest  # by newer messages
            self._check(state, None if read_to is None or replaced else max(read_to + 1, self._floor))

    async def _check_gap(self) -> None:
        """Raise an error if messages were lost in the gap."""
        if self._gap is not None:
            read_to, self._gap = self._gap, None  # before awaiting: another gap may appear meanwhile
            self._inspect(await self._session.state(self._range.stream), read_to)
            self._checked_at = asyncio.get_running_loop().time()

    async def _check_end(self) -> None:
        """Check the gap after the last message received."""
        if self._check is not None and self._gap is None:
            self._gap = self._last
        await self._check_gap()

    async def _more_elsewhere(self) -> bool:
        """Whether the stream's leader has further messages of the range that the consumer's server still lacks."""
        if not self._replicated or self._range.per_subject:
            return False
        following = await self._session.next_match(self._range.stream, self._last + 1, self._range.subjects)
        return following is not None and following < self._range.end

    # ------------------------------------------------------------------ consumers, one after another

    async def _receive(self) -> None:
        clock = asyncio.get_running_loop().time
        troubled: float | None = None
        try:
            while not self._finished:
                total = self._inbox.total
                await self._session.retry(self._attach)
                await self._pull()
                await self._leave()
                troubled = clock() if troubled is None or self._inbox.total > total else troubled
                if clock() > troubled + self._session.timeout and not self._finished:
                    raise self._nothing_came(self._trouble)
        except Exception as error:
            missing = self._origin is not None and isinstance(error, MissingStreamError)
            if self._check is not None or not missing:
                self._failure = error
            if missing:
                await self._leave()
                self._finish()
        finally:
            self._ready.set()

    async def _attach(self) -> None:
        """Create a consumer that starts after the last message, and subscribe."""
        self._forget()
        range_ = self._range
        config: dict[str, Any] = {"headers_only": range_.headers_only, "filter_subjects": range_.subjects}
        if range_.per_subject:
            config |= {"deliver_policy": "last_per_subject", "filter_subjects": range_.subjects or (">",)}
        else:
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": self._last + 1}
        self._consumer, answer = await self._session.create_consumer(range_.stream, config)
        if self._origin is not None:
            await self._identify(self._origin, answer)
        if self._finished:
            return
        self._skipped = self._last
        self._max_batch = min(BATCH, answer["config"].get("max_batch") or BATCH)
        self._drained = not answer["num_pending"]
        self._subject = self._connection.new_inbox()
        try:
            self._sid = await self._connection.receive_into(self._inbox, f"{self._subject}.*")
        except nats.errors.Error as error:
            raise UnavailableError(str(error)) from error

    async def _leave(self) -> None:
        """Unsubscribe, delete the consumer and keep the messages received from it."""
        if self._sid is not None:
            self._connection.forget(self._sid)
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._connection.stop_receiving(self._sid)
        if self._consumer:
            await self._session.delete_consumer(self._range.stream, self._consumer)
        if self._inbox.rows:
            self._left.append((self._consumer, self._inbox.take(1 << 62)))
            self._ready.set()
        self._sid, self._consumer = None, ""

    def _nothing_came(self, reason: str) -> SourceError:
        seconds = f"{self._session.timeout:g} s"
        return SourceError(f"no message from stream {self._range.stream} for {seconds}: {reason}")

    # ------------------------------------------------------------------ one consumer

    async def _pull(self) -> None:
        """Pull until the range is finished, or until a failure."""
        clock = asyncio.get_running_loop().time
        self._heard = self._came = clock()
        reads, late = self._connection.parser.reads, False
        while not self._finished and not self._trouble:
            self._wake.clear()
            if self._complete or clock() > self._checked_at + _CHECK_INTERVAL:
                await self._check_gap()
            if self._drained or self._idle:
                await self._check_drained()
            if self._complete and self._gap is None:
                self._finish()
            await self._ask_for_more()
            if self._connection.parser.reads != reads:  # perhaps part of a large message, which delays heartbeats
                reads, self._heard = self._connection.parser.reads, clock()
            if self._full:
                self._came = clock()
            if self._credit > 0 and clock() > self._heard + SILENCE:
                self._disturb("the server stopped responding")
            late_before, late = late, clock() > self._came + self._session.timeout
            if late and late_before and not (self._finished or self._trouble):  # twice: we may have been suspended
                raise self._nothing_came("the server answers, but sends no message")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), PAUSE)

    @property
    def _complete(self) -> bool:
        """Whether the end of the range has been reached."""
        return self._last >= self._range.end - 1

    @property
    def _credit(self) -> int:
        """Messages that open pulls may still deliver."""
        return self._granted - (self._inbox.total - self._before)

    async def _ask_for_more(self) -> None:
        """Pull at most the rest of the range: what follows belongs to other readers."""
        batch, size = self._max_batch, PULL_BYTES
        if not self._range.per_subject:  # which starts over with each consumer
            batch = min(batch, self._range.end - 1 - self._last - self._credit)
        if batch <= 0 or self._credit > self._max_batch // 2 or self._full or self._trouble or self._finished:
            return
        if self._too_large:
            if self._credit:
                return  # wait until the open pulls have been refused as well
            self._too_large, batch, size = False, 1, 0
        self._granted += batch
        stream, reply = self._range.stream, f"{self._subject}.1"
        await self._api.pull(
            stream, self._consumer, reply, batch=batch, max_bytes=size, expires=EXPIRES, heartbeat=HEARTBEAT
        )

    async def _check_drained(self) -> None:
        """Finish if the server has nothing left to send: a gap at the end of the range, or messages deleted since."""
        drained, self._drained, self._idle = self._drained, False, False
        if not drained:
            try:
                info = await self._api.request(f"CONSUMER.INFO.{self._range.stream}.{self._consumer}")
            except SourceError as error:
                self._disturb(str(error))
                return
            if info["num_pending"] and not await self._nothing_left():
                # the next ones are gone: the server skips only one of them per heartbeat, or still counts them
                patience = SILENCE if self._range.per_subject else self._session.timeout / 2
                if self._origin is not None and not self._range.per_subject:
                    patience = inf  # the session's timeout says how long a read waits
                if asyncio.get_running_loop().time() > self._came + patience:
                    await self._check_end()
                    self._disturb("expected messages were removed from the stream")
                return
            if info["delivered"]["consumer_seq"] != self._inbox.total - self._before:
                self._disturb("messages sent by the server did not arrive")
                return
        if not await self._more_elsewhere():
            await self._check_end()
            self._finish()

    async def _nothing_left(self) -> bool:
        """Whether the stream has no further message of the range, whatever `num_pending` says."""
        try:
            following = await self._session.next_match(self._range.stream, self._last + 1, self._range.subjects)
        except SourceError:  # no permission
            return False
        return following is None or following >= self._range.end

    def _finish(self) -> None:
        self._finished = True
        self._ready.set()
        self._wake.set()

    def _disturb(self, reason: str) -> None:
        self._trouble = self._trouble or reason
        self._wake.set()

    def _on_data(self) -> None:
        self._heard = self._came = asyncio.get_running_loop().time()
        ack = position(self._inbox.rows.last_reply(), self._range.stream, self._consumer)
        fresh, self._checked = self._inbox.total - self._checked, self._inbox.total
        if ack is not None and ack.delivery > self._inbox.total - self._before:
            self._inbox.rows, _ = self._inbox.rows.split(len(self._inbox.rows) - fresh)
            self._disturb("messages sent by the server did not arrive")
        elif ack is not None:
            skips = ack.seq - ack.delivery != self._skipped
            if skips and self._gap is None and self._check is not None and not self._range.per_subject:
                self._gap = self._last
                self._wake.set()
            self._last, self._skipped = max(ack.seq, self._last), ack.seq - ack.delivery
            self._drained = not ack.pending
            if self._drained or self._complete:
                self._wake.set()
        if self._enough:
            self._ready.set()
        if self._credit <= self._max_batch // 2:
            self._wake.set()
        if self._inbox.empty and self._api.imported:
            self._disturb("an empty message ended the pull")

    def _on_status(self, subject: bytes, block: bytes) -> None:
        if not subject.startswith(self._subject.encode()):
            return  # for an earlier consumer
        self._heard = asyncio.get_running_loop().time()
        status = parse_status(block)
        if status.reaction not in (Reaction.ALIVE, Reaction.PULL_AGAIN, Reaction.TOO_LARGE):
            self._disturb(f"{status.code} {status.text}")
        else:
            self._granted -= status.undelivered or 0
        if status.reaction is Reaction.TOO_LARGE:
            self._too_large |= (status.undelivered_bytes or 0) >= PULL_BYTES  # nothing of the pull was delivered
        self._idle = status.reaction is Reaction.ALIVE
        self._wake.set()
