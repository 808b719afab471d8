"""Watch the stream: keep its configuration in the archive, and notice that the server has lost messages of it.

A *rewind*: the stream ends before a message that it had, and gives that sequence to another one later. It does not end
the capture: new messages are archived beside the earlier ones of the same sequences, which differ in their timestamps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec.structs import replace

from jetcapture_py.archive.incarnations import Origin
from jetcapture_py.archive.stream_config import StreamConfig, is_time, path
from jetcapture_py.archive.watermark import ConsumerWatermark
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.config.units import parse_time
from jetcapture_py.errors import JetcaptureError, StoreError
from jetcapture_py.jetstream.consumer import is_consumer_of
from jetcapture_py.log import event
from jetcapture_py.store import NoteStore, change_note, read_own_watermark, read_watermark

log = logging.getLogger("jetcapture.capture")

REWIND, RECREATED = "rewind", "recreated"
TIMEOUT = 5.0
"""Seconds to wait for the store."""
CONFIRMATIONS = 3
CONFIRM_EVERY = 1.0
"""Seconds between answers that must agree: a replica that has just become leader may lag behind for a moment."""


async def keep_stream_config(state: CaptureState) -> None:
    """Write the stream's configuration if it has changed; a failure is logged and retried with the next watermark.

    Skipped where no watermark is kept, or without permission to read the stream. The same answer of the server shows
    whether it has lost messages.
    """
    notes, stream = state.notes, state.config.source.stream
    info = await state.source.stream_info() if state.source.origin.created else None
    if info is None:
        return
    await watch_stream(state, info)
    if notes is None or not is_time(created := state.source.origin.created):
        return
    now = StreamConfig(stream=stream, created=created, config=info["config"], continues=_continues(info, created))
    if (data := now.encode()) == state.stream_config:
        return
    try:
        await state.in_thread(state.store_threads, change_note, notes, path(stream, created), partial(_changed, now))
        state.stream_config = data
    except StoreError as error:
        event(log, logging.WARNING, "stream_config.failed", error=error)


def _continues(info: Mapping[str, Any], created: str) -> bool:
    """Whether the stream has or will have messages from before its creation: a mirror, or restored from a backup."""
    state = info["state"]
    restored = state["messages"] > 0 and parse_time(state["first_ts"]) < parse_time(created)
    return restored or info["config"].get("mirror") is not None


def _changed(now: StreamConfig, before: bytes | None) -> bytes | None:
    """Return what to write. A stream that continued an earlier one still does when it has none of its messages left."""
    if before is not None:
        with suppress(JetcaptureError):  # a damaged file is replaced
            kept = StreamConfig.decode(before, now.stream, path(now.stream, now.created))
            now = replace(now, continues=now.continues or kept.continues)
    data = now.encode()
    return None if before == data else data


async def watch_stream(state: CaptureState, info: Mapping[str, Any]) -> None:
    """Compare the server's answer to STREAM.INFO with what is known; log and count a loss once."""
    state.stream_end = state.stream_end or 0
    if (last := int(info["state"]["last_seq"])) >= state.stream_end:
        if (overtaken := state.observer.overtaken) is not None:  # by a message that may have a lower sequence because
            state.observer.overtaken = None  # the stream was rewound, and has grown since, or a clock was set back
            if await state.source.is_other(*overtaken):
                _rewound(state, None)
        state.stream_end = last
        return
    for _ in range(CONFIRMATIONS - 1):
        await asyncio.sleep(CONFIRM_EVERY)
        again = await state.source.stream_info()
        if again is None or (last := int(again["state"]["last_seq"])) >= state.stream_end:
            return
    _rewound(state, last)


def _rewound(state: CaptureState, last: int | None) -> None:
    """Log and count a rewind. `last` is the stream's last sequence after it, None if it has grown since."""
    advice, floor = "run jetcapture verify", state.source.state.ack_floor
    if last is not None and floor > last:
        advice = f"this consumer skips new messages up to {floor}: find them with jetcapture verify --content"
    event(log, logging.ERROR, "stream.rewound", last_seq=last, was=state.stream_end, advice=advice)
    state.stats.stream_losses[REWIND] += 1
    state.stream_end = last or 0
    state.observer.forget()


async def recognize_stream(state: CaptureState, mark: ConsumerWatermark | None = None) -> bool:
    """Compare the stream with the archive's watermark; log and count a stream that was created again.

    The same stream keeps the archive's creation time. `mark` is the capture's file if it has been read; without one,
    those of other captures tell. False without an answer from the store.
    """
    if state.notes is None or state.stream_end is not None:
        return True
    source, origin = state.source, None if mark is None else mark.origin
    try:
        async with asyncio.timeout(TIMEOUT):
            if mark is None:
                mark, origin = await state.in_thread(
                    state.store_threads, _known, state.notes, source.stream, source.consumer
                )
    except (StoreError, TimeoutError) as error:
        event(log, logging.WARNING, "watermark.failed", error=str(error) or "the store did not answer")
        return False
    except JetcaptureError as error:  # damaged: it is written again
        event(log, logging.WARNING, "watermark.failed", error=error)
    state.stream_end = 0
    created = source.origin.created
    if origin is None or not origin.created or not created:
        return True
    if await source.recognize(origin, progressed=mark is not None and is_consumer_of(source.state, mark)):
        # a consumer that starts later is at its start before the stream is
        if mark is not None and mark.seq >= source.state.config.get("opt_start_seq", 0):
            state.stream_end = mark.seq
        return True
    if mark is not None:
        event(log, logging.WARNING, "stream.recreated", created=created, archived=mark.created, was=mark.seq)
        state.stats.stream_losses[RECREATED] += 1
    return True


def _known(notes: NoteStore, stream: str, consumer: str) -> tuple[ConsumerWatermark | None, Origin | None]:
    """Return the capture's file, and the stream as the archive knows it. Raises JetcaptureError."""
    if (own := read_own_watermark(notes, stream, consumer)) is not None:
        return own, own.origin
    archived = read_watermark(notes, stream)
    return None, None if archived is None else archived.origin
