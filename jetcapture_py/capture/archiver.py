"""Turn received messages into stored objects: decode, route, block, encode, store. Independent of the server.

A capture is a source, an archiver and acknowledgements; repair and redecode are an archiver and a selection of
messages. It runs in one event loop. Threads decode, encode and store; they change no shared state.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence

import pyarrow as pa

from jetcapture_py.archive.writer import EncodedBlock, Encoder
from jetcapture_py.capture import sealing
from jetcapture_py.capture.blocks import Block, Blocks, StoredBlock
from jetcapture_py.capture.decoding import Decoding
from jetcapture_py.capture.encoding import Encoding
from jetcapture_py.capture.inferred import InferredTypes
from jetcapture_py.capture.sealing import Amount, Demand, Reason, SealRules
from jetcapture_py.capture.spool import Spool, Spooling
from jetcapture_py.capture.storing import Uploads
from jetcapture_py.config import shares
from jetcapture_py.config.model import Config
from jetcapture_py.config.values import TEXT_FORMATS
from jetcapture_py.ledger import Ledger
from jetcapture_py.store import Store, notes_of
from jetcapture_py.transform.prepare import Prepared, Preparer


class Archiver:
    """Archives messages as `config` says. `ledger` counts their memory."""

    def __init__(self, config: Config, ledger: Ledger, store: Store, preparer: Preparer, encoder: Encoder) -> None:
        block, spool, memory = config.block, config.limits.spool, config.limits.memory
        self.ledger = ledger
        in_memory = encoder.whole_blocks or not spool
        largest = min(block.max_bytes, memory // shares.BLOCK_SHARE) if in_memory else block.max_bytes
        rules = SealRules(max_age=block.max_age, max_bytes=largest, max_rows=block.max_messages)
        self.blocks = Blocks(rules, ledger)
        self.spooling: Spooling | None = None
        if spool:
            growth = shares.TEXT_GROWTH if block.format in TEXT_FORMATS and block.compression == "none" else 1
            files = Spool(spool.path, spool.size, resident=memory // shares.OPEN_SHARE, growth=growth)
            self.spooling = Spooling(self.blocks, files, memory)
        self.decoding = Decoding(preparer, ledger)
        self.types = InferredTypes(notes_of(store, config.store.url), config.source, preparer.decoder)
        self.uploads = Uploads(store, config.store, self.types.write)
        self.encoding = Encoding(encoder, ledger, self.spooling, self.uploads.threads)
        self.sealed_by: Counter[str] = Counter()
        """Number of blocks by the reason for sealing."""
        self.waiting = WaitingBlocks()
        self.progress = asyncio.Event()
        """Set whenever memory was freed or blocks are done with."""
        self._stored: asyncio.Queue[StoredBlock] = asyncio.Queue()
        self._opened = asyncio.Event()
        self._limits = config.limits

    # ------------------------------------------------------------------ messages to blocks

    def add(self, prepared: Prepared) -> None:
        """Put a decoded piece into blocks, and seal full ones; all of them if the next piece has other columns."""
        self.encoding.set_columns(prepared.columns)
        now = asyncio.get_running_loop().time()
        self._send(self.blocks.add(prepared.rows, prepared.runs, now))
        self._send(self.blocks.add(prepared.quarantine, prepared.quarantine_runs, now, quarantine=True))
        self._opened.set()
        if self.types.learn():
            self.seal_all("columns")

    async def memory_freed(self) -> None:
        """While blocks hold more than `limits.memory`, wait for those being stored or spooled."""
        ledger = self.ledger
        while self.blocks.memory + ledger["encoded"] + ledger.elsewhere > ledger.memory.limit and self._leaving:
            await self.progressed()

    @property
    def busy(self) -> bool:
        """Whether messages are being decoded, stored or spooled, rather than waiting in open blocks."""
        return bool(self.decoding.batch) or self._leaving

    @property
    def _leaving(self) -> bool:
        """Whether blocks are being stored, or rows spooled."""
        return self.blocks.sealed > 0 or (self.spooling is not None and self.spooling.active)

    def replies(self) -> list[pa.BinaryArray]:
        """Return the ack subjects of all held messages."""
        return [self.decoding.batch.replies, *(replies for block in self.blocks for replies in block.replies())]

    # ------------------------------------------------------------------ sealing: `sealing` decides

    def relieve(self, demand: Demand) -> None:
        """Seal the largest blocks when open blocks take too much of a budget, and spooling does not help."""
        spooling, blocks, everything = self.spooling, self.blocks, demand.starved
        spools = spooling is not None and spooling.begin(starved=demand.starved)
        if spooling is not None:  # blocks being stored free memory soon
            everything = everything and demand.idle and not (blocks.sealed or self.decoding.batch)
        amount = sealing.excess(
            Amount(blocks.messages, blocks.resident, blocks.open),
            self._limits,
            demand.unacked_limit,
            max_bytes=self.ledger.may_open,
            everything=everything,
        )
        amount = amount._replace(bytes=0) if spools else amount
        self._send(blocks.seal_largest(amount, sealing.room(self.uploads.workers, *self.waiting.amount)))
        if demand.overdue is not None:
            self._send(blocks.seal_due(demand.overdue, 0, "pressure"))

    def seal_all(self, reason: Reason) -> None:
        """Seal every open block."""
        self._send(self.blocks.seal_all(reason))

    def release(self) -> None:
        """Drop open blocks, because another replica receives their messages."""
        for block in self.blocks.seal_all("released"):
            self.blocks.release(block)
            self.forget(block)

    async def seal_by_age(self) -> None:
        """Seal each block as soon as it is due, until canceled."""
        loop = asyncio.get_running_loop()
        while True:
            while (opened := self.blocks.opened) is None:
                self._opened.clear()
                await self._opened.wait()
            due = opened + self.blocks.rules.max_age
            await asyncio.sleep(due - loop.time())
            self._send(self.blocks.seal_due(max(due, loop.time())))

    def _send(self, blocks: Sequence[Block]) -> None:
        """Queue sealed blocks for the store."""
        now = time.monotonic()
        for block in blocks:
            block.sealed_at = now
            self.sealed_by[block.sealed_by] += 1
            self.waiting.put(block)

    # ------------------------------------------------------------------ blocks to objects

    async def store(self) -> None:
        """Wait for sealed blocks, and store them as objects. Raises StoreError."""
        blocks = await self.waiting.next()
        objects = await self.encode(blocks)
        async for index, location in self.uploads.put_all(objects):
            encoded = objects[index]  # None if all messages of the block were erased
            self.free(encoded)
            self._stored.put_nowait(StoredBlock.of(blocks[index], encoded, location))

    async def stored(self) -> list[StoredBlock]:
        """Wait for stored blocks; return all there are. They are held until `forget`."""
        stored = [await self._stored.get()]
        while not self._stored.empty():
            stored.append(self._stored.get_nowait())
        return stored

    async def encode(self, blocks: Sequence[Block]) -> list[EncodedBlock | None]:
        """Make objects of blocks, and free their rows; None for a block whose messages were all erased."""
        objects = await self.encoding.encode(blocks)
        for block, encoded in zip(blocks, objects, strict=True):
            self.blocks.release(block)
            self.ledger["encoded"] += 0 if encoded is None else encoded.memory
        self.progress.set()
        return objects

    def free(self, encoded: EncodedBlock | None) -> None:
        """Release the memory of a stored object."""
        self.ledger["encoded"] -= 0 if encoded is None else encoded.memory

    def forget(self, block: Block) -> None:
        """Forget a block that was stored and acknowledged."""
        self.blocks.forget(block)
        self.progress.set()

    async def done(self) -> None:
        """Wait until no block is held."""
        while self.blocks.open or self.blocks.sealed:
            await self.progressed()

    async def progressed(self) -> None:
        self.progress.clear()
        await self.progress.wait()

    def close(self) -> None:
        """End the threads, without waiting for them."""
        self.decoding.close()
        self.uploads.close()
        if self.spooling is not None:
            self.spooling.close()


class WaitingBlocks:
    """Sealed blocks that wait for the store."""

    def __init__(self) -> None:
        self._blocks: deque[Block] = deque()
        self._bytes = 0
        self._filled = asyncio.Event()

    @property
    def amount(self) -> tuple[int, int]:
        """How many there are, and their bytes."""
        return len(self._blocks), self._bytes

    def put(self, block: Block) -> None:
        self._blocks.append(block)
        self._bytes += block.bytes
        self._filled.set()

    def take(self) -> Block:
        block = self._blocks.popleft()
        self._bytes -= block.bytes
        return block

    async def next(self) -> list[Block]:
        """Wait for one large block, or several small ones for one thread."""
        while not self._blocks:
            self._filled.clear()
            await self._filled.wait()
        blocks = [self.take()]
        while blocks[-1].bytes < shares.SMALL_BLOCK_BYTES and len(blocks) < shares.SMALL_BLOCKS and self._blocks:
            blocks.append(self.take())
        return blocks
