"""Do work in threads, with the results in order, and few of them in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
Item = TypeVar("Item")


def futures_of(do: Callable[[Item], T], items: Iterable[Item], workers: int, most: int) -> Generator[Future[T]]:
    """Yield the future of `do` for every item, in order; at most `most` of them are not taken yet.

    What has not begun when the generator is closed is left out.
    """
    waiting: deque[Future[T]] = deque()
    threads = ThreadPoolExecutor(workers, "read")
    try:
        for item in items:
            if len(waiting) >= most:
                yield waiting.popleft()
            waiting.append(threads.submit(do, item))
        while waiting:
            yield waiting.popleft()
    finally:
        threads.shutdown(cancel_futures=True)
