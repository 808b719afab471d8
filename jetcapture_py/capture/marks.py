"""Write the watermark."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from datetime import timedelta

from jetcapture_py.archive.watermark import Watermark, path
from jetcapture_py.capture.key_rule import describe_time
from jetcapture_py.capture.progress import WatermarkUpdate, update_watermark
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.capture.stream_configs import keep_stream_config
from jetcapture_py.errors import StoreError
from jetcapture_py.jetstream.admin import ConsumerState
from jetcapture_py.log import event
from jetcapture_py.store import NoteStore, change_note

log = logging.getLogger("jetcapture.capture")

IDLE_MARK = timedelta(minutes=1)
"""Minimum time between writes, across all replicas, when only the watermark's time has changed."""
LAST_MARK = 5.0
"""Seconds that a stopping capture waits for the watermark to be written."""


async def last_mark(state: CaptureState) -> None:
    """Write the final watermark, and the stream's configuration."""
    try:
        async with asyncio.timeout(LAST_MARK):
            await mark(state, timedelta())
            await keep_stream_config(state)
    except TimeoutError:
        event(log, logging.WARNING, "watermark.failed", error="the store did not answer in time")


async def mark(state: CaptureState, idle: timedelta = IDLE_MARK) -> None:
    """Move the watermark forward if possible; a failure is logged and retried with the next one.

    No watermark is written with one root per key, or if the store cannot keep notes.
    """
    store = state.store
    if not isinstance(store, NoteStore) or "{key}" in state.config.store.url or not await state.source.refresh():
        return
    found = state.observer.watermark(state.source.state, state.source.stream_created)
    if found is None:
        return
    found = replace(found, last_object=state.last_object, bucket_time=describe_time(state.config.block))
    try:
        state.watermark = await state.in_thread(
            state.store_threads, _move_watermark, store, found, state.source.state, idle
        )
        state.observer.recorded()
    except StoreError as error:
        event(log, logging.WARNING, "watermark.failed", error=error)


def _move_watermark(store: NoteStore, found: Watermark, consumer: ConsumerState, idle: timedelta) -> Watermark:
    """Merge `found` into the watermark's file, if that changes it; return the file's watermark."""
    updates: list[WatermarkUpdate] = []

    def change(data: bytes | None) -> bytes | None:
        updates.append(update_watermark(data, found, consumer, idle))
        return updates[-1].data

    change_note(store, path(found.stream), change)
    for name, fields in updates[-1].warnings:
        event(log, logging.WARNING, name, **fields)
    return updates[-1].content
