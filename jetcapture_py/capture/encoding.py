"""Encode sealed blocks in threads, as many at a time as the memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from jetcapture_py.archive.sparse import Known
from jetcapture_py.archive.writer import EncodedBlock, Encoder
from jetcapture_py.capture.blocks import Block
from jetcapture_py.capture.resident import Resident
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.config.shares import RELEASE_SHARE


class Encoding:
    """Encodes blocks with `encoder`, and with all columns that the decoder is known to have."""

    def __init__(self, state: CaptureState, encoder: Encoder) -> None:
        self.encoder = encoder
        self._state = state
        self._known: Known | None = None
        self._resident = Resident(state.config.limits.memory // RELEASE_SHARE)

    def stream_known(self) -> None:
        """Set the stream and consumer that objects name as their source."""
        source = self._state.source
        self.encoder = self.encoder.for_stream(source.stream_created, source.consumer)

    def learn(self, columns: pa.Schema | None) -> None:
        """Remember all columns that the decoder knows of."""
        if columns is not None and (self._known is None or columns is not self._known.schema):
            self._known = Known(columns)

    async def encode(self, blocks: Sequence[Block]) -> list[EncodedBlock]:
        """Encode blocks, and free their rows."""
        state = self._state
        async with state.encoding.acquire(sum(block.table_bytes for block in blocks)):
            work = [(block.id, block.sealed_by, block.batches(), self._columns_of(block)) for block in blocks]
            objects = await state.in_thread(state.store_threads, self._encode, work)
        for block, encoded in zip(blocks, objects, strict=True):
            block.release()
            state.encoded_bytes += encoded.data.size
        state.progress.set()
        return objects

    def _columns_of(self, block: Block) -> Known | None:
        return None if block.id.quarantine else self._known

    def _encode(self, work: list[tuple[Any, ...]]) -> list[EncodedBlock]:
        try:
            return [self.encoder.encode_or_salvage(*each) for each in work]
        finally:
            self._resident.release_unused()
