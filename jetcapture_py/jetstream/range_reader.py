"""Reads one range of a stream whole and in order, whatever happens to the server meanwhile.

The range comes from a consumer that nobody else knows, that acknowledges nothing and lives as long as the range takes:
the stream's own consumers are not touched. At any trouble it is left to die, and another one goes on behind the last
message received. Nothing is handed on before the consumer's count of deliveries says that all before it has come.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import nats.errors

from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.ack_subject import position
from jetcapture_py.jetstream.connection import ApiError, UnavailableError
from jetcapture_py.jetstream.pull_status import Reaction, parse_status, undelivered, undelivered_bytes
from jetcapture_py.jetstream.read_session import PAUSE, ReadSession
from jetcapture_py.jetstream.wire.inbox import Inbox, Received

BATCH = 50_000
"""Maximum messages per pull."""
PULL_BYTES = 16 << 20
"""Maximum bytes per pull; a larger message is pulled alone and without a limit."""
WAITING = 24 << 20
"""Bytes of received messages above which they are handed on, and nothing more is pulled until some have been taken."""
ENOUGH = 16_384
"""Number of messages that are passed on together, regardless of size."""
HEARTBEAT, SILENCE, EXPIRES = 1.0, 3.0, 30.0
"""Seconds: heartbeat interval of a pull, timeout without a heartbeat, and expiry of the pull."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRange:
    """Messages of a stream with sequences from `first` up to, and without, `end`, on `subjects`; none means all.

    With `per_subject` only those among them that are the last of their subject when they are read; with `headers_only`
    without their payloads.
    """

    stream: str
    first: int
    end: int
    subjects: tuple[str, ...] = ()
    per_subject: bool = False
    headers_only: bool = False


