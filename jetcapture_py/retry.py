"""Puts objects into the store for as long as it takes, and says so while it fails."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor

from jetcapture_py.encode import EncodedBlock
from jetcapture_py.errors import PermanentStoreError
from jetcapture_py.log import event
from jetcapture_py.stats import Stats
from jetcapture_py.store import Store

log = logging.getLogger("jetcapture.store")

FIRST_RETRY, LONGEST_RETRY = 0.2, 30.0


async def put_all(
    store: Store, objects: Sequence[EncodedBlock], threads: Executor, retry_for: float, stats: Stats
) -> AsyncIterator[tuple[int, str]]:
    """Store every object; yields its index and location as soon as it is stored, in whatever order that happens.

    What fails is tried again with backoff and jitter; after `retry_for` seconds its error is raised.
    """
    loop, delay, attempt = asyncio.get_running_loop(), FIRST_RETRY, 1
    began = loop.time()
    pending = list(enumerate(objects))
    while pending:
        outcomes = await loop.run_in_executor(threads, _put_each, store, [each for _, each in pending])
        failed: list[tuple[int, EncodedBlock]] = []
        errors: list[Exception] = []
        for (index, encoded), outcome in zip(pending, outcomes, strict=True):
            if isinstance(outcome, Exception):
                failed.append((index, encoded))
                errors.append(outcome)
            else:
                yield index, outcome
        if failed:
            stats.store_errors += len(failed)
            level = logging.ERROR if isinstance(errors[0], PermanentStoreError) else logging.WARNING
            fields = {"attempt": attempt, "objects": len(failed), "object": failed[0][1].name.path}
            event(log, level, "store.failed", error=errors[0], **fields)
            if loop.time() - began >= retry_for:
                raise errors[0]
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311  jitter, not a secret
            delay = min(delay * 2, LONGEST_RETRY)
            attempt += 1
        elif attempt > 1:
            event(log, logging.INFO, "store.recovered", attempts=attempt, objects=len(pending))
        pending = failed


def _put_each(store: Store, objects: Sequence[EncodedBlock]) -> list[str | Exception]:
    """Where each object was stored, or why it was not. In a worker thread."""
    outcomes: list[str | Exception] = []
    for encoded in objects:
        try:
            outcomes.append(store.put(encoded.name, encoded.data))
        except Exception as error:
            outcomes.append(error)
    return outcomes
