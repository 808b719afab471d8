"""HTTP endpoints of the running process: metrics, liveness, readiness, and a status page.

    /metrics      for Prometheus
    /livez        200 unless only a restart can help: the event loop or the decoder is stuck
    /readyz       200 when connected, consuming, decoding and storing; otherwise 503, with one line per failing check
    /             status page without scripts; /snapshot is the same and does not refresh itself
    /status.json  the facts of the status page

A process with several captures joins them: each sample of a metric has the labels `capture` and `stream`, probes answer
503 if any capture's do, with its lines after the capture's name, and the page lists the captures. /{name}/ is the
status page of one, and /{name}/metrics, /{name}/livez and so on are its own.

Probes are answered in the client's thread from values that the capture maintains, so they do not wait for its event
loop. Metrics and page are built in that event loop, so that they are consistent. The page's modules are imported when
it is first asked for, so that they do not delay the start.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import asdict
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from jetcapture_py.monitoring.health import health, stuck
from jetcapture_py.monitoring.history import History
from jetcapture_py.monitoring.http_server import HTML, PLAIN, Answer
from jetcapture_py.monitoring.metrics import CONTENT_TYPE, JoinedMetrics, MaintenanceMetrics, Metrics
from jetcapture_py.text import age

if TYPE_CHECKING:
    from jetcapture_py.capture.state import CaptureState
    from jetcapture_py.monitoring.facts import CaptureFacts, MaintenanceState

TIMEOUT = 5.0
"""Seconds that the event loop may take to answer, and to start."""
STUCK = 30.0
"""Seconds without progress after which the event loop counts as stuck."""
BEAT = 1.0
"""Seconds between heartbeats of the event loop, and between looks at the health."""
JSON = "application/json"
PAGES, DATA = ("/", "/snapshot"), ("/metrics", "/status.json")
PROBES = {"/livez": "alive", "/readyz": "ready"}
"""Probes, and what they say when nothing is wrong."""
NO_ANSWER = Answer(HTTPStatus.SERVICE_UNAVAILABLE, PLAIN, b"the event loop does not answer\n")


def _made_in(loop: asyncio.AbstractEventLoop, making: Coroutine[Any, Any, Answer]) -> Answer:
    """Return the answer that an event loop makes, or NO_ANSWER after some seconds."""
    try:
        made = asyncio.run_coroutine_threadsafe(making, loop)
    except RuntimeError:  # the event loop is closed
        making.close()
        return NO_ANSWER
    try:
        return made.result(TIMEOUT)
    except (TimeoutError, CancelledError):
        made.cancel()
        return NO_ANSWER


class Pages:
    """The answers of one capture. Create and stop it in the capture's event loop."""

    def __init__(self, state: CaptureState) -> None:
        self.state = state
        self._metrics = Metrics(state)
        self._history = History(state)
        self._loop = asyncio.get_running_loop()
        self._beaten = time.monotonic()
        self._running = threading.Event()
        self._next: asyncio.Handle = self._loop.call_soon(self._beat)

    def stop(self) -> None:
        self._next.cancel()

    @property
    def drained(self) -> bool:
        """Whether the capture has ended without a failure."""
        return self.state.ended == ""

    def facts(self) -> CaptureFacts:
        """Return the capture's facts. Call it in the capture's event loop."""
        from jetcapture_py.monitoring.facts import gather

        return gather(self.state, self._history)

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        self._running.set()
        self._next = self._loop.call_later(BEAT, self._beat)
        self._history.observe()

    def _late(self) -> float:
        """Seconds since the event loop was last known to run."""
        return time.monotonic() - self._beaten

    # ------------------------------------------------------------------ in threads of the server

    def answer(self, path: str) -> Answer:
        """See `http_server.Application`."""
        if path in PROBES:
            return _probe(path, self.trouble(path))
        if path not in (*PAGES, *DATA):
            return _not_found()
        answer = _made_in(self._loop, self._make(path))
        return _no_page(self._late()) if answer is NO_ANSWER and path in PAGES else answer

    def trouble(self, probe: str) -> Sequence[str]:
        """Return one line for each thing that makes a probe fail."""
        if probe == "/readyz":
            late = self._late()
            running = [f"running: the event loop has not run for {age(late)}"] if late > TIMEOUT else []
            return [*health(self.state).lines, *running]
        if not self._running.wait(TIMEOUT) or self._late() > STUCK:
            return [NO_ANSWER.body.decode().strip()]
        reason = stuck(self.state)
        return [] if reason is None else [reason]

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


