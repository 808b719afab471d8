"""Reads ranges of a stream, sequences and timestamps, whole and in order, whatever becomes of the server meanwhile.

Each comes from a consumer of our own that acknowledges nothing, delivers no payloads, and lives only for it. At any
trouble it is left to die, and another one goes on behind the last message received.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import nats.errors

from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.ack_subject import positions
from jetcapture_py.jetstream.connection import ApiError, UnavailableError
from jetcapture_py.jetstream.inspect import PATIENCE, PAUSE, Server
from jetcapture_py.jetstream.pull_status import Reaction, parse_status
from jetcapture_py.jetstream.wire.inbox import Inbox, Received

BATCH = 20_000
PULL_BYTES = 16 << 20
HEARTBEAT, EXPIRES, SILENCE = 1.0, 30.0, 5.0
"""Seconds: the server's sign of life during a pull, when the pull ends, and when it is given up without a sign."""

_MOST_DOUBTS = 5
_FRAME_OVERHEAD = 64 << 10
_SHORT = 9


async def read(
    server: Server, filters: tuple[str, ...], stretches: Iterable[tuple[int, int]]
) -> AsyncGenerator[tuple[bool, Any, Any]]:
    """The messages in these ranges of sequences, which come in order, and some beyond them.

    Each time whether another range begins here, the sequences, and the timestamps in nanoseconds.
    """
    read = 0
    for first, last in stretches:
        begins = True
        async for received in _stretch(server, filters, max(first, read + 1), last):
            yield begins, *received
            begins, read = False, int(received[0][-1])
        read = max(read, last)


async def _stretch(server: Server, filters: tuple[str, ...], first: int, last: int) -> AsyncGenerator[tuple[Any, Any]]:
    """One range; at any trouble from a new consumer on behind the last message that came."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + PATIENCE
    while first <= last:
        pull = _Pull(server, filters, first, last)
        async with contextlib.aclosing(pull.messages()) as messages:
            async for seqs, times in messages:
                first, deadline = int(seqs[-1]) + 1, clock() + PATIENCE
                yield seqs, times
        if pull.finished:
            return
        if server.denied:
            raise SourceError(f"NATS refused: {server.denied}")
        if clock() > deadline:
            raise SourceError(f"nothing arrives from stream {server.stream} from message {first} on: {pull.trouble}")
        await asyncio.sleep(PAUSE)


class _Pull:
    """Reads one range from one consumer. It was `finished`, or there was `trouble`."""

    def __init__(self, server: Server, filters: tuple[str, ...], first: int, last: int) -> None:
        self._server, self._filters = server, filters
        self._first, self._last = first, last
        self._event = asyncio.Event()
        self._inbox = Inbox(self._event.set)
        self._inbox.on_status = self._on_status
        self._over = True  # no pull is under way
        self._taken = self._left = self._doubts = 0
        self._idle = False
        self.finished = False
        self.trouble = ""

    def _on_status(self, _: bytes, block: bytes) -> None:
        status = parse_status(block)
        if status.reaction is not Reaction.ALIVE:
            self._over = True
            if status.reaction is not Reaction.PULL_AGAIN:
                self.trouble = f"{status.code} {status.text}"
        self._idle = True
        self._event.set()

    async def messages(self) -> AsyncGenerator[tuple[Any, Any]]:
        """The messages, as sequences and timestamps in nanoseconds."""
        server, connection = self._server, self._server.connection
        config = {"deliver_policy": "by_start_sequence", "opt_start_seq": self._first, "headers_only": True}
        name, answer = await server.create(config | {"filter_subjects": list(self._filters)})
        subject, subscription = connection.new_inbox(), None
        disturbed, server.wake = server.disturbed, self._event.set
        try:
            if not answer["num_pending"]:
                self.finished = True
                return
            subscription = await connection.subscribe(subject)
            connection.register(subscription._id, self._inbox)
            while not self.finished and not self.trouble:
                received = await self._receive(name, subject)
                if disturbed != server.disturbed:
                    self.trouble = "the connection was lost"
                elif received:
                    seqs, times = positions(server.stream, name, received.replies)
                    self._note(received.last_reply(), len(received))
                    if not self.trouble:
                        yield seqs, times
        except nats.errors.Error as error:
            self.trouble = str(error)
        finally:
            if subscription is not None:
                connection.forget(subscription._id)
                with contextlib.suppress(nats.errors.Error, OSError):
                    await subscription.unsubscribe()
            if disturbed == server.disturbed:  # else nobody may answer
                await server.delete(name)

    async def _receive(self, name: str, subject: str) -> Received:
        """What has come; pulls, when nothing more will."""
        server = self._server
        self._idle = False
        if self._over or self._left <= 0:
            self._over, self._left = False, min(BATCH, self._last - self._first + 1)
            size = max(PULL_BYTES, server.connection.max_payload + _FRAME_OVERHEAD)
            await server.api.pull(
                server.stream, name, subject, batch=self._left, max_bytes=size, expires=EXPIRES, heartbeat=HEARTBEAT
            )
        try:
            await asyncio.wait_for(self._event.wait(), SILENCE)
        except TimeoutError:
            self.trouble = "the server stopped responding"
        self._event.clear()
        self.trouble = self.trouble or server.denied
        received = self._inbox.take(1 << 62)
        self._left -= len(received)
        self._doubts = 0 if received else self._doubts + 1
        if not received and self._idle and not self.trouble:
            await self._see_whether_all_came(name)
        return received

    def _note(self, reply: bytes, count: int) -> None:
        """Look where the last message stands: …stream.consumer.delivered.seq.consumer_seq.timestamp.pending[.token]"""
        self._taken += count
        tokens = reply.split(b".")
        base = 2 if len(tokens) == _SHORT else 4
        if int(tokens[base + 4]) != self._taken:
            self.trouble = "messages sent by the server did not arrive"
            return
        self._first = int(tokens[base + 3]) + 1
        self.finished = self._first > self._last or tokens[base + 6] == b"0"

    async def _see_whether_all_came(self, name: str) -> None:
        """The server has nothing to send: messages may have been deleted since."""
        try:
            info = await self._server.api.request(f"CONSUMER.INFO.{self._server.stream}.{name}")
        except (ApiError, UnavailableError) as error:
            self.trouble = str(error)
            return
        if info["num_pending"] == 0 and info["delivered"]["consumer_seq"] == self._taken and not self._inbox.rows:
            self.finished = True
        elif self._doubts > _MOST_DOUBTS:
            self.trouble = "expected messages do not arrive"
