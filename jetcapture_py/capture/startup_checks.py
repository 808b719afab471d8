"""Checks at the start: the store accepts writes, the archive is the expected one, and its rule for keys is the same.

All copies of a message are under one key and bucket as long as the rule stays the same. Copies of messages in flight
during a change may not be, and then only full deduplication drops them.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from jetcapture_py.archive.watermark import ConsumerWatermark
from jetcapture_py.archive.writer import Encoder
from jetcapture_py.capture.daemon_thread import in_thread
from jetcapture_py.capture.side_tasks import IDLE_MARK, write_watermark
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.capture.storing import probe
from jetcapture_py.capture.stream_watch import TIMEOUT, recognize_stream
from jetcapture_py.config.units import format_duration
from jetcapture_py.errors import JetcaptureError, MissingStreamError, SourceError
from jetcapture_py.log import event
from jetcapture_py.store import LocalStore, driver_of, read_own_watermark, read_watermark
from jetcapture_py.text import without_credentials

log = logging.getLogger("jetcapture.capture")

ADVICE = 'messages in flight may be stored under two keys or buckets; read them with dedupe="full", or --dedupe full'


async def check(state: CaptureState, encoder: Encoder, stop: asyncio.Event) -> None:
    """Check that the store accepts writes, warn of a changed key rule and of an empty archive; log the store's driver.

    Raises StoreError.
    """
    if driver := driver_of(state.store):
        event(log, logging.INFO, "store.driver", **driver)
    await probe(state, stop)
    mark = await _watermark(state)
    _warn_of_changed_rule(mark, encoder)
    state.key_rule = encoder.key_rule
    _warn_of_new_archive(state)
    await recognize_stream(state, mark)
    _warn_of_new_consumer(state, mark)
    state.observer.began(state.source.state)
    await _begin_watermark(state)


async def advised(state: CaptureState, error: SourceError) -> SourceError:
    """Return the error; if the stream does not exist, with how to restore it from the archive, if that has it."""
    stream, notes = state.config.source.stream, state.notes
    if isinstance(error, MissingStreamError) and notes is not None:
        with suppress(JetcaptureError):
            if await in_thread(read_watermark, notes, stream) is not None:
                url = without_credentials(state.config.store.url)
                return MissingStreamError(f"{error}; or restore it: jetcapture restore {url} {stream}")
    return error


def _warn_of_new_archive(state: CaptureState) -> None:
    """Warn when the archive's directory is empty although the consumer has acknowledged messages."""
    store, consumer = state.store, state.source.state
    if isinstance(store, LocalStore) and store.new and consumer.acknowledged:
        reason = "it is empty, but the consumer has acknowledged messages; is the volume mounted?"
        event(log, logging.WARNING, "archive.new", root=store.root, ack_floor=consumer.ack_floor, reason=reason)


async def _watermark(state: CaptureState) -> ConsumerWatermark | None:
    """Return the capture's watermark; None without one, or if it cannot be read."""
    notes, source = state.notes, state.config.source
    if notes is None:
        return None
    try:
        async with asyncio.timeout(TIMEOUT):
            return await state.in_thread(state.store_threads, read_own_watermark, notes, source.stream, source.consumer)
    except (JetcaptureError, TimeoutError) as error:  # writing it fails as well, and that is logged
        event(log, logging.DEBUG, "rule.unknown", error=error)
        return None


async def _begin_watermark(state: CaptureState) -> None:
    """Write the watermark before the first pull, so that readers wait for this capture."""
    try:
        async with asyncio.timeout(TIMEOUT):
            await write_watermark(state, IDLE_MARK)
    except TimeoutError:
        event(log, logging.WARNING, "watermark.failed", error="the store did not answer in time")


def _warn_of_new_consumer(state: CaptureState, mark: ConsumerWatermark | None) -> None:
    """Warn when a consumer was created again and begins elsewhere than its watermark ends."""
    source = state.source
    if source.state.deliveries:
        return
    begins = source.state.delivered + 1
    if mark is None or not mark.seq or mark.created != source.origin.created:
        return
    effect = {"fetches_again": f"{begins} to {mark.seq}"}
    if begins > mark.seq:
        effect = {"skips": f"{mark.seq + 1} to {begins - 1}", "advice": "run jetcapture verify"}
    if begins != mark.seq + 1:
        event(log, logging.WARNING, "consumer.recreated", begins=begins, archived=mark.seq, **effect)


def _warn_of_changed_rule(mark: ConsumerWatermark | None, encoder: Encoder) -> None:
    """Warn if the watermark's writer had another rule for keys and buckets."""
    if mark is not None and (fields := _changes(mark, encoder)):
        event(log, logging.WARNING, "rule.changed", **fields, advice=ADVICE)


def _changes(mark: ConsumerWatermark, encoder: Encoder) -> dict[str, str]:
    """Compare the rule in the watermark with the encoder's: what it was and what it is, where that differs."""
    changes: dict[str, str] = {}
    if None not in (mark.key_rule, encoder.key_rule) and mark.key_rule != encoder.key_rule:
        changes |= {"key_before": str(mark.key_rule), "key": str(encoder.key_rule)}
    if mark.interval and mark.interval != encoder.interval:
        changes["interval_before"] = format_duration(mark.interval)
        changes["interval"] = format_duration(encoder.interval)
    if mark.interval and mark.bucket_time != encoder.time:
        changes |= {"time_before": mark.bucket_time, "time": encoder.time}
    return changes
