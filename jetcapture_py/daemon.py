"""Run a capture as a process: signals, shutdown and the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from typing import NoReturn

from jetcapture_py.capture import memory
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.config.model import Config
from jetcapture_py.errors import ConfigError, JetcaptureError
from jetcapture_py.log import event
from jetcapture_py.monitoring.http_server import HttpServer
from jetcapture_py.text import LONGEST_LOGGED, one_line

log = logging.getLogger("jetcapture")

DRAINED, FAILED = 0, 1


def run(config: Config, *, until_caught_up: bool = False, server: HttpServer | None = None) -> int:
    """Capture until SIGTERM, SIGINT or SIGHUP, or until caught up; return the exit code.

    `server` already answers probes. A second SIGTERM or SIGINT exits immediately. Raises ConfigError for problems found
    only at startup: an object that cannot be imported, a missing extra.
    """
    for warning in config.warnings():
        event(log, logging.WARNING, "config.warning", warning=warning)
    if not config.has_user_code:  # user code may need it
        memory.without_pandas()
    try:
        asyncio.run(_run(config, server, until_caught_up=until_caught_up))
    except ConfigError:
        raise
    except BaseExceptionGroup as group:
        _failed(*_leaves(group))
    except Exception as error:
        _failed(error)
    return DRAINED


async def _run(config: Config, server: HttpServer | None, *, until_caught_up: bool) -> None:
    capture = Capture(config)
    state = capture.state
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            if number is signal.SIGHUP:
                return  # a closing terminal sends it more than once
            event(log, logging.ERROR, "capture.killed", signal=number.name, unacked=state.unacked)
            leave(FAILED)
        event(log, logging.INFO, "capture.draining", signal=number.name, unacked=state.unacked)
        if not state.opened:
            leave(DRAINED)  # nothing has been pulled yet, and nats-py may swallow a cancellation
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue  # nohup: the process outlives its terminal
        loop.add_signal_handler(number, on_signal, number)
    event(log, logging.INFO, "capture.started", stream=config.source.stream, consumer=config.source.consumer)
    with _http(state, server):
        await capture.run(stop, until_caught_up=until_caught_up)
    event(log, logging.INFO, "capture.stopped", **state.stats.fields())


@contextlib.contextmanager
def _http(state: CaptureState, server: HttpServer | None) -> Iterator[None]:
    """Serve metrics and probes while the capture runs.

    Unless `http` is configured explicitly, a port in use is not an error: replicas may share a machine.
    """
    config = state.config.http
    with contextlib.ExitStack() as stack:
        if config is not None:
            from jetcapture_py.monitoring.http import serve

            try:
                stack.enter_context(serve(state, config.listen, server))
            except JetcaptureError as error:
                if "http" in state.config.model_fields_set:
                    raise
                event(log, logging.WARNING, "http.off", reason=str(error))
        yield


def _failed(*errors: BaseException) -> NoReturn:
    """Log the errors and exit without waiting for threads, which may hang in the store."""
    for error in errors:
        known = isinstance(error, JetcaptureError)
        event(log, logging.ERROR, "capture.failed", error=one_line(str(error), LONGEST_LOGGED) if known else error)
        if not known:
            log.debug("traceback", exc_info=error)
    leave(FAILED)


def leave(code: int) -> NoReturn:
    """Exit without waiting for threads."""
    logging.shutdown()
    os._exit(code)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
