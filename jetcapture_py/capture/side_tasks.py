"""Side tasks of the pipeline: seal by age and under pressure, keep messages alive, watch the consumer and the decoder,
and write the watermark and the stream's configuration."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from jetcapture_py import store
from jetcapture_py.capture.parts import describe_time
from jetcapture_py.capture.spool import Spooling
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.capture.stream_watch import keep_stream_config, recognize_stream
from jetcapture_py.capture.watermark import move_watermark
from jetcapture_py.config.block import MANY_KEYS
from jetcapture_py.config.shares import STALLED_SHARE
from jetcapture_py.errors import JetcaptureError, StoreError
from jetcapture_py.log import event

log = logging.getLogger("jetcapture.capture")

TICK = 0.1
TICK_SHARE = 0.001
"""Minimum seconds of a tick per capture of the process, so that ticks do not take all of its time."""
POLL = 1.0
IDLE_POLL = 5.0
"""Seconds between checks of what only messages can change, while there are none."""
QUIET = 1.0
"""Seconds without a message after which tasks wait for one instead of looking every `TICK`."""
STALLED = 0.1
"""Seconds without a message, while many are held, after which the consumer's limit may have been reached."""
STALLED_FOR = 10.0
"""Seconds without a message after which nothing depends on it any more."""
KEEP_ALIVE_PER_WAIT = 3
CATCH_UP_POLL = 0.01
ARRIVING = 0.5
"""Seconds that delivered messages may take to arrive; those that have not are another replica's."""
MARK = 15.0
"""Seconds between updates of the watermark."""
IDLE_MARK = timedelta(minutes=1)
"""Minimum time between writes, across all replicas, when only the watermark's time has changed."""
LAST_MARK = 5.0
"""Minimum seconds that a stopping capture waits for the watermark to be written."""
DECODER_SLOW = 30.0
"""Seconds that a batch may be in the decoder and the key function before the capture is not ready."""


def tasks(state: CaptureState, stop: asyncio.Event, *, until_caught_up: bool) -> list[Coroutine[Any, Any, None]]:
    """The side tasks of a capture; the caller cancels those still running at the end."""
    work = [_seal_by_age(state), _keep_alive(state), _watch(state), _watch_decoder(state), _mark(state)]
    if not state.config.block.bundles:
        work.append(_watch_keys(state))
    if state.spooling is not None:
        work.append(_spool(state, state.spooling))
    return [*work, _catch_up(state, stop)] if until_caught_up else work


async def _pause(state: CaptureState, seconds: float, *, quiet: float) -> None:
    """Wait for `seconds`; if nothing arrives and nothing is in progress, longer: `quiet` seconds, or for a message."""
    source, spooling = state.source, state.spooling
    seconds = max(seconds, TICK_SHARE * state.ledger.memory.captures)
    busy = source.waiting or state.decoding.batch or state.blocks.sealed or source.pulls.starved or state.draining
    if busy or source.idle_for() < QUIET or (spooling is not None and spooling.active):
        await asyncio.sleep(seconds)
        return
    source.arrived.clear()
    try:
        async with asyncio.timeout(max(seconds, quiet)):
            await source.arrived.wait()
    except TimeoutError:
        return
    await asyncio.sleep(seconds)


async def _spool(state: CaptureState, spooling: Spooling) -> None:
    """Move rows to the spool whenever the memory is short; where that fails, blocks are sealed."""
    await spooling.check()
    while True:
        async for _ in spooling.steps():
            state.progress.set()
            state.source.wake_pulls()
        state.progress.set()
        state.seal_under_pressure()


async def _seal_by_age(state: CaptureState) -> None:
    loop, blocks, max_age = asyncio.get_running_loop(), state.blocks, state.config.block.max_age
    while True:
        soon = min(POLL, max_age - blocks.oldest_age(loop.time())) if blocks.open else IDLE_POLL
        await _pause(state, TICK, quiet=soon)
        state.send_to_store(blocks.seal_due(loop.time()))
        if state.draining and state.source.idle_for() > STALLED:  # need not wait for the pulls to end
            state.send_to_store(blocks.seal_all("drain"))
        state.seal_under_pressure()
        state.source.wake_pulls()


async def _keep_alive(state: CaptureState) -> None:
    loop = asyncio.get_running_loop()
    last = loop.time()
    while True:
        due = last + state.source.state.ack_wait / KEEP_ALIVE_PER_WAIT  # it may be shortened at any time
        if loop.time() < due:
            soon = min(due - loop.time(), POLL / 2)
            await (asyncio.sleep(soon) if state.unacked else _pause(state, soon, quiet=due - loop.time()))
            continue
        last = loop.time()
        await state.acks.keep_alive(state.held_replies())


