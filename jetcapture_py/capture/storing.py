"""Put objects into the store with retries, and report its state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, TypeVar

from jetcapture_py.archive.writer import EncodedBlock
from jetcapture_py.config.model import StoreConfig
from jetcapture_py.errors import FullStoreError, JetcaptureError, PermanentStoreError, StoreError
from jetcapture_py.log import event
from jetcapture_py.plugins import user_code
from jetcapture_py.retry import delays
from jetcapture_py.store import Store
from jetcapture_py.text import age, one_line
from jetcapture_py.threads import in_pool

log = logging.getLogger("jetcapture.store")

FIRST_RETRY, MAX_RETRY = 0.2, 30.0
MAX_TURN = 2.0
"""Seconds after which a turn with a failure ends: a hanging store would cost a timeout per object."""
SLOW = 60.0
"""Seconds without an answer after which the store counts as hanging."""

T = TypeVar("T")


class Histogram:
    """A histogram of durations in seconds; `total` is their sum."""

    BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

    def __init__(self) -> None:
        self.total = 0.0
        self._counts = [0] * (len(self.BOUNDS) + 1)

    def add(self, seconds: float) -> None:
        self.total += seconds
        self._counts[bisect_left(self.BOUNDS, seconds)] += 1

    def buckets(self) -> dict[str, int]:
        """Return the cumulative counts by upper bound; the last one is +Inf."""
        return dict(zip((*map(str, self.BOUNDS), "+Inf"), accumulate(self._counts), strict=True))


class Storing:
    """Attempts to store. A *turn* is a group of objects stored together."""

    def __init__(self) -> None:
        self.seconds = Histogram()
        """Durations of successful puts."""
        self.errors: Counter[str] = Counter()
        """Failures by kind: temporary or permanent."""
        self.retries = 0
        self.last_success: float | None = None
        """Seconds since the epoch; None before the first object."""
        self._asked: dict[object, float] = {}
        self._failing: dict[object, tuple[str, bool]] = {}  # why, and whether the store is full

    def began(self, turn: object, now: float) -> None:
        self._asked[turn] = now

    def succeeded(self, seconds: float) -> None:
        self.seconds.add(seconds)
        self.last_success = time.time()

    def failed(self, turn: object, errors: list[Exception]) -> None:
        """Record the errors of objects of this turn that were not stored."""
        for error in errors:
            self.errors["permanent" if isinstance(error, PermanentStoreError) else "temporary"] += 1
        first = errors[0]
        reason = one_line(str(first) if isinstance(first, JetcaptureError) else first)
        self._failing[turn] = reason, isinstance(first, FullStoreError)
        self._asked.pop(turn, None)

    def ended(self, turn: object) -> None:
        """Record the end of a turn: everything is stored, or given up."""
        self._asked.pop(turn, None)
        self._failing.pop(turn, None)

    def trouble(self, now: float) -> str | None:
        """Return in one line why objects are not being stored; None without a problem."""
        for reason, _ in self._failing.values():
            return reason
        waited = now - min(self._asked.values(), default=now)
        return f"the store has not answered for {age(waited)}" if waited > SLOW else None

    @property
    def full(self) -> bool:
        """Whether objects are not stored because the store has no space left."""
        return next((full for _, full in self._failing.values()), False)


class Uploads:
    """The store, its threads and its state. Errors are retried for `store.retry_for` seconds.

    `before` is called in a thread before objects are put; they wait while it fails.
    """

    def __init__(self, store: Store, config: StoreConfig, before: Callable[[], None] = lambda: None) -> None:
        self.store, self.workers, self.retry_for = store, config.concurrency, config.retry_for
        self._before = before
        self.threads = ThreadPoolExecutor(config.concurrency, "store")
        self.storing = Storing()

    async def call(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work` in one of the store's threads."""
        return await in_pool(self.threads, work, *args)

    async def probe(self, stop: asyncio.Event) -> None:
        """Check that the store accepts writes; retry transient errors until `stop`.

        Raises PermanentStoreError immediately, and any other error after `store.retry_for`.
        """
        loop, turn = asyncio.get_running_loop(), object()
        give_up = loop.time() + self.retry_for
        try:
            for attempt, delay in enumerate(delays(FIRST_RETRY, MAX_RETRY), 1):
                if stop.is_set():
                    return None
                self.storing.began(turn, loop.time())
                try:
                    return await self.call(self.store.probe)
                except PermanentStoreError:
                    raise
                except StoreError as error:
                    self.storing.failed(turn, [error])
                    event(log, logging.WARNING, "store.failed", error=error, attempt=attempt)
                    if loop.time() >= give_up:
                        raise
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), delay)
        finally:
            self.storing.ended(turn)

    async def put_all(self, objects: Sequence[EncodedBlock | None]) -> AsyncIterator[tuple[int, str]]:
        """Store every object; yield index and location of each as soon as it is stored, in any order.

        For None, nothing is stored and the location is "". Failures are retried with backoff and jitter; after
        `store.retry_for` the error is raised.
        """
        loop, turn, storing = asyncio.get_running_loop(), object(), self.storing
        give_up = loop.time() + self.retry_for
        pending = [(index, encoded) for index, encoded in enumerate(objects) if encoded is not None]
        for index in (index for index, encoded in enumerate(objects) if encoded is None):
            yield index, ""
        if not pending:
            return
        try:
            for attempt, delay in enumerate(delays(FIRST_RETRY, MAX_RETRY), 1):
                storing.began(turn, loop.time())
                objects_left = [each for _, each in pending]
                outcomes = await self.call(_put_each, self.store, self._before, objects_left)
                failed: list[tuple[int, EncodedBlock]] = []
                errors: list[Exception] = []
                for (index, encoded), (outcome, seconds) in zip(pending, outcomes, strict=True):
                    if isinstance(outcome, Exception):
                        failed.append((index, encoded))
                        errors.append(outcome)
                    else:
                        storing.succeeded(seconds)
                        yield index, outcome
                if not failed:
                    if attempt > 1:
                        event(log, logging.INFO, "store.recovered", attempts=attempt, objects=len(pending))
                    return
                storing.failed(turn, errors)
                level = logging.ERROR if isinstance(errors[0], PermanentStoreError) else logging.WARNING
                fields = {"attempt": attempt, "objects": len(failed), "object": failed[0][1].name.path}
                event(log, level, "store.failed", error=errors[0], **fields)
                if loop.time() >= give_up:
                    raise errors[0]
                await asyncio.sleep(delay)
                storing.retries += len(failed)
                pending = [*failed[1:], *failed[:1]]  # the first is always tried, so every object gets its turn
        finally:
            storing.ended(turn)

    def close(self) -> None:
        """End the threads after their current work, without waiting."""
        self.threads.shutdown(wait=False, cancel_futures=True)