class RangeReader:
    """Reads `wanted`. Messages beyond its end may be among the last ones; with `per_subject` some may come twice.

    A subclass may look at what is missing: see the methods from `_started` on.
    """

    def __init__(self, session: ReadSession, wanted: StreamRange) -> None:
        self._session, self._wanted = session, wanted
        self._connection, self._api = session.connection, session.api
        self._inbox = Inbox(self._on_data)
        self._inbox.on_status = self._on_status
        self._ready, self._wake = asyncio.Event(), asyncio.Event()
        self._finished = False
        self._failure: BaseException | None = None
        self._last = wanted.first - 1  # of what was received
        self._left: deque[tuple[str, Received]] = deque()  # from consumers before the present one
        self._forget()

    def _forget(self) -> None:
        """Forget the consumer."""
        self._consumer, self._subject, self._trouble = "", "", ""
        self._sid: int | None = None
        self._most = BATCH
        self._granted = 0  # messages that the pulls have asked for
        self._before = self._checked = self._inbox.total
        self._skipped = 0  # sequences without a message up to the last one
        self._idle = self._drained = self._too_large = False

    async def messages(self) -> AsyncGenerator[tuple[str, Received]]:
        """The messages, a chunk of one consumer's at a time, with the consumer's name.

        Raises SourceError when nothing comes for the session's timeout although something should.
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
        """Return what was received from one consumer, once it is enough; None at the end."""
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
        """Whether pulling pauses. The same bound passes messages on, so the two sides cannot wait for each other."""
        return self._inbox.rows.memory > WAITING

    # ------------------------------------------------------------------ what a subclass may look at

    async def _started(self, answer: dict[str, Any]) -> None:
        """A consumer has been created, and this was the answer."""

    def _skips(self) -> None:
        """Sequences have no message behind the last one received, before `_last` is moved over them."""

    async def _check(self) -> None:
        """Look at what is missing, now and then."""

    @property
    def _settled(self) -> bool:
        """Whether nothing is left to look at."""
        return True

    @property
    def _replaced_after(self) -> float:
        """Seconds without a message after which a consumer that counts messages to come is replaced by another one."""
        return SILENCE if self._wanted.per_subject else self._session.timeout / 2

    async def _check_end(self) -> None:
        """Look at what is missing behind the last message received."""

    async def _more_elsewhere(self) -> bool:
        """Whether messages of the range exist that the consumer does not know of yet."""
        return False

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
            await self._failed(error)
        finally:
            self._ready.set()

    async def _failed(self, error: Exception) -> None:
        self._failure = error

    async def _attach(self) -> None:
        """Create a consumer that starts behind the last message, and subscribe."""
        self._forget()
        wanted = self._wanted
        config: dict[str, Any] = {"headers_only": wanted.headers_only, "filter_subjects": wanted.subjects}
        if wanted.per_subject:
            config |= {"deliver_policy": "last_per_subject", "filter_subjects": wanted.subjects or (">",)}
        else:
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": self._last + 1}
        self._consumer, answer = await self._session.create_consumer(wanted.stream, config)
        await self._started(answer)
        if self._finished:
            return
        self._skipped = self._last
        self._most = min(BATCH, answer["config"].get("max_batch") or BATCH)
        self._drained = not answer["num_pending"]
        self._subject = self._connection.new_inbox()
        try:
            self._sid = await self._connection.receive_into(self._inbox, f"{self._subject}.*")
        except nats.errors.Error as error:
            raise UnavailableError(str(error)) from error

    async def _leave(self) -> None:
        """Have no consumer any more."""
        if self._sid is not None:
            self._connection.forget(self._sid)
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._connection.stop_receiving(self._sid)
        if self._consumer:
            await self._session.delete_consumer(self._wanted.stream, self._consumer)
        if self._inbox.rows:
            self._left.append((self._consumer, self._inbox.take(1 << 62)))
            self._ready.set()
        self._sid, self._consumer = None, ""

    def _nothing_came(self, reason: str) -> SourceError:
        seconds = f"{self._session.timeout:g} s"
        return SourceError(f"no message from stream {self._wanted.stream} for {seconds}: {reason}")

    # ------------------------------------------------------------------ one consumer

    async def _pull(self) -> None:
        """Pull until the range is finished, or until a failure."""
        clock = asyncio.get_running_loop().time
        self._heard = self._came = clock()
        reads, late = self._connection.reads, False
        while not self._finished and not self._trouble:
            self._wake.clear()
            await self._check()
            if self._drained or self._idle:
                await self._see_whether_all_came()
            if self._complete and self._settled:
                self._finish()
            await self._ask_for_more()
            if self._connection.reads != reads:  # perhaps of a large message, which keeps heartbeats waiting
                reads, self._heard = self._connection.reads, clock()
            if self._full:
                self._came = clock()
            if self._credit > 0 and clock() > self._heard + SILENCE:
                self._disturb("the server stopped responding")
            late_before, late = late, clock() > self._came + self._session.timeout
            if late and late_before and not (self._finished or self._trouble):  # seen twice: we may have been suspended
                raise self._nothing_came("the server answers, but sends no message")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), PAUSE)

    @property
    def _complete(self) -> bool:
        """Whether nothing of the range is behind what was received."""
        return self._last >= self._wanted.end - 1

    @property
    def _credit(self) -> int:
        """Messages that open pulls may still deliver."""
        return self._granted - (self._inbox.total - self._before)

    async def _ask_for_more(self) -> None:
        """Pull no more than the rest of the range: what lies behind it is another reader's."""
        batch, size = self._most, PULL_BYTES
        if not self._wanted.per_subject:  # which begins anew with each consumer
            batch = min(batch, self._wanted.end - 1 - self._last - self._credit)
        if batch <= 0 or self._credit > self._most // 2 or self._full or self._trouble or self._finished:
            return
        if self._too_large:
            if self._credit:
                return  # the pulls under way will be refused as well
            self._too_large, batch, size = False, 1, 0
        self._granted += batch
        stream, reply = self._wanted.stream, f"{self._subject}.1"
        await self._api.pull(
            stream, self._consumer, reply, batch=batch, max_bytes=size, expires=EXPIRES, heartbeat=HEARTBEAT
        )

    async def _see_whether_all_came(self) -> None:
        """Handle that the server has nothing to send: a gap at the range's end, or messages deleted since planning."""
        drained, self._drained, self._idle = self._drained, False, False
        if not drained:
            try:
                info = await self._api.request(f"CONSUMER.INFO.{self._wanted.stream}.{self._consumer}")
            except (ApiError, UnavailableError) as error:
                self._disturb(str(error))
                return
            if info["num_pending"]:
                # the next ones are gone: the server skips only one of them at each sign of life, or still counts them
                if asyncio.get_running_loop().time() > self._came + self._replaced_after:
                    await self._check_end()
                    self._disturb("expected messages were removed from the stream")
                return
            if info["delivered"]["consumer_seq"] != self._inbox.total - self._before:
                self._disturb("messages sent by the server did not arrive")
                return
        if not await self._more_elsewhere():
            await self._check_end()
            self._finish()

    def _finish(self) -> None:
        self._finished = True
        self._ready.set()
        self._wake.set()

    def _disturb(self, reason: str) -> None:
        self._trouble = self._trouble or reason
        self._wake.set()

    def _on_data(self) -> None:
        self._heard = self._came = asyncio.get_running_loop().time()
        found = position(self._inbox.rows.last_reply(), self._wanted.stream, self._consumer)
        fresh, self._checked = self._inbox.total - self._checked, self._inbox.total
        if found is not None and found.delivery > self._inbox.total - self._before:
            self._inbox.rows, _ = self._inbox.rows.split(len(self._inbox.rows) - fresh)
            self._disturb("messages sent by the server did not arrive")
        elif found is not None:
            if found.seq - found.delivery != self._skipped:
                self._skips()
            self._last, self._skipped = max(found.seq, self._last), found.seq - found.delivery
            self._drained = not found.pending
            if self._drained or self._complete:
                self._wake.set()
        if self._enough:
            self._ready.set()
        if self._credit <= self._most // 2:
            self._wake.set()

    def _on_status(self, subject: bytes, block: bytes) -> None:
        if not subject.startswith(self._subject.encode()):
            return  # of a consumer we have left
        self._heard = asyncio.get_running_loop().time()
        status = parse_status(block)
        if status.reaction not in (Reaction.ALIVE, Reaction.PULL_AGAIN, Reaction.TOO_LARGE):
            self._disturb(f"{status.code} {status.text}")
        else:
            self._granted -= undelivered(block) or 0
        if status.reaction is Reaction.TOO_LARGE:
            self._too_large |= (undelivered_bytes(block) or 0) >= PULL_BYTES  # more than the rest of a pull
        self._idle = status.reaction is Reaction.ALIVE
        self._wake.set()
