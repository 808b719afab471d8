"""HTTP endpoints of the running process: metrics, liveness, readiness, and a status page.

    /metrics   for Prometheus
    /livez     200 unless only a restart can help: the event loop or the decoder is stuck
    /readyz    200 when connected, consuming, decoding and storing; otherwise 503, with one line per failing check
    /          status page without scripts

Probes are answered in the server's thread from values that the capture maintains, so they do not wait for its event
loop. Metrics and page are built in that event loop, so that they are consistent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from html import escape
from http import HTTPStatus
from typing import TYPE_CHECKING

from jetcapture_py.log import event
from jetcapture_py.monitoring.health import health, stuck
from jetcapture_py.monitoring.http_server import MOST_CLIENTS, PLAIN, Answer, HttpServer, Starting
from jetcapture_py.monitoring.metrics import CONTENT_TYPE, Metrics

if TYPE_CHECKING:
    from jetcapture_py.capture.state import CaptureState

log = logging.getLogger("jetcapture.http")

TIMEOUT = 5.0
"""Seconds that the event loop may take to answer, and to start."""
STUCK = 30.0
"""Seconds without progress after which the event loop counts as stuck."""
BEAT = 0.25
"""Seconds between heartbeats of the event loop."""
HTML = "text/html; charset=utf-8"
_NO_ANSWER = Answer(HTTPStatus.SERVICE_UNAVAILABLE, PLAIN, b"the event loop does not answer\n")


@contextlib.contextmanager
def serve(state: CaptureState, listen: str, server: HttpServer | None = None) -> Iterator[int]:
    """Serve on `listen`, `address:port`, inside the block; yields the port. Call it in the capture's event loop.

    `server` is already listening there. Raises JetcaptureError when the address cannot be used.
    """
    server = server or HttpServer(listen, Starting(), most_clients=MOST_CLIENTS)
    pages = _Pages(state)
    server.application = pages
    event(log, logging.INFO, "http.listening", listen=listen, port=server.port)
    try:
        yield server.port
    finally:
        pages.stop()
        server.stop()


class _Pages:
    """The answers of one capture. Create and stop it in the capture's event loop."""

    def __init__(self, state: CaptureState) -> None:
        self._state = state
        self._metrics = Metrics(state)
        self._loop = asyncio.get_running_loop()
        self._beaten = time.monotonic()
        self._running: Future[None] = Future()
        self._next: asyncio.Handle = self._loop.call_soon(self._beat)
        self._being_made: dict[str, asyncio.Future[Answer]] = {}

    def stop(self) -> None:
        """Stop the heartbeat."""
        self._next.cancel()

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        if not self._running.done():
            self._running.set_result(None)
        self._next = self._loop.call_later(BEAT, self._beat)

    def _late(self) -> float:
        """Seconds since the event loop was last known to run."""
        return time.monotonic() - self._beaten

    # ------------------------------------------------------------------ in the server's thread

    async def answer(self, path: str) -> Answer:
        """See `http_server.Application`."""
        if path == "/livez":
            return await self._livez()
        if path == "/readyz":
            return self._readyz()
        if path in ("/metrics", "/"):
            return await self._from_capture(path)
        return Answer(HTTPStatus.NOT_FOUND, PLAIN, b"not found; available: /, /metrics, /livez, /readyz\n")

    async def _livez(self) -> Answer:
        if not self._running.done():
            await asyncio.wait((asyncio.wrap_future(self._running),), timeout=TIMEOUT)
        if not self._running.done() or self._late() > STUCK:
            return _NO_ANSWER
        if reason := stuck(self._state):
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, PLAIN, f"{reason}\n".encode())
        return Answer(HTTPStatus.OK, PLAIN, b"alive\n")

    def _readyz(self) -> Answer:
        trouble = [*health(self._state).trouble]
        if (late := self._late()) > TIMEOUT:
            trouble.append(f"running: the event loop has not run for {late:.0f} s")
        status = HTTPStatus.SERVICE_UNAVAILABLE if trouble else HTTPStatus.OK
        return Answer(status, PLAIN, "".join(f"{line}\n" for line in trouble or ("ready",)).encode())

    async def _from_capture(self, path: str) -> Answer:
        """Return an answer built in the capture's event loop; concurrent requests share it."""
        making = self._being_made.get(path)
        if making is None or making.done():
            work = self._make(path)
            try:
                made = asyncio.run_coroutine_threadsafe(work, self._loop)
            except RuntimeError:  # the event loop is closed
                work.close()
                return _NO_ANSWER
            making = self._being_made[path] = asyncio.wrap_future(made)
        done, _ = await asyncio.wait((making,), timeout=TIMEOUT)
        return making.result() if done and not making.cancelled() else _NO_ANSWER

    # ------------------------------------------------------------------ in the capture's event loop

    async def _make(self, path: str) -> Answer:
        if path == "/metrics":
            return Answer(HTTPStatus.OK, CONTENT_TYPE, self._metrics.text())
        return Answer(HTTPStatus.OK, HTML, self._page().encode())

    def _page(self) -> str:
        source = self._state.config.source
        title = escape(f"{source.stream} / {source.consumer}")
        trouble = health(self._state).trouble
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
