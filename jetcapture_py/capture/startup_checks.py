"""Checks before the first pull: the store accepts writes, and it is the expected archive."""

from __future__ import annotations

import asyncio
import logging

from jetcapture_py.archive.writer import Encoder
from jetcapture_py.capture import key_rule
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.capture.storing import probe
from jetcapture_py.log import event
from jetcapture_py.store import LocalStore

log = logging.getLogger("jetcapture.capture")


async def check(state: CaptureState, encoder: Encoder, stop: asyncio.Event) -> None:
    """Check that the store accepts writes, warn of a changed key rule and of an empty archive.

    Raises StoreError.
    """
    await probe(state, stop)
    await key_rule.warn_of_change(state, encoder)
    _warn_of_new_archive(state)
    state.observer.began(state.source.state)


def _warn_of_new_archive(state: CaptureState) -> None:
    """Warn when the archive's directory is empty although the consumer has acknowledged messages."""
    store, consumer = state.store, state.source.state
    if isinstance(store, LocalStore) and store.new and consumer.acknowledged:
        reason = "it is empty, but the consumer has acknowledged messages; is the volume mounted?"
        event(log, logging.WARNING, "archive.new", root=store.root, ack_floor=consumer.ack_floor, reason=reason)
