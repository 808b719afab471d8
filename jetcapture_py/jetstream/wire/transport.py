"""From the socket into memory without a copy: nats-py's TCP transport, reading straight into the parser's memory.

With TLS, or over a websocket, bytes come as nats-py's own transports give them, and are copied there.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import ParseResult

from nats.aio.transport import TcpTransport

SEGMENT = 4 << 20
"""Bytes of a piece of memory."""
ROOM = 64 << 10
"""Bytes that there must be room for when the socket is read."""
READ = 1 << 20
"""Most bytes taken at once where they are copied."""
FLOW = 8 << 10
"""When so many bytes have come at once, more are coming: they are waited for..."""
GATHER = 0.005
"""...so many seconds, because a few bytes cost nearly as much time as many. Answers to acks have to wait with them."""


class ReceiveBuffer:
    """Where the bytes of a connection are put, one behind the other: those from `start` to `stop` are not parsed yet.

    What lies there is never moved but for them, at a segment's end, and never changed: others may go on using it.
    `needed` is how many bytes the first frame has, if that is known and they have not all come.
    """

    __slots__ = ("needed", "segment", "start", "stop")

    def __init__(self) -> None:
        self.segment = bytearray()
        self.start = self.stop = self.needed = 0

    def __len__(self) -> int:
        return self.stop - self.start

    def room(self, size: int) -> memoryview:
        """Where the next bytes go, at least `size` of them; `stop` is to be moved behind them."""
        if len(self.segment) - self.stop < size:
            rest = self.segment[self.start : self.stop]
            self.segment = bytearray(max(SEGMENT, self.needed, 2 * len(rest)) + size)
            self.segment[: len(rest)] = rest
            self.start, self.stop = 0, len(rest)
        return memoryview(self.segment)[self.stop :]

    def append(self, data: bytes) -> None:
        """Put `data` there."""
        self.room(len(data))[: len(data)] = data
        self.stop += len(data)


if TYPE_CHECKING:

    class _Base(asyncio.StreamReader):
        """What typeshed does not tell of its base."""

        _eof: bool
        _exception: Exception | None

        async def _wait_for_data(self, name: str) -> None: ...
        def _wakeup_waiter(self) -> None: ...

else:
    _Base = asyncio.StreamReader


class _Reader(_Base):
    """A stream reader whose bytes lie in a `ReceiveBuffer`, which is what `read` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = ReceiveBuffer()
        self._fresh = False

    def received(self, size: int) -> None:
        """So many bytes have been put into the memory."""
        self.memory.stop += size
        self._fresh = True
        self._wakeup_waiter()

    def feed_data(self, data: Any) -> None:
        """Put `data` into the memory: an event loop that will not receive there, as uvloop, gives it instead."""
        self.memory.append(data)
        self.received(0)

    def at_eof(self) -> bool:
        """Whether there is nothing more, and nothing left."""
        return self._eof and not self._fresh

    async def read(self, n: int = -1) -> Any:  # noqa: ARG002
        """The memory, when something new is in it, or nothing more will come."""
        if self._exception is not None:
            raise self._exception
        if not self._fresh and not self._eof:
            await self._wait_for_data("read")
        self._fresh = False
        return self.memory

    async def readline(self) -> bytes:
        """A line, taken out of the memory."""
        memory = self.memory
        while (end := memory.segment.find(b"\n", memory.start, memory.stop)) < 0 and not self.at_eof():
            await self.read()
        end = memory.stop if end < 0 else end + 1
        line = bytes(memory.segment[memory.start : end])
        memory.start = end
        self._fresh = len(memory) > 0
        return line


class _Protocol(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """Has the event loop receive into the reader's memory."""

    def __init__(self, reader: _Reader) -> None:
        super().__init__(reader)
        self._into = reader

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where to receive to."""
        return self._into.memory.room(max(sizehint, ROOM))

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes were received."""
        self._into.received(nbytes)


class Transport(TcpTransport):
    """nats-py's, but `read` gives a `ReceiveBuffer` where no TLS is used, and gathers what comes in small pieces."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flowing = False

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:  # noqa: ARG002
        """Connect; see nats-py."""
        reader = _Reader()
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(lambda: _Protocol(reader), uri.hostname or "", uri.port or 0)
        transport, protocol = await asyncio.wait_for(connecting, connect_timeout)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        self._bare_io_reader = self._io_reader = reader
        self._bare_io_writer = self._io_writer = writer

    async def read(self, buffer_size: int) -> Any:
        """What has come; see nats-py."""
        if self._flowing:
            await self._gather()
        data = await super().read(max(buffer_size, READ))
        self._flowing = len(data) >= FLOW
        return data

    async def _gather(self) -> None:
        """Let what comes wait in the kernel for a moment: every look at it is a turn of the event loop."""
        transport: Any = self._io_writer and self._io_writer.transport
        transport.pause_reading()
        try:
            await asyncio.sleep(GATHER)
        finally:
            transport.resume_reading()


PRIVATE = frozenset({"_bare_io_reader", "_bare_io_writer", "_io_reader", "_io_writer"})
"""What is used here of nats-py's transport, and is not public."""


def supported() -> bool:
    """Whether nats-py's transport is made as this one expects."""
    return vars(TcpTransport()).keys() >= PRIVATE  # type: ignore[no-untyped-call]