def _put_each(
    store: Store, before: Callable[[], None], objects: Sequence[EncodedBlock]
) -> list[tuple[str | Exception, float]]:
    """Return each object's location or error, and the seconds taken. Runs in a worker thread."""
    try:
        before()
    except JetcaptureError as error:
        _drop_tracebacks(error)
        return [(error, 0.0)] * len(objects)
    outcomes: list[tuple[str | Exception, float]] = []
    first, failure = time.perf_counter(), None
    for encoded in objects:
        began = time.perf_counter()
        if failure is not None and began - first > MAX_TURN:
            outcomes.append((failure, 0.0))
            continue
        outcome = _put(store, encoded)
        outcomes.append((outcome, time.perf_counter() - began))
        if isinstance(outcome, Exception):
            failure = outcome
    return outcomes


def _put(store: Store, encoded: EncodedBlock) -> str | Exception:
    try:
        with user_code(StoreError, Exception):
            return store.put(encoded.name, encoded.data)
    except Exception as error:
        if not isinstance(error, JetcaptureError):
            log.debug("traceback", exc_info=error)
        _drop_tracebacks(error)
        return error


def _drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an error and its causes: their frames hold the object, and often the error, in a cycle."""
    errors: list[BaseException] = [error]
    for cause in errors:
        cause.__traceback__ = None
        errors += (more for more in (cause.__cause__, cause.__context__) if more is not None and more not in errors)
