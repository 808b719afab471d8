"""Store messages without a consumer, as a capture with this configuration would: an archiver and a selection of rows.

Nothing is acknowledged, and the watermark stays. Names follow from messages: to store the same ones again changes
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import pyarrow as pa

from jetcapture_py.archive.writer import EncodedBlock
from jetcapture_py.capture import parts
from jetcapture_py.capture.archiver import Archiver
from jetcapture_py.capture.sealing import Demand, Reason
from jetcapture_py.config.model import Config
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.ledger import Ledger, Memory
from jetcapture_py.store import configured_store, notes_of, read_erased
from jetcapture_py.transform.keys import Run

RETRY_FOR = 60.0
"""Maximum seconds to retry a failing store, because a user is waiting."""

Rows = tuple[pa.RecordBatch, Sequence[Run]]
"""Routed rows, and the runs of each block."""
Choose = Callable[[pa.RecordBatch, Sequence[Run], bool], Rows]
"""Selects the routed rows to store. The flag is True for rows of the quarantine."""
Put = Callable[[EncodedBlock], Awaitable[None]]
"""Stores an object. Raises StoreError."""


class Recapture:
    """Stores messages; `sealed_by` is the objects' reason for sealing. A context manager that ends its threads."""

    def __init__(self, config: Config, sealed_by: Reason, choose: Choose, put: Put | None = None) -> None:
        """`put` is called instead of the method of this name. Raises ConfigError."""
        limits = config.limits.model_copy(update={"spool": None})
        config = config.model_copy(update={"limits": limits})
        preparer, encoder = parts.preparer(config, None, None), parts.encoder(config, None, None)
        store = configured_store(config.store)
        self.notes = notes_of(store, config.store.url)
        self.archiver = Archiver(config, Ledger(Memory(limits.memory)), store, preparer, encoder)
        self.archiver.uploads.retry_for = min(config.store.retry_for, RETRY_FOR)
        self._stream, self._sealed_by = config.source.stream, sealed_by
        self._choose, self._put = choose, put or self.put

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.archiver.close()

    async def put(self, encoded: EncodedBlock) -> None:
        """Store an object. Raises StoreError."""
        async for _ in self.archiver.uploads.put_all([encoded]):
            pass

    def set_source(self, stream_created: str, consumer: str) -> None:
        """Set the source recorded in the footers of later objects."""
        encoding = self.archiver.encoding
        encoding.encoder = encoding.encoder.for_stream(stream_created, consumer)

    async def check_store(self) -> None:
        """Raise StoreError unless objects can be stored. Read the erased messages, which are not stored again, and the
        types of inferred columns.

        Raises JetcaptureError if they cannot be read.
        """
        uploads, encoding = self.archiver.uploads, self.archiver.encoding
        await uploads.probe(asyncio.Event())
        encoding.erased = await uploads.call(read_erased, self.notes, self._stream, encoding.erased)
        await uploads.call(self.archiver.types.read)

    async def add(self, consumer: str, received: Received) -> None:
        """Decode and route messages delivered to `consumer`, and put them into blocks. Store full blocks, and the
        largest ones when a budget is exceeded. Raises StoreError."""
        archiver = self.archiver
        archiver.decoding.preparer = replace(archiver.decoding.preparer, consumer=consumer)
        async for prepared in archiver.decoding.pieces(received):
            good, bad = (prepared.rows, prepared.runs, False), (prepared.quarantine, prepared.quarantine_runs, True)
            (rows, runs), (failed, failed_runs) = self._choose(*good), self._choose(*bad)
            archiver.add(replace(prepared, rows=rows, runs=runs, quarantine=failed, quarantine_runs=failed_runs))
            archiver.relieve(Demand())
            while archiver.waiting.amount[0]:
                await self._store()
                archiver.relieve(Demand())

    async def flush(self) -> None:
        """Store all blocks. Raises StoreError."""
        self.archiver.seal_all(self._sealed_by)
        await self._store()

    async def _store(self) -> None:
        """Encode sealed blocks and store their objects, several at a time."""
        archiver = self.archiver

        async def work() -> None:
            while archiver.waiting.amount[0]:
                block = archiver.waiting.take()
                for encoded in await archiver.encode([block]):
                    if encoded is not None:
                        await self._put(encoded)
                        archiver.free(encoded)
                archiver.forget(block)

        await asyncio.gather(*(work() for _ in range(archiver.uploads.workers)))
