"""Encode sealed blocks in threads, as many at a time as the memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import BlockId
from jetcapture_py.archive.ordering import PIECE_BYTES
from jetcapture_py.archive.removed import Erased
from jetcapture_py.archive.sparse import ColumnSet
from jetcapture_py.archive.writer import EncodedBlock, Encoder
from jetcapture_py.capture.allocator import Resident
from jetcapture_py.capture.blocks import Block
from jetcapture_py.capture.spool import SpoolFile, Spooling
from jetcapture_py.config.shares import ENCODING_COPIES, ENCODING_PIECES, RELEASE_SHARE
from jetcapture_py.ledger import Ledger
from jetcapture_py.threads import in_pool

_Work = tuple[BlockId, str, Sequence[pa.RecordBatch], ColumnSet | None]


class Encoding:
    """Encodes blocks with `encoder` and all columns seen from the decoder."""

    def __init__(self, encoder: Encoder, ledger: Ledger, spooling: Spooling | None, threads: Executor) -> None:
        self.encoder, self.threads = encoder, threads
        """Several captures may share the threads."""
        self.erased = Erased()
        """Messages that are not stored again."""
        self.left_out = 0
        """Erased messages that were delivered again."""
        self._ledger, self._spooling = ledger, spooling
        self._known: ColumnSet | None = None
        self._resident = Resident(ledger.memory.limit // RELEASE_SHARE)

    def set_columns(self, columns: pa.Schema | None) -> None:
        """Remember all columns of the decoder."""
        if columns is not None and (self._known is None or columns is not self._known.schema):
            self._known = ColumnSet(columns)

    async def encode(self, blocks: Sequence[Block]) -> list[EncodedBlock | None]:
        """Encode blocks without erased messages; None for a block that has no others."""
        async with self._ledger.encoding(sum(map(self._memory, blocks))):
            work = [
                (block.spooled, (block.id, block.sealed_by, block.batches(), self._columns_of(block)))
                for block in blocks
            ]
            objects, left_out = await in_pool(self.threads, self._encode, work, self.erased)
        self.left_out += left_out
        return objects

    def _columns_of(self, block: Block) -> ColumnSet | None:
        return None if block.id.quarantine else self._known

    def _encode(self, work: Sequence[tuple[bool, _Work]], erased: Erased) -> tuple[list[EncodedBlock | None], int]:
        """Return the objects, and the number of erased messages that were left out."""
        objects: list[EncodedBlock | None] = []
        left_out = 0
        try:
            for spooled, (block, sealed_by, batches, known) in work:
                rows, count = without_erased(batches, erased) if erased else (batches, 0)
                arguments = block, sealed_by, rows, known
                encode = self._encode_to_file if spooled else self._encode_in_memory
                objects.append(encode(arguments) if rows else None)
                left_out += count
        finally:
            self._resident.release_unused()
        return objects, left_out

    def _encode_in_memory(self, work: _Work) -> EncodedBlock:
        return self.encoder.encode_or_salvage(*work)

    def _encode_to_file(self, work: _Work) -> EncodedBlock:
        """Make the object of spooled rows in the spool or, if that fails, in memory."""
        spooling = self._spooling
        if spooling is not None and spooling.works:
            try:
                sink = SpoolFile(spooling.spool)
            except OSError as error:
                spooling.failed(error)
                return self.encoder.encode_or_salvage(*work)
            with sink:
                try:
                    return self.encoder.encode_or_salvage(*work, sink=sink)
                except Exception as error:
                    if not sink.failed:
                        raise
                    spooling.failed(error)
        return self.encoder.encode_or_salvage(*work)

    def _memory(self, block: Block) -> int:
        """Memory for making an object, in bytes. An object in a file needs a few pieces, unless its writer needs all
        rows."""
        copies = ENCODING_COPIES * block.bytes
        whole = self.encoder.whole_blocks and not block.id.quarantine
        return min(copies, ENCODING_PIECES * PIECE_BYTES) if block.spooled and not whole else copies


def without_erased(batches: Sequence[pa.RecordBatch], erased: Erased) -> tuple[list[pa.RecordBatch], int]:
    """Drop the rows of erased messages that were delivered again; also return the number of these messages."""
    kept, count = [], 0
    for batch in batches:
        seqs = batch.column(layout.SEQ).to_numpy()
        mask = erased.contains(seqs, batch.column(layout.TIMESTAMP).cast(pa.int64()).to_numpy())
        count += len(np.unique(seqs[mask]))
        if not mask.all():
            kept.append(batch.filter(pa.array(~mask)) if mask.any() else batch)
    return kept, count
