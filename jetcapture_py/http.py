"""What can be asked of the running process: metrics, liveness, readiness, and a page for people.

    /metrics   for Prometheus
    /livez     200 while the event loop runs; otherwise 503, or nothing at all: restart the process
    /readyz    200 when connected, consuming and storing; otherwise 503, with a line for each that is not so
    /          the same for people, as a page without scripts

Requests are read in threads of their own, so that no slow client is in the pipeline's way; answers are made in its
event loop, so that they are consistent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from jetcapture_py.errors import JetcaptureError
from jetcapture_py.health import health
from jetcapture_py.log import event
from jetcapture_py.metrics import CONTENT_TYPE, Metrics

if TYPE_CHECKING:
    from jetcapture_py.capture import Capture

log = logging.getLogger("jetcapture.http")

PATIENCE = 5.0
"""Seconds that the event loop may take for an answer."""
SLOWEST_CLIENT = 10.0
MOST_CLIENTS = 32
PLAIN, HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"


class Answer(NamedTuple):
    """What is sent back."""

    status: HTTPStatus
    type: str
    body: bytes


@contextlib.contextmanager
def serve(capture: Capture, listen: str) -> Iterator[int]:
    """Answer on `listen`, `address:port`, inside the block; gives the port. Call it in the capture's event loop.

    Raises JetcaptureError when nothing can listen there.
    """
    loop = asyncio.get_running_loop()
    pages = _Pages(capture)

    class Handler(_Handler):
        def answer(self, path: str) -> Answer:
            async def made() -> Answer:
                return pages.answer(path)

            waiting: Future[Answer] = asyncio.run_coroutine_threadsafe(made(), loop)
            return waiting.result(PATIENCE)

    server = _Server(_listening(listen), Handler)
    port = int(server.socket.getsockname()[1])
    thread = threading.Thread(target=server.serve_forever, name="http", daemon=True)
    thread.start()
    event(log, logging.INFO, "http.listening", listen=listen, port=port)
    try:
        yield port
    finally:
        threading.Thread(target=server.shutdown, daemon=True).start()  # it waits for answers that this loop has to make
        server.socket.close()


def _listening(listen: str) -> socket.socket:
    parts = urlsplit(f"//{listen}")
    host, port = parts.hostname or "", parts.port or 0
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=both, backlog=32)
    except OSError as error:
        raise JetcaptureError(f"http.listen: cannot listen on {listen}: {os.strerror(error.errno or 0)}") from error


class _Server(ThreadingHTTPServer):
    """Takes a socket that listens already."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, handler: type[_Handler]) -> None:
        super().__init__(listening.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self._free = threading.BoundedSemaphore(MOST_CLIENTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a client on, in a thread; turn it away when there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a client to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Leave clients alone that went away."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "jetcapture", ""
    timeout = SLOWEST_CLIENT

    def answer(self, path: str) -> Answer:
        """What is to be sent. In a thread of this request's own."""
        raise NotImplementedError

    def do_GET(self) -> None:
        """Answer one request."""
        try:
            status, kind, body = self.answer(urlsplit(self.path).path)
        except (TimeoutError, RuntimeError):  # RuntimeError: the loop is closed
            status, kind, body = HTTPStatus.SERVICE_UNAVAILABLE, PLAIN, b"the event loop does not answer\n"
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")):
            self.send_header(name, value)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base's signature
        """Requests are not logged."""


class _Pages:
    """The answers; to be asked in the capture's event loop."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._metrics = Metrics(capture)

    def answer(self, path: str) -> Answer:
        if path == "/livez":
            return Answer(HTTPStatus.OK, PLAIN, b"alive\n")
        if path == "/readyz":
            trouble = health(self._capture).trouble
            status = HTTPStatus.SERVICE_UNAVAILABLE if trouble else HTTPStatus.OK
            return Answer(status, PLAIN, "".join(f"{line}\n" for line in trouble or ("ready",)).encode())
        if path == "/metrics":
            return Answer(HTTPStatus.OK, CONTENT_TYPE, self._metrics.text())
        if path == "/":
            return Answer(HTTPStatus.OK, HTML, self._page().encode())
        return Answer(HTTPStatus.NOT_FOUND, PLAIN, b"there are /, /metrics, /livez and /readyz\n")

    def _page(self) -> str:
        source = self._capture.config.source
        title = escape(f"{source.stream} / {source.consumer}")
        trouble = health(self._capture).trouble
        verdict = "".join(f"<p class=bad>{escape(line)}</p>" for line in trouble) or "<p class=good>ready</p>"
        rows = "".join(
            f"<tr><td>{escape(text)}<td>{escape(labels)}<td class=number>{value}"
            for text, labels, value in self._metrics.rows()
        )
        return PAGE.format(title=title, verdict=verdict, rows=rows)


PAGE = """<!doctype html>
<html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width"><meta http-equiv=refresh content=5>
<title>{title} - jetcapture</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100% }}
td {{ border-top: 1px solid #8884; padding: .2rem .5rem .2rem 0; vertical-align: top }}
.number {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }}
.good::before {{ content: "\\2713  "; color: #2a2 }} .bad::before {{ content: "\\2717  "; color: #d33 }}
</style>
<h1>{title}</h1>
{verdict}
<table>{rows}</table>
<p><a href=/metrics>metrics</a> <a href=/readyz>readyz</a> <a href=/livez>livez</a></p>
"""
