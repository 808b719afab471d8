"""Store messages without a consumer, exactly as a capture with this configuration would: decode, route, encode, put.

Nothing is acknowledged, and the watermark stays. Names follow from messages: to store the same ones again changes
nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import pyarrow as pa

from jetcapture_py.archive.writer import EncodedBlock
from jetcapture_py.capture import parts, pressure
from jetcapture_py.capture.blocks import Block
from jetcapture_py.capture.encoding import Encoding
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.capture.storing import probe, put_all
from jetcapture_py.config.model import Config
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.store import configured_store, read_erased
from jetcapture_py.transform.keys import Run

RETRY_FOR = 60.0
"""Seconds for which a failing store is retried at most: somebody waits for the answer."""

Rows = tuple[pa.RecordBatch, Sequence[Run]]
"""Routed rows, and where those of each block are."""
Choose = Callable[[pa.RecordBatch, Sequence[Run], bool], Rows]
"""Returns those of routed rows that are to be stored. The flag says that they are for the quarantine."""
Put = Callable[[EncodedBlock], Awaitable[None]]
"""Stores an object. Raises StoreError."""


class Recapture:
    """Stores messages; objects name `sealed_by` as why they were sealed. A context manager: it ends threads."""

    def __init__(self, config: Config, sealed_by: str, choose: Choose, put: Put | None = None) -> None:
        """`put` is called instead of the method of this name. Raises ConfigError."""
        limits = config.limits.model_copy(update={"spool": None})
        store = config.store.model_copy(update={"retry_for": min(config.store.retry_for, RETRY_FOR)})
        self.config = config.model_copy(update={"limits": limits, "store": store})
        encoder = parts.encoder(self.config, None, None)
        self.state = CaptureState(self.config, configured_store(store), whole_blocks=encoder.whole_blocks)
        self._sealed_by, self._choose, self._put = sealed_by, choose, put or self.put
        self._encoding = Encoding(self.state, encoder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.state.decoding.close()
        self.state.store_threads.shutdown(wait=False, cancel_futures=True)

    async def put(self, encoded: EncodedBlock) -> None:
        """Store an object. Raises StoreError."""
        async for _ in put_all(self.state, [encoded]):
            pass

    def set_source(self, stream_created: str, consumer: str) -> None:
        """Set what footers of the following objects name as their source."""
        self._encoding.encoder = self._encoding.encoder.for_stream(stream_created, consumer)

    async def check_store(self) -> None:
        """Raise StoreError unless objects can be stored. Read which messages were erased, and are not stored again.

        Raises JetcaptureError if that cannot be read.
        """
        state = self.state
        await probe(state, asyncio.Event())
        stream = self.config.source.stream
        state.erased = await state.in_thread(state.store_threads, read_erased, state.notes, stream, state.erased)

    async def add(self, consumer: str, received: Received) -> None:
        """Decode and route messages delivered to `consumer`, and put them into blocks; store those that are full, or
        too much together. Raises StoreError."""
        state = self.state
        state.decoding.preparer = replace(state.decoding.preparer, consumer=consumer)
        async for prepared in state.decoding.pieces(received):
            self._encoding.set_columns(prepared.columns)
            full: list[Block] = []
            for quarantine, rows, runs in (
                (False, prepared.rows, prepared.runs),
                (True, prepared.quarantine, prepared.quarantine_runs),
            ):
                chosen, chosen_runs = self._choose(rows, runs, quarantine)
                if chosen_runs:
                    full += state.blocks.add(chosen, chosen_runs, 0.0, quarantine=quarantine)
            await self._store([*full, *pressure.seal(state.blocks, self.config.limits)])

    async def flush(self) -> None:
        """Store all blocks. Raises StoreError."""
        await self._store(self.state.blocks.seal_all(self._sealed_by))

    async def _store(self, blocks: Sequence[Block]) -> None:
        """Encode blocks and store their objects, several at a time."""
        waiting = deque(blocks)

        async def work() -> None:
            while waiting:
                block = waiting.popleft()
                for encoded in await self._encoding.encode([block]):
                    if encoded is not None:
                        await self._put(encoded)
                        self.state.ledger["encoded"] -= encoded.memory
                self.state.blocks.forget(block)

        await asyncio.gather(*(work() for _ in range(min(len(blocks), self.config.store.concurrency))))
