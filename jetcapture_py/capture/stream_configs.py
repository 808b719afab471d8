"""Keep the stream's configuration in the archive."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from jetcapture_py.archive.stream_config import StreamConfig, decode, is_time, path
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.capture.stream_watch import watch_stream
from jetcapture_py.config.units import parse_time
from jetcapture_py.errors import JetcaptureError, StoreError
from jetcapture_py.log import event
from jetcapture_py.store import NoteStore, change_note

log = logging.getLogger("jetcapture.capture")


async def keep_stream_config(state: CaptureState) -> None:
    """Write the stream's configuration if it has changed; a failure is logged and retried with the next watermark.

    Skipped where no watermark is kept, or without permission to read the stream. The same answer of the server shows
    whether it has lost messages.
    """
    store, stream = state.store, state.config.source.stream
    info = await state.source.stream_info() if state.source.stream_created else None
    if info is None:
        return
    await watch_stream(state, info)
    if not isinstance(store, NoteStore) or "{key}" in state.config.store.url:
        return
    if not is_time(created := str(info.get("created", ""))):
        return
    found = StreamConfig(stream=stream, created=created, config=info["config"], continues=_continues(info))
    if (data := found.encode()) == state.stream_config:
        return
    try:
        await state.in_thread(state.store_threads, change_note, store, path(stream, created), partial(_changed, found))
        state.stream_config = data
    except StoreError as error:
        event(log, logging.WARNING, "stream_config.failed", error=error)


def _continues(info: Mapping[str, Any]) -> bool:
    """Whether the stream has or will have messages from before its creation: a mirror, or restored from a backup."""
    state = info["state"]
    restored = state["messages"] > 0 and parse_time(state["first_ts"]) < parse_time(info["created"])
    return restored or info["config"].get("mirror") is not None


def _changed(found: StreamConfig, there: bytes | None) -> bytes | None:
    """Return what to write. A stream that continued an earlier one still does when it has none of its messages left."""
    if there is not None:
        with suppress(JetcaptureError):  # a damaged file is replaced
            kept = decode(there, found.stream, path(found.stream, found.created))
            found = replace(found, continues=found.continues or kept.continues)
    data = found.encode()
    return None if there == data else data
