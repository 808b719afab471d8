"""What stands between a daemon and what it talks to, and spoils it: TCP for NATS, HTTP for S3."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Self

import aiohttp
from aiohttp import web
from yarl import URL

Direction = Literal["up", "down"]
"""`up` is towards the server."""

_CHUNK = 64 << 10
_BUFFER = 128 << 10
"""Bytes that the kernel keeps of a direction, twice: with its usual 10 MB, nobody would notice who does not read."""


class Proxy:
    """Forwards TCP connections to a port, which may change. `heal` makes it transparent again."""

    def __init__(self, target: Callable[[], int]) -> None:
        self._target = target
        self._writers: dict[Direction, set[asyncio.StreamWriter]] = {"up": set(), "down": set()}
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[Direction, asyncio.Event] = {"up": asyncio.Event(), "down": asyncio.Event()}
        self.delay = 0.0
        self.rate = 0.0
        self.refusing = False
        self.port = 0
        self.heal()

    async def __aenter__(self) -> Self:
        listening = _small_buffers()
        listening.bind(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._accept, sock=listening)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def heal(self) -> None:
        """Every fault ends, but for connections that are closed already."""
        self.delay = self.rate = 0.0
        self.refusing = False
        for gate in self._open.values():
            gate.set()

    def freeze(self, *directions: Direction) -> None:
        """Connections stay, but nothing passes: what was sent meanwhile arrives afterwards."""
        for direction in directions:
            self._open[direction].clear()

    def cut(self) -> None:
        """Reset every connection; what was on its way is lost."""
        for writer in [*self._writers["up"], *self._writers["down"]]:
            writer.transport.abort()

    def half_close(self, direction: Direction) -> None:
        """Say to one side that nothing more will come; what it still sends goes on to the other."""
        for writer in list(self._writers[direction]):
            with suppress(OSError, RuntimeError):
                writer.write_eof()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._forward(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        connecting = _small_buffers()
        try:
            await asyncio.get_running_loop().sock_connect(connecting, ("127.0.0.1", self._target()))
            server_reader, server_writer = await asyncio.open_connection(sock=connecting)
        except OSError:
            connecting.close()
            writer.transport.abort()
            return
        self._writers["up"].add(server_writer)
        self._writers["down"].add(writer)
        try:
            await asyncio.gather(
                self._pump(reader, server_writer, "up"),
                self._pump(server_reader, writer, "down"),
            )
        except (OSError, RuntimeError):
            pass  # one of them is gone
        finally:
            self._writers["up"].discard(server_writer)
            self._writers["down"].discard(writer)
            writer.transport.abort()
            server_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
        while data := await reader.read(_CHUNK):
            if self.delay:
                await asyncio.sleep(self.delay)
            if self.rate:
                await asyncio.sleep(len(data) / self.rate)
            await self._open[direction].wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError  # the other direction ends with it


def _small_buffers() -> socket.socket:
    made = socket.socket()
    made.settimeout(0)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # accepted connections inherit them
        made.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    return made


Trouble = Literal["500", "503", "403", "hang", "cut", "lost answer", "slow"]
TROUBLES: tuple[Trouble, ...] = ("500", "503", "403", "hang", "cut", "lost answer", "slow")
_ANSWERS = {"500": (500, "InternalError"), "503": (503, "SlowDown"), "403": (403, "AccessDenied")}


class HttpProxy:
    """Forwards HTTP requests to S3 or its like, and spoils a share of the writing ones in the way of `trouble`."""

    def __init__(self, target: str, draw: random.Random) -> None:
        self.trouble: Trouble | None = None
        self.share = 1.0
        self.counts: Counter[str] = Counter()
        self._target, self._draw = target, draw
        self._healed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.heal()
        await self._runner.cleanup()
        await self._session.close()

    def heal(self) -> None:
        """Every request is answered again; those that hang are lost."""
        self.trouble = None
        self._healed.set()

    def spoil(self, trouble: Trouble, share: float) -> None:
        """From now on that happens to a share of the requests that write."""
        self._healed.clear()
        self.trouble, self.share = trouble, share

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        writes = request.method in ("PUT", "POST", "DELETE")
        trouble = self.trouble if writes and self._draw.random() < self.share else None
        if trouble is not None:
            self.counts[trouble] += 1
        if trouble == "cut":  # in the middle of the body, as far as it is large enough to have one
            await request.content.read(max(1, (request.content_length or 2) // 2))
            return self._abort(request)
        body = await request.read()
        if trouble in _ANSWERS:
            status, code = _ANSWERS[trouble]
            text = f"<Error><Code>{code}</Code><Message>chaos</Message><RequestId>0</RequestId></Error>"
            return web.Response(status=status, text=text, content_type="application/xml")
        if trouble == "hang":
            await self._healed.wait()
            return self._abort(request)
        if trouble == "slow":
            await asyncio.sleep(len(body) / 50_000 + 0.2)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        url = f"{self._target}{request.raw_path}"
        async with self._session.request(
            request.method, URL(url, encoded=True), data=body, headers=headers, allow_redirects=False
        ) as answer:
            content = await answer.read()
            if trouble == "lost answer":
                return self._abort(request)
            kept = [(name, value) for name, value in answer.headers.items() if name.lower() not in _HOP]
            if request.method == "HEAD":
                kept.append(("Content-Length", answer.headers.get("Content-Length", "0")))
            return web.Response(status=answer.status, body=content, headers=kept)

    def _abort(self, request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)


_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive", "expect", "server", "date", "host"}
