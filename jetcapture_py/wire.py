"""The fast receive path: whole MSG and HMSG frames of our own subscriptions, straight into columns.

nats-py builds a task's worth of objects per message. Here its connection (TLS, authentication, reconnect, PING) is
kept and only the parser is replaced, before `connect()`: frames of registered subscriptions are taken in a tight loop,
every other frame goes to the stock parser, whole. Where nats-py's internals are not the ones this was written against,
`Connection._process_msg` receives the same messages through the stock parser, slower.

Bypassed on the fast path: nats-py's statistics and its pending limits; the pulls' credit bounds what can arrive.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error, ProtocolError
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from jetcapture_py.denials import Denials

OBJECT_OVERHEAD = 320
"""Bytes that one received message costs beside its content, as four Python byte strings in lists."""

Hook = Callable[[], Awaitable[None]]

_MAX_CONTROL_LINE = 1 << 20
_MAX_DIGITS = 12


@dataclass(slots=True)
class Received:
    """Messages as they came, one list per column; `headers` holds raw header blocks, b"" for none.

    `size` is the bytes of headers and payloads together.
    """

    subjects: list[bytes] = field(default_factory=list)
    replies: list[bytes] = field(default_factory=list)
    headers: list[bytes] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    size: int = 0

    @property
    def memory(self) -> int:
        """Bytes held, with what the Python objects cost."""
        return self.size + len(self.payloads) * OBJECT_OVERHEAD

    def __len__(self) -> int:
        return len(self.payloads)

    def extend(self, other: Received) -> None:
        """Append the messages of `other`."""
        self.subjects += other.subjects
        self.replies += other.replies
        self.headers += other.headers
        self.payloads += other.payloads
        self.size += other.size

    def split(self, count: int) -> tuple[Received, Received]:
        """The first `count` messages, and the others."""
        parts = []
        for part in (slice(count), slice(count, None)):
            columns = (self.subjects[part], self.replies[part], self.headers[part], self.payloads[part])
            parts.append(Received(*columns, size=sum(map(len, columns[2])) + sum(map(len, columns[3]))))
        return parts[0], parts[1]


def _ignore(subject: bytes, headers: bytes) -> None:
    """Leave a status alone."""


class Inbox:
    """What one subscription received and nobody took yet.

    `on_data()` is called when a run of messages has been added. `on_status(subject, header_block)` is called at once
    for frames without a reply subject, the server's statuses; with `statuses=False` these are messages, too.
    `total` and `total_bytes` count everything ever received.
    """

    __slots__ = ("on_data", "on_status", "rows", "statuses", "total", "total_bytes")

    def __init__(self, on_data: Callable[[], None], *, statuses: bool = True) -> None:
        self.on_data = on_data
        self.statuses = statuses
        self.on_status: Callable[[bytes, bytes], None] = _ignore
        self.rows = Received()
        self.total = self.total_bytes = 0

    def take(self, memory: int) -> Received:
        """What was received since the last call, in about `memory` bytes; the rest stays for the next call."""
        taken, self.rows = self.rows, Received()
        if taken.memory > memory and len(taken) > 1:
            taken, self.rows = taken.split(max(1, len(taken) * memory // taken.memory))
        return taken

    def count_from(self, before: int) -> None:
        """Account for the rows from index `before` on, which have just been appended."""
        rows = self.rows
        messages = len(rows) - before
        if messages:
            size = sum(map(len, rows.payloads[before:])) + sum(map(len, rows.headers[before:]))
            rows.size += size
            self.total += messages
            self.total_bytes += size
            self.on_data()

    def accept(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        """Take one message, or one status, from the stock parser."""
        if not reply and self.statuses:
            self.on_status(subject, headers or b"")
            return
        rows = self.rows
        rows.subjects.append(subject)
        rows.replies.append(reply)
        rows.headers.append(headers or b"")
        rows.payloads.append(payload)
        self.count_from(len(rows) - 1)


class Connection(Client):
    """A nats-py client whose registered subscriptions fill an `Inbox` instead of making message objects."""

    def __init__(self, *, fast: bool = True, require_tls: bool = False) -> None:
        super().__init__()
        self._require_tls = require_tls
        self.inboxes: dict[int, Inbox] = {}
        self.denials = Denials()
        self.fast = fast and supported()
        if self.fast:
            self._ps = FrameParser(self)

    def register(self, sid: int, inbox: Inbox) -> None:
        """From now on, messages of subscription `sid` go to `inbox`."""
        self.inboxes[sid] = inbox

    def forget(self, sid: int) -> None:
        """No more messages of subscription `sid` are expected."""
        self.inboxes.pop(sid, None)

    def watch(self, disconnected: Hook, reconnected: Hook, closed: Hook, error: Callable[[Exception], Any]) -> None:
        """Call these from now on; what befell the first attempts to connect was the caller's own to see."""
        self._disconnected_cb, self._reconnected_cb = disconnected, reconnected
        self._closed_cb, self._error_cb = closed, error

    def _connect_command(self) -> bytes:
        """The CONNECT line, which carries the credentials: never sent in the clear when TLS was asked for."""
        server = self._current_server
        secure = self._server_info.get("tls_required") or self.options["tls_handshake_first"]
        if self._require_tls and not secure and (server is None or server.uri.scheme != "wss"):
            raise Error("nats: TLS is configured, but the server does not offer it")
        return super()._connect_command()

    async def _process_err(self, err_msg: str) -> None:
        self.denials.note(err_msg, self._inbox_prefix.decode())
        await super()._process_err(err_msg)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        inbox = self.inboxes.get(sid)
        if inbox is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            inbox.accept(subject, reply, data, headers)

    async def ask(self, subject: str, payload: bytes, timeout: float) -> Msg:
        """The answer to a request. Raises as nats-py's `request` does, and `DeniedError` at once."""
        return await self.denials.request(self, subject, payload, timeout)

    async def write(self, commands: bytes) -> None:
        """Send protocol commands, in order with all others; buffered while reconnecting.

        Waits for the socket only when more than the client's pending size has piled up.
        """
        await self._send_command(commands)
        await self._flush_pending()


