"""Receives one range of a stream whole and in order, whatever becomes of the server meanwhile.

It comes from a consumer that nobody else knows, that acknowledges nothing and lives as long as the range takes: the
stream's own consumers are not touched. At any trouble it is left to die, and another one goes on behind the last
message received.
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

from jetcapture_py.connect import ApiError, UnavailableError
from jetcapture_py.errors import SourceError
from jetcapture_py.received import Inbox, Received
from jetcapture_py.statuses import Reaction, parse_status
from spark_jobs.nats_offsets import SHORT_LIVED, Range, check_created, check_there, consumer_name, stream_state
from spark_jobs.nats_options import ReadOptions
from spark_jobs.nats_session import PAUSE, Session

BATCH = 50_000
"""Most messages a pull asks for."""
PULL_BYTES = 16 << 20
WAITING = 24 << 20
"""Bytes of received messages at which nothing more is pulled until Spark has taken some."""
ENOUGH = 16_384
"""Messages that are handed on together, or"""
HANDED = 32 << 20
"""so many bytes of them."""
HEARTBEAT, SILENCE, EXPIRES = 1.0, 3.0, 30.0
"""Seconds: the server's sign of life during a pull, when it is given up without one, and when the pull ends."""

_FRAME_OVERHEAD = 64 << 10
_SHORT = 9
_UNUSED = re.compile(rb"Nats-Pending-Messages: *([0-9]+)")


class Fetch:
    """Iterates over the messages of `part`, a chunk of one consumer's at a time, with the consumer's name.

    Messages beyond its end may be among the last ones, and with `part.per_subject` some may come twice.

    `bare` leaves payloads and headers out. Raises SourceError when messages are gone that must not be, or when nothing
    comes for `options.timeout` seconds after trouble.
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
        self._left: deque[tuple[str, Received]] = deque()  # from consumers before the present one
        self._forget()

    def _forget(self) -> None:
        """Nothing is known of a consumer."""
        self._consumer, self._subject, self._trouble = "", "", ""
        self._subscription: Subscription | None = None
        self._granted = 0  # messages that the pulls have asked for
        self._before = self._inbox.total
        self._idle = False

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
        """What has been received from one consumer, once there is enough of it; None at the end."""
        await self._ready.wait()
        if self._failure is not None:
            raise self._failure
        received = self._left.popleft() if self._left else (self._consumer, self._inbox.take(HANDED))
        if not self._finished and not self._enough:
            self._ready.clear()
        self._wake.set()  # there may be credit again
        return received if received[1] else None

    @property
    def _enough(self) -> bool:
        rows = self._inbox.rows
        return bool(self._left) or len(rows) >= ENOUGH or rows.memory >= HANDED

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
                    raise SourceError(f"nothing came from stream {self._options.stream}: {self._trouble}")
        except Exception as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _attach(self) -> None:
        """Have a consumer that starts behind the last message, and subscribe."""
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
        state = stream_state(await self._api.request(f"STREAM.INFO.{stream}"))
        if self._options.fail_on_data_loss:
            check_created(stream, self._part.created, state.created)
            if not self._part.per_subject:
                check_there(stream, self._last + 1, state)
                check_there(stream, max(self._part.end, state.first), state)
        if not answer["num_pending"] or state.created != self._part.created:
            self._finish()
            return
        self._subject = self._connection.new_inbox()
        try:
            self._subscription = await self._connection.subscribe(f"{self._subject}.*")
        except nats.errors.Error as error:
            raise UnavailableError(str(error)) from error
        self._connection.register(self._subscription._id, self._inbox)

    async def _leave(self) -> None:
        """Have no consumer any more. One that cannot be deleted now is forgotten by the server after a while."""
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

    # ------------------------------------------------------------------ one consumer

    async def _pull(self) -> None:
        """Pull until the range is finished, or until trouble."""
        clock = asyncio.get_running_loop().time
        self._heard = clock()
        while not self._finished and not self._trouble:
            self._wake.clear()
            await self._ask_for_more()
            if self._idle:
                await self._see_whether_all_came()
            if self._credit > 0 and clock() > self._heard + SILENCE:
                self._trouble = "the server fell silent"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), PAUSE)

    @property
    def _credit(self) -> int:
        """Messages that the pulls under way may still bring."""
        return self._granted - (self._inbox.total - self._before)

    async def _ask_for_more(self) -> None:
        """Pull no more than the rest of the range: what lies behind it is another task's."""
        batch = min(BATCH, self._part.end - 1 - self._last - self._credit)
        if batch <= 0 or self._credit > BATCH // 2 or self._inbox.rows.memory > WAITING or self._trouble:
            return
        size = max(PULL_BYTES, self._connection.max_payload + _FRAME_OVERHEAD)
        self._granted += batch
        stream, reply = self._options.stream, f"{self._subject}.1"
        await self._api.pull(
            stream, self._consumer, reply, batch=batch, max_bytes=size, expires=EXPIRES, heartbeat=HEARTBEAT
        )

    async def _see_whether_all_came(self) -> None:
        """The server has nothing to send: messages may have been deleted since the range was planned."""
        self._idle = False
        try:
            info = await self._api.request(f"CONSUMER.INFO.{self._options.stream}.{self._consumer}")
        except (ApiError, UnavailableError) as error:
            self._trouble = str(error)
            return
        if info["num_pending"] == 0:
            if info["delivered"]["consumer_seq"] == self._inbox.total - self._before:
                self._finish()
            else:
                self._trouble = "messages that the server sent did not come"

    def _finish(self) -> None:
        self._finished = True
        self._ready.set()
        self._wake.set()

    def _disturb(self, reason: str) -> None:
        self._trouble = self._trouble or reason
        self._wake.set()

    def _on_data(self) -> None:
        """Look where the last message stands: $JS.ACK.[domain.account.]stream.consumer.delivered.seq.…"""
        self._heard = asyncio.get_running_loop().time()
        tokens = self._inbox.rows.last_reply().split(b".")
        base = 2 if len(tokens) == _SHORT else 4
        if tokens[base + 1 : base + 2] == [self._consumer.encode()]:
            self._last = int(tokens[base + 3])
            if self._last >= self._part.end - 1 or tokens[base + 6] == b"0":
                self._finish()
        if self._enough:
            self._ready.set()
        if self._credit <= BATCH // 2:
            self._wake.set()

    def _on_status(self, subject: bytes, block: bytes) -> None:
        if not subject.startswith(self._subject.encode()):
            return  # of a consumer we have left
        self._heard = asyncio.get_running_loop().time()
        status = parse_status(block)
        if status.reaction not in (Reaction.ALIVE, Reaction.PULL_AGAIN):
            self._disturb(f"{status.code} {status.text}")
        elif unused := _UNUSED.search(block):
            self._granted -= int(unused[1])
        self._idle = self._credit > 0
        self._wake.set()
