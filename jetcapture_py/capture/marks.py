"""Keep a capture's watermark, and the stream's configuration."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta

from msgspec.structs import replace

from jetcapture_py import store
from jetcapture_py.archive.watermark import ConsumerWatermark
from jetcapture_py.capture.archiver import Archiver
from jetcapture_py.capture.parts import describe_time
from jetcapture_py.capture.stats import Stats
from jetcapture_py.capture.stream_watch import TIMEOUT, StreamWatch
from jetcapture_py.capture.watermark import Observer, move_watermark
from jetcapture_py.config.block import BlockConfig
from jetcapture_py.errors import JetcaptureError, StoreError
from jetcapture_py.jetstream.source import PullSource
from jetcapture_py.log import event
from jetcapture_py.transform.prepare import Prepared

log = logging.getLogger("jetcapture.capture")

MARK = 15.0
"""Seconds between updates of the watermark."""
IDLE_MARK = timedelta(minutes=1)
"""Minimum time between writes, across all replicas, when only the watermark's time has changed."""
LAST_MARK = 5.0
"""Minimum seconds that a stopping capture waits for the watermark to be written."""


class Marks:
    """The metadata files of one capture. None are written with one root per key, or if the store cannot keep them."""

    def __init__(self, block: BlockConfig, source: PullSource, archiver: Archiver, stats: Stats, url: str) -> None:
        """`url` is that of the store."""
        self.notes = store.notes_of(archiver.uploads.store, url)
        self.observer = Observer(source.stream, source.config.source.consumer)
        self.stream = StreamWatch(source, self.notes, archiver.uploads, self.observer)
        self.watermark: ConsumerWatermark | None = None
        self.key_rule: str | None = None
        """The rule for keys, as in footers; None if unknown."""
        self.store_hangs = False
        """Whether a thread may still be waiting for the store at exit."""
        self._block, self._source, self._archiver, self._stats = block, source, archiver, stats

    def saw(self, prepared: Prepared) -> None:
        """Record received messages."""
        for seq, timestamp in prepared.span:
            self.observer.saw(seq, timestamp)

    async def read(self) -> ConsumerWatermark | None:
        """Return the capture's watermark; None without one, or if it cannot be read."""
        if self.notes is None:
            return None
        source = self._source.config.source
        try:
            async with asyncio.timeout(TIMEOUT):
                return await self._archiver.uploads.call(
                    store.read_own_watermark, self.notes, source.stream, source.consumer
                )
        except (JetcaptureError, TimeoutError) as error:  # writing it fails as well, and that is logged
            event(log, logging.DEBUG, "rule.unknown", error=error)
            return None

    async def begin(self) -> None:
        """Write the watermark before the first pull, so that readers wait for this capture."""
        try:
            async with asyncio.timeout(TIMEOUT):
                await self.write(IDLE_MARK)
        except TimeoutError:
            event(log, logging.WARNING, "watermark.failed", error="the store did not answer in time")

    async def keep(self) -> None:
        """Keep everything up to date, until canceled."""
        while True:
            await self.stream.keep_config()
            await asyncio.sleep(MARK)
            await self.read_erased()
            if await self._source.refresh():
                await self.write(IDLE_MARK)

    async def read_erased(self) -> None:
        """Read the erased messages, so that they are not stored again. A failure is logged and retried with the next
        watermark."""
        archiver, stream = self._archiver, self._source.stream
        before = archiver.encoding.erased
        try:
            erased = await archiver.uploads.call(store.read_erased, self.notes, stream, before)
        except JetcaptureError as error:
            event(log, logging.WARNING, "erased.unreadable", error=error)
            return
        if erased is not before:
            archiver.encoding.erased = erased
            event(log, logging.INFO, "erased.read", tombstones=len(erased.tombstones), messages=len(erased))

    async def write(self, idle: timedelta) -> None:
        """Move the watermark to the consumer's last known state; a failure is logged and retried with the next one."""
        source, objects = self._source, self._stats.objects
        if self.notes is None or not await self.stream.recognize():
            return
        mark = self.observer.watermark(source.state, source.origin)
        if mark is None:
            return
        mark = replace(
            mark,
            last_stored=objects[0].acknowledged if objects else None,
            key_rule=self.key_rule,
            interval=int(self._block.interval),
            bucket_time=describe_time(self._block),
        )
        try:
            self.watermark = await self._archiver.uploads.call(
                move_watermark, self.notes, mark, [*self.observer.seen, source.state], idle
            )
            self.observer.recorded()
        except StoreError as error:
            event(log, logging.WARNING, "watermark.failed", error=error)

    async def finish(self, deadline: float) -> None:
        """Write the final watermark, and the stream's configuration."""
        source = self._source
        answered = source.connected and await source.refresh()
        if not answered and self.notes is not None and source.failure is None:  # else `capture.failed` says why
            event(log, logging.WARNING, "watermark.failed", error="NATS did not answer in time")
        try:
            async with asyncio.timeout_at(max(deadline, asyncio.get_running_loop().time() + LAST_MARK)):
                if answered:
                    await self.write(timedelta())
                    await self.stream.keep_config()
        except TimeoutError:
            self.store_hangs = True
            event(log, logging.WARNING, "watermark.failed", error="the store did not answer in time")
