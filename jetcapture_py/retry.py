"""Retry work that another process has interfered with, such as maintenance that removed an object."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

from jetcapture_py.errors import ConflictError, VanishedError

VANISHED_ATTEMPTS = 3
"""Attempts for the same object that is listed but gone."""
CONFLICT_ATTEMPTS = 8
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
T = TypeVar("T")


def delays(first: float, longest: float) -> Iterator[float]:
    """Yield seconds to wait between attempts, endlessly: doubling from `first` to `longest`, with jitter."""
    delay = first
    while True:
        yield delay * random.uniform(0.5, 1.0)  # noqa: S311  jitter, not a secret
        delay = min(delay * 2, longest)


def retried(work: Callable[[], T]) -> T:
    """Call `work` again when an object disappears because a compaction has replaced it.

    During a compaction, different objects may vanish in each attempt; the same one is not listed again.
    """
    vanished: Counter[str] = Counter()
    while True:
        try:
            return work()
        except VanishedError as error:
            vanished[str(error)] += 1
            if vanished[str(error)] == VANISHED_ATTEMPTS:
                raise


def retried_on_conflict(work: Callable[[], T]) -> T:
    """Call `work` again, after a random pause, when another process has changed or removed something."""
    for pause in islice(delays(_PAUSE_S, _LONGEST_PAUSE_S), CONFLICT_ATTEMPTS - 1):
        try:
            return work()
        except (ConflictError, VanishedError):
            time.sleep(pause)  # so that two processes do not collide again
    return work()
