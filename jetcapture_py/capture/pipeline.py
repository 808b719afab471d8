"""The whole pipeline, top to bottom: pull → decode → route → block → store → ack.

Guarantee: a message is acknowledged only after the object that holds it is durably stored. `_acknowledge` is the one
place that acknowledges, and it only ever sees blocks that `_store` has stored.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from jetcapture_py.archive.block_writer import BlockWriter
from jetcapture_py.capture import parts, side_tasks, startup_checks
from jetcapture_py.capture.announcing import Announcer, Notifiers, OnStored
from jetcapture_py.capture.blocks import StoredBlock, replies_of
from jetcapture_py.capture.encoding import Encoding
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.capture.storing import put_all
from jetcapture_py.config.model import Config
from jetcapture_py.errors import DrainError, SourceError
from jetcapture_py.ledger import Memory
from jetcapture_py.store import Store, configured_store
from jetcapture_py.transform.batch import Decoder
from jetcapture_py.transform.keys import KeyFunction

ACKNOWLEDGING = 3  # tasks, so that a block does not wait for the answers to earlier ones


class Capture:
    """One replica. `decoder`, `key`, `store`, `writer` and `on_stored` replace what the configuration names.

    `state` is for side tasks and metrics. Captures may share `memory`; those of `notifiers` notify. Raises ConfigError.
    """

    def __init__(
        self,
        config: Config,
        *,
        decoder: Decoder | None = None,
        key: KeyFunction | None = None,
        store: Store | None = None,
        writer: BlockWriter | None = None,
        on_stored: OnStored | None = None,
        memory: Memory | None = None,
        notifiers: Notifiers = tuple,
    ) -> None:
        store, encoder = store or configured_store(config.store), parts.encoder(config, decoder, key, writer)
        preparer = replace(parts.preparer(config, decoder, key), pinned=config.source.mode == "ordered")
        self.state = CaptureState(config, store, whole_blocks=encoder.whole_blocks, memory=memory, preparer=preparer)
        self.encoding = Encoding(self.state, encoder)
        self.announcer = Announcer(self.state, on_stored, notifiers)

    async def run(self, stop: asyncio.Event, *, until_caught_up: bool = False) -> None:
        """Capture until `stop` is set, then drain. Raises SourceError, StoreError, DrainError (in exception groups)."""
        with self.state.ledger.joined():
            await self._run(stop, until_caught_up=until_caught_up)

    async def _run(self, stop: asyncio.Event, *, until_caught_up: bool) -> None:
        state = self.state
        try:
            await state.acks.open()
        except SourceError as error:
            raise await startup_checks.advised(state, error) from error
        try:
            await startup_checks.check(state, self.encoding.encoder, stop)
            await side_tasks.read_erased(state)
            await self.announcer.check()
            self.encoding.stream_known()
            state.opened = True
            async with asyncio.TaskGroup() as tasks:
                work = side_tasks.tasks(state, stop, until_caught_up=until_caught_up)
                work += [state.source.pull(), state.acks.run(), *self.announcer.tasks()]
                work += [self._store() for _ in range(state.config.store.concurrency)]
                work += [self._acknowledge() for _ in range(ACKNOWLEDGING)]
                others = [tasks.create_task(task) for task in work]
                intake, stopped = tasks.create_task(self._intake()), tasks.create_task(stop.wait())
                try:
                    await asyncio.wait((intake, stopped), return_when=asyncio.FIRST_COMPLETED)
                    await self._drain(intake)
                finally:
                    await side_tasks.end(intake, stopped, *others)
        finally:
            await state.close()
        if state.source.failure is not None:
            raise await startup_checks.advised(state, state.source.failure)

    async def _intake(self) -> None:
        """Put received messages into blocks; seal blocks that are full, or that exceed a budget together."""
        state, loop = self.state, asyncio.get_running_loop()
        while (received := await state.source.receive()) is not None:
            async for prepared in state.decoding.pieces(state.acks.admit(received)):  # decoded and routed
                for seq, timestamp in prepared.span:
                    state.observer.saw(seq, timestamp)
                self.encoding.set_columns(prepared.columns)
                blocks, now = state.blocks, loop.time()
                full = blocks.add(prepared.rows, prepared.runs, now)
                full += blocks.add(prepared.quarantine, prepared.quarantine_runs, now, quarantine=True)
                state.send_to_store(full)
                state.stats.count_prepared(prepared)
                state.seal_under_pressure()
                await state.memory_freed()

    async def _store(self) -> None:
        """Store sealed blocks as objects. A block is held until its object is stored."""
        state = self.state
        while True:
            blocks = await state.sealed_blocks()
            objects = await self.encoding.encode(blocks)
            async for index, location in put_all(state, objects):
                encoded = objects[index]  # None if nothing is left of the block, because all of it was erased
                state.ledger["encoded"] -= 0 if encoded is None else encoded.memory
                state.stored.put_nowait(StoredBlock.of(blocks[index], encoded, location))
            del blocks, objects, encoded
            state.source.wake_pulls()
            state.seal_under_pressure()

    async def _acknowledge(self) -> None:
        """Acknowledge stored blocks. Nothing else in this program acknowledges."""
        state = self.state
        while True:
            stored = await state.stored_blocks()
            await state.acks.ack(replies_of(stored))
            for block, *_ in stored:
                state.blocks.forget(block)
            state.stats.count_stored(stored)
            self.announcer.announce(stored)
            state.progress.set()
            del stored, block  # they hold ack subjects, and the next ones may be late

    async def _drain(self, intake: asyncio.Task[None]) -> None:
        """Stop pulling, then seal, store and acknowledge everything, within `drain_timeout`.

        Raises DrainError unless every message that was delivered here is acknowledged.
        """
        state = self.state
        state.draining, deadline = True, asyncio.get_running_loop().time() + state.config.drain_timeout
        try:
            async with asyncio.timeout_at(deadline):
                await state.acks.stop()
                await intake
                state.send_to_store(state.blocks.seal_all("drain"))
                await state.all_acknowledged()
        except TimeoutError:
            late = f"messages not stored and acknowledged in time: {state.unacked}; they are redelivered"
            reason = late if state.unacked else "the server did not answer in time"
            raise DrainError(f"drain_timeout: {reason}") from None
        await side_tasks.last_mark(state, deadline)
        await self.announcer.finish(deadline)
        await state.acks.check_drained()
