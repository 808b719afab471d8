"""What goes on beside the pipeline: sealing by age and pressure, keeping messages alive, watching the consumer, and
writing the watermark."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from jetcapture_py.archive import watermark
from jetcapture_py.capture.progress import Move, move
from jetcapture_py.errors import StoreError
from jetcapture_py.log import event
from jetcapture_py.store import LocalStore, NoteStore, change_note

if TYPE_CHECKING:
    from jetcapture_py.archive.writer import EncodedBlock
    from jetcapture_py.capture.blocks import Block
    from jetcapture_py.capture.pipeline import Capture
    from jetcapture_py.capture.stats import Stats
    from jetcapture_py.jetstream.admin import ConsumerState
    from jetcapture_py.transform.prepare import Prepared

log = logging.getLogger("jetcapture.capture")

TICK = 0.1
POLL = 1.0
STALLED = 0.1
"""Without a message for so many seconds, while many are held, the consumer's limit may have been reached."""
KEEP_ALIVE_PER_WAIT = 3
CATCH_UP_POLL = 0.01
MARK = 15.0
"""Seconds between looks at the watermark."""
IDLE_MARK = timedelta(minutes=1)
"""A watermark of which only the time has changed is written no more often than this, by all replicas together."""
LAST_MARK = 5.0
DECODER_SLOW = 30.0
"""Seconds that a batch may be in the decoder and the key function before the capture is not ready."""


def tasks(capture: Capture, stop: asyncio.Event, *, until_caught_up: bool) -> list[Coroutine[Any, Any, None]]:
    """The side tasks of a capture, each to run until it is cancelled."""
    work = [_seal_by_age(capture), _keep_alive(capture), _watch(capture), _watch_decoder(capture), _mark(capture)]
    return [*work, _catch_up(capture, stop)] if until_caught_up else work


def relieve(capture: Capture) -> None:
    """Seal the largest blocks when too much of a budget lies open, so that the rest of it is for what is being stored.

    That is half of it; of what may be unacknowledged less, because a server that waits for acks is slow to take them.

    All of them when their memory is missing for a pull: of large messages, a few already fill the budget.

    No more than the store takes next: while it is busy, the blocks that wait for it can still grow.
    """
    blocks, limits, unacked = capture.blocks, capture.config.limits, capture.source.unacked_limit
    rows = blocks.rows - unacked // 3
    size = blocks.bytes if capture.source.starved else blocks.bytes - limits.memory // 2
    count = blocks.open - limits.open_blocks
    sealed = blocks.seal_most(
        rows=rows + unacked // 32 if rows > 0 else 0,
        size=size + limits.memory // 8 if size > 0 else 0,
        blocks=count + limits.open_blocks // 8 if count > 0 else 0,
        most=capture.room,
    )
    capture.send(sealed)


def held_replies(capture: Capture) -> pa.BinaryArray:
    """The ack subjects of every message that was received and not acknowledged."""
    blocks = [replies for block in capture.blocks for replies in block.replies()]
    return pa.concat_arrays([capture.source.waiting_replies(), capture.preparing.replies, *blocks])


def count(stats: Stats, prepared: Prepared) -> None:
    """Count a batch that has been put into blocks."""
    stats.received += prepared.messages
    stats.redelivered += prepared.redelivered
    stats.strays += prepared.strays
    stats.quarantined += prepared.quarantine.num_rows
    if prepared.strays:
        event(log, logging.WARNING, "receive.strays", frames=prepared.strays)
    if prepared.quarantine.num_rows:
        first = prepared.quarantine.slice(0, 1).to_pylist()[0]
        event(
            log,
            logging.WARNING,
            "messages.quarantined",
            messages=prepared.quarantine.num_rows,
            first_seq=first["_nats_seq"],
            first_stage=first["stage"],
            first_error=first["error"],
        )


def warn_of_new_archive(capture: Capture) -> None:
    """Warn when the archive's directory was empty although the consumer has acknowledged messages."""
    store, state = capture.store, capture.source.state
    if isinstance(store, LocalStore) and store.new and state.acknowledged:
        reason = "it was empty, but the consumer has acknowledged messages before; is the volume mounted?"
        event(log, logging.WARNING, "archive.new", root=store.root, ack_floor=state.ack_floor, reason=reason)


async def last_mark(capture: Capture) -> None:
    """Leave the watermark behind that everything stored so far allows."""
    try:
        async with asyncio.timeout(LAST_MARK):
            await mark(capture, timedelta())
    except TimeoutError:
        event(log, logging.WARNING, "watermark.failed", error="no answer from the store in time")


