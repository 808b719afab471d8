"""A small HTTP server with its own thread and event loop: it answers while the rest of the process is busy.

The number of clients, the size of requests and the time per client are limited. At the limit a new client replaces an
idle one, so open connections cannot block a probe.

It starts before most of the program is imported, so this module imports little.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from jetcapture_py.errors import JetcaptureError
from jetcapture_py.log import event

log = logging.getLogger("jetcapture.http")

DEFAULT_LISTEN = "127.0.0.1:8080"
BACKLOG = 128
MAX_CLIENTS = 32
MAX_REQUEST_BYTES = 8192
IDLE = 3.0
"""Seconds that a client may take to send a request."""
SLOWEST_CLIENT = 10.0
"""Seconds from then on until the answer must be sent."""
MAX_STARTING = 300.0
"""Seconds that the program may take to start before it counts as stuck."""
PLAIN = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
_STARTING = (
    b"<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=1>"
    b"<title>Starting \xc2\xb7 jetcapture</title><p>Starting\n"
)
"""The page until there is a status page; it reloads itself."""
_METHODS = (b"GET", b"HEAD")


class Answer(NamedTuple):
    """An HTTP response."""

    status: HTTPStatus
    type: str
    body: bytes
    location: str = ""
    """Where a redirect leads."""


class Application(Protocol):
    """Builds the answers."""

    async def answer(self, path: str) -> Answer:
        """Answer a GET request for `path`, without its query. Runs in the server's event loop, so it must not block."""
        ...


class Starting:
    """Answers while the program starts: it is alive and not ready."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def answer(self, path: str) -> Answer:
        if path == "/livez" and time.monotonic() - self._since < MAX_STARTING:
            return Answer(HTTPStatus.OK, PLAIN, b"alive\n")
        if path == "/":
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, HTML, _STARTING)
        return Answer(HTTPStatus.SERVICE_UNAVAILABLE, PLAIN, b"starting\n")


class HttpServer:
    """Serves an application, until `stop`. Raises JetcaptureError when it cannot listen on `listen`, `address:port`."""

    def __init__(self, listen: str, application: Application, *, max_clients: int = MAX_CLIENTS) -> None:
        self.listen, self.application = listen, application
        self._max_clients = max_clients
        self._socket = _listening(listen)
        self.port = int(self._socket.getsockname()[1])
        self._clients: dict[_Client, None] = {}  # oldest first
        self._end: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._accept()), name="http", daemon=True)
        self._thread.start()

    def serve(self, application: Application) -> None:
        """Serve another application from now on."""
        self.application = application
        host = urlsplit(f"//{self.listen}").hostname
        if host in (None, "0.0.0.0", "::"):  # noqa: S104  all addresses
            host = "localhost"
        page = f"http://{f'[{host}]' if ':' in str(host) else host}:{self.port}/"  # for a browser on this machine
        event(log, logging.INFO, "http.listening", listen=self.listen, port=self.port, page=page)

    def stop(self) -> None:
        """Close all connections and stop listening. May be called again."""
        if not self._end.done():
            self._end.set_result(None)
        self._thread.join()

    async def _accept(self) -> None:
        server = await asyncio.start_server(
            self._connected, sock=self._socket, backlog=BACKLOG, limit=MAX_REQUEST_BYTES
        )
        await asyncio.wrap_future(self._end)
        server.close()
        for client in self._clients:
            client.drop()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=0)  # the next request is read when this answer has been taken
        client = _Client(reader, writer)
        if len(self._clients) >= self._max_clients:
            other = min(self._clients, key=lambda each: each.busy)  # the oldest idle one, or else the oldest
            del self._clients[other]
            other.drop()
        self._clients[client] = None
        try:
            while await self._exchange(client):
                client.busy = False
        except (OSError, EOFError, ValueError, TimeoutError, asyncio.LimitOverrunError):
            pass  # it has gone, is too slow, or speaks something else
        except asyncio.CancelledError:
            pass  # it was dropped; asyncio would log that
        finally:
            self._clients.pop(client, None)
            client.close()

    async def _exchange(self, client: _Client) -> bool:
        """One request and its answer; whether another may follow. Raises whatever is wrong with the client."""
        async with asyncio.timeout(IDLE):
            head = await client.reader.readuntil(b"\r\n\r\n")
        client.busy = True
        request, *headers = head[:-4].split(b"\r\n")
        method, target, version = request.split(b" ")
        path = urlsplit(target.decode("latin-1")).path
        if not version.startswith(b"HTTP/1."):
            return False
        async with asyncio.timeout(SLOWEST_CLIENT):
            if method in _METHODS:
                answer = await self._answer(path)
            else:
                answer = Answer(HTTPStatus.NOT_IMPLEMENTED, PLAIN, b"only GET and HEAD\n")
            goes_on = method in _METHODS and version == b"HTTP/1.1" and not any(map(_ends, headers))
            client.writer.write(_head(answer, goes_on=goes_on) + (b"" if method == b"HEAD" else answer.body))
            await client.writer.drain()
        return goes_on

    async def _answer(self, path: str) -> Answer:
        try:
            return await self.application.answer(path)
        except Exception as error:
            event(log, logging.ERROR, "http.failed", error=error)
            return Answer(HTTPStatus.INTERNAL_SERVER_ERROR, PLAIN, b"internal error\n")


class _Client:
    """A connection; it is `busy` from its request to its answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.busy = False
        self._task = asyncio.current_task()

    def drop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """Close it; what it has not taken yet is lost."""
        transport = self.writer.transport
        if transport.get_write_buffer_size():
            transport.abort()
        else:
            transport.close()


def _ends(header: bytes) -> bool:
    """Whether no further request can be read after one with this header: the last one, or one with a body."""
    name, _, value = header.lower().partition(b":")
    return name in (b"content-length", b"transfer-encoding") or (name == b"connection" and b"close" in value)


def _head(answer: Answer, *, goes_on: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        "Server: jetcapture",
        f"Content-Type: {answer.type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; img-src data:",
        *([f"Location: {answer.location}"] if answer.location else []),
        *([] if goes_on else ["Connection: close"]),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def _listening(listen: str) -> socket.socket:
    parts = urlsplit(f"//{listen}")
    host, port = parts.hostname or "", parts.port or 0
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=both, backlog=BACKLOG)
    except OSError as error:
        raise JetcaptureError(f"http.listen: cannot listen on {listen}: {os.strerror(error.errno or 0)}") from error


def start_early(*arguments: Path, listen: str | None = None) -> HttpServer | None:
    """Answer probes before the configurations have been checked: on `listen`, or the address that they seem to say.

    None where that is unclear, off, or fails: reading the configurations then reports what is wrong.
    """
    try:
        address = listen or _stated_address(arguments)
        return None if address is None else HttpServer(address, Starting())
    except (OSError, ValueError, JetcaptureError):
        return None


def _stated_address(arguments: Sequence[Path]) -> str | None:
    """Return the first address in the files, or the default; None if `http` is off. Raises ValueError and others."""
    from jetcapture_py.config import yaml_text

    for path in chain.from_iterable(map(yaml_text.expand, arguments)):
        data = yaml_text.read(path.read_text("utf-8-sig"), os.environ)
        section = data.get("http", {}) if isinstance(data, dict) else None
        if not isinstance(section, dict):
            return None
        if section.get("listen"):
            return str(section["listen"])
    return DEFAULT_LISTEN
