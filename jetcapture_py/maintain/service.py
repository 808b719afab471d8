"""The commands `maintain` and `compact`: one pass over the archives of one or several captures, or a service.

The service makes a pass at an interval, reads the files again before each, and tells over HTTP how it goes.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

from jetcapture_py import text
from jetcapture_py.config.maintain import CompactConfig
from jetcapture_py.config.model import Config
from jetcapture_py.config.section import validated
from jetcapture_py.config.several import CaptureFiles, CaptureId, Captures
from jetcapture_py.config.units import format_duration
from jetcapture_py.errors import ConfigError, JetcaptureError
from jetcapture_py.log import about, event, setup
from jetcapture_py.maintain.compact import CompactionSettings
from jetcapture_py.maintain.maintenance import Maintenance, PassResult, Progress
from jetcapture_py.manage.many import NOTHING, CommandResult, show_line, show_one
from jetcapture_py.monitoring.facts import MaintenanceState, TableState
from jetcapture_py.monitoring.http import MaintenanceSite
from jetcapture_py.monitoring.http_server import HttpServer
from jetcapture_py.reading.selection import Selection
from jetcapture_py.text import MAX_LOGGED, escaped, one_line, plural

log = logging.getLogger("jetcapture.maintain")

DONE, FAILED, INTERRUPTED = 0, 1, 128 + signal.SIGINT
"""Exit codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactRequest:
    """What the command `compact` was asked for."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings that replace those of `maintain.compact`, as text."""
    selection: Selection = field(default_factory=Selection)
    """Keys, and times of buckets."""
    incomplete: bool = False
    """Also compact buckets that the watermark has not passed."""

    def of(self, config: Config, *, dry_run: bool) -> CompactionSettings:
        """Return the settings for one capture. Raises JetcaptureError if they exclude one another."""
        given = (config.maintain.compact if config.maintain else None) or CompactConfig()
        given = validated(CompactConfig, {**given.model_dump(), **self.settings})
        return CompactionSettings(
            target=given.target,
            after=given.after,
            grace=given.grace,
            selection=self.selection,
            incomplete=self.incomplete,
            dry_run=dry_run,
        )


# ---------------------------------------------------------------------- one pass


def maintain(
    files: CaptureFiles, request: CompactRequest | None = None, *, dry_run: bool = False, as_json: bool = False
) -> int:
    """Make one pass over the archive of each capture, with `request` only of compaction; return the exit code.

    Raises ConfigError, and JetcaptureError for a request that cannot be met.
    """
    with _handling(_interrupted, signal.SIGINT):
        return _one_pass(files, request, dry_run=dry_run, as_json=as_json)


def _one_pass(files: CaptureFiles, request: CompactRequest | None, *, dry_run: bool, as_json: bool) -> int:
    results: list[tuple[CaptureId, str, PassResult]] = []
    selected = _required(files, section=request is None)
    for lines in selected.problems.values():
        for line in lines:
            _tell("", line)
    if not selected.configs and not selected.problems:
        sys.stderr.write(NOTHING)
    code = FAILED if selected.problems else DONE
    single = files.shows_one(selected)
    width = max((len(escaped(capture.name)) for capture in selected.configs), default=0)
    with text.progress_bars() as show:
        for capture, config in selected.configs.items():
            label = "" if single else f"{capture.name}: "
            maintenance = Maintenance(
                config,
                compact=None if request is None else request.of(config, dry_run=dry_run),
                dry_run=dry_run,
                tell=partial(_tell, label),
                progress=_bars(show, label),
            )
            try:
                results.append((capture, label, maintenance.run()))
            except Exception as error:  # also a bug, or a library's: other archives go on
                _tell(label, _reason(error))
                code = FAILED
    for capture, label, result in results:
        done = CommandResult(summary=result.summary, lines=result.lines(), records=[result.as_dict()])
        if single and not as_json:
            show_one(done, as_json=False)
        else:
            show_line(capture.name, result.stream, done, width, as_json=as_json)
        if reason := _failure(result):
            _tell(label, reason)
            code = FAILED
    return code


def _required(files: CaptureFiles, *, section: bool) -> Captures:
    """Return the captures. Raises JetcaptureError, also if a file lacks `maintain` with `section`."""
    selected = files.select()
    lacking = {capture.path: None for capture, config in selected.configs.items() if config.maintain is None}
    if section and lacking:
        raise ConfigError(*(f"{'' if files.single else f'{path}: '}{_NO_SECTION}" for path in lacking))
    return selected


_NO_SECTION = "maintain: required by `jetcapture maintain`, but not set, such as {compact: {}}"


def _bars(show: Callable[[str, int, int], None], label: str) -> Progress:
    """Return what shows a bar for each part of an archive."""
    totals: dict[str, int] = {}

    def progress(part: str, objects: int, _size: int) -> None:
        total = totals.setdefault(part, objects)
        if total:
            show(f"{label}compacting {part}", total - objects, total)

    return progress


def _failure(result: PassResult) -> str:
    """Return what failed in a pass, in one line; "" if nothing did."""
    errors = result.errors
    more = f" (and {plural(len(errors) - 1, 'more failure')})" if len(errors) > 1 else ""
    return f"{errors[0]}{more}" if errors else ""


