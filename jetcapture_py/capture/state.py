"""The state of a capture: the pipeline changes it; side tasks and the facts for monitoring read it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

import pyarrow as pa

from jetcapture_py.archive.removed import Erased
from jetcapture_py.archive.watermark import ConsumerWatermark
from jetcapture_py.capture import parts, pressure
from jetcapture_py.capture.blocks import Block, Blocks, SealRules, StoredBlock
from jetcapture_py.capture.daemon_thread import in_pool
from jetcapture_py.capture.decoding import Decoding
from jetcapture_py.capture.spool import Spool, Spooling
from jetcapture_py.capture.stats import Stats
from jetcapture_py.capture.watermark import Observer
from jetcapture_py.config import shares
from jetcapture_py.config.model import Config
from jetcapture_py.config.values import TEXT_FORMATS
from jetcapture_py.jetstream.ordered_acks import Ordered
from jetcapture_py.jetstream.shared import Acks, Shared
from jetcapture_py.jetstream.source import PullSource
from jetcapture_py.ledger import Ledger, Memory
from jetcapture_py.store import Store, notes_of
from jetcapture_py.transform.prepare import Preparer

T = TypeVar("T")


class CaptureState:
    """The state of one capture. Sizes are bytes, times are seconds.

    `whole_blocks` says that an object is made of one table, which no file can hold. Others may share `memory`.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        *,
        whole_blocks: bool = False,
        memory: Memory | None = None,
        preparer: Preparer | None = None,
    ) -> None:
        block, source, limit = config.block, config.source, config.limits.memory
        self.config = config
        self.store, self.notes = store, notes_of(store, config.store.url)
        self.stats = Stats()
        self.ledger = Ledger(memory or Memory(limit))
        spool = config.limits.spool
        in_memory = whole_blocks or not spool
        largest = min(block.max_bytes, limit // shares.BLOCK_SHARE) if in_memory else block.max_bytes
        rules = SealRules(max_age=block.max_age, max_bytes=largest, max_rows=block.max_messages)
        self.blocks = Blocks(rules, self.ledger)
        self.spooling: Spooling | None = None
        if spool:
            growth = shares.TEXT_GROWTH if block.format in TEXT_FORMATS and block.compression == "none" else 1
            files = Spool(spool.path, spool.size, resident=limit // shares.OPEN_SHARE, growth=growth)
            self.spooling = Spooling(self.blocks, files, limit)
        self.decoding = Decoding(preparer or parts.preparer(config, None, None), self.ledger)
        self.source = PullSource(config, self.ledger)
        self.acks: Acks = (Ordered if config.source.mode == "ordered" else Shared)(self.source, self.stats)
        self.observer = Observer(source.stream, source.consumer)
        self.opened = self.draining = False
        self.ended: str | None = None
        """None until the capture has ended, then the reason for its failure, or "" after a drain."""
        self.store_hangs = False
        """Whether a thread may still be waiting for the store at the end."""
        self.waiting_bytes = 0
        self.erased = Erased()
        """Messages that are acknowledged without being stored."""
        self.key_rule: str | None = None
        """The rule for keys, as in footers; None if unknown."""
        self.watermark: ConsumerWatermark | None = None
        self.stream_config: bytes | None = None
        """What was last written of the stream's configuration."""
        self.stream_end: int | None = None
        """The last sequence that the stream is known to have had; None before it was asked."""
        self.sealed: asyncio.Queue[Block] = asyncio.Queue()
        """Blocks that wait for the store."""
        self.stored: asyncio.Queue[StoredBlock] = asyncio.Queue()
        """Blocks that wait to be acknowledged."""
        self.progress = asyncio.Event()
        """Set whenever memory was freed or messages were acknowledged."""
        self.store_threads = ThreadPoolExecutor(config.store.concurrency, "store")
        self.encode_threads: Executor = self.store_threads
        """Several captures may share them."""

    @property
    def unacked(self) -> int:
        return self.source.unacked

    def held_replies(self) -> pa.BinaryArray:
        """The ack subjects of every message that was received and not acknowledged."""
        blocks = [replies for block in self.blocks for replies in block.replies()]
        return pa.concat_arrays([self.source.waiting_replies(), self.decoding.batch.replies, *blocks])

    def send_to_store(self, blocks: list[Block]) -> None:
        """Queue sealed blocks for the store."""
        now = time.monotonic()
        for block in blocks:
            block.sealed_at = now
            self.stats.sealed_by[block.sealed_by] += 1
            self.waiting_bytes += block.bytes
            self.sealed.put_nowait(block)

    def seal_under_pressure(self) -> None:
        """Seal the largest blocks when open blocks take too much of a budget, and spooling does not help."""
        source, workers = self.source, self.config.store.concurrency
        sealed = pressure.seal(
            self.blocks,
            self.config.limits,
            self.acks.unacked_limit,
            open_bytes=self.ledger.may_open,
            starved=source.pulls.starved,
            idle=not (self.blocks.sealed or self.decoding.batch or source.waiting),
            spooling=self.spooling,
            room=pressure.room(workers, self.sealed.qsize(), self.waiting_bytes),
        )
        self.send_to_store(sealed)
        if (opened := self.acks.seal_before(all_in_blocks=not self.decoding.batch)) is not None:
            self.send_to_store(self.blocks.seal_due(opened, 0, "pressure"))

    def release(self) -> None:
        """Drop open blocks: another replica receives their messages."""
        for block in self.blocks.seal_all("released"):
            self.blocks.release(block)
            self.blocks.forget(block)
        self.acks.forget()
        self.progress.set()

    async def sealed_blocks(self) -> list[Block]:
        """Wait for sealed blocks: a large one, or several small ones that share a thread's turn."""
        blocks = [await self.sealed.get()]
        while (
            blocks[-1].bytes < shares.SMALL_BLOCK_BYTES
            and len(blocks) < shares.SMALL_BLOCKS
            and not self.sealed.empty()
        ):
            blocks.append(self.sealed.get_nowait())
        self.waiting_bytes -= sum(block.bytes for block in blocks)
        return blocks

    async def stored_blocks(self) -> list[StoredBlock]:
        """Wait for stored blocks; return all there are."""
        stored = [await self.stored.get()]
        while not self.stored.empty():
            stored.append(self.stored.get_nowait())
        return stored

    async def memory_freed(self) -> None:
        """Wait while blocks hold more than `limits.memory`, if some are on their way to the store or the spool."""
        ledger = self.ledger
        while self.blocks.memory + ledger["encoded"] + ledger.elsewhere > ledger.memory.limit and (
            self.blocks.sealed or (self.spooling is not None and self.spooling.active)
        ):
            await self.progressed()

    async def all_acknowledged(self) -> None:
        """Wait until every block is stored and acknowledged."""
        while self.blocks.sealed:
            await self.progressed()

    async def progressed(self) -> None:
        """Wait for `progress`."""
        self.progress.clear()
        await self.progress.wait()

    async def in_thread(self, threads: Executor, work: Callable[..., T], *args: Any) -> T:
        """Run `work` in one of `threads`; what it logs names this capture."""
        return await in_pool(threads, work, *args)

    async def close(self) -> None:
        """Hand back unacknowledged messages, and end the connection and the threads, also after a failure."""
        self.stats.quarantine.end()
        self.source.halt()  # after a failure, do not wait for open pulls
        await self.acks.stop()  # first, or the messages would be redelivered right here
        await self.acks.close(self.held_replies())
        self.decoding.close()
        self.store_threads.shutdown(wait=False)
        if self.spooling is not None:
            self.spooling.close()
