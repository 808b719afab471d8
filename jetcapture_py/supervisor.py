"""The process of `jetcapture run`: captures in one event loop, signals, HTTP, shutdown and the exit code.

Captures are started, replaced and drained until exactly the configured ones run; if a file is wrong, nothing changes.
With one configuration file there is one capture, without a name in logs and metrics. With several files or a
directory, each capture is named after its file, and all share the log, the HTTP server and the encoding threads.

Captures of a file for many streams start when their stream appears and end when it is deleted. One that fails does not
stop the others, and is started again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from jetcapture_py.capture.announcing import Notifiers
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.captures import CaptureFiles, CaptureId, Captures, refuse_wrong
from jetcapture_py.config.model import Config, NatsConfig
from jetcapture_py.config.units import format_duration
from jetcapture_py.errors import ConfigError, JetcaptureError
from jetcapture_py.jetstream.unreadable import Notifier
from jetcapture_py.ledger import Memory
from jetcapture_py.log import about, event, setup
from jetcapture_py.monitoring.facts import counts
from jetcapture_py.monitoring.http import Site
from jetcapture_py.monitoring.http_server import HttpServer, server_at
from jetcapture_py.plugins import is_reference
from jetcapture_py.text import MAX_LOGGED, one_line
from jetcapture_py.threads import in_thread, leave

T = TypeVar("T")

log = logging.getLogger("jetcapture")

DRAINED, FAILED, REFUSED = 0, 1, 2
"""Exit codes."""
ENCODERS = 4
"""Encoding threads of several captures: as many as one capture has by default."""
CANCEL_AGAIN = 1.0
"""Seconds after which a capture that was canceled before it was open is canceled again: nats-py may swallow the
first."""
LOOK = 60.0
"""Seconds between searches for the streams of a file for many; each also restarts its failed captures."""


def run(
    files: CaptureFiles,
    *,
    until_caught_up: bool = False,
    keep_going: bool = False,
    server: HttpServer | None = None,
) -> int:
    """Capture until SIGTERM or SIGINT, until the terminal closes, or until caught up; return the exit code.

    SIGHUP reads the files again; a blocked one is delivered. If standard input is a terminal, SIGHUP says that it has
    closed. `server` already answers probes. A second SIGTERM or SIGINT exits immediately. Raises ConfigError for
    problems found at startup, such as an object that cannot be imported, or a missing extra.
    """
    on_terminal = os.isatty(0)
    try:
        selected = files.select()
        supervisor = Supervisor(files, server, until_caught_up=until_caught_up, keep_going=keep_going)
        asyncio.run(_run(supervisor, selected, on_terminal=on_terminal))
    except ConfigError:
        raise
    except Exception as error:
        log_failure(error)
        leave(FAILED)
    if supervisor.code or supervisor.abandoned or on_terminal:
        leave(supervisor.code)  # threads may hang in the store; Python cannot flush to a closed terminal
    return supervisor.code


async def _run(supervisor: Supervisor, selected: Captures, *, on_terminal: bool) -> None:
    _handle_signals(supervisor, on_terminal=on_terminal)
    await supervisor.run(selected)


def _handle_signals(supervisor: Supervisor, *, on_terminal: bool) -> None:
    loop = asyncio.get_running_loop()

    def drain(number: signal.Signals) -> None:
        event(log, logging.INFO, "capture.draining", signal=number.name, unacked=supervisor.unacked)
        if not supervisor.opened:
            leave(supervisor.code)  # nothing has been pulled yet, and nats-py may swallow a cancellation
        supervisor.stop()

    def end(number: signal.Signals) -> None:
        if supervisor.stopping:
            event(log, logging.ERROR, "capture.killed", signal=number.name, unacked=supervisor.unacked)
            leave(FAILED)
        drain(number)

    def hang_up() -> None:
        if not on_terminal:
            supervisor.changed.set()
        elif not supervisor.stopping:  # a closing terminal sends it more than once
            drain(signal.SIGHUP)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the process outlives its terminal
        loop.add_signal_handler(signal.SIGHUP, hang_up)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


class _Member:
    """A capture, its configuration, and its task once it has started."""

    def __init__(
        self,
        capture: CaptureId,
        config: Config,
        memory: Memory | None,
        notifiers: Notifiers,
        *,
        single: bool,
    ) -> None:
        self.id, self.name, self.config = capture, capture.name, config
        self.label = None if single else capture.name
        self.memory = memory
        self.capture = Capture(config, memory=memory, notifiers=notifiers)
        self.stop = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None
        self.failure = ""
        self.error: BaseException | None = None
        """The failure, until we know whether its stream was deleted."""

    @property
    def running(self) -> asyncio.Task[None] | None:
        """The task, while it runs."""
        return None if self.task is None or self.task.done() else self.task


class Supervisor:
    """The captures of a process. A failure stops all of them, or with `keep_going` only its own.

    `server` already answers probes.
    """

    def __init__(
        self,
        files: CaptureFiles,
        server: HttpServer | None = None,
        *,
        until_caught_up: bool = False,
        keep_going: bool = False,
    ) -> None:
        self.code = DRAINED
        """The exit code of the process."""
        self.stopping = False
        """Whether all captures are being drained."""
        self.abandoned = False
        """Whether threads may hang: a capture was canceled at its start or did not drain, or its store hangs."""
        self.changed = asyncio.Event()
        """Set to re-read the files."""
        self._files, self._server = files, server
        self._until_caught_up, self._keep_going = until_caught_up, keep_going
        self._selected = Captures(listen="")
        """The last selection of the files."""
        self._members: dict[CaptureId, _Member] = {}
        self._refused: tuple[str, ...] = ()
        """Problems of the last reading of the files."""
        self._encode_threads = None if files.single else ThreadPoolExecutor(ENCODERS, "encode")

    @property
    def unacked(self) -> int:
        return sum(member.capture.source.unacked for member in self._members.values() if member.running)

    @property
    def opened(self) -> bool:
        """Whether any capture may hold messages."""
        return any(member.capture.opened for member in self._members.values() if member.running)

    async def run(self, selected: Captures) -> None:
        """Run captures, including those of later files and streams, until all have ended.

        Raises ConfigError for problems at the start, and JetcaptureError if nothing can listen on a configured address.
        """
        setup(selected.log.format, selected.log.level)
        try:
            await self.reconcile(selected, restart=True)
            due = time.monotonic() + LOOK
            while (running := self._tasks()) or self._looks:
                changed = asyncio.create_task(self.changed.wait())
                wait = max(0.0, due - time.monotonic()) if self._looks else None
                await asyncio.wait((changed, *running), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                reload, late = self.changed.is_set(), self._looks and time.monotonic() >= due
                self.changed.clear()
                if self.stopping or not (reload or late or any(member.error for member in self._members.values())):
                    continue
                due = time.monotonic() + LOOK if reload or late else due
                await self._update(reload=reload, restart=reload or late)
        finally:
            self._serve(None)
        for member in self._members.values():
            if self._files.single and member.task is not None:
                await member.task  # raises its ConfigError
        self._report_failures()
        incomplete = self._until_caught_up and (self._selected.problems or self._selected.left_out)
        if incomplete or any(member.failure for member in self._members.values()):
            self.code = self.code or FAILED

    @property
    def _looks(self) -> bool:
        """Whether to poll the server for new streams."""
        return self._files.of_many and not self._until_caught_up and not self.stopping

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [task for member in self._members.values() if (task := member.running)]

    async def _update(self, *, reload: bool, restart: bool) -> None:
        """Run the captures that the files select; `reload` re-reads the files. On any problem, change nothing."""
        before = dict(self._members)

        def select() -> tuple[CaptureFiles, Captures]:
            files = self._files.again() if reload else self._files
            return files, files.select([*self._running()])

        try:
            if (read := await self._in_thread(select)) is None:
                return
            files, selected = read
            await self.reconcile(selected, restart=restart)
        except Exception as error:  # running captures continue
            self._report_failures()
            lines = error.problems if isinstance(error, ConfigError) else (_reason(error),)
            for line in lines if reload or lines != self._refused else ():
                event(log, logging.ERROR, "config.refused", error=one_line(line, MAX_LOGGED))
            self._refused = lines
            return
        self._files, self._refused = files, ()
        if reload and not self.stopping:
            setup(selected.log.format, selected.log.level)
            after = self._members
            event(
                log,
                logging.INFO,
                "config.reloaded",
                started=sorted(capture.name for capture in after.keys() - before.keys()),
                restarted=sorted(
                    capture.name for capture in after.keys() & before.keys() if after[capture] is not before[capture]
                ),
                stopped=sorted(capture.name for capture in before.keys() - after.keys()),
                unchanged=sum(member is before.get(capture) for capture, member in after.items()),
            )

    async def reconcile(self, selected: Captures, *, restart: bool) -> None:
        """Start missing captures, replace changed ones, and drain removed ones.

        With `restart`, also restart failed ones. Raises JetcaptureError on any problem, without changing anything.
        """
        present, desired = self._running(or_failed=not restart), selected.configs
        changed = {capture: config for capture, config in desired.items() if config != present.get(capture)}
        made = await self._in_thread(partial(self._make, changed, selected))
        if made is None or self.stopping:
            return
        refuse_wrong(selected, self._running())
        server = self._server
        if selected.listen != self._selected.listen:
            server = server_at(selected.listen, server, required=selected.listen_required)
        self._report(selected)
        self._report_failures(selected)
        self._selected = selected
        self._members = made | self._members
        self._serve(server)
        self._show(self._site)
        replaced = [capture for capture in self._members if capture in made or capture not in desired]
        await asyncio.gather(*(self._replace(capture, made.get(capture)) for capture in replaced))

    def _report(self, selected: Captures) -> None:
        """Log which streams are not captured, and why."""
        for capture, lines in selected.problems.items():
            if self._selected.problems.get(capture) != lines:
                event(log, logging.ERROR, "config.refused", error=one_line("; ".join(lines), MAX_LOGGED))
        for capture, reason in selected.left_out.items():
            if self._selected.left_out.get(capture) != reason:
                event(log, logging.INFO, "stream.left_out", stream=capture.stream, reason=reason)

    def _report_failures(self, selected: Captures | None = None) -> None:
        """Log captures of many streams that failed, or whose streams were deleted: those no longer `selected`."""
        for capture, member in self._members.items():
            if member.error is not None:
                error, member.error = member.error, None
                gone = selected is not None and capture not in selected.configs and capture not in selected.problems
                with about(member.label):
                    if gone:
                        event(log, logging.INFO, "stream.gone", stream=member.config.source.stream)
                    else:
                        log_failure(error)

    def stop(self) -> None:
        """Drain all captures, which ends `run`."""
        self.stopping = True
        self.changed.set()
        for member in self._members.values():
            member.ending = asyncio.create_task(self._end(member))

    def _running(self, *, or_failed: bool = False) -> dict[CaptureId, Config]:
        return {capture: member.config for capture, member in self._members.items() if or_failed or not member.failure}

    async def _in_thread(self, work: Callable[[], T]) -> T | None:
        """Return the result of `work`, done in a thread because user code may hang; None once the process is to end."""
        working = asyncio.create_task(in_thread(work))
        while not working.done():
            if self.stopping:
                return None
            await asyncio.wait((working,), timeout=CANCEL_AGAIN)
        return working.result()

    # ------------------------------------------------------------------ HTTP

    @property
    def _site(self) -> Site | None:
        """The status page; None without a server, and while it only answers probes."""
        application = None if self._server is None else self._server.application
        return application if isinstance(application, Site) else None

    def _serve(self, server: HttpServer | None) -> None:
        """Serve the status page with this server instead of the current one."""
        before, site = self._server, self._site
        if before is not None and before is not server:
            before.stop()
        if site is not None and server is None:
            site.stop()
        self._server = server
        if server is not None and not isinstance(server.application, Site):
            site = site or Site(single=self._files.single)
            self._show(site)
            server.serve(site)

    def _show(self, site: Site | None) -> None:
        """Update the captures that the status page shows."""
        if site is None:
            return
        failures = {
            one_line(capture.name): one_line("; ".join(lines), MAX_LOGGED)
            for capture, lines in self._selected.problems.items()
        }
        failures |= {member.name: member.failure for member in self._members.values() if member.failure}
        site.show({member.name: member.capture for member in self._members.values()}, failures)

    # ------------------------------------------------------------------ one capture

    def _make(self, configs: Mapping[CaptureId, Config], selected: Captures) -> dict[CaptureId, _Member]:
        """Create captures, in a thread; ones that cannot run are no longer `selected`. The streams of a file share
        memory."""
        made: dict[CaptureId, _Member] = {}
        memories = {
            (member.id.path, member.config.limits.memory): member.memory
            for member in self._members.values()
            if member.memory is not None
        }
        for capture, config in configs.items():
            try:
                with about(None if self._files.single else capture.name):
                    for warning in config.warnings():
                        event(log, logging.WARNING, "config.warning", warning=warning)
                    limit = config.limits.memory
                    memory = memories.setdefault((capture.path, limit), Memory(limit)) if capture.stream else None
                    member = made[capture] = _Member(
                        capture,
                        config,
                        memory,
                        partial(self._notifiers, config.nats),
                        single=self._files.single,
                    )
                if self._encode_threads is not None and not is_reference(config.block.format):  # user code may hang
                    member.capture.archiver.encoding.threads = self._encode_threads
            except ConfigError as error:
                prefix = "" if self._files.single else f"{capture}: "
                selected.problems[capture] = tuple(f"{prefix}{line}" for line in error.problems)
                del selected.configs[capture]
        return made

    def _notifiers(self, nats: NatsConfig) -> list[Notifier]:
        """Return the running captures of an account that publish notifications."""
        members = [member for member in self._members.values() if member.running and member.config.nats == nats]
        return [notifier for member in members if (notifier := member.capture.announcer.notifier) is not None]

    async def _replace(self, capture: CaptureId, new: _Member | None) -> None:
        """Drain the old capture, if any, and start the new one, if any."""
        if (old := self._members[capture]) is not new:
            if old.running:
                with about(old.label):
                    event(log, logging.INFO, "capture.draining", signal="SIGHUP", unacked=old.capture.source.unacked)
            await self._end(old)
        if self.stopping:
            return
        if new is None:
            del self._members[capture]
        else:
            self._members[capture] = new
            self._start(new)
        self._show(self._site)

    def _start(self, member: _Member) -> None:
        config, source = member.config, member.config.source
        with about(member.label):
            event(
                log,
                logging.INFO,
                "capture.started",
                stream=source.stream,
                consumer=source.consumer,
                servers=",".join(config.nats.servers),
                stored_within=format_duration(config.block.max_age),
            )
            member.task = asyncio.create_task(self._run(member))

    async def _run(self, member: _Member) -> None:
        try:
            await member.capture.run(member.stop, until_caught_up=self._until_caught_up)
        except asyncio.CancelledError:
            if not member.stop.is_set():
                raise
            self.abandoned = True
        except (Exception, BaseExceptionGroup) as error:
            self._failed(member, error)
            return
        member.capture.ended = ""
        self.abandoned |= member.capture.marks.store_hangs
        event(log, logging.INFO, "capture.stopped", **counts(member.capture))

    def _failed(self, member: _Member, error: BaseException) -> None:
        """Report the failure of a capture; stop the others."""
        if isinstance(error, ConfigError) and self._files.single:
            member.failure = str(error)
            raise error
        if member.id.stream and not (self._until_caught_up or self.stopping or member.stop.is_set()):
            member.error = next(_leaves(error))  # `run` checks whether its stream is gone
            member.capture.ended = member.failure = _reason(member.error)
            self._show(self._site)
            return
        reasons = [log_failure(leaf) for leaf in _leaves(error)]
        member.capture.ended = reasons[-1]
        if member.stop.is_set() and not self.stopping:  # it was being replaced
            self.abandoned = True
            return
        member.failure = reasons[-1]
        self._show(self._site)
        self.code = self.code or (REFUSED if isinstance(error, ConfigError) else FAILED)
        if not self._keep_going and not self.stopping and not member.id.stream:
            self.stop()

    async def _end(self, member: _Member) -> None:
        """Drain a capture, or cancel it before it can hold messages."""
        member.stop.set()
        while task := member.running:
            if not member.capture.opened:
                task.cancel()
            await asyncio.wait((task,), timeout=CANCEL_AGAIN)


def log_failure(error: BaseException) -> str:
    """Log why a capture failed; return it in one line."""
    reason = _reason(error)
    event(log, logging.ERROR, "capture.failed", error=reason)
    if not isinstance(error, JetcaptureError):
        log.debug("traceback", exc_info=error)
    return reason


def _reason(error: BaseException) -> str:
    return one_line(str(error) if isinstance(error, JetcaptureError) else error, MAX_LOGGED)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in exception groups."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
