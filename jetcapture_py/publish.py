"""Publishes to JetStream fast, and leaves no message unaccounted for.

A publish without a reply subject can be dropped silently, so every message asks for its acknowledgement. Messages are
pipelined: up to a window of them is under way at once, commands are joined into few writes, and one wildcard
subscription receives the acknowledgements. `flush` returns when every message is acknowledged, or raises.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

from jetcapture_py.errors import SourceError

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

MESSAGE_ID = "Nats-Msg-Id"
Headers = Sequence[tuple[str, str]]

_CHUNK_BYTES = 128 * 1024
_RETRIES = 3
_RETRY_AFTER = 0.25
_KNOWN_SUBJECTS = 10_000
_SUBJECT = re.compile(r"[^\s\x00-\x1f\x7f.]+(\.[^\s\x00-\x1f\x7f.]+)*")
_HEADER_NAME = re.compile(r"[!-9;-~]+")
_HEADER_VALUE = re.compile(r"[^\r\n\x00]*")


def check_subject(subject: str) -> None:
    """Raise SourceError unless one message can be published to `subject` and means just that.

    Wildcards, empty tokens and white space are refused, and so are the server's own `$JS.` and `$SYS.`: a subject may
    be made of data, and data must not be able to name an API call.
    """
    if not _SUBJECT.fullmatch(subject):
        raise SourceError(f"invalid subject {subject!r}: tokens are separated by single dots and hold no white space")
    if not {"*", ">"}.isdisjoint(subject.split(".")):
        raise SourceError(f"invalid subject {subject!r}: a message cannot be published to a wildcard")
    if subject.startswith(("$JS.", "$SYS.")):
        raise SourceError(f"invalid subject {subject!r}: it belongs to the server")


def header_block(headers: Iterable[tuple[str, str]]) -> bytes:
    """The headers as the protocol wants them, in order, repeated names included."""
    lines = ["NATS/1.0\r\n"]
    for name, value in headers:
        if not _HEADER_NAME.fullmatch(name):
            raise SourceError(f"invalid header name {name!r}: printable ASCII without spaces and colons is allowed")
        if not _HEADER_VALUE.fullmatch(value):
            raise SourceError(f"invalid value of header {name}: it holds a line break or a NUL")
        lines.append(f"{name}: {value}\r\n")
    lines.append("\r\n")
    return "".join(lines).encode()


class _Message(NamedTuple):
    """A message under way, kept until it is acknowledged."""

    subject: str
    headers: bytes
    payload: bytes
    has_id: bool


class Publisher:
    """Acknowledged publishing over a connection; `published` and `duplicates` count the acknowledgements.

    For one task: calls must not overlap. At most `window` messages and `window_bytes` bytes are under way. A message
    waits in memory until a chunk is full, the window is, or `flush` is called. One whose acknowledgement does not come
    within `ack_timeout` seconds is published again when it has a `Nats-Msg-Id`, which makes that safe; otherwise nobody
    can tell whether it was stored, and that is an error. One that no stream took is published again in any case.
    Messages that are published again may change places with later ones.
    """

    def __init__(
        self, nc: Client, *, window: int = 1000, window_bytes: int = 16 * 1024 * 1024, ack_timeout: float = 5.0
    ) -> None:
        self.published = 0
        self.duplicates = 0
        self._nc = nc
        self._window = window
        self._window_bytes = window_bytes
        self._ack_timeout = ack_timeout
        self._subscription: Subscription | None = None
        self._inbox = ""
        self._next = 0
        self._pending: dict[int, _Message] = {}
        self._pending_bytes = 0
        self._chunk: list[bytes] = []
        self._chunk_bytes = 0
        self._refused: dict[int, int] = {}  # number -> times it found no server
        self._subjects: set[str] = set()
        self._error: SourceError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._low = 0  # the waiter is woken when no more than this many are pending
        self._low_bytes = 0

    async def __aenter__(self) -> Self:
        self._inbox = f"{self._nc.new_inbox()}."
        self._subscription = await self._nc.subscribe(
            f"{self._inbox}*", cb=self._on_ack, pending_msgs_limit=0, pending_bytes_limit=0
        )
        return self

    async def __aexit__(self, exc_type: object, *_: object) -> None:
        try:
            if exc_type is None:
                await self.flush()
        finally:
            if self._subscription is not None and not self._nc.is_closed:
                await self._subscription.unsubscribe()
            self._subscription = None

    async def publish(self, subject: str, payload: bytes, headers: Headers | None = None) -> None:
        """Publish one message; waits only while the window is full. Raises what an earlier message met."""
        if self._error is not None:
            raise self._error
        if subject not in self._subjects:
            self._learn(subject)
        block, has_id = b"", False
        if headers is not None:
            block = header_block(headers)
            has_id = any(name == MESSAGE_ID for name, _ in headers)
        size = len(block) + len(payload)
        if size > self._nc.max_payload:
            raise SourceError(f"a message for {subject} has {size} bytes, the server allows {self._nc.max_payload}")
        number = self._next
        self._next = number + 1
        message = _Message(subject, block, payload, has_id)
        self._pending[number] = message
        self._pending_bytes += size
        self._enqueue(number, message)
        if len(self._pending) >= self._window or self._pending_bytes >= self._window_bytes:
            await self._drain_to(self._window // 2, self._window_bytes // 2)
        elif self._chunk_bytes >= _CHUNK_BYTES:
            await self._write()

    async def flush(self) -> None:
        """Return when every message so far is acknowledged; raise when one cannot be."""
        await self._drain_to(0, 0)
        if self._error is not None:
            raise self._error

    def _learn(self, subject: str) -> None:
        check_subject(subject)
        if len(self._subjects) >= _KNOWN_SUBJECTS:
            self._subjects.clear()
        self._subjects.add(subject)

    def _enqueue(self, number: int, message: _Message) -> None:
        subject, block, payload, _ = message
        if block:
            head = f"HPUB {subject} {self._inbox}{number} {len(block)} {len(block) + len(payload)}\r\n"
        else:
            head = f"PUB {subject} {self._inbox}{number} {len(payload)}\r\n"
        self._chunk += (head.encode(), block, payload, b"\r\n")
        self._chunk_bytes += len(head) + len(block) + len(payload) + 2

    async def _write(self) -> None:
        """Hand the chunk to the connection. The only place that goes below nats-py's public API, which knows headers
        only as a dict and builds and flushes one command a message."""
        if self._nc.is_closed:
            raise SourceError("the connection to NATS is closed")
        if not self._chunk:
            return
        data = b"".join(self._chunk)
        self._chunk.clear()
        self._chunk_bytes = 0
        await self._nc._send_command(data)
        await self._nc._flush_pending()
        await asyncio.sleep(0)  # the connection's own task does the writing

    async def _drain_to(self, count: int, size: int) -> None:
        """Write what waits, then wait until at most so much is pending; publish overdue messages again."""
        self._low, self._low_bytes = count, size
        attempts = 0
        while self._error is None:
            await self._write()
            if len(self._pending) <= count and self._pending_bytes <= size:
                return
            before = self.published
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(self._ack_timeout):
                    await self._waiter
            except TimeoutError:
                attempts = 0 if self.published > before else attempts + 1
                if attempts:
                    self._publish_again(attempts)
            finally:
                self._waiter = None
        raise self._error

    def _publish_again(self, attempt: int) -> None:
        """No acknowledgement at all came for `ack_timeout`: what is pending is overdue."""
        unsafe = sum(not message.has_id for message in self._pending.values())
        if unsafe or attempt > _RETRIES:
            seconds = self._ack_timeout * attempt
            raise SourceError(
                f"{len(self._pending)} messages were not acknowledged within {seconds:g} s"
                + (f"; {unsafe} have no {MESSAGE_ID}, so publishing them again could store them twice" * bool(unsafe))
            )
        for number, message in self._pending.items():
            self._enqueue(number, message)

    async def _on_ack(self, msg: Msg) -> None:
        data = msg.data
        number = int(msg.subject[len(self._inbox) :])
        message = self._pending.get(number)
        if message is None:  # a second acknowledgement, of a message published again
            return
        if not data or b'"error"' in data:
            problem = _problem(data)
            if problem is not None:
                self._on_problem(number, message, *problem)
                return
        del self._pending[number]
        self._pending_bytes -= len(message.headers) + len(message.payload)
        self.published += 1
        if b'"duplicate"' in data:
            self.duplicates += 1
        if len(self._pending) <= self._low and self._pending_bytes <= self._low_bytes:
            self._wake()

    def _on_problem(self, number: int, message: _Message, temporary: bool, text: str) -> None:
        times = self._refused[number] = self._refused.get(number, 0) + 1
        if temporary and times <= _RETRIES:
            asyncio.get_running_loop().call_later(_RETRY_AFTER * times, self._retry, number)
        elif self._error is None:
            self._error = SourceError(f"a message for {message.subject} was refused: {text}")
            self._wake()

    def _retry(self, number: int) -> None:
        message = self._pending.get(number)
        if message is not None:
            self._enqueue(number, message)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _problem(data: bytes) -> tuple[bool, str] | None:
    """Whether a refusal is temporary, and its text; None when the answer is no refusal."""
    if not data:
        return True, "no stream listens on it"
    try:
        error = json.loads(data).get("error")
    except ValueError:
        return False, f"unintelligible answer {data[:100]!r}"
    if error is None:
        return None
    return error.get("code") == 503, f"{error.get('description', 'no reason given')} ({error.get('err_code', 0)})"
