"""Compute the ranges of a restore in threads, and send them in order."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.jetstream.restore import KEEP_ALIVE, StreamRestore
from jetcapture_py.restoring import backup
from jetcapture_py.restoring.part import RestoreRange
from jetcapture_py.threads import futures_of

T = TypeVar("T")

Pieces = Iterator[Future[tuple[int, list[bytes]]]]

_NAME = "jetcapture restore"
_TIMEOUT = 20.0
_AHEAD = 1
"""Computed ranges that wait, besides those being computed."""
_MAX_THREADS = 4
"""More do not help: outside Arrow and NumPy, only one thread runs at a time."""


def ahead(work: Callable[[RestoreRange], T], ranges: Sequence[RestoreRange]) -> Generator[Future[T]]:
    """Yield the futures of all results in order, computed in threads, a few ahead."""
    parallel = min(_MAX_THREADS, os.cpu_count() or 1)
    return futures_of(work, ranges, parallel, parallel + 1 + _AHEAD)


async def check_target(login: NatsConfig, stream: str) -> None:
    """Check that the server can restore and that the stream does not exist. Raises SourceError."""
    async with ReadSession(login, _NAME, timeout=_TIMEOUT) as session:
        await StreamRestore(session, stream).check()


async def send(
    login: NatsConfig,
    config: Mapping[str, Any],
    span: tuple[int, int],
    consumers: Sequence[tuple[Mapping[str, Any], int]],
    pieces: Pieces,
    sent: Callable[[int], None],
) -> dict[str, Any]:
    """Create a stream with this `config` from the numbers of messages and pieces in `pieces`; return its STREAM.INFO.

    `span` is its first and last sequence. `consumers` are API configurations and ack floors. `sent` is called with the
    number of messages sent so far. On any failure, the incomplete stream is deleted.
    """
    total, stream, task = 0, config["name"], asyncio.current_task()
    assert task is not None  # noqa: S101  # in a coroutine
    async with ReadSession(login, _NAME, timeout=_TIMEOUT) as session:
        restore = StreamRestore(session, stream)
        await restore.check()
        _on_termination(task.cancel)
        try:
            await restore.begin(config, dict(zip(("first_seq", "last_seq"), span, strict=True)))
            await restore.create(b"".join(backup.framed(backup.head(*span, consumers))))
            for future in pieces:
                count, chunks = await _patiently(future, restore)
                for chunk in chunks:
                    await restore.send(chunk)
                    if task.cancelling():
                        raise asyncio.CancelledError  # nats-py swallows a cancellation during a flush
                total += count
                sent(total)
            await restore.send(b"".join(backup.framed(backup.END)))
            info = await restore.finish()
            _on_termination(lambda: None)  # the stream is complete
            return info
        except BaseException as error:
            _on_termination(lambda: None)  # the stream is removed first
            reason = await restore.abort()
            if reason is None:
                raise
            raise SourceError(
                f"{str(error) or 'interrupted'}; the incomplete stream {stream} could not be removed "
                f"({reason}); if this restore created it, delete it: nats stream rm {stream}"
            ) from error


async def _patiently(future: Future[tuple[int, list[bytes]]], restore: StreamRestore) -> tuple[int, list[bytes]]:
    """Wait for a piece; meanwhile keep the restore alive."""
    waiting = asyncio.wrap_future(future)
    while not (await asyncio.wait((waiting,), timeout=KEEP_ALIVE))[0]:
        await restore.keep_alive()
    return waiting.result()


def _on_termination(act: Callable[[], object]) -> None:
    """Install a SIGTERM handler, until the event loop is closed."""
    with suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread, or no such signals
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, act)
