"""HTTP endpoints of a process with several captures.

    /metrics             of all captures, each sample with the labels `capture` and `stream`
    /livez, /readyz      503 if any capture's answer is, with its lines after the capture's name
    /, /snapshot         the list of captures; it refreshes itself, or not
    /status.json         the facts of all captures
    /{name}/             the status page of a capture; /{name}/metrics, /{name}/livez and so on are its own

A capture's own answers are those of `http.Pages`; this module finds and joins them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from jetcapture_py.monitoring.http import JSON, PAGES, LoopAnswers, Pages
from jetcapture_py.monitoring.http_server import HTML, PLAIN, Answer
from jetcapture_py.monitoring.metrics import CONTENT_TYPE, JoinedMetrics

if TYPE_CHECKING:
    from jetcapture_py.capture.state import CaptureState

_NOT_FOUND = Answer(
    HTTPStatus.NOT_FOUND,
    PLAIN,
    b"not found; available: /, /snapshot, /status.json, /metrics, /livez, /readyz, /{name}/\n",
)


class Site:
    """The answers for all captures; with `single`, those of the only one. Create and change it in their event loop."""

    def __init__(self, *, single: bool) -> None:
        self._single = single
        self._answers = LoopAnswers(self._make)
        self._states: Mapping[str, CaptureState] = {}
        self._pages: Mapping[str, Pages] = {}
        self._failures: Mapping[str, str] = {}

    def show(self, states: Mapping[str, CaptureState], failures: Mapping[str, str]) -> None:
        """Answer for these captures and no others; `failures` has why a capture failed or could not start, by name."""
        same = {name: pages for name, pages in self._pages.items() if states.get(name) is self._states[name]}
        for name in self._pages.keys() - same.keys():
            self._pages[name].stop()
        self._pages = {name: same.get(name) or Pages(state) for name, state in states.items()}
        self._states, self._failures = states, failures

    # ------------------------------------------------------------------ in the server's thread

    async def answer(self, path: str) -> Answer:
        """See `http_server.Application`."""
        if self._single:
            return await next(iter(self._pages.values())).answer(path)
        if path in ("/livez", "/readyz"):
            return await self._probes(path)
        if path in (*PAGES, "/metrics", "/status.json"):
            return await self._answers.get(path)
        name, slash, rest = path.removeprefix("/").partition("/")
        pages = self._pages.get(unquote(name))
        if pages is not None and not slash:  # the page's links are relative
            return Answer(HTTPStatus.PERMANENT_REDIRECT, PLAIN, b"", f"/{quote(unquote(name), safe='')}/")
        return _NOT_FOUND if pages is None else await pages.answer(f"/{rest}")

    async def _probes(self, path: str) -> Answer:
        """Return the answers of all captures as one."""
        failures = self._failures if path == "/readyz" else {}
        pages = {name: each for name, each in sorted(self._pages.items()) if name not in failures and not each.drained}
        answers = await asyncio.gather(*(each.answer(path) for each in pages.values()))
        trouble = [f"{name}: failed: {reason}" for name, reason in sorted(failures.items())]
        for name, answer in zip(pages, answers, strict=True):
            if answer.status != HTTPStatus.OK:
                trouble += [f"{name}: {line}" for line in answer.body.decode().splitlines()]
        if trouble:
            text = "".join(f"{line}\n" for line in trouble)
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, PLAIN, text.encode())
        return Answer(HTTPStatus.OK, PLAIN, b"ready\n" if path == "/readyz" else b"alive\n")

    # ------------------------------------------------------------------ in the captures' event loop

    async def _make(self, path: str) -> Answer:
        if path == "/metrics":
            return Answer(HTTPStatus.OK, CONTENT_TYPE, JoinedMetrics(self._states, len(self._failures)).text())
        from jetcapture_py.monitoring.facts import status_json
        from jetcapture_py.monitoring.view import overview

        found = {name: pages.facts() for name, pages in sorted(self._pages.items())}
        if path == "/status.json":
            return Answer(HTTPStatus.OK, JSON, status_json([*found.values()]))
        return Answer(HTTPStatus.OK, HTML, overview(found, self._failures, refresh=path == "/").encode())
