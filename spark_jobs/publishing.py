"""Publishes Arrow batches from an executor: a connection by any way to log in, one loop, every message acknowledged.

This is what a replay and the data source's writer have in common. It runs in the process of a Spark task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import pyarrow as pa

from jetcapture_py.connect import connect
from jetcapture_py.publish import WINDOW, Publisher
from jetcapture_py.wire import Connection
from spark_jobs.login import nats_config

EXTRA = "header:"
"""In front of a header's name in the name of a column: a string for each row, null for none."""

_PATIENCE = 20.0
"""Seconds that unreachable servers are tried before the task fails. Later, the publisher's patience counts."""


def publish_batches(
    batches: Iterable[pa.RecordBatch], options: Mapping[str, str], window: int = WINDOW, *, stored: bool = False
) -> tuple[int, int]:
    """Publish all rows in order; how many were acknowledged, and how many of these the stream knew already.

    `batches` have the columns `subject` (string) and `payload` (binary or string), and may have `id` (string: the
    message id, with which a message survives a lost connection and a retried task), `headers` (map<string,
    list<string>>) and `header:NAME`. They are read in a thread while messages are under way. `options` are those of
    `login`, `window` counts messages. `stored` as in `Publisher.publish_batch`. Raises SourceError; with no batch,
    nothing is connected to.
    """
    return asyncio.run(_publish(iter(batches), options, window, stored))


async def open_connection(options: Mapping[str, str], name: str = "jetcapture replay") -> Connection:
    """A connection by the options of `login`, which stays through restarts of the server. Raises SourceError."""

    async def ignore(*_: object) -> None:
        """What matters ends in an exception of whoever waits for an answer."""

    return await connect(
        nats_config(options),
        name,
        on_disconnected=ignore,
        on_reconnected=ignore,
        on_closed=ignore,
        on_error=ignore,
        patience=_PATIENCE,
    )


async def _publish(
    batches: Iterator[pa.RecordBatch], options: Mapping[str, str], window: int, stored: bool
) -> tuple[int, int]:
    batch = await asyncio.to_thread(next, batches, None)
    if batch is None:
        return 0, 0
    nc = await open_connection(options)
    try:
        async with Publisher(nc, window=window) as publisher:
            while batch is not None:
                following = asyncio.create_task(asyncio.to_thread(next, batches, None))
                try:
                    await _publish_batch(publisher, batch, stored)
                finally:
                    batch = await following
            await publisher.flush()
            return publisher.published, publisher.duplicates
    finally:
        with suppress(OSError):  # closing passes on what a dead server did to the socket, over the error that matters
            await nc.close()


async def _publish_batch(publisher: Publisher, batch: pa.RecordBatch, stored: bool) -> None:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    await publisher.publish_batch(
        columns["subject"],
        columns["payload"],
        columns.get("headers"),
        columns.get("id"),
        extra={name.removeprefix(EXTRA): values for name, values in columns.items() if name.startswith(EXTRA)},
        stored=stored,
    )
