"""An event loop and an executor in an actor's thread. The loop has no clock, and sleeps as the actor does."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class AtOnce(Executor):
    """Does the work in the actor's thread."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, do: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(do(*arguments, **named))
        except BaseException as error:
            done.set_exception(error)
        return done


class _Selector(selectors.SelectSelector):
    slept = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing would ever wake it"
        if timeout > 0:
            time.sleep(timeout)
            self.slept += timeout
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._sleeping = _Selector()
        super().__init__(self._sleeping)
        self.set_exception_handler(lambda *_: None)  # the garbage collector calls it, in any actor's thread

    def time(self) -> float:
        return self._sleeping.slept


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run asynchronous work whose executors are `AtOnce`."""
    loop = _Loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
