"""A small HTTP server in threads of its own: it answers while the rest of the process is busy.

A connection serves one request; a client slower than `SLOWEST_CLIENT` is disconnected. Each connection has its own
thread, so that open ones cannot block a probe.

It starts before most of the program is imported, so this module imports little.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from jetcapture_py.errors import JetcaptureError
from jetcapture_py.log import event

log = logging.getLogger("jetcapture.http")

DEFAULT_LISTEN = "127.0.0.1:8080"
BACKLOG = 128
SLOWEST_CLIENT = 3.0
"""Maximum seconds for a client to send more of its request, or to receive the answer."""
STOP_WITHIN = 0.1
"""Maximum seconds until the server stops."""
MAX_STARTING = 300.0
"""Maximum seconds of the program's start; longer counts as stuck."""
PLAIN = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
_STARTING = (
    b"<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=1>"
    b"<title>Starting \xc2\xb7 jetcapture</title><p>Starting\n"
)
"""The page until there is a status page; it reloads itself."""


class Answer(NamedTuple):
    """An HTTP response."""

    status: HTTPStatus
    type: str
    body: bytes
    location: str = ""
    """Target of a redirect."""


class Application(Protocol):
    """Builds the answers."""

    def answer(self, path: str) -> Answer:
        """Answer a GET request for `path`, without its query. Runs in the client's thread."""
        ...


class Starting:
    """Answers while the program starts: it is alive and not ready."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def answer(self, path: str) -> Answer:
        if path == "/livez" and time.monotonic() - self._since < MAX_STARTING:
            return Answer(HTTPStatus.OK, PLAIN, b"alive\n")
        if path == "/":
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, HTML, _STARTING)
        return Answer(HTTPStatus.SERVICE_UNAVAILABLE, PLAIN, b"starting\n")


class HttpServer(ThreadingHTTPServer):
    """Serves an application, until `stop`. Raises JetcaptureError when it cannot listen on `listen`, `address:port`."""

    def __init__(self, listen: str, application: Application) -> None:
        listening = _listening(listen)
        super().__init__(listening.getsockname(), _Request, bind_and_activate=False)
        self.socket.close()
        self.socket, self.port = listening, int(listening.getsockname()[1])
        self.listen, self.application = listen, application
        self._thread = threading.Thread(target=self.serve_forever, args=(STOP_WITHIN,), name="http", daemon=True)
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
        """Stop listening. Safe to call again."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
            self.server_close()

    def answer(self, path: str) -> Answer:
        try:
            return self.application.answer(path)
        except Exception as error:
            event(log, logging.ERROR, "http.failed", error=error)
            return Answer(HTTPStatus.INTERNAL_SERVER_ERROR, PLAIN, b"internal error\n")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: the client has gone, or is too slow."""


class _Request(BaseHTTPRequestHandler):
    """One request of a client."""

    server: HttpServer
    protocol_version = "HTTP/1.1"
    timeout = SLOWEST_CLIENT

    def do_GET(self) -> None:
        answer = self.server.answer(urlsplit(self.path).path)
        self.send_response(answer.status)
        for name, value in (
            ("Content-Type", answer.type),
            ("Content-Length", str(len(answer.body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; img-src data:"),
            ("Location", answer.location),
            ("Connection", "close"),
        ):
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(answer.body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def version_string(self) -> str:
        return "jetcapture"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        """Log nothing."""


def server_at(listen: str | None, present: HttpServer | None, *, required: bool) -> HttpServer | None:
    """Return a server at an address: the current one if it already listens there. Raises JetcaptureError.

    Unless the address is `required`, a port in use is not an error: replicas may share a machine.
    """
    if present is not None and present.listen == listen:
        return present
    if present is not None and isinstance(present.application, Starting):
        present.stop()  # it has only answered probes, maybe on the same port
    try:
        return None if listen is None else HttpServer(listen, Starting())
    except JetcaptureError as error:
        if required:
            raise
        event(log, logging.WARNING, "http.off", reason=str(error))
        return None


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
    """Answer probes before the configurations have been checked: on `listen`, or on their apparent address.

    Return None if the address is unclear, off, or fails: reading the configurations then reports the problem.
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
