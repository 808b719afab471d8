"""Run captures as a process: signals, HTTP, shutdown and the exit code.

With one configuration file there is one capture, and nothing in logs and metrics names it. With several files or a
directory, each capture is named after its file, and all share the log, the HTTP server and the threads that encode.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import NoReturn

from jetcapture_py.config.several import ConfigFiles, Selected
from jetcapture_py.errors import ConfigError
from jetcapture_py.log import event
from jetcapture_py.monitoring.http_server import HttpServer
from jetcapture_py.startup import has_terminal, release_hangups
from jetcapture_py.supervisor import FAILED, Supervisor, log_failure

log = logging.getLogger("jetcapture")

TERMINAL_CLOSES = 1.0
"""Seconds after SIGHUP in which the terminal may turn out to have closed."""


def run(
    files: ConfigFiles,
    *,
    until_caught_up: bool = False,
    keep_going: bool = False,
    server: HttpServer | None = None,
    had_terminal: bool = False,
) -> int:
    """Capture until SIGTERM or SIGINT, until the terminal closes, or until caught up; return the exit code.

    SIGHUP reads the files again; one that was held is delivered. `server` already answers probes, and `had_terminal`
    says whether the process began with a terminal. A second SIGTERM or SIGINT exits immediately. Raises
    ConfigError for problems found at startup, such as an object that cannot be imported, or a missing extra.
    """
    supervisor = Supervisor(files, server, until_caught_up=until_caught_up, keep_going=keep_going)
    try:
        asyncio.run(_run(supervisor, files.select(), had_terminal=had_terminal))
    except ConfigError:
        raise
    except Exception as error:
        log_failure(error)
        leave(FAILED)
    if supervisor.code or supervisor.abandoned:
        leave(supervisor.code)  # threads of such a capture may hang in the store
    return supervisor.code


async def _run(supervisor: Supervisor, selected: Selected, *, had_terminal: bool) -> None:
    _handle_signals(supervisor, had_terminal=had_terminal)
    await supervisor.run(selected)


def _handle_signals(supervisor: Supervisor, *, had_terminal: bool) -> None:
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

    def drain_without_terminal() -> None:
        if had_terminal and not supervisor.stopping and not has_terminal():
            drain(signal.SIGHUP)

    def hang_up() -> None:
        drain_without_terminal()
        if not supervisor.stopping:  # a closing terminal sends it more than once
            supervisor.changed.set()
            loop.call_later(TERMINAL_CLOSES, drain_without_terminal)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the process outlives its terminal
        loop.add_signal_handler(signal.SIGHUP, hang_up)
    release_hangups()


def leave(code: int) -> NoReturn:
    """Exit without waiting for threads."""
    logging.shutdown()
    os._exit(code)
