"""The pipeline: pull → decode → route → block → store → ack. Read it top to bottom; it is all of it.

Promise: a message is acknowledged only after the object that holds it is durably stored. `_acknowledge` is the one
place that acks, and it only ever sees blocks that `_store` has stored.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from jetcapture_py.archive.sparse import Known
from jetcapture_py.archive.watermark import Watermark
from jetcapture_py.archive.writer import EncodedBlock, Encoder
from jetcapture_py.backoff import delays
from jetcapture_py.capture import key_rule, side_tasks
from jetcapture_py.capture.blocks import Block, Blocks, SealRules
from jetcapture_py.capture.budget import AtOnce, Gate
from jetcapture_py.capture.memory import step_back
from jetcapture_py.capture.progress import Observer
from jetcapture_py.capture.resident import Resident
from jetcapture_py.capture.stats import Stats
from jetcapture_py.capture.storing import probe, put_all
from jetcapture_py.config.model import Config
from jetcapture_py.errors import ConfigError, DrainError
from jetcapture_py.jetstream.acks import AckResult
from jetcapture_py.jetstream.source import Source
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.store import Store, open_store
from jetcapture_py.transform.batch import BatchTooWideError, Decoder
from jetcapture_py.transform.decode import make_decoder
from jetcapture_py.transform.keys import KeyFunction, make_key
from jetcapture_py.transform.prepare import Preparer

T = TypeVar("T")
OnStored = Callable[[EncodedBlock, str], Awaitable[None]]

ACK_ATTEMPTS = 5
"""Attempts that a consumer may leave unanswered although it can be reached."""
FIRST_ACK_RETRY, LONGEST_ACK_RETRY = 0.2, 2.0
ACKNOWLEDGING = 3
"""Blocks need not wait for the server's answer to those before them."""
SMALL, TOGETHER = 64 << 10, 64
"""Blocks below so many bytes share a worker thread's turn, up to so many of them."""
MOST_COLUMNS = 16 << 20
"""Bytes of columns that are made of received messages at once; usually as many as lie in one piece of memory."""
PREPARING_COPIES = 3
"""A batch in preparation lies in memory as received, as columns, and as routed columns."""
ENCODING_COPIES = 3
"""A block that is being encoded lies in memory in one piece, sorted and encoded, too."""


