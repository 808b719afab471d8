"""Notice that the server has lost messages of the stream, or has another stream of its name.

A *rewind*: the stream ends before a message that it had, and gives that sequence to another one later. It does not end
the capture: new messages are archived beside the earlier ones of the same sequences, which differ in their timestamps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from jetcapture_py.archive.watermark import Watermark
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.log import event
from jetcapture_py.store import NoteStore, read_watermark

log = logging.getLogger("jetcapture.capture")

REWIND, RECREATED = "rewind", "recreated"
CONFIRMATIONS = 3
CONFIRM_EVERY = 1.0
"""Seconds between answers that must agree: a replica that has just become leader may lag behind for a moment."""


async def watch_stream(state: CaptureState, info: Mapping[str, Any]) -> None:
    """Compare the server's answer to STREAM.INFO with what is known; log and count a loss once."""
    if state.stream_end is None:
        state.stream_end = await _archived(state, str(info.get("created", "")))
    if (last := int(info["state"]["last_seq"])) >= state.stream_end:
        if state.observer.overtaken is not None:
            await _check_overtaken(state, *state.observer.overtaken)
        state.stream_end = last
        return
    for _ in range(CONFIRMATIONS - 1):
        await asyncio.sleep(CONFIRM_EVERY)
        again = await state.source.stream_info()
        if again is None or again.get("created") != info.get("created"):
            return
        if (last := int(again["state"]["last_seq"])) >= state.stream_end:
            return
    _rewound(state, last)


async def _check_overtaken(state: CaptureState, seq: int, timestamp: int) -> None:
    """Detect a rewind that new messages have already outgrown: the stream has another message with this sequence.

    A server's clock that was set back also lets a later message have a lower sequence.
    """
    state.observer.overtaken = None
    if await state.source.is_other(seq, timestamp):
        _rewound(state, None)


def _rewound(state: CaptureState, last: int | None) -> None:
    """Log and count a rewind. `last` is the stream's last sequence after it, None if it has grown since."""
    advice, floor = "run jetcapture verify", state.source.state.ack_floor
    if last is not None and floor > last:
        advice = f"this consumer skips new messages up to {floor}: find them with jetcapture verify --content"
    event(log, logging.ERROR, "stream.rewound", last_seq=last, was=state.stream_end, advice=advice)
    state.stats.stream_losses[REWIND] += 1
    state.stream_end = last or 0
    state.observer.forget()


async def _archived(state: CaptureState, created: str) -> int:
    """Return the stream's sequence in the archive's watermark; log and count that it was created again since."""
    mark = await _watermark(state)
    if mark is None or not mark.created or not created:
        return 0
    if mark.created == created:  # a consumer that starts later is at its start before the stream is
        return mark.seq if mark.seq >= state.source.state.config.get("opt_start_seq", 0) else 0
    event(log, logging.WARNING, "stream.recreated", created=created, archived=mark.created, was=mark.seq)
    state.stats.stream_losses[RECREATED] += 1
    return 0


async def _watermark(state: CaptureState) -> Watermark | None:
    store, stream = state.store, state.config.source.stream
    if not isinstance(store, NoteStore) or "{key}" in state.config.store.url:
        return None
    try:
        return await state.in_thread(state.store_threads, read_watermark, store, stream)
    except JetcaptureError as error:
        event(log, logging.WARNING, "watermark.failed", error=error)
        return None
