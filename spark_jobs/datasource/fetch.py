"""Receive one range of a stream completely and in order, across server failures.

A temporary consumer, which acknowledges nothing, delivers it; the stream's own consumers are not touched. After any
failure the consumer is abandoned, and a new one continues behind the last message received.

Detecting loss: a consumer silently skips removed messages. So, with `failOnDataLoss`, the stream's first sequence is
requested after every gap. If it lies behind the start of the gap, messages were removed before they were read, by a
purge or by a limit on the stream's size or age. Messages missing inside the stream are not a loss: they were deleted
individually, or displaced by newer ones of their subject.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

import nats.errors
from nats.aio.subscription import Subscription

from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.connection import ApiError, UnavailableError
from jetcapture_py.jetstream.pull_status import Reaction, parse_status
from jetcapture_py.jetstream.wire.inbox import Inbox, Received
from spark_jobs.datasource.offsets import (
    SHORT_LIVED,
    Range,
    StreamState,
    check_created,
    check_there,
    consumer_name,
    find_next,
    stream_state,
)
from spark_jobs.datasource.options import ReadOptions
from spark_jobs.datasource.session import PAUSE, MissingStreamError, Session

BATCH = 50_000
"""Maximum messages per pull."""
PULL_BYTES = 16 << 20
"""Maximum bytes per pull; a larger message is pulled alone and without a limit."""
WAITING = 24 << 20
"""Bytes of received messages above which they are passed on, and pulling pauses until Spark has taken some."""
ENOUGH = 16_384
"""Number of messages that are passed on together, regardless of size."""
HEARTBEAT, SILENCE, EXPIRES = 1.0, 3.0, 30.0
"""Seconds: heartbeat interval of a pull, timeout without a heartbeat, and expiry of the pull."""
LOOK = 0.05
"""Minimum seconds between requests for the stream's first sequence; with `subjects`, gaps are frequent."""

_SHORT = 9
_UNUSED = re.compile(rb"Nats-Pending-Messages: *([0-9]+)")
_UNUSED_BYTES = re.compile(rb"Nats-Pending-Bytes: *([0-9]+)")


