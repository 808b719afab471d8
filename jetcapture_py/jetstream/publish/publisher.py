"""Publish to JetStream fast, with every message acknowledged.

A publish without a reply subject can be dropped silently, so every message requests an acknowledgement. Messages are
pipelined: up to a window of them is in flight, commands are combined into few writes, and one wildcard subscription
receives the acknowledgements in bulk. `flush` returns when every message is acknowledged, or raises.

Messages of one publisher are stored in the order of the calls, even across a reconnect: nothing is written while
disconnected, and afterwards all unacknowledged messages are written again, in order, before new ones. There are two
exceptions: the server temporarily refuses a message, because the stream has no leader, and accepts a later one that was
already in flight; or it stores a message without acknowledging it, and loses it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple, Self

import nats.errors
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive.arrow_bytes import byte_strings
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.publish.frames import (
    MESSAGE_ID,
    check_subject,
    fitting,
    frames,
    has_id,
    slices,
    unusual_subjects,
)
from jetcapture_py.jetstream.wire.client import Connection, Denial
from jetcapture_py.jetstream.wire.inbox import PAYLOAD, SUBJECT, Inbox
from jetcapture_py.text import age, plural


class Refusal(NamedTuple):
    """A refused message: number of refusals, whether the error is temporary, and its text."""

    times: int
    temporary: bool
    text: str


class InFlight:
    """Unacknowledged messages, written or waiting, by the subject of their acknowledgement; `size` is their bytes.

    `acknowledged` and `duplicates` count accepted messages. A temporarily refused message is held back until `release`,
    together with everything not written yet, which must not overtake it.
    """

    def __init__(self) -> None:
        self.size = 0
        self.acknowledged = 0
        self.duplicates = 0
        self._frames: dict[bytes, bytes] = {}
        self._waiting: list[bytes] = []  # frames to write, for the first time or again
        self._held: set[bytes] = set()
        self._refused: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def held(self) -> bool:
        """Whether writing is paused."""
        return bool(self._held)

    def add(self, replies: list[bytes], frames: list[bytes]) -> None:
        size = sum(map(len, frames))
        self._frames.update(zip(replies, frames, strict=True))
        self._waiting += frames
        self.size += size

    def take(self) -> bytes:
        """Remove and return the bytes to write now."""
        if self._held or not self._waiting:
            return b""
        data = b"".join(self._waiting)
        self._waiting.clear()
        return data

    def again(self) -> int:
        """Queue all messages to be written again, because none will be acknowledged any more.

        Return the number of messages that this could store twice: already written, and without an id. Unless it is 0,
        the caller must not write.
        """
        messages = list(self._frames.items())
        written = messages[: len(messages) - len(self._waiting)]
        unsafe = sum(not has_id(frame) for reply, frame in written if reply not in self._held)
        self._held.clear()
        self._waiting = [frame for _, frame in messages]
        return unsafe

    def release(self) -> None:
        """Queue held messages to be written again, before those that follow them."""
        self._waiting[:0] = [frame for reply, frame in self._frames.items() if reply in self._held]
        self._held.clear()

    def acknowledge(self, subjects: list[bytes], answers: list[bytes]) -> Iterator[tuple[str, Refusal]]:
        """Process the server's answers; yield refusals with the subjects of their messages."""
        frames = self._frames
        for subject, answer in zip(subjects, answers, strict=True):
            frame = frames.get(subject)
            if frame is None:  # a second acknowledgement, of a message published again
                continue
            if (not answer or b'"error"' in answer) and (problem := _problem(answer)) is not None:
                times = self._refused[subject] = self._refused.get(subject, 0) + 1
                if problem[0]:
                    self._held.add(subject)
                yield frame.split(b" ", 2)[1].decode(errors="replace"), Refusal(times, *problem)
                continue
            del frames[subject]
            self.size -= len(frame)
            self.acknowledged += 1
            if b'"duplicate"' in answer:
                self.duplicates += 1


def _problem(data: bytes) -> tuple[bool, str] | None:
    """Return whether a refusal is temporary, and its text; None for an acknowledgement."""
    if not data:
        return True, "no stream listens on it"
    try:
        error = json.loads(data).get("error")
        if error is None:
            return None
        text = f"{error.get('description', 'no reason given')} ({error.get('err_code', 0)})"
        return error.get("code") in (429, 503), text
    except (ValueError, AttributeError):
        return False, f"unexpected answer {data[:100]!r}"


WINDOW = 1000
WINDOW_BYTES = 16 << 20

_RETRIES = 4
_RETRY_AFTER = 0.25  # doubled every time
_TICK = 0.1