def _reason(error: Exception) -> str:
    """Return what failed, as a line."""
    if isinstance(error, JetcaptureError):
        return str(error)
    log.debug("traceback", exc_info=error)
    return one_line(error)


def _tell(label: str, line: str) -> None:
    sys.stderr.write(f"jetcapture: {label}{one_line(line, MAX_LOGGED)}\n")


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals; afterwards, they are handled as before."""
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, previous in zip(numbers, before, strict=True):
            signal.signal(number, previous)


def _interrupted(*_: object) -> None:
    sys.stderr.write("jetcapture: interrupted; another pass goes on from here\n")
    os._exit(INTERRUPTED)


# ---------------------------------------------------------------------- service


def serve(files: CaptureFiles, every: float, server: HttpServer | None = None) -> int:
    """Make a pass over each archive every `every` seconds until SIGTERM or SIGINT; return the exit code.

    After the first signal, objects that are being merged are finished; a second one exits immediately. `server` already
    answers probes. Raises ConfigError for problems at the start; later ones leave all settings as they were.
    """
    _required(files, section=True)
    service = _Service(files, every)
    with _handling(service.end, signal.SIGTERM, signal.SIGINT):
        return service.run(server)


class _Service:
    """The passes of a process, one archive after the other."""

    def __init__(self, files: CaptureFiles, every: float) -> None:
        self._files, self._every = files, every
        self._stop = threading.Event()
        self._passes: dict[CaptureId, Maintenance] = {}
        self._states: dict[str, MaintenanceState] = {}

    def end(self, number: int, _frame: object) -> None:
        """Stop; when called again, exit immediately."""
        if self._stop.is_set():
            os._exit(FAILED)
        event(log, logging.INFO, "maintain.stopping", signal=signal.Signals(number).name)
        self._stop.set()

    def run(self, server: HttpServer | None) -> int:
        """Make passes until it is stopped."""
        selected = self._files.select()
        setup(selected.log.format, selected.log.level)
        server = self._listening(selected, server)
        event(log, logging.INFO, "maintain.started", captures=len(selected.configs), every=format_duration(self._every))
        while not self._stop.is_set():
            started = time.monotonic()
            self._read_again()
            for capture, maintenance in self._passes.items():
                with about(None if self._files.single else capture.name):
                    self._pass(maintenance, self._states[capture.name])
            self._stop.wait(max(0.0, started + self._every - time.monotonic()))
        if server is not None:
            server.stop()
        return DONE

    def _listening(self, selected: Captures, server: HttpServer | None) -> HttpServer | None:
        """Serve metrics and probes. Raises JetcaptureError if nothing can listen on a configured address."""
        site = MaintenanceSite(self._states)
        if server is not None and server.listen != selected.listen:
            server.stop()
            server = None
        if server is None and selected.listen is not None:
            try:
                server = HttpServer(selected.listen, site)
            except JetcaptureError as error:
                if selected.listen_required:
                    raise
                event(log, logging.WARNING, "http.off", reason=str(error))
        if server is not None:
            server.serve(site)
        return server

    def _read_again(self) -> None:
        """Read the files again, for the archives of the next passes; if a file is wrong, keep the present ones."""
        try:
            selected = self._files.again().select()
        except JetcaptureError as error:
            event(log, logging.ERROR, "config.refused", error=one_line("; ".join(str(error).splitlines()), MAX_LOGGED))
            return
        for lines in selected.problems.values():
            event(log, logging.ERROR, "config.refused", error=one_line("; ".join(lines), MAX_LOGGED))
        wanted = {capture: config for capture, config in selected.configs.items() if config.maintain is not None}
        for capture in [capture for capture in self._passes if capture not in wanted]:
            del self._passes[capture], self._states[capture.name]
        for capture, config in wanted.items():
            if capture in self._passes and self._passes[capture].config == config:
                continue
            state = self._states[capture.name] = MaintenanceState(stream=config.source.stream)
            self._passes[capture] = Maintenance(
                config, progress=lambda part, *left, state=state: state.backlog.update({part: left})
            )

    def _pass(self, maintenance: Maintenance, state: MaintenanceState) -> None:
        """Make one pass, and note how it went. A failure is logged; the next pass tries again."""
        if self._stop.is_set():
            return
        state.started, reason = time.time(), ""
        try:
            result = maintenance.run(self._stop)
            reason = _failure(result)
            _note(result, state)
        except Exception as error:  # also a bug, or a library's: other archives go on
            reason = _reason(error)
        state.started, state.failure = None, one_line(reason, MAX_LOGGED)
        state.passes += 1
        if reason:
            state.failures += 1
            event(log, logging.ERROR, "maintain.failed", error=reason)
        else:
            state.ended = time.time()


def _note(result: PassResult, state: MaintenanceState) -> None:
    """Log a pass, and keep its figures."""
    summaries = result.compacted.values()
    state.seconds, state.waiting = result.seconds, result.waiting
    state.removed += result.removed
    expired = 0 if result.expired is None else result.expired.objects
    state.expired += expired
    state.objects_before = sum(summary.objects_before for summary in summaries)
    state.objects_after = sum(summary.objects_after for summary in summaries)
    state.bytes_after = sum(summary.bytes_after for summary in summaries)
    state.tables = tuple(
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
