"""Put objects into the store, with retries, and report failures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence

from jetcapture_py.archive.writer import EncodedBlock
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.errors import JetcaptureError, PermanentStoreError, StoreError
from jetcapture_py.log import event
from jetcapture_py.plugins import user_code
from jetcapture_py.retry import delays
from jetcapture_py.store import Store

log = logging.getLogger("jetcapture.store")

FIRST_RETRY, MAX_RETRY = 0.2, 30.0
MAX_TURN = 2.0
"""Seconds after which a turn with a failure ends: a hanging store would cost a timeout per object."""


async def probe(state: CaptureState, stop: asyncio.Event) -> None:
    """Check that the store accepts writes; retry transient errors until `stop`.

    Raises PermanentStoreError immediately, and any other error after `store.retry_for`.
    """
    loop, turn, storing = asyncio.get_running_loop(), object(), state.stats.storing
    give_up = loop.time() + state.config.store.retry_for
    try:
        for attempt, delay in enumerate(delays(FIRST_RETRY, MAX_RETRY), 1):
            if stop.is_set():
                return None
            storing.began(turn, loop.time())
            try:
                return await state.in_thread(state.store_threads, state.store.probe)
            except PermanentStoreError:
                raise
            except StoreError as error:
                storing.failed(turn, [error])
                event(log, logging.WARNING, "store.failed", error=error, attempt=attempt)
                if loop.time() >= give_up:
                    raise
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), delay)
    finally:
        storing.ended(turn)


async def put_all(state: CaptureState, objects: Sequence[EncodedBlock | None]) -> AsyncIterator[tuple[int, str]]:
    """Store every object; yield index and location of each as soon as it is stored, in any order.

    Where there is no object, there is nothing to store, and the location is "". Failures are retried with backoff and
    jitter; after `store.retry_for` the error is raised.
    """
    loop, turn, storing = asyncio.get_running_loop(), object(), state.stats.storing
    give_up = loop.time() + state.config.store.retry_for
    pending = [(index, encoded) for index, encoded in enumerate(objects) if encoded is not None]
    for index in (index for index, encoded in enumerate(objects) if encoded is None):
        yield index, ""
    if not pending:
        return
    try:
        for attempt, delay in enumerate(delays(FIRST_RETRY, MAX_RETRY), 1):
            storing.began(turn, loop.time())
            objects_left = [each for _, each in pending]
            outcomes = await state.in_thread(state.store_threads, _put_each, state, objects_left)
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
            pending = [*failed[1:], *failed[:1]]  # the first is always tried, so each comes first at some time
    finally:
        storing.ended(turn)


def _put_each(state: CaptureState, objects: Sequence[EncodedBlock]) -> list[tuple[str | Exception, float]]:
    """Return each object's location or error, and the seconds taken. Runs in a worker thread."""
    outcomes: list[tuple[str | Exception, float]] = []
    first, failure = time.perf_counter(), None
    for encoded in objects:
        began = time.perf_counter()
        if failure is not None and began - first > MAX_TURN:
            outcomes.append((failure, 0.0))
            continue
        outcome = _put(state.store, encoded)
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
    """Drop those of an error and its causes: their frames hold the object, and often the error as well, in a cycle."""
    errors: list[BaseException] = [error]
    for cause in errors:
        cause.__traceback__ = None
        errors += (more for more in (cause.__cause__, cause.__context__) if more is not None and more not in errors)