class Capture:
    """One replica. `run` captures until `stop` is set; everything may be replaced by an object of the user's own.

    `on_stored(block, location)` is awaited after a block is stored and before its messages are acknowledged.
    """

    def __init__(
        self,
        config: Config,
        *,
        decoder: Decoder | None = None,
        key: KeyFunction | None = None,
        store: Store | None = None,
        on_stored: OnStored | None = None,
    ) -> None:
        block, source, limits = config.block, config.source, config.limits
        self.config = config
        self.stats = Stats()
        largest = min(block.max_bytes, limits.memory // 4)
        self.blocks = Blocks(SealRules(max_age=block.max_age, max_bytes=largest, max_rows=block.max_messages))
        self.source = Source(
            config,
            held=lambda: self.memory,
            unacked=lambda: self.unacked,
            replies=lambda: side_tasks.held_replies(self),
        )
        self.store = store or open_store(config.store.url, config.store.options)
        self.prepare = Preparer(
            stream=source.stream,
            consumer=source.consumer,
            decoder=decoder or _made("decode", make_decoder, config.decode),
            key=key or _made("key", partial(make_key, decode=None if decoder else config.decode), config.key),
            interval=int(block.interval),
            keep_payload=config.decode.keep_payload,
        )
        self.encoder = Encoder(
            stream=source.stream,
            interval=int(block.interval),
            compression=block.compression,
            key_rule=key_rule.describe(config.key, config.decode, key, decoder),
        )
        self.on_stored = on_stored
        self.observer = Observer(source.stream, source.consumer)
        self.preparing = Received()
        self._decoding_since: float | None = None
        self.at_once = AtOnce(min(limits.memory // 8, MOST_COLUMNS))
        self.known: Known | None = None
        self.encoding = Gate(limits.memory // 8)
        self.resident = Resident(limits.memory // 8)
        self.encoded_bytes = self.waiting_bytes = 0
        self.opened = self.draining = False
        self._unconfirmed_at = -math.inf
        self.watermark: Watermark | None = None
        self.last_object: tuple[str, datetime] | None = None
        self.sealed: asyncio.Queue[Block] = asyncio.Queue()
        self.stored: asyncio.Queue[tuple[Block, EncodedBlock]] = asyncio.Queue()
        self.progress = asyncio.Event()
        self._decoding = ThreadPoolExecutor(1, "decode", initializer=step_back)
        self._storing = ThreadPoolExecutor(config.store.concurrency, "store", initializer=step_back)

    @property
    def memory(self) -> int:
        """Bytes held by everything after reception."""
        copies = self.preparing.memory * PREPARING_COPIES + self.encoding.within * ENCODING_COPIES
        return self.blocks.memory.bytes + copies + self.encoded_bytes

    @property
    def unacked(self) -> int:
        """Messages received and not acknowledged."""
        return self.source.waiting + len(self.preparing) + self.blocks.unacked

    def decoding_for(self) -> float:
        """Seconds that the present batch has been in the decoder and the key function; 0 without one."""
        since = self._decoding_since  # read once: other threads ask
        return 0.0 if since is None else time.monotonic() - since

    async def run(self, stop: asyncio.Event, *, until_caught_up: bool = False) -> None:
        """Capture until `stop` is set, then drain. Raises SourceError, StoreError, DrainError (in exception groups)."""
        await self.source.open()
        try:
            await probe(self.store, self._storing, self.config.store.retry_for, self.stats, stop)
            await key_rule.warn_of_change(self)
            side_tasks.warn_of_new_archive(self)
            self.observer.began(self.source.state)
            self.opened = True
            self.encoder = self.encoder.for_stream(self.source.stream_created, self.source.consumer)
            async with asyncio.TaskGroup() as tasks:
                side = [
                    tasks.create_task(work) for work in side_tasks.tasks(self, stop, until_caught_up=until_caught_up)
                ]
                side += [tasks.create_task(self._store()) for _ in range(self.config.store.concurrency)]
                side += [tasks.create_task(self._acknowledge()) for _ in range(ACKNOWLEDGING)]
                side.append(tasks.create_task(self.source.pull()))
                intake = tasks.create_task(self._intake())
                stopped = tasks.create_task(stop.wait())
                try:
                    await asyncio.wait((intake, stopped), return_when=asyncio.FIRST_COMPLETED)
                    await self._drain(intake)
                finally:
                    await _end(*side, intake, stopped)
        finally:
            self.source.halt()  # after a failure, nobody waits for open pulls
            await self.source.stop()  # first, or what is given back would come straight back here
            await self.source.give_back(side_tasks.held_replies(self))
            await self.source.close()
            self._decoding.shutdown(wait=False)
            self._storing.shutdown(wait=False)
        if self.source.failure is not None:
            raise self.source.failure

    async def _intake(self) -> None:
        """Received messages become rows of open blocks; blocks that are full, or too much together, are sealed."""
        while (received := await self.source.receive()) is not None:
            self.preparing = received
            self.preparing = await self.source.payloads.only_whole(received)
            while self.preparing:
                await self._memory_to_be_freed()
                part, rest = self.preparing.split(self.at_once.messages)
                self._decoding_since = time.monotonic()
                try:
                    prepared = await self._in(self._decoding, self.prepare, part)
                except BatchTooWideError:
                    self.at_once.too_many(len(part))
                    continue
                finally:
                    self._decoding_since = None
                self.at_once.were(len(part), prepared.rows.nbytes)
                for seq, timestamp in prepared.span:
                    self.observer.saw(seq, timestamp)
                now = asyncio.get_running_loop().time()
                self._learn(prepared.columns)
                self.send(self.blocks.add(prepared.rows, prepared.runs, now))
                self.send(self.blocks.add(prepared.quarantine, prepared.quarantine_runs, now, quarantine=True))
                self.preparing = rest
                side_tasks.count(self.stats, prepared)
                side_tasks.relieve(self)

    def _learn(self, columns: pa.Schema | None) -> None:
        """Remember all columns that the decoder knows of."""
        if columns is not None and (self.known is None or columns is not self.known.schema):
            self.known = Known(columns)

    async def _memory_to_be_freed(self) -> None:
        """Wait while blocks hold more than they may, if some of them are on their way to the store."""
        while self.blocks.memory.bytes + self.encoded_bytes > self.config.limits.memory and self.blocks.sealed:
            self.progress.clear()
            await self.progress.wait()

    @property
    def room(self) -> int:
        """How many more blocks may wait for the store: a turn of every worker, of small blocks or of large ones."""
        workers = self.config.store.concurrency
        return workers * (TOGETHER if self.waiting_bytes < workers * TOGETHER * SMALL else 2) - self.sealed.qsize()

    def send(self, blocks: list[Block]) -> None:
        """Hand sealed blocks to the store."""
        for block in blocks:
            self.stats.sealed_by[block.sealed_by] += 1
            self.waiting_bytes += block.bytes
            self.sealed.put_nowait(block)

    async def _store(self) -> None:
        """Sealed blocks become objects. A block is held until its object is stored, however often that fails."""
        while True:
            blocks = [await self.sealed.get()]
            while blocks[-1].bytes < SMALL and len(blocks) < TOGETHER and not self.sealed.empty():
                blocks.append(self.sealed.get_nowait())
            self.waiting_bytes -= sum(block.bytes for block in blocks)
            async with self.encoding.of(sum(block.table_bytes for block in blocks)):
                parts = [(block.id, block.sealed_by, block.batches(), self._known(block)) for block in blocks]
                objects = await self._in(self._storing, self._encode, parts)
            for block, encoded in zip(blocks, objects, strict=True):
                block.release()
                self.encoded_bytes += encoded.data.size
            self.progress.set()
            retry_for = self.config.store.retry_for
            async for index, location in put_all(self.store, objects, self._storing, retry_for, self.stats):
                self.encoded_bytes -= objects[index].data.size
                if self.on_stored is not None:
                    await self.on_stored(objects[index], location)
                self.stored.put_nowait((blocks[index], objects[index]))
            self.source.nudge()
            side_tasks.relieve(self)

    def _known(self, block: Block) -> pa.Schema | None:
        return None if block.id.quarantine else self.known

    def _encode(self, parts: list[tuple[Any, ...]]) -> list[EncodedBlock]:
        try:
            return [self.encoder.encode_or_salvage(*part) for part in parts]
        finally:
            self.resident.relieve()

    async def _acknowledge(self) -> None:
        """Stored blocks are acknowledged, all that are there at once. Nothing else in this program acknowledges."""
        while True:
            stored = [await self.stored.get()]
            while not self.stored.empty():
                stored.append(self.stored.get_nowait())
            replies = pa.concat_arrays([replies for block, _ in stored for replies in block.replies()])
            confirmed = await self._confirmed(replies)
            if not confirmed:
                self._unconfirmed_at = asyncio.get_running_loop().time()
            for block, _ in stored:
                self.blocks.forget(block)
            side_tasks.report(self, stored, confirmed=confirmed)
            self.progress.set()

    async def _confirmed(self, replies: pa.BinaryArray) -> bool:
        """Acknowledge until the server confirms it, or gives reason to give up."""
        unanswered = 0
        for delay in delays(FIRST_ACK_RETRY, LONGEST_ACK_RETRY):
            result = await self.source.ack(replies)
            if result is AckResult.CONFIRMED:
                return True
            self.stats.unconfirmed_acks += 1
            unanswered += result is AckResult.UNCONFIRMED
            if result is AckResult.REFUSED or unanswered == ACK_ATTEMPTS:
                return False
            await asyncio.sleep(delay)
        raise AssertionError("the delays have no end")

    async def _drain(self, intake: asyncio.Task[None]) -> None:
        """Stop pulling, then seal, store and acknowledge everything, within `drain_timeout`.

        Raises DrainError unless every message that was delivered here is acknowledged.
        """
        self.draining = True
        try:
            async with asyncio.timeout(self.config.drain_timeout):
                ended = await self.source.stop()
                await intake
                self.send(self.blocks.seal_all("drain"))
                while self.blocks.unacked:
                    self.progress.clear()
                    await self.progress.wait()
        except TimeoutError:
            late = f"{self.unacked} messages were not stored and acknowledged in time, and are given back"
            raise DrainError(
                f"drain_timeout: {late if self.unacked else 'the server did not answer in time'}"
            ) from None
        await side_tasks.last_mark(self)
        since = asyncio.get_running_loop().time() - self._unconfirmed_at
        doubtful = not ended or since < self.source.state.ack_wait  # older ones have come back, and were acknowledged
        if self.source.failure is None and doubtful and not await self._none_unacked():
            reason = "acknowledgements were not confirmed" if ended else "the connection to NATS was lost"
            raise DrainError(f"drain: {reason}; what the server has not counted comes back after ack_wait")

    async def _none_unacked(self) -> bool:
        """Whether the server has no unacknowledged message, of whatever replica."""
        return self.source.connected and await self.source.refresh() and self.source.state.unacked == 0

    async def in_store(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work` where objects are stored, in a thread."""
        return await self._in(self._storing, work, *args)

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *args)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until they have ended: nats-py swallows a cancellation that meets it in a flush."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=1)


def _made(path: str, make: Callable[[Any], T], setting: Any) -> T:
    """What `make` makes of a setting; ConfigError with the setting's path when it cannot."""
    try:
        return make(setting)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
