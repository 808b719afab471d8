"""Checks at the start: the store accepts writes, the archive is the expected one, and its rule for keys is the same.

All copies of a message are under one key and bucket as long as the rule stays the same. Copies of messages in flight
during a change may not be, and then only full deduplication drops them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

from jetcapture_py.archive import footer, layout
from jetcapture_py.archive.writer import Encoder
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.capture.storing import probe
from jetcapture_py.config.units import format_duration
from jetcapture_py.errors import JetcaptureError, MissingStreamError, SourceError
from jetcapture_py.log import event
from jetcapture_py.store import LocalStore, ObjectReader, driver_of, read_watermark, users_errors
from jetcapture_py.text import without_credentials

log = logging.getLogger("jetcapture.capture")

TIMEOUT = 5.0
"""Seconds that a start waits for the store's answer about the last object."""
ADVICE = 'messages in flight may be stored under two keys or buckets; read them with dedupe="full", or --dedupe full'


async def check(state: CaptureState, encoder: Encoder, stop: asyncio.Event) -> None:
    """Check that the store accepts writes, warn of a changed key rule and of an empty archive; log the store's driver.

    Raises StoreError.
    """
    if driver := driver_of(state.store):
        event(log, logging.INFO, "store.driver", **driver)
    await probe(state, stop)
    await _warn_of_changed_rule(state, encoder)
    _warn_of_new_archive(state)
    state.observer.began(state.source.state)


async def advised(state: CaptureState, error: SourceError) -> SourceError:
    """Return the error; if the stream does not exist, with how to restore it from the archive, if that has it."""
    stream, notes = state.config.source.stream, state.notes
    if isinstance(error, MissingStreamError) and notes is not None:
        with suppress(JetcaptureError):
            if await asyncio.to_thread(read_watermark, notes, stream) is not None:
                url = without_credentials(state.config.store.url)
                return MissingStreamError(f"{error}; or restore it: jetcapture spark restore {url} --as {stream}")
    return error


def _warn_of_new_archive(state: CaptureState) -> None:
    """Warn when the archive's directory is empty although the consumer has acknowledged messages."""
    store, consumer = state.store, state.source.state
    if isinstance(store, LocalStore) and store.new and consumer.acknowledged:
        reason = "it is empty, but the consumer has acknowledged messages; is the volume mounted?"
        event(log, logging.WARNING, "archive.new", root=store.root, ack_floor=consumer.ack_floor, reason=reason)


async def _warn_of_changed_rule(state: CaptureState, encoder: Encoder) -> None:
    """Log a warning if the object stored last has another rule for keys and buckets than the configuration.

    Silent if that is unknown: a capture needs no permission to read objects.
    """
    try:
        async with asyncio.timeout(TIMEOUT):
            last = await state.in_thread(state.store_threads, _last_footer, state)
    except (JetcaptureError, TimeoutError) as error:
        event(log, logging.DEBUG, "rule.unknown", error=error)
        return
    if last is not None and (fields := _changes(last[1], encoder)):
        event(log, logging.WARNING, "rule.changed", **fields, object=last[0], advice=ADVICE)


def _changes(stored: Mapping[str, str], encoder: Encoder) -> dict[str, str]:
    """Compare the rule in an object's footer with the encoder's: what it was and what it is, where that differs."""
    changes: dict[str, str] = {}
    if (before := stored.get("key_rule")) is not None and encoder.key_rule is not None and before != encoder.key_rule:
        changes |= {"key_before": before, "key": encoder.key_rule}
    interval = stored.get("interval", "")
    if interval.isdecimal() and int(interval) != encoder.interval:
        changes |= {"interval_before": format_duration(int(interval)), "interval": format_duration(encoder.interval)}
    time = stored.get("time", layout.STREAM_TIME)
    if stored and "quarantine" not in stored and time != encoder.time:
        changes |= {"time_before": time, "time": encoder.time}
    return changes


def _last_footer(state: CaptureState) -> tuple[str, Mapping[str, str]] | None:
    """Read the footer of the object that the watermark says was stored last; its path and its entries.

    Raises JetcaptureError, whatever a store of the user raises.
    """
    store, notes = state.store, state.notes
    if notes is None or not isinstance(store, ObjectReader):
        return None
    mark = read_watermark(notes, state.config.source.stream)
    last = None if mark is None else mark.of(state.config.source.consumer).last_object
    if last is None:
        return None
    path = last[0]
    name = layout.parse_path(path)
    if name is None or name.stream != state.config.source.stream or not name.parquet:
        return None
    with users_errors():
        return path, footer.read(lambda size: store.read_end(path, size))