async def _watch(state: CaptureState) -> None:
    """Refresh the consumer's limits and what other replicas hold; immediately when messages stop arriving."""
    loop, source = asyncio.get_running_loop(), state.source
    last = wait = 0.0
    while True:
        await _pause(state, TICK, quiet=last + wait - loop.time())
        held = state.unacked
        stalled = STALLED < source.idle_for() < STALLED_FOR and held > state.acks.unacked_limit // STALLED_SHARE
        wait = POLL / 5 if stalled else POLL if held else IDLE_POLL
        if loop.time() - last >= wait:
            await source.refresh()
            if state.acks.released() and state.blocks.open:
                state.release()
            state.seal_under_pressure()  # other replicas may hold more than before
            last = loop.time()


async def _watch_decoder(state: CaptureState) -> None:
    """Log each batch once that the decoder or the key function does not return in time."""
    logged = None
    while True:
        await _pause(state, POLL, quiet=DECODER_SLOW)
        batch, seconds = state.decoding.batch, state.decoding.seconds
        if seconds > DECODER_SLOW and batch is not logged:
            event(log, logging.WARNING, "decoder.slow", messages=len(batch), seconds=round(seconds))
            logged = batch


async def _watch_keys(state: CaptureState) -> None:
    """Log once that there are so many keys that bundles would store them with fewer requests and less CPU."""
    while True:
        await _pause(state, POLL, quiet=MARK)
        if state.blocks.open > MANY_KEYS and (keys := state.blocks.open_keys()) > MANY_KEYS:
            event(log, logging.WARNING, "keys.many", open_keys=keys, advice="set block.bundles, or use a coarser key")
            return


async def read_erased(state: CaptureState) -> None:
    """Read which messages were erased, so that they are not stored again. A failure is logged and retried with the
    next watermark."""
    stream = state.config.source.stream
    try:
        erased = await state.in_thread(state.store_threads, store.read_erased, state.notes, stream, state.erased)
    except JetcaptureError as error:
        event(log, logging.WARNING, "erased.unreadable", error=error)
        return
    if erased is not state.erased:
        state.erased = erased
        event(log, logging.INFO, "erased.read", tombstones=len(erased.tombstones), messages=len(erased))


async def _mark(state: CaptureState) -> None:
    while True:
        await keep_stream_config(state)
        await asyncio.sleep(MARK)
        await read_erased(state)
        if await state.source.refresh():
            await write_watermark(state, IDLE_MARK)


async def last_mark(state: CaptureState, deadline: float) -> None:
    """Write the final watermark, and the stream's configuration."""
    answered = state.source.connected and await state.source.refresh()
    if not answered and state.notes is not None and state.source.failure is None:  # else `capture.failed` says why
        event(log, logging.WARNING, "watermark.failed", error="NATS did not answer in time")
    try:
        async with asyncio.timeout_at(max(deadline, asyncio.get_running_loop().time() + LAST_MARK)):
            if answered:
                await write_watermark(state, timedelta())
                await keep_stream_config(state)
    except TimeoutError:
        state.store_hangs = True
        event(log, logging.WARNING, "watermark.failed", error="the store did not answer in time")


async def write_watermark(state: CaptureState, idle: timedelta) -> None:
    """Move the watermark to the consumer's last known state; a failure is logged and retried with the next one.

    No watermark is written with one root per key, or if the store cannot keep notes.
    """
    source, objects = state.source, state.stats.objects
    if state.notes is None or not await recognize_stream(state):
        return
    mark = state.observer.watermark(source.state, source.origin)
    if mark is None:
        return
    block = state.config.block
    mark = replace(
        mark,
        last_stored=objects[0].acknowledged if objects else None,
        key_rule=state.key_rule,
        interval=int(block.interval),
        bucket_time=describe_time(block),
    )
    try:
        state.watermark = await state.in_thread(
            state.store_threads, move_watermark, state.notes, mark, [*state.observer.seen, source.state], idle
        )
        state.observer.recorded()
    except StoreError as error:
        event(log, logging.WARNING, "watermark.failed", error=error)


async def _catch_up(state: CaptureState, stop: asyncio.Event) -> None:
    """Stop once nothing is left to deliver and nothing is unacknowledged, here or at another replica."""
    loop, reached = asyncio.get_running_loop(), 0.0
    state.source.pulls.catching_up = True
    while not stop.is_set():
        await asyncio.sleep(CATCH_UP_POLL)
        if state.decoding.batch or state.source.idle_for() < CATCH_UP_POLL:
            continue
        if state.source.waiting:
            state.source.flush()
            continue
        if not await state.source.refresh():
            continue
        consumer = state.source.state
        if consumer.pending and not (state.source.idle_for() > QUIET and await state.source.delivered_all()):
            continue
        reached = reached or loop.time()
        if consumer.unacked == 0 and state.unacked == 0:
            stop.set()
        elif not state.source.other_unacked or loop.time() - reached > ARRIVING:
            state.send_to_store(state.blocks.seal_all("caught_up"))


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until they have ended: nats-py swallows a cancellation during a flush."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=1)
