"""The whole pipeline, top to bottom: pull → decode → route → block → store → ack.

Guarantee: a message is acknowledged only after the object that holds it is durably stored, unless it was erased.
`_acknowledge` alone calls `Acks.ack`, and it only ever sees blocks that `_store` has stored.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from jetcapture_py.archive.block_writer import BlockWriter
from jetcapture_py.capture import parts, side_tasks, startup_checks
from jetcapture_py.capture.announcing import Announcer, Notifiers, OnStored
from jetcapture_py.capture.archiver import Archiver
from jetcapture_py.capture.blocks import replies_of
from jetcapture_py.capture.marks import Marks
from jetcapture_py.capture.side_tasks import SideTasks
from jetcapture_py.capture.stats import Stats
from jetcapture_py.config.model import Config
from jetcapture_py.errors import DrainError
from jetcapture_py.jetstream.ordered_acks import Ordered
from jetcapture_py.jetstream.shared import Acks, Shared
from jetcapture_py.jetstream.source import PullSource
from jetcapture_py.ledger import Ledger, Memory
from jetcapture_py.store import Store, configured_store
from jetcapture_py.transform.batch import Decoder
from jetcapture_py.transform.keys import KeyFunction

ACKNOWLEDGING = 3  # tasks, so that a block does not wait for the answers to earlier ones


class Capture:
    """One replica: a source, an archiver, and acknowledgements.

    `decoder`, `key`, `store`, `writer` and `on_stored` replace what the configuration names. Captures may share
    `memory`; those of `notifiers` notify. Raises ConfigError.
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
        ordered, stats = config.source.mode == "ordered", Stats()
        self.config, self.stats = config, stats
        self.ledger = Ledger(memory or Memory(config.limits.memory))
        self.source = PullSource(config, self.ledger)
        self.acks: Acks = (Ordered if ordered else Shared)(self.source, stats)
        store, encoder = store or configured_store(config.store), parts.encoder(config, decoder, key, writer)
        preparer = replace(parts.preparer(config, decoder, key), pinned=ordered)
        self.archiver = Archiver(config, self.ledger, store, preparer, encoder)
        self.marks = Marks(config.block, self.source, self.archiver, stats, config.store.url)
        self.announcer = Announcer(config, self.source, on_stored, notifiers)
        self.side_tasks = SideTasks(self.acks, self.archiver)
        self.opened = False
        self.ended: str | None = None
        """None while running; then the reason for the failure, or "" after a drain."""

    @property
    def draining(self) -> bool:
        return self.source.pulls.stopped

    async def run(self, stop: asyncio.Event, *, until_caught_up: bool = False) -> None:
        """Capture until `stop` is set, then drain. Raises SourceError, StoreError, DrainError (in exception groups)."""
        source, archiver = self.source, self.archiver
        with self.ledger.joined():
            await startup_checks.open_source(self.acks, self.marks)
            try:
                await startup_checks.check(self.marks, source, archiver, stop)
                await self.announcer.check()
                self.opened = True
                async with asyncio.TaskGroup() as tasks:
                    work = self.side_tasks.tasks(stop, until_caught_up=until_caught_up)
                    work += [source.pulls.run(), self.acks.run(), self.marks.keep(), *self.announcer.tasks()]
                    work += [self._store() for _ in range(archiver.uploads.workers)]
                    work += [self._acknowledge() for _ in range(ACKNOWLEDGING)]
                    others = [tasks.create_task(task) for task in work]
                    intake, stopped = tasks.create_task(self._intake()), tasks.create_task(stop.wait())
                    try:
                        await asyncio.wait((intake, stopped), return_when=asyncio.FIRST_COMPLETED)
                        await self._drain(intake)
                    finally:
                        await side_tasks.end(intake, stopped, *others)
            finally:
                self.stats.quarantine.end()
                source.halt()  # after a failure, do not wait for open pulls
                await self.acks.stop()  # first, or the messages would be redelivered right here
                await self.acks.close(self.side_tasks.held_replies())
                archiver.close()
        if source.failure is not None:
            raise await startup_checks.advised(source.failure, source, self.marks)

    async def _intake(self) -> None:
        """Put received messages into blocks; seal full blocks, and the largest ones when a budget is exceeded."""
        archiver = self.archiver
        while (received := await self.source.receive()) is not None:
            async for prepared in archiver.decoding.pieces(self.acks.admit(received)):  # decoded and routed
                self.marks.saw(prepared)
                archiver.add(prepared)
                self.stats.count_prepared(prepared)
                self.side_tasks.relieve()
                await archiver.memory_freed()

    async def _store(self) -> None:
        """Store sealed blocks as objects. A block is held until its object is stored."""
        while True:
            await self.archiver.store()
            self.source.pulls.wake_for_more()
            self.side_tasks.relieve()

    async def _acknowledge(self) -> None:
        """Acknowledge stored blocks. Nothing else is acknowledged."""
        while True:
            stored = await self.archiver.stored()
            await self.acks.ack(replies_of(stored))
            for block, *_ in stored:
                self.archiver.forget(block)
            self.stats.count_stored(stored)
            self.announcer.announce(stored)
            del stored, block  # they hold ack subjects, and the next ones may be late

    async def _drain(self, intake: asyncio.Task[None]) -> None:
        """Stop pulling, then seal, store and acknowledge everything, within `drain_timeout`.

        Raises DrainError unless every message delivered here is acknowledged.
        """
        source, deadline = self.source, asyncio.get_running_loop().time() + self.config.drain_timeout
        try:
            async with asyncio.timeout_at(deadline):
                await self.acks.stop()
                await intake
                self.archiver.seal_all("drain")
                await self.archiver.done()
        except TimeoutError:
            late = f"messages not stored and acknowledged in time: {source.unacked}; they are redelivered"
            reason = late if source.unacked else "the server did not answer in time"
            raise DrainError(f"drain_timeout: {reason}") from None
        await self.marks.finish(deadline)
        await self.announcer.finish(deadline)
        await self.acks.check_drained()
