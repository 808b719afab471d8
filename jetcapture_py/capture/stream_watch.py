"""Watch the stream: keep its configuration in the archive, and detect messages that the server has lost.

A *rewind*: the stream has lost its last messages and reuses their sequences. It does not end the capture: new
messages are archived beside the earlier ones of the same sequences, which differ in their timestamps.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec.structs import replace

from jetcapture_py.archive.incarnations import Origin
from jetcapture_py.archive.stream_config import StreamConfig, is_time, path
from jetcapture_py.archive.watermark import ConsumerWatermark
from jetcapture_py.capture.storing import Uploads
from jetcapture_py.capture.watermark import Observer
from jetcapture_py.config.units import parse_time
from jetcapture_py.errors import JetcaptureError, StoreError
from jetcapture_py.jetstream.consumer import is_consumer_of
from jetcapture_py.jetstream.source import PullSource
from jetcapture_py.log import event
from jetcapture_py.store import NoteStore, change_note, read_own_watermark, read_watermark

log = logging.getLogger("jetcapture.capture")

REWIND, RECREATED = "rewind", "recreated"
TIMEOUT = 5.0
"""Seconds to wait for the store."""
CONFIRMATIONS = 3
CONFIRM_EVERY = 1.0
"""Seconds between answers that must agree: a replica that has just become leader may lag behind for a moment."""


class StreamWatch:
    """Watches the stream of `source`. `notes` stores the archive's metadata files; None if it cannot keep any."""

    def __init__(self, source: PullSource, notes: NoteStore | None, uploads: Uploads, observer: Observer) -> None:
        self.end: int | None = None
        """The stream's last known sequence; None before it was compared with the archive or asked for."""
        self.losses: Counter[str] = Counter()
        """Losses by kind: rewind or recreated."""
        self._source, self._notes, self._uploads, self._observer = source, notes, uploads, observer
        self._config: bytes | None = None  # the configuration last written

    async def keep_config(self) -> None:
        """Write the stream's configuration if it has changed; a failure is logged and retried with the next watermark.

        Skipped where no watermark is kept, or without permission to read the stream. The same answer of the server
        shows whether it has lost messages.
        """
        notes, stream = self._notes, self._source.stream
        info = await self._source.consumer.stream_info() if self._source.origin.created else None
        if info is None:
            return
        await self.watch(info)
        if notes is None or not is_time(created := self._source.origin.created):
            return
        now = StreamConfig(stream=stream, created=created, config=info["config"], continues=_continues(info, created))
        if (data := now.encode()) == self._config:
            return
        try:
            await self._uploads.call(change_note, notes, path(stream, created), partial(_changed, now))
            self._config = data
        except StoreError as error:
            event(log, logging.WARNING, "stream_config.failed", error=error)

    async def watch(self, info: Mapping[str, Any]) -> None:
        """Compare the server's answer to STREAM.INFO with the last state; log and count a loss once."""
        self.end = self.end or 0
        if (last := int(info["state"]["last_seq"])) >= self.end:
            # a later message had a lower sequence: the stream was rewound and has grown since, or a clock was set back
            if (overtaken := self._observer.overtaken) is not None:
                self._observer.overtaken = None
                if await self._source.consumer.is_other(*overtaken):
                    self._rewound(None)
            self.end = last
            return
        for _ in range(CONFIRMATIONS - 1):
            await asyncio.sleep(CONFIRM_EVERY)
            again = await self._source.consumer.stream_info()
            if again is None or (last := int(again["state"]["last_seq"])) >= self.end:
                return
        self._rewound(last)

    def _rewound(self, last: int | None) -> None:
        """Log and count a rewind. `last` is the stream's last sequence after it, None if it has grown since."""
        advice, floor = "run jetcapture verify", self._source.state.ack_floor
        if last is not None and floor > last:
            advice = f"this consumer skips new messages up to {floor}: find them with jetcapture verify --content"
        event(log, logging.ERROR, "stream.rewound", last_seq=last, was=self.end, advice=advice)
        self.losses[REWIND] += 1
        self.end = last or 0
        self._observer.forget()

    async def recognize(self, mark: ConsumerWatermark | None = None) -> bool:
        """Compare the stream with the archive's watermark; log and count a recreated stream.

        The same stream keeps the archive's creation time. `mark` is the capture's file, if already read; without one,
        other captures' files decide. Return False without an answer from the store.
        """
        if self._notes is None or self.end is not None:
            return True
        source, origin = self._source, None if mark is None else mark.origin
        try:
            async with asyncio.timeout(TIMEOUT):
                if mark is None:
                    mark, origin = await self._uploads.call(
                        _known, self._notes, source.stream, source.config.source.consumer
                    )
        except (StoreError, TimeoutError) as error:
            event(log, logging.WARNING, "watermark.failed", error=str(error) or "the store did not answer")
            return False
        except JetcaptureError as error:  # damaged: it is written again
            event(log, logging.WARNING, "watermark.failed", error=error)
        self.end = 0
        created = source.origin.created
        if origin is None or not origin.created or not created:
            return True
        if await source.consumer.recognize(origin, progressed=mark is not None and is_consumer_of(source.state, mark)):
            # a consumer that starts later is at its start before the stream is
            if mark is not None and mark.seq >= source.state.config.get("opt_start_seq", 0):
                self.end = mark.seq
            return True
        if mark is not None:
            event(log, logging.WARNING, "stream.recreated", created=created, archived=mark.created, was=mark.seq)
            self.losses[RECREATED] += 1
        return True


def _continues(info: Mapping[str, Any], created: str) -> bool:
    """Whether the stream has or will have messages from before its creation: a mirror, or restored from a backup."""
    state = info["state"]
    restored = state["messages"] > 0 and parse_time(state["first_ts"]) < parse_time(created)
    return restored or info["config"].get("mirror") is not None


def _changed(now: StreamConfig, before: bytes | None) -> bytes | None:
    """Return the configuration to write. A stream that continued an earlier one still does after the earlier messages
    are gone."""
    if before is not None:
        with suppress(JetcaptureError):  # a damaged file is replaced
            kept = StreamConfig.decode(before, now.stream, path(now.stream, now.created))
            now = replace(now, continues=now.continues or kept.continues)
    data = now.encode()
    return None if before == data else data


def _known(notes: NoteStore, stream: str, consumer: str) -> tuple[ConsumerWatermark | None, Origin | None]:
    """Return the capture's file and the archive's record of the stream. Raises JetcaptureError."""
    if (mark := read_own_watermark(notes, stream, consumer)) is not None:
        return mark, mark.origin
    archived = read_watermark(notes, stream)
    return None, None if archived is None else archived.origin
