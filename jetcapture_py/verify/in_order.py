"""Work done in several threads, with the results in the order of the items and a bound on how many of them wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_AHEAD = 4
"""Items per thread that may be worked on or wait to be taken: results take memory."""


def in_order(
    name: str, workers: int, work: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[tuple[Item, Result]]:
    """Every item with what `work` returns for it. With one worker in the caller's thread, which is faster."""
    if workers <= 1:
        yield from ((item, work(item)) for item in items)
        return
    pending: deque[tuple[Item, Future[Result]]] = deque()
    with ThreadPoolExecutor(workers, name) as threads:
        for item in items:
            if len(pending) >= workers * _AHEAD:
                done, future = pending.popleft()
                yield done, future.result()
            pending.append((item, threads.submit(work, item)))
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
