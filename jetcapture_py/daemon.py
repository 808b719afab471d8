"""The process around a capture: signals, the way out, and the exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from typing import NoReturn

from jetcapture_py.capture import Capture
from jetcapture_py.config import Config
from jetcapture_py.errors import ConfigError, JetcaptureError
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
        _failed(*_leaves(group))
    except Exception as error:
        _failed(error)
    return DRAINED


async def _run(config: Config, *, until_caught_up: bool) -> None:
    capture = Capture(config)
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            event(log, logging.ERROR, "capture.killed", signal=number.name, unacked=capture.unacked)
            leave(FAILED)
        event(log, logging.INFO, "capture.draining", signal=number.name, unacked=capture.unacked)
        if not capture.opened:
            leave(DRAINED)  # nothing has been pulled yet, and the client library may swallow a cancellation
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    event(log, logging.INFO, "capture.started", stream=config.source.stream, consumer=config.source.consumer)
    await capture.run(stop, until_caught_up=until_caught_up)
    event(log, logging.INFO, "capture.stopped", **capture.stats.fields())


def _failed(*errors: BaseException) -> NoReturn:
    """Say why, and end; a thread may hang in the store for ever, and nothing it does can be acknowledged any more."""
    for error in errors:
        known = isinstance(error, JetcaptureError)
        event(log, logging.ERROR, "capture.failed", error=str(error) if known else error)
        if not known:
            log.debug("traceback", exc_info=error)
    leave(FAILED)


def leave(code: int) -> NoReturn:
    """End the process without waiting for threads."""
    logging.shutdown()
    os._exit(code)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
