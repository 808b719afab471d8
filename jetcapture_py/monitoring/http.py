"""HTTP endpoints of the running process: metrics, liveness, readiness, and a status page.

    /metrics      for Prometheus
    /livez        200 unless only a restart can help: the event loop or the decoder is stuck
    /readyz       200 when connected, consuming, decoding and storing; otherwise 503, with one line per failing check
    /             status page without scripts; /snapshot is the same and does not refresh itself
    /status.json  the facts of the status page

A process with several captures joins them: each sample of a metric has the labels `capture` and `stream`, probes answer
503 if any capture's do, with its lines after the capture's name, and the page lists the captures. /{name}/ is the
status page of one, and /{name}/metrics, /{name}/livez and so on are its own.

Answers are made in the client's thread from the last facts, which the captures' event loop makes once a second. Their
age is the loop's heartbeat. The page's modules are imported with its first request, so that they do not delay the
start.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from http import HTTPStatus
from traceback import format_exc
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from jetcapture_py.log import about, event
from jetcapture_py.monitoring.facts import (
    CaptureFacts,
    MaintenanceState,
    ProcessFacts,
    capture_metrics,
    gather,
    maintenance_metrics,
    status_json,
    this_process,
    unknown,
)
from jetcapture_py.monitoring.history import History
from jetcapture_py.monitoring.http_server import HTML, PLAIN, Answer
from jetcapture_py.monitoring.metrics import CONTENT_TYPE
from jetcapture_py.text import age, one_line

if TYPE_CHECKING:
    from jetcapture_py.capture.pipeline import Capture

log = logging.getLogger("jetcapture.http")

MAX_TRACEBACK = 4000
"""Characters of a traceback in the log."""
BEAT = 1.0
"""Seconds between facts."""
LATE, STUCK = 5.0, 30.0
"""Seconds without new facts after which the event loop is not ready, and not alive."""
JSON = "application/json"
PROBES = {"/livez": "alive", "/readyz": "ready"}
"""Probes, and their text when nothing is wrong."""
PAGES = ("/", "/snapshot")
PATHS = (*PROBES, *PAGES, "/metrics", "/status.json")
NO_ANSWER = b"the event loop does not answer\n"


class Site:
    """The answers for all captures; with `single`, for the only one. All but `answer` is for their event loop."""

    def __init__(self, *, single: bool) -> None:
        self._single = single
        self._histories: Mapping[str, History] = {}
        self._captures: Mapping[str, CaptureFacts] = {}
        self._failures: Mapping[str, str] = {}
        self._loop = asyncio.get_running_loop()
        self._beat()

    def show(self, captures: Mapping[str, Capture], failures: Mapping[str, str]) -> None:
        """Answer for these captures only; `failures` has the reasons of captures that failed or could not start, by
        name."""
        before, facts, process = self._histories, self._captures, this_process()
        same = {name for name, capture in captures.items() if name in before and before[name].capture is capture}
        self._histories = {n: before[n] if n in same else History(capture) for n, capture in sorted(captures.items())}
        self._captures = {n: facts[n] if n in same else gather(h, process) for n, h in self._histories.items()}
        self._failures = dict(sorted(failures.items()))

    def update(self) -> None:
        """Renew the facts."""
        process = this_process()
        self._captures = {name: self._gather(name, history, process) for name, history in self._histories.items()}
        self._made = time.monotonic()

    def _gather(self, name: str, history: History, process: ProcessFacts) -> CaptureFacts:
        """Return the facts of a capture. An error makes it not ready, but neither stops it nor hides the others."""
        last = self._captures[name]
        try:
            return gather(history, process, last)
        except Exception as error:
            reason = one_line(error)
            if "monitoring" not in last.health.trouble:
                where = one_line(format_exc(), MAX_TRACEBACK)
                with about(None if self._single else name):
                    event(log, logging.ERROR, "monitoring.failed", error=reason, traceback=where)
            return unknown(last, reason)

    def stop(self) -> None:
        self._next.cancel()

    def _beat(self) -> None:
        self._next = self._loop.call_later(BEAT, self._beat)
        self.update()

    # ------------------------------------------------------------------ in threads of the server

    def answer(self, path: str) -> Answer:
        """See `http_server.Application`."""
        captures, failures = self._captures, self._failures
        if self._single or path in PATHS:
            return self._answer(path, captures, None if self._single else failures)
        name, slash, rest = path.removeprefix("/").partition("/")
        facts = captures.get(unquote(name))
        if facts is None:
            return _not_found(", /{name}/")
        if not slash:  # the page's links are relative
            return Answer(HTTPStatus.PERMANENT_REDIRECT, PLAIN, b"", f"/{quote(unquote(name), safe='')}/")
        return self._answer(f"/{rest}", {name: facts}, None)

    def _answer(self, path: str, captures: Mapping[str, CaptureFacts], failures: Mapping[str, str] | None) -> Answer:
        """Answer for captures; without `failures`, for the only one."""
        if path in PROBES:
            return _probe(path, self._trouble(path, captures, failures))
        if path not in PATHS:
            return _not_found()
        if (late := self._late()) > LATE:
            return _no_page(late) if path in PAGES else Answer(HTTPStatus.SERVICE_UNAVAILABLE, PLAIN, NO_ANSWER)
        if path == "/metrics":
            failed = None if failures is None else len(failures)
            return Answer(HTTPStatus.OK, CONTENT_TYPE, capture_metrics(captures, failed).text())
        if path == "/status.json":
            return Answer(HTTPStatus.OK, JSON, status_json(captures.values()))
        from jetcapture_py.monitoring.view import document, overview

        refresh = path == "/"
        if failures is not None:
            return _page(overview(captures, failures, refresh=refresh))
        return _page(document(next(iter(captures.values())), refresh=refresh))

    def _trouble(
        self, probe: str, captures: Mapping[str, CaptureFacts], failures: Mapping[str, str] | None
    ) -> Sequence[str]:
        """Return one line per reason of a failing probe, prefixed with the name if there are several captures."""
        if failures is None:
            return self._trouble_of(probe, next(iter(captures.values())))
        failed = failures if probe == "/readyz" else {}
        running = {name: facts for name, facts in captures.items() if name not in failed and facts.state != "ended"}
        lines = [f"{name}: {line}" for name, facts in running.items() for line in self._trouble_of(probe, facts)]
        return [*(f"{name}: failed: {reason}" for name, reason in failed.items()), *lines]

    def _trouble_of(self, probe: str, facts: CaptureFacts) -> Sequence[str]:
        late = self._late()
        if probe == "/readyz":
            running = [f"running: the event loop has not run for {age(late)}"] if late > LATE else []
            return [*facts.health.lines, *running]
        stuck = NO_ANSWER.decode().strip() if late > STUCK else facts.health.stuck
        return [stuck] if stuck else []

    def _late(self) -> float:
        """Return the age of the last facts in seconds."""
        return time.monotonic() - self._made


class MaintenanceSite:
    """The answers of `jetcapture maintain`: it is alive while it runs, and ready unless an archive's last pass failed.

    `states` has the archives by the names of their captures. To change it, replace it.
    """

    def __init__(self, states: Mapping[str, MaintenanceState]) -> None:
        self.states = states

    def answer(self, path: str) -> Answer:
        """See `http_server.Application`."""
        states = dict(sorted(self.states.items()))
        if path in PROBES:
            failed = [
                f"{name}: the last pass failed: {state.failure}" for name, state in states.items() if state.failure
            ]
            return _probe(path, failed if path == "/readyz" else ())
        if path == "/metrics":
            return Answer(HTTPStatus.OK, CONTENT_TYPE, maintenance_metrics(states).text())
        if path == "/status.json":
            archives = [{"capture": name, **asdict(state)} for name, state in states.items()]
            return Answer(HTTPStatus.OK, JSON, json.dumps({"archives": archives}).encode() + b"\n")
        if path not in PAGES:
            return _not_found()
        from jetcapture_py.monitoring.view import maintenance

        return _page(maintenance(this_process(), states, refresh=path == "/"))


def _probe(path: str, trouble: Sequence[str]) -> Answer:
    status = HTTPStatus.SERVICE_UNAVAILABLE if trouble else HTTPStatus.OK
    return Answer(status, PLAIN, "".join(f"{line}\n" for line in trouble or (PROBES[path],)).encode())


def _page(text: str, status: HTTPStatus = HTTPStatus.OK) -> Answer:
    return Answer(status, HTML, text.encode())


def _no_page(seconds: float) -> Answer:
    from jetcapture_py.monitoring.view import no_answer

    return _page(no_answer(seconds), HTTPStatus.SERVICE_UNAVAILABLE)


def _not_found(more: str = "") -> Answer:
    text = f"not found; available: /, /snapshot, /status.json, /metrics, /livez, /readyz{more}\n"
    return Answer(HTTPStatus.NOT_FOUND, PLAIN, text.encode())
