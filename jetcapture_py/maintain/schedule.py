"""The service of `maintain --every`: passes at an interval, with their state over HTTP.

The configuration files are read again before each round of passes.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from dataclasses import replace

from jetcapture_py.compaction.summary import failure
from jetcapture_py.config.captures import CaptureFiles, CaptureId, Captures
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import format_duration
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.log import about, event, setup
from jetcapture_py.maintain.command import DONE, FAILED, handling, required
from jetcapture_py.maintain.passes import Pass, PassRequest, run_pass
from jetcapture_py.manage.many import reason_of
from jetcapture_py.monitoring.facts import MaintenanceState, TableState
from jetcapture_py.monitoring.http import MaintenanceSite
from jetcapture_py.monitoring.http_server import HttpServer, server_at
from jetcapture_py.store.archive import open_archive
from jetcapture_py.text import MAX_LOGGED, one_line
from jetcapture_py.threads import leave

log = logging.getLogger("jetcapture.maintain")


def serve(files: CaptureFiles, every: float, server: HttpServer | None = None) -> int:
    """Make a pass over each archive every `every` seconds until SIGTERM or SIGINT; return the exit code.

    After the first signal, merges in progress are finished; a second signal exits immediately. `server` already answers
    probes. Raises ConfigError for problems at the start; later ones leave all settings unchanged.
    """
    selected = required(files, section=True)
    service = _Service(files, every)
    with handling(service.end, signal.SIGTERM, signal.SIGINT):
        return service.run(selected, server)


class _Service:
    """The passes of a process, one archive after the other."""

    def __init__(self, files: CaptureFiles, every: float) -> None:
        self._files, self._every = files, every
        self._stop = threading.Event()
        self._configs: dict[CaptureId, Config] = {}
        self._last: dict[CaptureId, Pass] = {}
        """The last completed pass over each archive."""
        self._site = MaintenanceSite({})

    def end(self, number: int, _frame: object) -> None:
        """Stop; on a second call, exit immediately."""
        if self._stop.is_set():
            leave(FAILED)
        event(log, logging.INFO, "maintain.stopping", signal=signal.Signals(number).name)
        self._stop.set()

    def run(self, selected: Captures, server: HttpServer | None) -> int:
        """Make passes until it is stopped."""
        setup(selected.log.format, selected.log.level)
        server = server_at(selected.listen, server, required=selected.listen_required)
        if server is not None:
            server.serve(self._site)
        event(log, logging.INFO, "maintain.started", captures=len(selected.configs), every=format_duration(self._every))
        while not self._stop.is_set():
            started = time.monotonic()
            self._read_again()
            for capture, config in self._configs.items():
                with about(None if self._files.single else capture.name):
                    self._pass(capture, config)
            self._stop.wait(max(0.0, started + self._every - time.monotonic()))
        if server is not None:
            server.stop()
        return DONE

    def _read_again(self) -> None:
        """Re-read the files for the next passes; if a file is wrong, keep the current archives."""
        try:
            selected = self._files.again().select()
        except JetcaptureError as error:
            event(log, logging.ERROR, "config.refused", error=one_line(reason_of(error), MAX_LOGGED))
            return
        for lines in selected.problems.values():
            event(log, logging.ERROR, "config.refused", error=one_line("; ".join(lines), MAX_LOGGED))
        configs = {capture: config for capture, config in selected.configs.items() if config.maintain is not None}
        same = {capture for capture, config in configs.items() if config == self._configs.get(capture)}
        self._configs = configs
        self._last = {capture: last for capture, last in self._last.items() if capture in same}
        self._site.states = {
            capture.name: self._site.states[capture.name]
            if capture in same
            else MaintenanceState(stream=config.source.stream)
            for capture, config in configs.items()
        }

    def _pass(self, capture: CaptureId, config: Config) -> None:
        """Make one pass and record its result. A failure is logged; the next pass tries again."""
        if self._stop.is_set():
            return
        name, reason = capture.name, ""

        def update(state: MaintenanceState) -> None:
            self._site.states = {**self._site.states, name: state}

        def progress(part: str, objects: int, size: int) -> None:
            state = self._site.states[name]
            update(replace(state, backlog={**state.backlog, part: (objects, size)}))

        update(replace(self._site.states[name], started=time.time()))
        try:
            request = replace(PassRequest.of(config), stop=self._stop, progress=progress)
            archive = open_archive(config.store.url, config.store.options)
            result = self._last[capture] = run_pass(config, archive, request, self._last.get(capture))
            reason = failure(result.errors)
            update(_noted(result, self._site.states[name]))
        except Exception as error:  # including bugs, of libraries too: other archives continue
            reason = reason_of(error)
        state = self._site.states[name]
        ended = replace(
            state,
            started=None,
            failure=one_line(reason, MAX_LOGGED),
            passes=state.passes + 1,
            failures=state.failures + bool(reason),
            ended=state.ended if reason else time.time(),
        )
        update(ended)
        if reason:
            event(log, logging.ERROR, "maintain.failed", error=reason)


def _noted(result: Pass, state: MaintenanceState) -> MaintenanceState:
    """Log a pass; return the updated state."""
    summaries = result.compacted.values()
    expired = 0 if result.expired is None else result.expired.objects
    tables = tuple(
        TableState(
            name=table.name,
            snapshot=table.snapshot,
            files=table.files,
            waiting=table.unsettled,
            renamed=len(table.renamed),
            complete_to=table.complete_to.timestamp() if table.complete_to else None,
        )
        for table in result.tables.values()
    )
    state = replace(
        state,
        seconds=result.seconds,
        waiting=result.waiting,
        removed=state.removed + result.removed,
        expired=state.expired + expired,
        objects_before=sum(summary.objects_before for summary in summaries),
        objects_after=sum(summary.objects_after for summary in summaries),
        bytes_after=sum(summary.bytes_after for summary in summaries),
        tables=tables,
    )
    event(
        log,
        logging.INFO,
        "maintain.done",
        stream=result.stream,
        seconds=round(result.seconds, 3),
        objects_before=state.objects_before,
        objects_after=state.objects_after,
        waiting=result.waiting,
        removed=result.removed,
        expired=expired,
    )
    return state
