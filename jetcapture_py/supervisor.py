"""Start, replace and drain captures until exactly the configured ones are running, all in one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.model import Config
from jetcapture_py.config.several import ConfigFiles, Selected
from jetcapture_py.config.units import format_duration
from jetcapture_py.errors import ConfigError, JetcaptureError
from jetcapture_py.log import about, event, setup
from jetcapture_py.monitoring.http_server import HttpServer, serving
from jetcapture_py.plugins import is_reference
from jetcapture_py.text import LONGEST_LOGGED, one_line

if TYPE_CHECKING:
    from jetcapture_py.monitoring.site import Site

log = logging.getLogger("jetcapture")

DRAINED, FAILED, REFUSED = 0, 1, 2
"""Exit codes."""
ENCODERS = 4
"""Threads in which several captures encode their blocks: as many as one capture has by default."""
CANCEL_AGAIN = 1.0
"""Seconds after which a capture that was canceled before it was open is canceled again; nats-py may swallow that."""


class _Member:
    """A capture, its configuration, and its task once it has started."""

    def __init__(self, path: Path, config: Config, *, single: bool) -> None:
        self.name, self.config = path.stem, config
        self.label = None if single else path.stem
        self.capture = Capture(config)
        self.stop = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.failure = ""

    @property
    def running(self) -> bool:
        """Whether it has started and not ended."""
        return self.task is not None and not self.task.done()


class Supervisor:
    """The captures of a process. A failure stops all of them, or with `keep_going` only its own.

    `server` already answers probes.
    """

    def __init__(
        self,
        files: ConfigFiles,
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
        """Whether a capture was canceled while it started, or was replaced and did not drain."""
        self.changed = asyncio.Event()
        """Set to have the files read again."""
        self._files, self._server = files, server
        self._until_caught_up, self._keep_going = until_caught_up, keep_going
        self._members: dict[Path, _Member] = {}
        self._refused: dict[Path, str] = {}
        self._site: Site | None = None
        self._http = ExitStack()
        self._listen: str | None = ""
        self._error: ConfigError | None = None
        self._ends: set[asyncio.Task[None]] = set()
        self._encode_threads = None if files.single else ThreadPoolExecutor(ENCODERS, "encode")

    @property
    def unacked(self) -> int:
        """Unacknowledged messages of all captures."""
        return sum(each.capture.state.unacked for each in self._members.values() if each.running)

    @property
    def opened(self) -> bool:
        """Whether any capture may hold messages."""
        return any(each.running and each.capture.state.opened for each in self._members.values())

    async def run(self, selected: Selected) -> None:
        """Run captures, and those that later files say, until every one has ended.

        Raises ConfigError for problems at the start, with `keep_going` only if there is no capture, and JetcaptureError
        if nothing can listen on a configured address.
        """
        try:
            await self.reconcile(selected, first=True)
            while running := [each.task for each in self._members.values() if each.task is not None and each.running]:
                changed = asyncio.create_task(self.changed.wait())
                await asyncio.wait((changed, *running), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if self.changed.is_set() and not self.stopping:
                    self.changed.clear()
                    await self.reconcile(await asyncio.to_thread(self._files.select, self._running()))
        finally:
            self._http.close()
            if self._site is not None:
                self._site.show({}, {})
        if self._error is not None:
            raise self._error

    async def reconcile(self, selected: Selected, *, first: bool = False) -> None:
        """Start captures that are missing, replace those that have changed or failed, and drain those that are gone.

        What has a problem stays as it is. At the start, `first`, it raises ConfigError, with `keep_going` only if
        nothing can run.
        """
        setup(selected.log.format, selected.log.level)
        running = self._running()
        refused = dict(selected.problems)
        changed = {path: config for path, config in selected.configs.items() if config != running.get(path)}
        made = await asyncio.to_thread(self._make, changed, refused)
        if self.stopping:
            return
        if first and refused:
            if not (self._keep_going and made):
                raise ConfigError(*(line for lines in refused.values() for line in lines))
            self.code = REFUSED
        gone = [
            path
            for path in self._members
            if path not in selected.configs and not {path, path.parent} & selected.problems.keys()
        ]
        self._refused = {path: one_line("; ".join(lines), LONGEST_LOGGED) for path, lines in refused.items()}
        for reason in self._refused.values():
            event(log, logging.ERROR, "config.refused", error=reason)
        outcome = {
            "started": sorted(path.stem for path in made if path not in self._members),
            "restarted": sorted(path.stem for path in made if path in self._members),
            "stopped": sorted(path.stem for path in gone),
        }
        self._members = made | self._members
        self._show()
        self._serve(selected, first=first)
        await asyncio.gather(*(self._replace(path, made.get(path)) for path in (*made, *gone)))
        if not first:
            event(log, logging.INFO, "config.reloaded", **outcome, unchanged=len(self._members) - len(made))

    def stop(self) -> None:
        """Drain all captures, which ends `run`."""
        self.stopping = True
        for each in self._members.values():
            self._ends.add(asyncio.create_task(self._end(each)))

    def _running(self) -> dict[Path, Config]:
        return {path: each.config for path, each in self._members.items() if not each.failure}

    # ------------------------------------------------------------------ HTTP

    def _serve(self, selected: Selected, *, first: bool) -> None:
        """Serve metrics and probes where the files say, and no longer where they said before.

        If that is impossible, `first` raises JetcaptureError, and later the address stays. Unless `http` is configured
        explicitly, a port in use is not an error: replicas may share a machine.
        """
        if selected.listen == self._listen:
            return
        http, early, self._server = ExitStack(), self._server, None
        if selected.listen is None:
            if early is not None:
                early.stop()
        else:
            from jetcapture_py.monitoring.site import Site

            if self._site is None:
                self._site = Site(single=self._files.single)
                self._show()
            try:
                http.enter_context(serving(self._site, selected.listen, early))
            except JetcaptureError as error:
                if selected.listen_required and first:
                    raise
                if selected.listen_required:
                    event(log, logging.ERROR, "config.refused", error=str(error))
                    return
                event(log, logging.WARNING, "http.off", reason=str(error))
        self._http.close()
        self._http, self._listen = http, selected.listen

    def _show(self) -> None:
        """Answer for the captures that there are now."""
        if self._site is None:
            return
        failures = {each.name: each.failure for each in self._members.values() if each.failure}
        for path, reason in self._refused.items():
            if path in self._members:
                if self._members[path].failure:
                    failures[path.stem] = reason
            elif not any(each.parent == path for each in self._members):  # a directory whose captures go on
                taken = {each.name for each in self._members.values()} | failures.keys()
                failures[one_line(path) if path.stem in taken else one_line(path.stem)] = reason
        self._site.show({each.name: each.capture.state for each in self._members.values()}, failures)

    # ------------------------------------------------------------------ one capture

    def _make(self, configs: Mapping[Path, Config], refused: dict[Path, tuple[str, ...]]) -> dict[Path, _Member]:
        """Make captures in a thread, as user code may hang; add to `refused` what is wrong with the others."""
        made: dict[Path, _Member] = {}
        for path, config in configs.items():
            prefix = "" if self._files.single and not self._members else f"{path}: "
            try:
                made[path] = self._made(path, config)
            except ConfigError as error:
                refused[path] = tuple(f"{prefix}{line}" for line in error.problems)
            except Exception as error:
                if not self._members:
                    raise
                refused[path] = (f"{prefix}{one_line(error)}",)
        return made

    def _made(self, path: Path, config: Config) -> _Member:
        with about(None if self._files.single else path.stem):
            for warning in config.warnings():
                event(log, logging.WARNING, "config.warning", warning=warning)
            made = _Member(path, config, single=self._files.single)
        if self._encode_threads is not None and not is_reference(config.block.format):  # user code may hang
            made.capture.state.encode_threads = self._encode_threads
        return made

    async def _replace(self, path: Path, new: _Member | None) -> None:
        """Drain a capture, if there is one, and start the new one, if there is one."""
        if (old := self._members[path]) is not new:
            if old.running:
                with about(old.label):
                    event(log, logging.INFO, "capture.draining", signal="SIGHUP", unacked=old.capture.state.unacked)
            await self._end(old)
        if self.stopping:
            return
        if new is None:
            del self._members[path]
        else:
            self._members[path] = new
            self._start(new)
        self._show()

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
        member.capture.state.ended = ""
        event(log, logging.INFO, "capture.stopped", **member.capture.state.stats.fields())

    def _failed(self, member: _Member, error: BaseException) -> None:
        """Report the failure of a capture; stop the others."""
        if isinstance(error, ConfigError) and self._files.single:
            member.failure = str(error)
            self._error = error
            return
        reasons = [log_failure(each) for each in _leaves(error)]
        member.capture.state.ended = reasons[-1]
        if member.stop.is_set() and not self.stopping:  # it was being replaced
            self.abandoned = True
            return
        member.failure = reasons[-1]
        self._show()
        self.code = self.code or (REFUSED if isinstance(error, ConfigError) else FAILED)
        if not self._keep_going and not self.stopping:
            self.stop()

    async def _end(self, member: _Member) -> None:
        """Drain a capture, or cancel it before it can hold messages."""
        member.stop.set()
        while member.task is not None and member.running:
            if not member.capture.state.opened:
                member.task.cancel()
            await asyncio.wait((member.task,), timeout=CANCEL_AGAIN)


def log_failure(error: BaseException) -> str:
    """Log why a capture failed; return it in one line."""
    known = isinstance(error, JetcaptureError)
    reason = one_line(str(error) if known else error, LONGEST_LOGGED)
    event(log, logging.ERROR, "capture.failed", error=reason)
    if not known:
        log.debug("traceback", exc_info=error)
    return reason


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in exception groups."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error