class Fetch:
    """Iterates over the messages of `part`, a chunk of one consumer's at a time, with the consumer's name.

    Messages beyond its end may be among the last ones, and with `part.per_subject` some may come twice.

    `bare` omits payloads and headers. Raises SourceError when required messages are gone, or when expected messages do
    not arrive for `options.timeout` seconds.
    """

    def __init__(self, session: Session, options: ReadOptions, part: Range, *, bare: bool) -> None:
        self._session, self._options, self._part, self._bare = session, options, part, bare
        self._connection, self._api = session.connection, session.api
        self._inbox = Inbox(self._on_data)
        self._inbox.on_status = self._on_status
        self._ready, self._wake = asyncio.Event(), asyncio.Event()
        self._finished = False
        self._failure: BaseException | None = None
        self._last = part.first - 1  # of what was received
        self._floor = 0  # where the stream began, if the range may begin before that
        self._watched = options.fail_on_data_loss
        self._gap: int | None = None  # the last message before a gap that was not looked into yet
        self._looked = 0.0
        self._left: deque[tuple[str, Received]] = deque()  # from consumers before the present one
        self._forget()

    def _forget(self) -> None:
        """Forget the consumer."""
        self._consumer, self._subject, self._trouble = "", "", ""
        self._subscription: Subscription | None = None
        self._most = BATCH
        self._granted = 0  # messages that the pulls have asked for
        self._before = self._inbox.total
        self._skipped = 0  # sequences without a message up to the last one
        self._idle = self._drained = self._too_large = self._replicated = False

    def __iter__(self) -> Iterator[tuple[str, Received]]:
        run = self._session.run
        self._session.on_disconnected = lambda: self._disturb("the connection was lost")
        task = run(self._begin())
        try:
            while (received := run(self._next())) is not None:
                yield received
        finally:
            run(self._end(task))

    async def _begin(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._receive())

    async def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.wait([task])
        await self._leave()

    async def _next(self) -> tuple[str, Received] | None:
        """Return what was received from one consumer, once it is enough; None at the end."""
        await self._ready.wait()
        if self._failure is not None:
            raise self._failure
        received = self._left.popleft() if self._left else (self._consumer, self._inbox.take(WAITING))
        if not self._finished and not self._enough:
            self._ready.clear()
        self._wake.set()  # there may be credit again
        return received if received[1] else None

    @property
    def _enough(self) -> bool:
        return bool(self._left) or len(self._inbox.rows) >= ENOUGH or self._full

    @property
    def _full(self) -> bool:
        """Whether pulling pauses. The same bound passes messages on, so the two sides cannot wait for each other."""
        return self._inbox.rows.memory > WAITING

    # ------------------------------------------------------------------ consumers, one after another

    async def _receive(self) -> None:
        clock = asyncio.get_running_loop().time
        troubled: float | None = None
        try:
            while not self._finished:
                total = self._inbox.total
                await self._session.patiently(self._attach)
                await self._pull()
                await self._leave()
                troubled = clock() if troubled is None or self._inbox.total > total else troubled
                if clock() > troubled + self._session.timeout and not self._finished:
                    raise self._nothing_came(self._trouble)
        except MissingStreamError as error:
            if self._watched:
                self._failure = error
            await self._leave()
            self._finish()
        except Exception as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _attach(self) -> None:
        """Create a consumer that starts behind the last message, and subscribe."""
        self._forget()
        stream, name = self._options.stream, consumer_name()
        config: dict[str, Any] = {"name": name, **SHORT_LIVED, "headers_only": self._bare}
        if self._part.per_subject:
            config["deliver_policy"] = "last_per_subject"
            config["filter_subjects"] = self._options.subjects or (">",)
        else:
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": self._last + 1}
            config["filter_subjects"] = self._options.subjects
        answer = await self._api.request(
            f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "action": "create", "config": config}
        )
        self._consumer = name
        state = stream_state(await self._api.request(f"STREAM.INFO.{stream}"))  # after it, or it might be another one
        if self._part.per_subject:
            self._check(state, None)
            self._floor = self._floor or state.first
        else:
            self._check(state, self._last if self._gap is None else self._gap)
        self._gap = None
        if state.created != self._part.created or (self._part.per_subject and not answer["num_pending"]):
            self._finish()
            return
        self._replicated = state.replicated
        self._skipped = self._last
        self._most = min(BATCH, answer["config"].get("max_batch") or BATCH)
        self._drained = not answer["num_pending"]
        self._subject = self._connection.new_inbox()
        try:
            self._subscription = await self._connection.subscribe(f"{self._subject}.*")
        except nats.errors.Error as error:
            raise UnavailableError(str(error)) from error
        self._connection.register(self._subscription._id, self._inbox)

    async def _leave(self) -> None:
        """Delete the consumer. If that fails, the server removes it after a while."""
        with contextlib.suppress(nats.errors.Error, OSError, UnavailableError, ApiError):
            if self._subscription is not None:
                self._connection.forget(self._subscription._id)
                await self._subscription.unsubscribe()
            if self._consumer and self._connection.is_connected:
                await self._api.request(f"CONSUMER.DELETE.{self._options.stream}.{self._consumer}")
        if self._inbox.rows:
            self._left.append((self._consumer, self._inbox.take(1 << 62)))
            self._ready.set()
        self._subscription, self._consumer = None, ""

    # ------------------------------------------------------------------ what is lost

    def _check(self, state: StreamState, read_to: int | None) -> None:
        """Raise SourceError if the stream was recreated, or messages of the range behind `read_to` are gone."""
        if not self._watched:
            return
        part, stream = self._part, self._options.stream
        check_created(stream, part.created, state.created)
        if read_to is not None and not (part.per_subject and state.keeps_latest):  # there, new messages move the front
            check_there(stream, max(read_to + 1, self._floor), state)
        check_there(stream, max(part.end, state.first), state)

    async def _look_into_gap(self) -> None:
        """Raise SourceError if messages were lost in the gap."""
        if self._gap is not None:
            read_to, self._gap = self._gap, None  # before awaiting: another gap may appear meanwhile
            self._check(stream_state(await self._session.request(f"STREAM.INFO.{self._options.stream}")), read_to)
            self._looked = asyncio.get_running_loop().time()

    async def _look_behind(self) -> None:
        """Do the same for messages missing behind the last one."""
        if self._watched and self._gap is None:
            self._gap = self._last
        await self._look_into_gap()

    def _nothing_came(self, reason: str) -> SourceError:
        seconds = f"{self._session.timeout:g} s"
        return SourceError(f"no message from stream {self._options.stream} for {seconds}: {reason}")

    # ------------------------------------------------------------------ one consumer

    async def _pull(self) -> None:
        """Pull until the range is finished, or until a failure."""
        clock = asyncio.get_running_loop().time
        self._heard = self._came = clock()
        reads, late = self._connection.reads, False
        while not self._finished and not self._trouble:
            self._wake.clear()
            if self._complete or clock() > self._looked + LOOK:
                await self._look_into_gap()
            if self._drained or self._idle:
                await self._see_whether_all_came()
            if self._complete and self._gap is None:
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
        return self._last >= self._part.end - 1

    @property
    def _credit(self) -> int:
        """Messages that open pulls may still deliver."""
        return self._granted - (self._inbox.total - self._before)

    async def _ask_for_more(self) -> None:
        """Pull no more than the rest of the range: later messages belong to another task."""
        batch, size = self._most, PULL_BYTES
        if not self._part.per_subject:  # which begins anew with each consumer
            batch = min(batch, self._part.end - 1 - self._last - self._credit)
        if batch <= 0 or self._credit > self._most // 2 or self._full or self._trouble or self._finished:
            return
        if self._too_large:
            if self._credit:
                return  # open pulls will also be refused
            self._too_large, batch, size = False, 1, 0
        self._granted += batch
        stream, reply = self._options.stream, f"{self._subject}.1"
        await self._api.pull(
            stream, self._consumer, reply, batch=batch, max_bytes=size, expires=EXPIRES, heartbeat=HEARTBEAT
        )

    async def _see_whether_all_came(self) -> None:
        """Handle that the server has nothing to send: a gap at the range's end, or messages deleted since planning."""
        drained, self._drained, self._idle = self._drained, False, False
        if not drained:
            try:
                info = await self._api.request(f"CONSUMER.INFO.{self._options.stream}.{self._consumer}")
            except (ApiError, UnavailableError) as error:
                self._disturb(str(error))
                return
            if info["num_pending"]:
                if self._part.per_subject and asyncio.get_running_loop().time() > self._came + SILENCE:
                    # the next ones are gone, and the server skips only one of them at each sign of life
                    await self._look_behind()
                    self._disturb("expected messages were removed from the stream")
                return
            if info["delivered"]["consumer_seq"] != self._inbox.total - self._before:
                self._disturb("messages sent by the server did not arrive")
                return
        if self._replicated and not self._part.per_subject:
            following = await find_next(self._session, self._options, self._last + 1)
            if following is not None and following < self._part.end:
                return  # the consumer is beside a replica that does not have it yet
        await self._look_behind()
        self._finish()

    def _finish(self) -> None:
        self._finished = True
        self._ready.set()
        self._wake.set()

    def _disturb(self, reason: str) -> None:
        self._trouble = self._trouble or reason
        self._wake.set()

    def _on_data(self) -> None:
        """Look where the last message stands: …stream.consumer.delivered.seq.consumer_seq.timestamp.pending[.token]"""
        self._heard = self._came = asyncio.get_running_loop().time()
        tokens = self._inbox.rows.last_reply().split(b".")
        base = 2 if len(tokens) == _SHORT else 4
        if tokens[base + 1 : base + 2] == [self._consumer.encode()]:
            seq, skipped = int(tokens[base + 3]), int(tokens[base + 3]) - int(tokens[base + 4])
            if skipped != self._skipped and self._gap is None and self._watched and not self._part.per_subject:
                self._gap = self._last
                self._wake.set()
            self._last, self._skipped = max(seq, self._last), skipped
            self._drained = tokens[base + 6] == b"0"
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
        elif unused := _UNUSED.search(block):
            self._granted -= int(unused[1])
        if status.reaction is Reaction.TOO_LARGE:
            unused = _UNUSED_BYTES.search(block)
            self._too_large |= unused is not None and int(unused[1]) >= PULL_BYTES  # more than the rest of a pull
        self._idle = status.reaction is Reaction.ALIVE
        self._wake.set()
