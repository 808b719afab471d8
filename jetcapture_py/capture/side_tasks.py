"""A capture's background tasks: relieve memory, keep messages alive, watch the consumer and the decoder."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import pyarrow as pa

from jetcapture_py.capture.archiver import Archiver
from jetcapture_py.capture.sealing import Demand
from jetcapture_py.capture.spool import Spooling
from jetcapture_py.config.block import MANY_KEYS
from jetcapture_py.config.shares import STALLED_SHARE
from jetcapture_py.jetstream.shared import Acks
from jetcapture_py.log import event

log = logging.getLogger("jetcapture.capture")

TICK = 0.1
TICK_SHARE = 0.001
"""Minimum seconds of a tick per capture of the process, so that ticks do not take all of its time."""
POLL = 1.0
IDLE_POLL = 5.0
"""Seconds between checks while no message arrives."""
QUIET = 1.0
"""Seconds without a message after which tasks wait for one instead of looking every `TICK`."""
STALLED = 0.1
"""Seconds without a message, while many are held, after which the consumer's limit may have been reached."""
STALLED_FOR = 10.0
"""Seconds without a message after which a stall is no longer checked."""
KEEP_ALIVE_PER_WAIT = 3
CATCH_UP_POLL = 0.01
ARRIVING = 0.5
"""Maximum seconds for delivered messages to arrive; after that, missing ones belong to another replica."""
KEYS_POLL = 15.0
"""Seconds between counts of the keys while nothing arrives."""
DECODER_SLOW = 30.0
"""Seconds that a batch may be in the decoder and the key function before the capture is not ready."""


class SideTasks:
    """The tasks of one capture, and their shared state."""

    def __init__(self, acks: Acks, archiver: Archiver) -> None:
        self._acks, self._source, self._archiver = acks, acks.source, archiver

    def tasks(self, stop: asyncio.Event, *, until_caught_up: bool) -> list[Coroutine[Any, Any, None]]:
        """Return all tasks. The caller cancels those still running at the end."""
        work = [self._archiver.seal_by_age(), self._relieve(), self._keep_alive(), self._watch(), self._watch_decoder()]
        if not self._source.config.block.bundles:
            work.append(self._watch_keys())
        if self._archiver.spooling is not None:
            work.append(self._spool(self._archiver.spooling))
        return [*work, self._catch_up(stop)] if until_caught_up else work

    def relieve(self) -> None:
        """Seal blocks if memory or unacknowledged messages are short."""
        source, acks = self._source, self._acks
        demand = Demand(
            unacked_limit=acks.unacked_limit,
            starved=source.pulls.starved,
            idle=not source.waiting,
            overdue=acks.seal_before(all_in_blocks=not self._archiver.decoding.batch),
        )
        self._archiver.relieve(demand)

    def held_replies(self) -> pa.BinaryArray:
        """Return the ack subjects of all unacknowledged messages."""
        return pa.concat_arrays([self._source.waiting_replies(), *self._archiver.replies()])

    async def _pause(self, seconds: float, *, quiet: float) -> None:
        """Wait for `seconds`; on an idle stream, for `quiet` seconds or a message."""
        source = self._source
        seconds = max(seconds, TICK_SHARE * self._archiver.ledger.memory.captures)
        busy = source.waiting or self._archiver.busy or source.pulls.starved or source.pulls.stopped
        if busy or source.idle_for() < QUIET:
            await asyncio.sleep(seconds)
            return
        source.arrived.clear()
        try:
            async with asyncio.timeout(max(seconds, quiet)):
                await source.arrived.wait()
        except TimeoutError:
            return
        await asyncio.sleep(seconds)

    async def _relieve(self) -> None:
        """Relieve memory and pull again when another capture has changed its use. While draining, do not wait for
        pulls."""
        source, archiver = self._source, self._archiver
        while True:
            await self._pause(TICK, quiet=POLL if archiver.blocks.open else IDLE_POLL)
            if source.pulls.stopped and source.idle_for() > STALLED:
                archiver.seal_all("drain")
            self.relieve()
            source.pulls.wake_for_more()

    async def _spool(self, spooling: Spooling) -> None:
        """Move rows to the spool whenever memory is short; if that fails, blocks are sealed."""
        progress = self._archiver.progress
        await spooling.check()
        while True:
            async for _ in spooling.steps():
                progress.set()
                self._source.pulls.wake_for_more()
            progress.set()
            self.relieve()

    async def _keep_alive(self) -> None:
        loop, source = asyncio.get_running_loop(), self._source
        last = loop.time()
        while True:
            due = last + source.state.ack_wait / KEEP_ALIVE_PER_WAIT  # it may be shortened at any time
            if loop.time() < due:
                soon = min(due - loop.time(), POLL / 2)
                await (asyncio.sleep(soon) if source.unacked else self._pause(soon, quiet=due - loop.time()))
                continue
            last = loop.time()
            await self._acks.keep_alive(self.held_replies())

    async def _watch(self) -> None:
        """Refresh the consumer's limits and the other replicas' share; immediately when messages stop arriving."""
        loop, source = asyncio.get_running_loop(), self._source
        last = wait = 0.0
        while True:
            await self._pause(TICK, quiet=last + wait - loop.time())
            held = source.unacked
            stalled = STALLED < source.idle_for() < STALLED_FOR and held > self._acks.unacked_limit // STALLED_SHARE
            wait = POLL / 5 if stalled else POLL if held else IDLE_POLL
            if loop.time() - last >= wait:
                await source.refresh()
                if self._acks.released() and self._archiver.blocks.open:
                    self._archiver.release()
                    self._acks.forget()
                self.relieve()  # other replicas may hold more than before
                last = loop.time()

    async def _watch_decoder(self) -> None:
        """Log a batch once if the decoder or the key function does not return in time."""
        logged = None
        while True:
            await self._pause(POLL, quiet=DECODER_SLOW)
            batch, seconds = self._archiver.decoding.batch, self._archiver.decoding.seconds
            if seconds > DECODER_SLOW and batch is not logged:
                event(log, logging.WARNING, "decoder.slow", messages=len(batch), seconds=round(seconds))
                logged = batch

    async def _watch_keys(self) -> None:
        """Log once that bundles would store this many keys with fewer requests and less CPU."""
        blocks = self._archiver.blocks
        while True:
            await self._pause(POLL, quiet=KEYS_POLL)
            if blocks.open > MANY_KEYS and (keys := blocks.open_keys()) > MANY_KEYS:
                advice = "set block.bundles, or use a coarser key"
                event(log, logging.WARNING, "keys.many", open_keys=keys, advice=advice)
                return

    async def _catch_up(self, stop: asyncio.Event) -> None:
        """Stop once everything is delivered and acknowledged, here and at other replicas."""
        loop, reached, source = asyncio.get_running_loop(), 0.0, self._source
        source.pulls.catch_up()
        while not stop.is_set():
            await asyncio.sleep(CATCH_UP_POLL)
            if self._archiver.decoding.batch or source.idle_for() < CATCH_UP_POLL:
                continue
            if source.waiting:
                source.flush()
                continue
            if not await source.refresh():
                continue
            consumer = source.state
            if consumer.pending and not (source.idle_for() > QUIET and await source.consumer.delivered_all()):
                continue
            reached = reached or loop.time()
            if consumer.unacked == 0 and source.unacked == 0:
                stop.set()
            elif not source.looked.unacked or loop.time() - reached > ARRIVING:
                self._archiver.seal_all("caught_up")


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until they have ended: nats-py swallows a cancellation during a flush."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=1)
