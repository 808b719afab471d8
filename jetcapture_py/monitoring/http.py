"""HTTP endpoints of the running process: metrics, liveness, readiness, and a status page.

    /metrics   for Prometheus
    /livez     200 unless only a restart can help: the event loop or the decoder is stuck
    /readyz    200 when connected, consuming, decoding and storing; otherwise 503, with one line per failing check
    /          status page without scripts; /snapshot is the same and does not refresh itself
    /status.json  the facts of the status page

Probes are answered in the server's thread from values that the capture maintains, so they do not wait for its event
loop. Metrics and page are built in that event loop, so that they are consistent. The page's modules are imported when
it is first asked for, so that they do not delay the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from jetcapture_py.monitoring.health import health, stuck
from jetcapture_py.monitoring.history import History
from jetcapture_py.monitoring.http_server import HTML, PLAIN, Answer, HttpServer, serving
from jetcapture_py.monitoring.metrics import CONTENT_TYPE, Metrics

if TYPE_CHECKING:
    from jetcapture_py.capture.state import CaptureState
    from jetcapture_py.monitoring.facts import CaptureFacts

TIMEOUT = 5.0
"""Seconds that the event loop may take to answer, and to start."""
STUCK = 30.0
"""Seconds without progress after which the event loop counts as stuck."""
BEAT = 1.0
"""Seconds between heartbeats of the event loop, and between looks at the health."""
JSON = "application/json"
PAGES = ("/", "/snapshot")
NO_ANSWER = Answer(HTTPStatus.SERVICE_UNAVAILABLE, PLAIN, b"the event loop does not answer\n")


@contextlib.contextmanager
def serve(state: CaptureState, listen: str, server: HttpServer | None = None) -> Iterator[int]:
    """Serve one capture on `listen` inside the block, see `serving`. Call it in the capture's event loop."""
    pages = Pages(state)
    try:
        with serving(pages, listen, server) as port:
            yield port
    finally:
        pages.stop()


class LoopAnswers:
    """Answers that are built in an event loop and asked for in the server's thread. Create it in that event loop."""

    def __init__(self, make: Callable[[str], Coroutine[Any, Any, Answer]]) -> None:
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._being_made: dict[str, asyncio.Future[Answer]] = {}

    async def get(self, path: str) -> Answer:
        """Return the answer, or NO_ANSWER after some seconds; concurrent requests share it."""
        making = self._being_made.get(path)
        if making is None or making.done():
            work = self._make(path)
            try:
                made = asyncio.run_coroutine_threadsafe(work, self._loop)
            except RuntimeError:  # the event loop is closed
                work.close()
                return NO_ANSWER
            making = self._being_made[path] = asyncio.wrap_future(made)
        done, _ = await asyncio.wait((making,), timeout=TIMEOUT)
        return making.result() if done and not making.cancelled() else NO_ANSWER


class Pages:
    """The answers of one capture. Create and stop it in the capture's event loop."""

    def __init__(self, state: CaptureState) -> None:
        self._state = state
        self._metrics = Metrics(state)
        self._history = History(state)
        self._loop = asyncio.get_running_loop()
        self._answers = LoopAnswers(self._make)
        self._beaten = time.monotonic()
        self._running: Future[None] = Future()
        self._next: asyncio.Handle = self._loop.call_soon(self._beat)

    def stop(self) -> None:
        """Stop the heartbeat."""
        self._next.cancel()

    @property
    def drained(self) -> bool:
        """Whether the capture has ended without a failure."""
        return self._state.ended == ""

    def facts(self) -> CaptureFacts:
        """Return the capture's facts. Call it in the capture's event loop."""
        from jetcapture_py.monitoring.facts import gather

        return gather(self._state, self._history)

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        if not self._running.done():
            self._running.set_result(None)
        self._next = self._loop.call_later(BEAT, self._beat)
        self._history.observe()

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
        if path in PAGES:
            answer = await self._answers.get(path)
            return _no_page(self._late()) if answer is NO_ANSWER else answer
        if path in ("/metrics", "/status.json"):
            return await self._answers.get(path)
        return Answer(
            HTTPStatus.NOT_FOUND,
            PLAIN,
            b"not found; available: /, /snapshot, /status.json, /metrics, /livez, /readyz\n",
        )

    async def _livez(self) -> Answer:
        if not self._running.done():
            await asyncio.wait((asyncio.wrap_future(self._running),), timeout=TIMEOUT)
        if not self._running.done() or self._late() > STUCK:
            return NO_ANSWER
        if reason := stuck(self._state):
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, PLAIN, f"{reason}\n".encode())
        return Answer(HTTPStatus.OK, PLAIN, b"alive\n")

    def _readyz(self) -> Answer:
        trouble = [*health(self._state).trouble]
        if (late := self._late()) > TIMEOUT:
            trouble.append(f"running: the event loop has not run for {late:.0f} s")
        status = HTTPStatus.SERVICE_UNAVAILABLE if trouble else HTTPStatus.OK
        return Answer(status, PLAIN, "".join(f"{line}\n" for line in trouble or ("ready",)).encode())

    # ------------------------------------------------------------------ in the capture's event loop

    async def _make(self, path: str) -> Answer:
        if path == "/metrics":
            return Answer(HTTPStatus.OK, CONTENT_TYPE, self._metrics.text())
        from jetcapture_py.monitoring.facts import status_json
        from jetcapture_py.monitoring.view import document

        facts = self.facts()
        if path == "/status.json":
            return Answer(HTTPStatus.OK, JSON, status_json([facts]))
        return Answer(HTTPStatus.OK, HTML, document(facts, refresh=path == "/").encode())


def _no_page(seconds: float) -> Answer:
    from jetcapture_py.monitoring.view import no_answer

    return Answer(HTTPStatus.SERVICE_UNAVAILABLE, HTML, no_answer(seconds).encode())
