"""Make calls in threads: of a pool, or in a dedicated one for calls that may hang, such as disk or user code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
Item = TypeVar("Item")


async def in_pool(threads: Executor, work: Callable[..., T], *args: Any) -> T:
    """Run `work` in one of `threads`; its log lines name the caller's capture."""
    return await asyncio.get_running_loop().run_in_executor(threads, copy_context().run, work, *args)


def futures_of(do: Callable[[Item], T], items: Iterable[Item], workers: int, max_ahead: int) -> Generator[Future[T]]:
    """Yield the future of `do` for every item, in order; at most `max_ahead` of them are not taken yet.

    Closing the generator cancels calls that have not begun.
    """
    waiting: deque[Future[T]] = deque()
    threads = ThreadPoolExecutor(workers, "read")
    try:
        for item in items:
            if len(waiting) >= max_ahead:
                yield waiting.popleft()
            waiting.append(threads.submit(do, item))
        while waiting:
            yield waiting.popleft()
    finally:
        threads.shutdown(cancel_futures=True)


class DaemonThread:
    """Makes one call at a time, in a thread that does not keep the process alive; it starts with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._since: float | None = None

    @property
    def busy_for(self) -> float | None:
        """Duration of the current call in seconds; None without one."""
        since = self._since  # read once: the thread changes it
        return None if since is None else time.monotonic() - since

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue a call. The garbage collector may do so, after another call."""
        if self._thread is None:
            self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._work.put((future, work))
        return future

    def close(self) -> None:
        """End the thread after its last call."""
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                self._since = time.monotonic()
                try:
                    result = work()
                except BaseException as error:
                    self._since = None  # before the caller sees the result
                    future.set_exception(error)
                else:
                    self._since = None
                    future.set_result(result)
                    del result
            del item, future, work  # they may hold a file


async def in_thread(work: Callable[..., T], *args: Any, **options: Any) -> T:
    """Do `work` in a thread that does not keep the process alive, unlike `asyncio.to_thread`."""
    thread = DaemonThread("work")
    future = thread.submit(partial(work, *args, **options))
    thread.close()
    return await asyncio.wrap_future(future)


def leave(code: int) -> NoReturn:
    """Exit without waiting for threads, which may hang, and without Python's cleanup."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, as after the terminal has gone
            stream.flush()
    os._exit(code)
