"""Startup checks: the store accepts writes, the archive is the expected one, and its rule for keys is unchanged.

All copies of a message are under one key and bucket as long as the rule stays the same. Copies of messages in flight
during a change may not be, and then only full deduplication drops them.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from jetcapture_py.archive.watermark import ConsumerWatermark
from jetcapture_py.archive.writer import Encoder
from jetcapture_py.capture.archiver import Archiver
from jetcapture_py.capture.marks import Marks
from jetcapture_py.config.units import format_duration
from jetcapture_py.errors import JetcaptureError, MissingStreamError, SourceError
from jetcapture_py.jetstream.consumer import ConsumerState
from jetcapture_py.jetstream.shared import Acks
from jetcapture_py.jetstream.source import PullSource
from jetcapture_py.log import event
from jetcapture_py.store import LocalStore, Store, driver_of, read_watermark
from jetcapture_py.text import without_credentials
from jetcapture_py.threads import in_thread

log = logging.getLogger("jetcapture.capture")

ADVICE = 'messages in flight may be under two keys or time slices; read them with dedupe="full", or --dedupe full'


async def check(marks: Marks, source: PullSource, archiver: Archiver, stop: asyncio.Event) -> None:
    """Check that the store accepts writes, warn of a changed key rule and of an empty archive; log the store's driver.

    Raises StoreError.
    """
    encoder, store = archiver.encoding.encoder, archiver.uploads.store
    if driver := driver_of(store):
        event(log, logging.INFO, "store.driver", driver=driver)
    await archiver.uploads.probe(stop)
    mark = await marks.read()
    _warn_of_changed_rule(mark, encoder)
    marks.key_rule = encoder.key_rule
    _warn_of_new_archive(store, source.state)
    await marks.stream.recognize(mark)
    _warn_of_new_consumer(source, mark)
    marks.observer.began(source.state)
    await marks.begin()
    await marks.read_erased()
    await archiver.uploads.call(archiver.types.read)
    archiver.encoding.encoder = encoder.for_stream(source.origin.created, source.config.source.consumer)


async def open_source(acks: Acks, marks: Marks) -> None:
    """Connect, and find or create the consumer. Raises SourceError."""
    try:
        await acks.open()
    except SourceError as error:
        raise await advised(error, acks.source, marks) from error


async def advised(error: SourceError, source: PullSource, marks: Marks) -> SourceError:
    """Return the error. If the stream is missing but archived, add how to restore it."""
    stream, notes = source.stream, marks.notes
    if isinstance(error, MissingStreamError) and notes is not None:
        with suppress(JetcaptureError):
            if await in_thread(read_watermark, notes, stream) is not None:
                url = without_credentials(source.config.store.url)
                return MissingStreamError(f"{error}; or restore it: jetcapture restore {url} {stream}")
    return error


def _warn_of_new_archive(store: Store, consumer: ConsumerState) -> None:
    """Warn when the archive's directory is empty although the consumer has acknowledged messages."""
    if isinstance(store, LocalStore) and store.new and consumer.acknowledged:
        reason = "it is empty, but the consumer has acknowledged messages; is the volume mounted?"
        event(log, logging.WARNING, "archive.new", root=store.root, ack_floor=consumer.ack_floor, reason=reason)


def _warn_of_new_consumer(source: PullSource, mark: ConsumerWatermark | None) -> None:
    """Warn if a recreated consumer does not begin where its watermark ends."""
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
    """Return the old and new values of the rule that differ between the watermark and the encoder."""
    changes: dict[str, str] = {}
    if None not in (mark.key_rule, encoder.key_rule) and mark.key_rule != encoder.key_rule:
        changes |= {"key_before": str(mark.key_rule), "key": str(encoder.key_rule)}
    if mark.interval and mark.interval != encoder.interval:
        changes["interval_before"] = format_duration(mark.interval)
        changes["interval"] = format_duration(encoder.interval)
    if mark.interval and mark.bucket_time != encoder.time:
        changes |= {"time_before": mark.bucket_time, "time": encoder.time}
    return changes
