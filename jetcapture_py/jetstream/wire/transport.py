"""A TCP transport for nats-py that reads from the socket directly into the parser's memory.

With TLS or WebSockets, bytes come from nats-py's own transports and are copied.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import ParseResult

import numpy as np
from nats.aio.transport import TcpTransport

SEGMENT = 4 << 20
"""Size of a block of memory in bytes."""
ROOM = 64 << 10
"""Minimum free bytes for a read from the socket."""
READ = 1 << 20
"""Maximum bytes per read that is copied."""
FLOW = 8 << 10
"""Minimum bytes of a read that suggests that more follow, so the next read is delayed by `GATHER`."""
CLOSING = 5.0
"""Seconds in which a connection must close, or it is aborted: the server may have stopped reading."""
_END = re.compile(rb"\n")
GATHER = 0.005
"""Seconds of delay, because small reads take nearly as long as large ones. It also delays answers to acks."""


class ReceiveBuffer:
    """A connection's received bytes; those from `start` to `stop` have not been parsed yet.

    At the end of a segment these are copied to a new one, because messages refer to the parsed bytes. `needed` is the
    size of the first frame if it is known and incomplete, else 0.
    """

    __slots__ = ("needed", "segment", "start", "stop")

    def __init__(self) -> None:
        self.segment = memoryview(bytearray())
        self.start = self.stop = self.needed = 0

    def __len__(self) -> int:
        return self.stop - self.start

    def room(self, size: int) -> memoryview:
        """Return free memory for at least `size` bytes; the caller then advances `stop`."""
        if len(self.segment) - self.stop < size:
            rest = self.segment[self.start : self.stop]
            room = max(SEGMENT, self.needed, 2 * len(rest)) + size
            self.segment = np.empty(room, np.uint8).data  # not cleared, unlike a bytearray
            self.segment[: len(rest)] = rest
            self.start, self.stop = 0, len(rest)
        return self.segment[self.stop :]

    def append(self, data: bytes) -> None:
        """Append a copy of `data`."""
        self.room(len(data))[: len(data)] = data
        self.stop += len(data)


if TYPE_CHECKING:

    class _Base(asyncio.StreamReader):
        """Private members missing from typeshed."""

        _eof: bool
        _exception: Exception | None

        async def _wait_for_data(self, name: str) -> None: ...
        def _wakeup_waiter(self) -> None: ...

else:
    _Base = asyncio.StreamReader


class _Reader(_Base):
    """A stream reader over a `ReceiveBuffer`, which `read` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = ReceiveBuffer()
        self._fresh = False

    def received(self, size: int) -> None:
        """Record that `size` bytes have been written to the memory."""
        self.memory.stop += size
        self._fresh = True
        self._wakeup_waiter()

    def feed_data(self, data: Any) -> None:
        """Append `data`, from event loops such as uvloop that do not use `get_buffer`."""
        self.memory.append(data)
        self.received(0)

    def at_eof(self) -> bool:
        """Whether the connection is closed and everything has been read."""
        return self._eof and not self._fresh

    async def read(self, n: int = -1) -> Any:  # noqa: ARG002
        """Wait for new bytes or the end; return the memory."""
        if self._exception is not None:
            raise self._exception
        if not self._fresh and not self._eof:
            await self._wait_for_data("read")
        self._fresh = False
        return self.memory

    async def readline(self) -> bytes:
        """Read a line and remove it from the memory."""
        memory = self.memory
        while not (line_end := _END.search(memory.segment, memory.start, memory.stop)) and not self.at_eof():
            await self.read()
        end = line_end.end() if line_end else memory.stop
        line = bytes(memory.segment[memory.start : end])
        memory.start = end
        self._fresh = len(memory) > 0
        return line


class _Protocol(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """Makes the event loop receive into the reader's memory."""

    def __init__(self, reader: _Reader) -> None:
        super().__init__(reader)
        self._into = reader

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory to receive into."""
        return self._into.memory.room(max(sizehint, ROOM))

    def buffer_updated(self, nbytes: int) -> None:
        """Record received bytes."""
        self._into.received(nbytes)


class Transport(TcpTransport):
    """Like nats-py's transport, but without TLS `read` returns a `ReceiveBuffer`, and small reads are combined."""

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

    async def wait_closed(self) -> None:
        """Wait until everything is sent and the connection is closed, or abort it: nats-py reconnects only then."""
        writer: asyncio.StreamWriter | None = self._io_writer
        if writer is None:
            return
        closed = asyncio.ensure_future(writer.wait_closed())
        await asyncio.wait({closed}, timeout=CLOSING)
        writer.transport.abort()  # no effect if closed
        await closed

    async def read(self, buffer_size: int) -> Any:
        """Read received bytes; see nats-py."""
        if self._flowing:
            await self._gather()
        data = await super().read(max(buffer_size, READ))
        self._flowing = len(data) >= FLOW
        return data

    async def _gather(self) -> None:
        """Let bytes accumulate in the kernel for a moment, to save iterations of the event loop."""
        transport: Any = self._io_writer and self._io_writer.transport
        transport.pause_reading()
        try:
            await asyncio.sleep(GATHER)
        finally:
            transport.resume_reading()
