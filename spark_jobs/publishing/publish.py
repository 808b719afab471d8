"""Publish Arrow batches from a Spark task and wait for all acknowledgements; for replay and the data source."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress

import pyarrow as pa

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.jetstream.connection import connect
from jetcapture_py.jetstream.publish.publisher import WINDOW, Publisher
from spark_jobs.publishing.prepare import HEADERS, PAYLOAD, SUBJECT

DUE = "due"
"""Column of publishing times, in microseconds after the first row, ascending."""

_CONNECT_TIMEOUT = 20.0
"""Seconds to keep trying unreachable servers before the task fails. Once connected, the publisher's timeouts apply."""
_PAUSE = 0.1
"""Seconds; before a longer pause, wait for all acknowledgements to notice failures."""


def publish_batches(batches: Iterable[pa.RecordBatch], login: NatsConfig, window: int = WINDOW) -> tuple[int, int]:
    """Publish all rows in order; return the number of acknowledged messages, and of duplicates among them.

    `batches` have columns of `publishing.prepare`, and optionally `due`. An id makes it safe to publish a message again
    after a lost connection or in a retried task. A thread reads batches while messages are in flight. `window` counts
    messages. Raises SourceError; does not connect without batches.
    """
    return asyncio.run(_publish(iter(batches), login, window))


async def _publish(batches: Iterator[pa.RecordBatch], login: NatsConfig, window: int) -> tuple[int, int]:
    batch = await asyncio.to_thread(next, batches, None)
    if batch is None:
        return 0, 0
    client = await connect(login, "jetcapture replay", timeout=_CONNECT_TIMEOUT)
    try:
        async with Publisher(client, window=window) as publisher:
            began = asyncio.get_running_loop().time()
            while batch is not None:
                following = asyncio.create_task(asyncio.to_thread(next, batches, None))
                try:
                    await _publish_in_time(publisher, batch, began)
                finally:
                    batch = await following
            await publisher.flush()
            return publisher.published, publisher.duplicates
    finally:
        with suppress(OSError):  # nats-py raises socket errors of a dead server
            await client.close()


async def _publish_in_time(publisher: Publisher, batch: pa.RecordBatch, began: float) -> None:
    """Publish each row when it is due, counted from `began`; publish late rows, and those without a time, at once."""
    subjects, payloads, headers = (batch.column(name) for name in (SUBJECT, PAYLOAD, HEADERS))
    if DUE not in batch.schema.names:
        await publisher.publish_batch(subjects, payloads, headers)
        return
    loop = asyncio.get_running_loop()
    dues = batch.column(DUE).to_numpy() / 1e6 + began
    position = 0
    while position < len(dues):
        stop = int(dues.searchsorted(loop.time(), side="right"))
        if stop > position:
            await publisher.publish_batch(*(part[position:stop] for part in (subjects, payloads, headers)))
            position = stop
            continue
        if dues[position] - loop.time() > _PAUSE:
            await publisher.flush()
        await asyncio.sleep(max(0.0, dues[position] - loop.time()))
