"""Checks before the first pull: the store accepts writes, and it is the expected archive."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from jetcapture_py.archive.writer import Encoder
from jetcapture_py.capture import key_rule
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.capture.storing import probe
from jetcapture_py.errors import JetcaptureError, MissingStreamError, SourceError
from jetcapture_py.log import event
from jetcapture_py.store import LocalStore, NoteStore, read_watermark
from jetcapture_py.text import without_credentials

log = logging.getLogger("jetcapture.capture")


async def check(state: CaptureState, encoder: Encoder, stop: asyncio.Event) -> None:
    """Check that the store accepts writes, warn of a changed key rule and of an empty archive.

    Raises StoreError.
    """
    await probe(state, stop)
    await key_rule.warn_of_change(state, encoder)
    _warn_of_new_archive(state)
    state.observer.began(state.source.state)


async def advised(state: CaptureState, error: SourceError) -> SourceError:
    """Return the error; if the stream does not exist, with how to restore it from the archive, if that has it."""
    config, store = state.config, state.store
    if not isinstance(error, MissingStreamError) or not isinstance(store, NoteStore) or "{key}" in config.store.url:
        return error
    stream = config.source.stream
    with suppress(JetcaptureError):
        if await asyncio.to_thread(read_watermark, store, stream) is not None:
            url = without_credentials(config.store.url)
            return MissingStreamError(f"{error}; or restore it: jetcapture spark restore {url} --as {stream}")
    return error


def _warn_of_new_archive(state: CaptureState) -> None:
    """Warn when the archive's directory is empty although the consumer has acknowledged messages."""
    store, consumer = state.store, state.source.state
    if isinstance(store, LocalStore) and store.new and consumer.acknowledged:
        reason = "it is empty, but the consumer has acknowledged messages; is the volume mounted?"
        event(log, logging.WARNING, "archive.new", root=store.root, ack_floor=consumer.ack_floor, reason=reason)
