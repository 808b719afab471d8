"""The process around a capture: signals, the way out, and the exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator

from jetcapture_py.capture import Capture
from jetcapture_py.config import Config
from jetcapture_py.errors import ConfigError, DrainError, JetcaptureError
from jetcapture_py.log import event

log = logging.getLogger("jetcapture")

DRAINED, FAILED = 0, 1


def run(config: Config, *, until_caught_up: bool = False) -> int:
    """Capture until SIGTERM or SIGINT, or until caught up; the exit code. A second signal ends the process at once.

    Raises ConfigError for what shows only when the parts are made: an object that cannot be imported, a missing extra.
    """
    for warning in config.warnings():
        event(log, logging.WARNING, "config.warning", warning=warning)
    try:
        asyncio.run(_run(config, until_caught_up=until_caught_up))
    except ConfigError:
        raise
    except BaseExceptionGroup as group:
        return _failed(*_leaves(group))
    except Exception as error:
        return _failed(error)
    return DRAINED


async def _run(config: Config, *, until_caught_up: bool) -> None:
    capture = Capture(config)
    stop = asyncio.Event()
    running = asyncio.create_task(capture.run(stop, until_caught_up=until_caught_up))

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            event(log, logging.ERROR, "capture.killed", signal=number.name, unacked=capture.unacked)
            leave(FAILED)
        event(log, logging.INFO, "capture.draining", signal=number.name, unacked=capture.unacked)
        stop.set()
        if not capture.opened:
            running.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    event(log, logging.INFO, "capture.started", stream=config.source.stream, consumer=config.source.consumer)
    try:
        await running
    except asyncio.CancelledError:
        if capture.opened:
            raise
    event(log, logging.INFO, "capture.stopped", **capture.stats.fields())


def _failed(*errors: BaseException) -> int:
    for error in errors:
        known = isinstance(error, JetcaptureError)
        event(log, logging.ERROR, "capture.failed", error=str(error) if known else error)
        if not known:
            log.debug("traceback", exc_info=error)
    if any(isinstance(error, DrainError) for error in errors):
        leave(FAILED)  # a thread may hang in the store for ever; nothing it does can be acknowledged any more
    return FAILED


def leave(code: int) -> None:
    """End the process without waiting for threads."""
    logging.shutdown()
    os._exit(code)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