def supported() -> bool:
    """Whether nats-py's parser is the one that `FrameParser` knows how to stand in for."""
    client = Client()
    return (
        type(getattr(client, "_ps", None)) is Parser
        and inspect.iscoroutinefunction(Parser.parse)
        and list(inspect.signature(Parser.parse).parameters) == ["self", "data"]
        and list(inspect.signature(Parser.reset).parameters) == ["self"]
        and list(inspect.signature(Client._process_msg).parameters)[1:]
        == ["sid", "subject", "reply", "data", "headers"]
    )


_Append = Callable[[bytes], None]
_Columns = tuple[_Append, _Append, _Append, _Append, Inbox, int]


class FrameParser(Parser):
    """Takes whole frames of registered subscriptions itself and hands the stock parser all others, one at a time."""

    nc: Connection

    def __init__(self, nc: Connection) -> None:
        self._epoch = 0
        super().__init__(nc)

    def reset(self) -> None:
        """Forget what was buffered: the connection it came from is gone."""
        super().reset()
        self._epoch += 1
        self._parts: list[bytes] = []
        self._buffered = 0
        self._needed = 0

    async def parse(self, data: bytes = b"") -> None:
        """Parse what the socket gave; bytes of an incomplete frame are kept for the next call."""
        self._parts.append(data)
        self._buffered += len(data)
        if self._buffered < self._needed:
            return  # a large payload is still arriving: look at nothing until it is whole
        buffer = b"".join(self._parts) if len(self._parts) > 1 else bytes(data)
        epoch, position = self._epoch, 0
        while position < len(buffer):
            position, frame = self._take(buffer, position)
            if not frame:
                break
            await self._delegate(frame)
            if self._epoch != epoch:
                return  # that frame ended the connection
        self._parts = [buffer[position:]] if position < len(buffer) else []
        self._buffered = len(buffer) - position
        if self._buffered > _MAX_CONTROL_LINE and not self._needed:
            raise ProtocolError

    async def _delegate(self, frame: bytes) -> None:
        epoch = self._epoch
        try:
            await super().parse(frame)
        except ProtocolError:
            raise
        except Exception as error:
            # Anything else would end nats-py's read loop silently; a protocol error makes it reconnect.
            raise ProtocolError from error
        if self._epoch == epoch and (self.buf or self.state != AWAITING_CONTROL_LINE):
            raise ProtocolError  # the frame was whole: what the stock parser still waits for will never come

    def _take(self, buffer: bytes, position: int) -> tuple[int, bytes]:
        """Take frames from `position` on, up to one that is not ours, which is returned with the place behind it.

        An empty frame means that the buffer ends, or ends within a frame, at the returned position.
        """
        find, end_of_buffer = buffer.find, len(buffer)
        columns: dict[bytes, _Columns] = {}
        self._needed = 0
        frame = b""
        while position < end_of_buffer:
            eol = find(b"\r\n", position)
            if eol < 0:
                break
            args = buffer[position:eol].split(b" ")
            start = eol + 2
            headers_size = 0
            ours = None
            try:
                if args[0] == b"MSG" and len(args) == 5:
                    stop = start + int(args[4])
                    ours = columns.get(args[2]) or self._columns(args[2], columns)
                elif args[0] == b"HMSG" and len(args) == 6:
                    headers_size = int(args[4])
                    stop = start + int(args[5])
                    ours = columns.get(args[2]) or self._columns(args[2], columns)
                elif self._bare(args):
                    headers_size = int(args[3]) if len(args) == 5 else 0
                    stop = start + int(args[-1])
                    args.insert(3, b"")
                    ours = columns.get(args[2]) or self._columns(args[2], columns)
            except ValueError:
                ours = None
            if ours is None or not 0 <= headers_size <= stop - start:
                length = _frame_length(buffer[position:eol], position, start)
                if position + length > end_of_buffer:
                    self._needed = length
                else:
                    frame = buffer[position : position + length]
                    position += length
                break
            if stop + 2 > end_of_buffer:
                self._needed = stop + 2 - position
                break
            subject, reply, header, payload, _, _ = ours
            subject(args[1])
            reply(args[3])
            header(buffer[start : start + headers_size])
            payload(buffer[start + headers_size : stop])
            position = stop + 2
        for _, _, _, _, inbox, before in columns.values():
            inbox.count_from(before)
        return position, frame

    def _bare(self, args: list[bytes]) -> bool:
        """Whether this is a message without a reply subject, of a subscription to which that is no status."""
        if len(args) != (4 if args[0] == b"MSG" else 5) or args[0] not in (b"MSG", b"HMSG"):
            return False
        inbox = self.nc.inboxes.get(int(args[2]))
        return inbox is not None and not inbox.statuses

    def _columns(self, sid: bytes, known: dict[bytes, _Columns]) -> _Columns | None:
        """How to append to the inbox of `sid`, and how many rows it had; None when the subscription is not ours."""
        inbox = self.nc.inboxes.get(int(sid))
        if inbox is None or b"%d" % int(sid) != sid:
            return None
        rows = inbox.rows
        appends = (rows.subjects.append, rows.replies.append, rows.headers.append, rows.payloads.append)
        known[sid] = (*appends, inbox, len(rows))
        return known[sid]


def _frame_length(line: bytes, position: int, start: int) -> int:
    """Length in bytes of the frame whose control line is `line`; payload and its line end included."""
    args: list[Any] = line.split()
    if args and args[0] in (b"MSG", b"HMSG") and args[-1].isdigit() and len(args[-1]) <= _MAX_DIGITS:
        return start - position + int(args[-1]) + 2
    return start - position