class Site:
    """The answers for all captures; with `single`, those of the only one. Create and change it in their event loop."""

    def __init__(self, *, single: bool) -> None:
        self._single = single
        self._loop = asyncio.get_running_loop()
        self._pages: Mapping[str, Pages] = {}
        self._failures: Mapping[str, str] = {}

    def show(self, states: Mapping[str, CaptureState], failures: Mapping[str, str]) -> None:
        """Answer for these captures and no others; `failures` has why a capture failed or could not start, by name."""
        same = {name: pages for name, pages in self._pages.items() if states.get(name) is pages.state}
        for name in self._pages.keys() - same.keys():
            self._pages[name].stop()
        self._pages = {name: same.get(name) or Pages(state) for name, state in states.items()}
        self._failures = failures

    # ------------------------------------------------------------------ in threads of the server

    def answer(self, path: str) -> Answer:
        """See `http_server.Application`."""
        if self._single:
            return next(iter(self._pages.values())).answer(path)
        if path in PROBES:
            return _probe(path, self._trouble(path))
        if path in (*PAGES, *DATA):
            return _made_in(self._loop, self._make(path))
        name, slash, rest = path.removeprefix("/").partition("/")
        pages = self._pages.get(unquote(name))
        if pages is not None and not slash:  # the page's links are relative
            return Answer(HTTPStatus.PERMANENT_REDIRECT, PLAIN, b"", f"/{quote(unquote(name), safe='')}/")
        return _not_found(", /{name}/") if pages is None else pages.answer(f"/{rest}")

    def _trouble(self, probe: str) -> Sequence[str]:
        """Return the lines of all captures, after their names."""
        failures = self._failures if probe == "/readyz" else {}
        pages = {name: each for name, each in sorted(self._pages.items()) if name not in failures and not each.drained}
        lines = [f"{name}: {line}" for name, each in pages.items() for line in each.trouble(probe)]
        return [*(f"{name}: failed: {reason}" for name, reason in sorted(failures.items())), *lines]

    # ------------------------------------------------------------------ in the captures' event loop

    async def _make(self, path: str) -> Answer:
        if path == "/metrics":
            states = {name: pages.state for name, pages in self._pages.items()}
            return Answer(HTTPStatus.OK, CONTENT_TYPE, JoinedMetrics(states, len(self._failures)).text())
        from jetcapture_py.monitoring.facts import status_json
        from jetcapture_py.monitoring.view import overview

        captures = {name: pages.facts() for name, pages in sorted(self._pages.items())}
        if path == "/status.json":
            return Answer(HTTPStatus.OK, JSON, status_json([*captures.values()]))
        return Answer(HTTPStatus.OK, HTML, overview(captures, self._failures, refresh=path == "/").encode())


class MaintenanceSite:
    """The answers of `jetcapture maintain`; `states` has the archives by the names of their captures.

    It is alive while it runs, and ready unless an archive's last pass failed.
    """

    def __init__(self, states: Mapping[str, MaintenanceState]) -> None:
        self._states = states

    def answer(self, path: str) -> Answer:
        """See `http_server.Application`."""
        states = dict(sorted(self._states.items()))
        if path in PROBES:
            failed = [
                f"{name}: the last pass failed: {state.failure}" for name, state in states.items() if state.failure
            ]
            return _probe(path, failed if path == "/readyz" else ())
        if path == "/metrics":
            return Answer(HTTPStatus.OK, CONTENT_TYPE, MaintenanceMetrics(states).text())
        if path == "/status.json":
            archives = [{"capture": name, **asdict(state)} for name, state in states.items()]
            return Answer(HTTPStatus.OK, JSON, json.dumps({"archives": archives}).encode() + b"\n")
        if path not in PAGES:
            return _not_found()
        from jetcapture_py.monitoring.facts import this_process
        from jetcapture_py.monitoring.view import maintenance

        return Answer(HTTPStatus.OK, HTML, maintenance(this_process(), states, refresh=path == "/").encode())


def _probe(path: str, trouble: Sequence[str]) -> Answer:
    status = HTTPStatus.SERVICE_UNAVAILABLE if trouble else HTTPStatus.OK
    return Answer(status, PLAIN, "".join(f"{line}\n" for line in trouble or (PROBES[path],)).encode())


def _no_page(seconds: float) -> Answer:
    from jetcapture_py.monitoring.view import no_answer

    return Answer(HTTPStatus.SERVICE_UNAVAILABLE, HTML, no_answer(seconds).encode())


def _not_found(more: str = "") -> Answer:
    text = f"not found; available: /, /snapshot, /status.json, /metrics, /livez, /readyz{more}\n"
    return Answer(HTTPStatus.NOT_FOUND, PLAIN, text.encode())
