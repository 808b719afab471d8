"""Publish to JetStream fast, with every message acknowledged.

A publish without a reply subject can be dropped silently, so every message requests an acknowledgement. Messages are
pipelined: up to a window of them is in flight, commands are combined into few writes, and one wildcard subscription
receives the acknowledgements, in bulk on a `wire.Connection`. `flush` returns when every message is acknowledged, or
raises.

Messages of one publisher are stored in the order of the calls, even across a reconnect: nothing is written while
disconnected, and afterwards all unacknowledged messages are written again, in order, before new ones. There are two
exceptions: the server temporarily refuses a message, because the stream has no leader, and accepts a later one that was
already in flight; or it stores a message without acknowledging it, and loses it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Self

import nats.errors
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.publish.frames import (
    MESSAGE_ID,
    Headers,
    byte_strings,
    check_subject,
    fitting,
    frame,
    frames,
    header_block,
    header_blocks,
    slices,
    unusual_subjects,
)
from jetcapture_py.jetstream.publish.in_flight import InFlight
from jetcapture_py.jetstream.wire.client import Connection
from jetcapture_py.jetstream.wire.inbox import PAYLOAD, SUBJECT, Inbox
from jetcapture_py.text import plural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from jetcapture_py.jetstream.permissions import Denial

WINDOW = 1000

_CHUNK_BYTES = 128 * 1024
_RETRIES = 4
_RETRY_AFTER = 0.25  # doubled every time
_TICK = 0.1
_KNOWN_SUBJECTS = 10_000


class Publisher:
    """Acknowledged publishing over a connection.

    For a single task: calls must not overlap. At most `window` messages and `window_bytes` bytes are in flight.
    Messages are buffered until a chunk or the window is full, or `flush` is called. A message that is not acknowledged
    within `ack_timeout` seconds, or before the connection breaks, is published again if it has a `Nats-Msg-Id`, which
    makes that safe; otherwise it may have been stored already, and that is an error. A message that no stream accepted
    is always published again. Gives up after `patience` seconds without any acknowledgement.
    """

    def __init__(
        self,
        nc: Client,
        *,
        window: int = WINDOW,
        window_bytes: int = 16 * 1024 * 1024,
        ack_timeout: float = 5.0,
        patience: float = 60.0,
    ) -> None:
        self._nc = nc
        self._window = window
        self._window_bytes = window_bytes
        self._ack_timeout = ack_timeout
        self._patience = patience
        self._subscription: Subscription | None = None
        self._acks = Inbox(self._on_acks, statuses=False)
        self._prefix = b""
        self._next = 0
        self._pending = InFlight()
        self._subjects: set[str] = set()
        self._error: SourceError | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._low = 0  # the waiter is woken when no more than this many are pending
        self._low_bytes = 0
        self._connections = 0  # reconnects when something was last written
        self._heard = 0.0

    @property
    def published(self) -> int:
        """Number of acknowledged messages."""
        return self._pending.acknowledged

    @property
    def duplicates(self) -> int:
        """Number of acknowledged messages that the stream already had."""
        return self._pending.duplicates

    async def __aenter__(self) -> Self:
        prefix = f"{self._nc.new_inbox()}."
        self._prefix = prefix.encode()
        self._connections = self._nc.stats["reconnects"]
        if isinstance(self._nc, Connection):
            self._sid = await self._nc.receive_into(self._acks, f"{prefix}*")
            self._nc.denials.listeners.append(self._on_denial)
        else:
            self._subscription = await self._nc.subscribe(
                f"{prefix}*", cb=self._on_message, pending_msgs_limit=0, pending_bytes_limit=0
            )
        try:
            await self._nc.flush()  # messages overtake other commands: the subscription must exist first
        except (nats.errors.Error, TimeoutError) as error:
            raise SourceError("there is no connection to NATS") from error
        return self

    async def __aexit__(self, exc_type: object, *_: object) -> None:
        try:
            if exc_type is None:
                await self.flush()
        finally:
            if self._retry is not None:
                self._retry.cancel()
            if isinstance(self._nc, Connection):
                self._nc.denials.listeners.remove(self._on_denial)
                self._nc.forget(self._sid)
                if not self._nc.is_closed:
                    await self._nc.stop_receiving(self._sid)
            elif self._subscription is not None and not self._nc.is_closed:
                await self._subscription.unsubscribe()

    async def publish(self, subject: str, payload: bytes, headers: Headers | None = None) -> None:
        """Publish one message; wait only while the window is full. Also raises errors of earlier messages."""
        if self._error is not None:
            raise self._error
        if subject not in self._subjects:
            self._learn(subject)
        block = b"" if headers is None else header_block(headers)
        if len(block) + len(payload) > self._nc.max_payload:
            self._refuse_size(len(block) + len(payload), subject)
        reply = b"%b%d" % (self._prefix, self._next)
        self._next += 1
        self._pending.add([reply], [frame(subject, reply, block, payload)])
        if len(self._pending) >= self._window or self._pending.size >= self._window_bytes:
            await self._drain_to(self._window // 2, self._window_bytes // 2)
        elif self._pending.waiting_size >= _CHUNK_BYTES:
            await self._write()
            await asyncio.sleep(0)  # let acknowledgements be read even if the caller never waits

    async def publish_batch(
        self,
        subjects: pa.Array,
        payloads: pa.Array,
        headers: pa.MapArray | None = None,
        ids: pa.Array | None = None,
        *,
        extra: Mapping[str, pa.Array] | None = None,
        lines: pa.BinaryArray | None = None,
        stored: bool = False,
    ) -> None:
        """Publish columns of messages, much faster than `publish`.

        `subjects` are strings, or binary if some are not UTF-8, without nulls; `payloads` binary or strings, null is
        empty; `headers` map<string, list<string>>, null for none. `ids` and the columns of `extra`, by header name, are
        strings, null for none; they replace headers of that name. `lines` are further raw header lines with their line
        ends, null for none. `stored` allows header names and values that `publish` would reject but NATS has accepted
        before. Nothing is published if any subject is invalid.
        """
        if self._error is not None:
            raise self._error
        if subjects.null_count:
            raise SourceError("a message has no subject: it is null")
        for subject in unusual_subjects(subjects):
            if subject not in self._subjects:
                self._learn(subject)
        added = dict(extra or {}) | ({} if ids is None else {MESSAGE_ID: ids})
        for start, rows in slices(payloads):
            part = subjects.slice(start, rows).cast(pa.binary())
            bodies = pc.fill_null(payloads.slice(start, rows).cast(pa.binary()), b"")
            blocks = header_blocks(
                None if headers is None else headers.slice(start, rows),
                {name: values.slice(start, rows) for name, values in added.items()},
                rows,
                lines=None if lines is None else lines.slice(start, rows),
                stored=stored,
            )
            sizes = pc.binary_length(bodies)
            sizes = sizes if blocks is None else pc.add(sizes, pc.binary_length(blocks))
            largest = pc.max(sizes).as_py()
            if largest > self._nc.max_payload:
                self._refuse_size(
                    largest, part[pc.index(sizes, largest).as_py()].as_py().decode(errors="backslashreplace")
                )
            numbers = pa.array(np.arange(self._next, self._next + rows)).cast(pa.string()).cast(pa.binary())
            replies = pc.binary_join_element_wise(pa.scalar(self._prefix), numbers, b"")
            self._next += rows
            await self._send(byte_strings(replies), frames(part, replies, blocks, bodies))

    async def flush(self) -> None:
        """Wait until every message so far is acknowledged. Raises SourceError."""
        await self._drain_to(0, 0)
        if self._error is not None:
            raise self._error

    def _learn(self, subject: str) -> None:
        check_subject(subject)
        if len(self._subjects) >= _KNOWN_SUBJECTS:
            self._subjects.clear()
        self._subjects.add(subject)

    def _refuse_size(self, size: int, subject: str) -> None:
        raise SourceError(f"a message for {subject} has {size} bytes, the server allows {self._nc.max_payload}")

    async def _send(self, replies: list[bytes], messages: list[bytes]) -> None:
        """Add and write messages as the window allows."""
        position = 0
        while position < len(messages):
            spare = max(0, self._window_bytes - len(messages[position]))
            if len(self._pending) >= self._window or self._pending.size > spare:
                await self._drain_to(self._window // 2, min(spare, self._window_bytes // 2))
            stop = position + self._window - len(self._pending)
            room = self._window_bytes - self._pending.size
            if sum(map(len, messages[position:stop])) > room:
                stop = position + fitting(messages[position:stop], room)
            self._pending.add(replies[position:stop], messages[position:stop])
            position = stop
            await self._write()
        await asyncio.sleep(0)  # as in `publish`

    async def _write(self) -> None:
        """Write waiting messages; while disconnected, keep them.

        The only place that bypasses nats-py's public API. After a reconnect, nats-py sends commands it has buffered
        although earlier ones were lost with the connection; commands written here are all lost.
        """
        nc = self._nc
        transport = nc._transport
        if nc.is_closed or transport is None:
            raise SourceError("the connection to NATS is closed")
        if not nc.is_connected:
            return
        if self._connections != nc.stats["reconnects"]:
            self._connections = nc.stats["reconnects"]
            self._publish_again("before the connection broke")
        if not (data := self._pending.take()):
            return
        with suppress(OSError, RuntimeError):  # the connection is breaking: its reader will notice
            transport.write(data)
            await transport.drain()  # type: ignore[no-untyped-call]

    async def _drain_to(self, count: int, size: int) -> None:
        """Write waiting messages, then wait until at most `count` messages and `size` bytes are pending; publish
        overdue messages again."""
        self._low, self._low_bytes = count, size
        loop = asyncio.get_running_loop()
        began = overdue = loop.time()
        while self._error is None:
            await self._write()
            if len(self._pending) <= count and self._pending.size <= size:
                return
            self._waiter = loop.create_future()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_TICK, self._ack_timeout)):
                    await self._waiter
            self._waiter = None
            silence = loop.time() - max(began, self._heard)
            if silence > self._patience:
                raise SourceError(f"{plural(len(self._pending), 'message')} not acknowledged within {silence:.0f} s")
            if (
                self._nc.is_connected
                and not self._pending.held
                and loop.time() - max(overdue, self._heard) >= self._ack_timeout
            ):
                self._publish_again(f"within {self._ack_timeout:g} s")
                overdue = loop.time()
        raise self._error

    def _publish_again(self, when: str) -> None:
        """Write all messages in flight again, in order, because they will not be acknowledged any more."""
        unsafe = self._pending.again()
        if unsafe:
            raise SourceError(
                f"{plural(len(self._pending), 'message')} not acknowledged {when}, {unsafe} without {MESSAGE_ID}, so "
                "publishing them again could store them twice"
            )

    async def _on_message(self, msg: Msg) -> None:
        self._acknowledge([msg.subject.encode()], [msg.data])

    def _on_acks(self) -> None:
        subjects, answers = self._acks.take(1 << 40).columns(SUBJECT, PAYLOAD)
        self._acknowledge(subjects.to_pylist(), answers.to_pylist())

    def _acknowledge(self, subjects: list[bytes], answers: list[bytes]) -> None:
        """Process answers. Must not raise: the connection's reader calls it."""
        loop = asyncio.get_running_loop()
        before = self.published
        for subject, refusal in self._pending.acknowledge(subjects, answers):
            if refusal.temporary and refusal.times <= _RETRIES:
                if self._retry is None:
                    self._retry = loop.call_later(_RETRY_AFTER * 2 ** (refusal.times - 1), self._release)
            elif self._error is None:
                self._error = SourceError(f"a message for {subject} was refused: {refusal.text}")
        if self.published > before:
            self._heard = loop.time()
        if self._error is not None or (len(self._pending) <= self._low and self._pending.size <= self._low_bytes):
            self._wake()

    def _on_denial(self, denial: Denial) -> None:
        """Fail if a publish or its acknowledgement is not permitted: it would never be acknowledged."""
        if self._error is None and not denial.subject.startswith("$js.api."):
            self._error = SourceError(f"NATS refused: {denial}")
        self._wake()

    def _release(self) -> None:
        self._retry = None
        self._pending.release()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
