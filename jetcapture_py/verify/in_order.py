"""Map items in threads, with ordered results and a bounded queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_AHEAD = 4
"""Maximum items per thread in progress or waiting to be taken: results take memory."""


def in_order(
    name: str, workers: int, work: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[tuple[Item, Result]]:
    """Yield every item with its result. A single worker runs in the caller's thread, which is faster."""
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