async def mark(capture: Capture, idle: timedelta = IDLE_MARK) -> None:
    """Move the watermark forward, if it can be; a failure is logged, and is tried again with the next one.

    There is none where every key has a root of its own, or where the store keeps objects only.
    """
    store = capture.store
    if not isinstance(store, NoteStore) or "{key}" in capture.config.store.url or not await capture.source.refresh():
        return
    found = capture.observer.watermark(capture.source.state, capture.source.stream_created)
    if found is None:
        return
    found = replace(found, last_object=capture.last_object)
    try:
        capture.watermark = await capture.in_store(_move_watermark, store, found, capture.source.state, idle)
    except StoreError as error:
        event(log, logging.WARNING, "watermark.failed", error=error)


def _move_watermark(
    store: NoteStore, found: watermark.Watermark, state: ConsumerState, idle: timedelta
) -> watermark.Watermark:
    """Write what is found, with what is there already, when that says something new; what is there then."""
    moves: list[Move] = []

    def change(data: bytes | None) -> bytes | None:
        moves.append(move(data, found, state, idle))
        return moves[-1].data

    change_note(store, watermark.path(found.stream), change)
    for name, fields in moves[-1].warnings:
        event(log, logging.WARNING, name, **fields)
    return moves[-1].there


def report(capture: Capture, stored: list[tuple[Block, EncodedBlock]], *, confirmed: bool) -> None:
    """Count and log blocks that are stored, and acknowledged unless the server has not `confirmed` it."""
    stats = capture.stats
    messages = sum(encoded.messages for _, encoded in stored)
    rows = sum(encoded.name.rows for _, encoded in stored)
    size = sum(encoded.data.size for _, encoded in stored)
    stats.stored_blocks += len(stored)
    stats.stored_messages += messages
    stats.stored_rows += rows
    stats.stored_bytes += size
    stats.acked += messages if confirmed else 0
    capture.last_object = stored[-1][1].name.path, datetime.now(UTC)
    reasons = ",".join(sorted({block.sealed_by for block, _ in stored}))
    fields: dict[str, Any] = {
        "blocks": len(stored),
        "messages": messages,
        "rows": rows,
        "bytes": size,
        "sealed_by": reasons,
    }
    if len(stored) == 1:
        fields["object"] = stored[0][1].name.path
    event(log, logging.INFO, "blocks.stored", **fields)


async def _seal_by_age(capture: Capture) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(TICK)
        capture.send(capture.blocks.seal_due(loop.time()))
        if capture.draining and capture.source.idle_for() > STALLED:  # need not wait for the pulls to end
            capture.send(capture.blocks.seal_all("drain"))
        relieve(capture)
        capture.source.nudge()


async def _keep_alive(capture: Capture) -> None:
    loop = asyncio.get_running_loop()
    last = loop.time()
    while True:
        due = last + capture.source.state.ack_wait / KEEP_ALIVE_PER_WAIT  # somebody may shorten it at any time
        if loop.time() < due:
            await asyncio.sleep(min(due - loop.time(), POLL / 2))
            continue
        last = loop.time()
        await capture.source.keep_alive(held_replies(capture))


async def _watch(capture: Capture) -> None:
    """Know the consumer's limits and how much other replicas hold; at once when messages stop coming."""
    loop, source = asyncio.get_running_loop(), capture.source
    last = 0.0
    while True:
        await asyncio.sleep(TICK)
        held = capture.unacked
        stalled = source.idle_for() > STALLED and held > source.unacked_limit // 8
        if loop.time() - last >= (POLL / 5 if stalled else POLL if held else POLL * 5):
            await source.refresh()
            last = loop.time()


async def _watch_decoder(capture: Capture) -> None:
    """Log once for each batch that the decoder or the key function does not return in time."""
    logged = None
    while True:
        await asyncio.sleep(POLL)
        batch, seconds = capture.preparing, capture.decoding_for()
        if seconds > DECODER_SLOW and batch is not logged:
            event(log, logging.WARNING, "decoder.slow", messages=len(batch), seconds=round(seconds))
            logged = batch


async def _mark(capture: Capture) -> None:
    while True:
        await asyncio.sleep(MARK)
        await mark(capture)


async def _catch_up(capture: Capture, stop: asyncio.Event) -> None:
    """Stop once nothing is left to deliver and nothing is unacknowledged, here or at another replica."""
    while True:
        await asyncio.sleep(CATCH_UP_POLL)
        if capture.preparing or capture.source.idle_for() < CATCH_UP_POLL:
            continue
        if capture.source.waiting:
            capture.source.hand_on()
            continue
        if not await capture.source.refresh():
            continue
        state = capture.source.state
        if state.pending == 0 and state.unacked == 0 and capture.unacked == 0:
            stop.set()
        elif state.pending == 0:
            capture.send(capture.blocks.seal_all("caught_up"))