class Publisher:
    """Acknowledged publishing over a connection.

    For a single task: calls must not overlap. At most `window` messages and `WINDOW_BYTES` bytes are in flight. A
    message that is not acknowledged within `ack_timeout` seconds, or before the connection breaks, is published again
    if it has a `Nats-Msg-Id`, which makes that safe; otherwise it may have been stored already, and that is an error. A
    message that no stream accepted is always published again. Gives up after `patience` seconds without any
    acknowledgement.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        window: int = WINDOW,
        ack_timeout: float = 5.0,
        patience: float = 60.0,
    ) -> None:
        self._nc = connection
        self._window = window
        self._ack_timeout = ack_timeout
        self._patience = patience
        self._acks = Inbox(self._on_acks, statuses=False)
        self._prefix = b""
        self._pending = InFlight()
        self._error: SourceError | None = None
        self._wake = asyncio.Event()
        self._connections = 0  # reconnect count at the last write
        self._heard = 0.0

    @property
    def published(self) -> int:
        return self._pending.acknowledged

    @property
    def duplicates(self) -> int:
        """Number of acknowledged messages that the stream already had."""
        return self._pending.duplicates

    async def __aenter__(self) -> Self:
        prefix = f"{self._nc.new_inbox()}."
        self._prefix = prefix.encode()
        self._connections = self._nc.stats["reconnects"]
        self._sid = await self._nc.receive_into(self._acks, f"{prefix}*")
        self._nc.denial_listeners.append(self._on_denial)
        try:
            await self._nc.flush()  # messages overtake other commands, so the subscription must exist first
        except (nats.errors.Error, TimeoutError) as error:
            raise SourceError("there is no connection to NATS") from error
        return self

    async def __aexit__(self, exc_type: object, *_: object) -> None:
        try:
            if exc_type is None:
                await self.flush()
        finally:
            self._nc.denial_listeners.remove(self._on_denial)
            self._nc.forget(self._sid)
            if not self._nc.is_closed:
                await self._nc.stop_receiving(self._sid)

    async def publish_batch(
        self,
        subjects: pa.Array,
        payloads: pa.Array,
        headers: pa.BinaryArray | None = None,
    ) -> None:
        """Publish columns of messages. Also raises errors of earlier messages.

        `subjects` are strings, or binary if some are not UTF-8, without nulls; `payloads` binary or strings, null is
        empty; `headers` are blocks of `frames.header_blocks`, null or empty for none. Nothing is published if any
        subject is invalid.
        """
        if self._error is not None:
            raise self._error
        if subjects.null_count:
            raise SourceError("a message has no subject: it is null")
        for subject in unusual_subjects(subjects):
            check_subject(subject)
        for start, rows in slices(payloads):
            part = subjects.slice(start, rows).cast(pa.binary())
            bodies = pc.fill_null(payloads.slice(start, rows).cast(pa.binary()), b"")
            blocks = None if headers is None else pc.fill_null(headers.slice(start, rows), b"")
            sizes = pc.binary_length(bodies)
            sizes = sizes if blocks is None else pc.add(sizes, pc.binary_length(blocks))
            largest = pc.max(sizes).as_py()
            if largest > self._nc.max_payload:
                subject = part[pc.index(sizes, largest).as_py()].as_py().decode(errors="backslashreplace")
                allowed = self._nc.max_payload
                raise SourceError(f"a message for {subject} has {largest} bytes, the server allows {allowed}")
            first = self.published + len(self._pending)
            numbers = pa.array(np.arange(first, first + rows)).cast(pa.string()).cast(pa.binary())
            replies = pc.binary_join_element_wise(pa.scalar(self._prefix), numbers, b"")
            await self._send(byte_strings(replies), frames(part, replies, blocks, bodies))

    async def flush(self) -> None:
        """Wait until every message so far is acknowledged. Raises SourceError."""
        await self._drain_to(0, 0)
        if self._error is not None:
            raise self._error

    async def _send(self, replies: list[bytes], messages: list[bytes]) -> None:
        """Add and write messages as the window allows."""
        position = 0
        while position < len(messages):
            spare = max(0, WINDOW_BYTES - len(messages[position]))
            if len(self._pending) >= self._window or self._pending.size > spare:
                await self._drain_to(self._window // 2, min(spare, WINDOW_BYTES // 2))
            stop = position + self._window - len(self._pending)
            room = WINDOW_BYTES - self._pending.size
            if sum(map(len, messages[position:stop])) > room:
                stop = position + fitting(messages[position:stop], room)
            self._pending.add(replies[position:stop], messages[position:stop])
            position = stop
            await self._write()
        await asyncio.sleep(0)  # let acknowledgements be read even if the caller never waits

    async def _write(self) -> None:
        """Write waiting messages; while disconnected, keep them.

        This bypasses nats-py's public API. After a reconnect, nats-py sends commands it has buffered although earlier
        ones were lost with the connection; commands written here are all lost.
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
        loop = asyncio.get_running_loop()
        began = overdue = loop.time()
        while self._error is None:
            self._wake.clear()
            await self._write()
            if len(self._pending) <= count and self._pending.size <= size:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_TICK, self._ack_timeout)):
                    await self._wake.wait()
            silence = loop.time() - max(began, self._heard)
            if silence > self._patience:
                raise SourceError(f"{plural(len(self._pending), 'message')} not acknowledged within {age(silence)}")
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

    def _on_acks(self) -> None:
        """Process answers. Must not raise: the connection's reader calls it."""
        subjects, answers = (column.to_pylist() for column in self._acks.take(1 << 40).columns(SUBJECT, PAYLOAD))
        loop = asyncio.get_running_loop()
        before, held = self.published, self._pending.held
        for subject, refusal in self._pending.acknowledge(subjects, answers):
            if refusal.temporary and refusal.times <= _RETRIES:
                if not held:
                    held = True
                    loop.call_later(_RETRY_AFTER * 2 ** (refusal.times - 1), self._release)
            elif self._error is None:
                self._error = SourceError(f"a message for {subject} was refused: {refusal.text}")
        if self.published > before:
            self._heard = loop.time()
        self._wake.set()

    def _on_denial(self, denial: Denial) -> None:
        """Fail if a publish or its acknowledgement is not permitted: it would never be acknowledged."""
        if self._error is None and not denial.subject.startswith("$js.api."):
            self._error = SourceError(f"NATS refused: {denial}")
        self._wake.set()

    def _release(self) -> None:
        self._pending.release()
        self._wake.set()
