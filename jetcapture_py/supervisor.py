"""Starts, watches, replaces and stops the captures of a process, all in one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.model import Config
from jetcapture_py.config.several import ConfigFiles, Selected, log_settings
from jetcapture_py.config.units import format_duration
from jetcapture_py.errors import ConfigError, JetcaptureError
from jetcapture_py.log import about, event, setup
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
    """A capture, its configuration, and its task once it has started. `replaced`: its failure ends nothing else."""

    def __init__(self, path: Path, config: Config, *, single: bool) -> None:
        self.name, self.config = path.stem, config
        self.label = None if single else path.stem
        self.capture = Capture(config)
        self.stop = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.failed = self.replaced = False

    @property
    def running(self) -> bool:
        """Whether it has started and not ended."""
        return self.task is not None and not self.task.done()


class Supervisor:
    """The captures of a process. `code` is its exit code, and `process` what they share.

    A failure stops all captures, or with `keep_going` only its own. `failures` has the reason for each capture that
    failed or could not start, by name. `abandoned`: one was canceled while it started, or replaced and did not drain.
    """

    def __init__(
        self, files: ConfigFiles, selected: Selected, *, until_caught_up: bool = False, keep_going: bool = False
    ) -> None:
        self.process = files.process(selected.configs.values())
        self.code = DRAINED
        self.stopping = self.abandoned = False
        self.changed = asyncio.Event()
        """Set to have the files read again."""
        self.failures: dict[str, str] = {}
        self._files, self._selected = files, selected
        self._until_caught_up, self._keep_going = until_caught_up, keep_going
        self._members: dict[Path, _Member] = {}
        self._site: Site | None = None
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

    def prepare(self) -> None:
        """Make all captures. Raises ConfigError, with `keep_going` only if there is none."""
        problems = dict(self._selected.problems)
        for path, config in self._selected.configs.items():
            try:
                self._members[path] = self._made(path, config)
            except ConfigError as error:
                prefix = "" if self._files.single else f"{path}: "
                problems[path] = tuple(f"{prefix}{line}" for line in error.problems)
        if problems and not (self._keep_going and self._members):
            raise ConfigError(*(line for lines in problems.values() for line in lines))
        for path, lines in problems.items():
            self._refused(path, lines)
            self.code = REFUSED

    def announce(self) -> None:
        """Log that the captures start; signals must be handled from here on."""
        for each in self._members.values():
            self._announce(each)

    def site(self) -> Site:
        """Return the HTTP endpoints of all captures."""
        from jetcapture_py.monitoring.site import Site

        self._site = Site(self.failures, single=self._files.single)
        for each in self._members.values():
            self._site.show(each.name, each.capture.state)
        return self._site

    async def run(self) -> None:
        """Run until every capture has ended. Raises ConfigError that only shows at the start of a single capture."""
        for each in self._members.values():
            self._start(each)
        while running := [each.task for each in self._members.values() if each.task is not None and each.running]:
            changed = asyncio.create_task(self.changed.wait())
            await asyncio.wait((changed, *running), return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if self.changed.is_set() and not self.stopping:
                self.changed.clear()
                await self._read_again()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Drain all captures, which ends `run`."""
        self.stopping = True
        for each in self._members.values():
            self._ends.add(asyncio.create_task(self._end(each)))

    # ------------------------------------------------------------------ one capture

    def _made(self, path: Path, config: Config) -> _Member:
        with about(None if self._files.single else path.stem):
            for warning in config.warnings():
                event(log, logging.WARNING, "config.warning", warning=warning)
            made = _Member(path, config, single=self._files.single)
        if self._encode_threads is not None and not is_reference(config.block.format):  # user code may hang
            made.capture.state.encode_threads = self._encode_threads
        return made

    def _announce(self, member: _Member) -> None:
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

    def _start(self, member: _Member) -> None:
        with about(member.label):
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
        member.failed = True
        if isinstance(error, ConfigError) and self._files.single:
            self._error = error
            return
        reasons = [log_failure(each) for each in _leaves(error)]
        member.capture.state.ended = reasons[-1]
        if member.replaced and not self.stopping:
            self.abandoned = True
            return
        self.failures[member.name] = reasons[-1]
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

    # ------------------------------------------------------------------ changed files

    async def _read_again(self) -> None:
        """Read the files; start, restart and stop what has changed. What has a problem stays as it is."""
        running = {path: each.config for path, each in self._members.items() if not each.failed}
        found = await asyncio.to_thread(self._files.read_again, running, self.process)
        if self.stopping:
            return
        for name in self.failures.keys() - {each.name for each in self._members.values() if each.failed}:
            del self.failures[name]  # they are tried again
        for path, lines in found.problems.items():
            self._refused(path, lines)
        changed = {path: config for path, config in found.configs.items() if config != running.get(path)}
        made = {path: new for path, config in changed.items() if (new := self._tried(path, config)) is not None}
        removed = [
            path
            for path in self._members
            if path not in found.configs and not {path, path.parent} & found.problems.keys()
        ]
        wanted = log_settings(found.configs.values())
        setup(wanted.format, wanted.level)
        outcome = {
            "started": sorted(path.stem for path in made if path not in self._members),
            "restarted": sorted(path.stem for path in made if path in self._members),
            "stopped": sorted(path.stem for path in removed),
        }
        await asyncio.gather(*(self._replace(path, made.get(path)) for path in (*made, *removed)))
        event(log, logging.INFO, "config.reloaded", **outcome, unchanged=len(self._members) - len(made))

    def _tried(self, path: Path, config: Config) -> _Member | None:
        """Make a capture; report why it cannot be made."""
        try:
            return self._made(path, config)
        except Exception as error:
            lines = error.problems if isinstance(error, ConfigError) else (one_line(error),)
            self._refused(path, tuple(f"{path}: {line}" for line in lines))
            return None

    async def _replace(self, path: Path, new: _Member | None) -> None:
        """Drain a capture, if there is one, and start the new one."""
        if (old := self._members.get(path)) is not None:
            old.replaced = True
            if old.running:
                with about(old.label):
                    event(log, logging.INFO, "capture.draining", signal="SIGHUP", unacked=old.capture.state.unacked)
            await self._end(old)
        if self.stopping:
            return
        if new is None:
            del self._members[path]
            if all(each.name != path.stem for each in self._members.values()):  # a file may have moved
                self.failures.pop(path.stem, None)
                if self._site is not None:
                    self._site.remove(path.stem)
            return
        self.failures.pop(new.name, None)
        self._members[path] = new
        if self._site is not None:
            self._site.show(new.name, new.capture.state)
        self._announce(new)
        self._start(new)

    def _refused(self, path: Path, lines: Sequence[str]) -> None:
        reason = one_line("; ".join(lines), LONGEST_LOGGED)
        event(log, logging.ERROR, "config.refused", error=reason)
        if path in self._members:
            if self._members[path].failed:
                self.failures[path.stem] = reason
        elif not any(each.parent == path for each in self._members):  # a directory whose captures go on
            taken = {each.name for each in self._members.values()} | self.failures.keys()
            self.failures[one_line(path) if path.stem in taken else one_line(path.stem)] = reason


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
