"""Keep the stream's configuration in the archive."""

from __future__ import annotations

import logging
from functools import partial

from jetcapture_py.archive.stream_config import StreamConfig, is_time, path
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.errors import StoreError
from jetcapture_py.log import event
from jetcapture_py.store import NoteStore, change_note

log = logging.getLogger("jetcapture.capture")


async def keep_stream_config(state: CaptureState) -> None:
    """Write the stream's configuration if it has changed; a failure is logged and retried with the next watermark.

    There is none where there is no watermark, or without permission to read it.
    """
    store, stream = state.store, state.config.source.stream
    if not isinstance(store, NoteStore) or "{key}" in state.config.store.url or not state.source.stream_created:
        return
    info = await state.source.stream_info()
    if info is None or not is_time(created := str(info.get("created", ""))):
        return
    data = StreamConfig(stream=stream, created=created, config=info["config"]).encode()
    if data == state.stream_config:
        return
    try:
        await state.in_thread(state.store_threads, change_note, store, path(stream, created), partial(_changed, data))
        state.stream_config = data
    except StoreError as error:
        event(log, logging.WARNING, "stream_config.failed", error=error)


def _changed(data: bytes, there: bytes | None) -> bytes | None:
    return None if there == data else data
