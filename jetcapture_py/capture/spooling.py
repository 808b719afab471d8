"""Move rows of open blocks to the spool under memory pressure, before blocks are sealed early."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence

import pyarrow as pa

from jetcapture_py.capture.blocks import Blocks
from jetcapture_py.capture.chunks import Chunk, concat
from jetcapture_py.capture.resident import Resident
from jetcapture_py.capture.spool import Spool, SpoolFile, UsedUpError
from jetcapture_py.config.shares import RELEASE_SHARE, SPOOL_SHARE, SPOOL_TARGET_SHARE
from jetcapture_py.log import event
from jetcapture_py.log_limit import LogLimit

log = logging.getLogger("jetcapture.spool")

RETRY = 10.0
"""Seconds after a failure before the spool is tried again; until then blocks are sealed early."""
QUIET = 300.0
"""Minimum seconds between log lines about failures."""
SMALL = 256 << 10
"""Remaining bytes below which a spooled chunk returns to memory, where it is merged with others."""


class Spooling:
    """Spools chunks of `blocks` while their open rows use more than a share of `memory` bytes.

    `active` while spooling. Never raises: rows that cannot be spooled stay in memory.
    """

    def __init__(self, blocks: Blocks, spool: Spool, memory: int) -> None:
        self.spool = spool
        self.active = False
        self.failures = 0
        self._blocks, self._memory = blocks, memory
        self._resident = Resident(memory // RELEASE_SHARE)
        self._target = 0
        self._wake = asyncio.Event()
        self._retry_at = 0.0
        self._limit = LogLimit(QUIET)

    async def open(self) -> None:
        """Create this process's directory, and remove those of dead processes."""
        try:
            await asyncio.wrap_future(self.spool.threads.submit(self.spool.open))
        except OSError as error:
            self.failed(error)

    def begin(self, *, starved: bool) -> bool:
        """Start spooling if memory is short, everything if `starved`. Return False if not needed or not possible."""
        if not self.active:
            enough = 0 if starved else self._memory // SPOOL_SHARE
            if self._blocks.resident <= enough or time.monotonic() < self._retry_at or self._next() is None:
                return False
            self.active = True
            self._wake.set()
        self._target = 0 if starved else self._memory // SPOOL_TARGET_SHARE
        return True

    async def steps(self) -> AsyncIterator[None]:
        """Wait for `begin`, then spool one chunk per step until enough is spooled or it fails."""
        await self._wake.wait()
        self._wake.clear()
        try:
            while self._blocks.resident > self._target and (chunk := self._next()) is not None:
                await self._spool(chunk)
                yield
        except (OSError, pa.ArrowException) as error:
            self.failed(error)
        finally:
            self.active = False

    def failed(self, error: Exception) -> None:
        """Record a failure, and pause spooling. May be called from any thread."""
        if isinstance(error, UsedUpError):
            return
        self.failures += 1
        self._retry_at = time.monotonic() + RETRY
        if times := self._limit.due(time.monotonic()):
            event(log, logging.WARNING, "spool.failed", path=self.spool.path, error=error, times=times)

    def _next(self) -> Chunk | None:
        """Return the oldest chunk with rows of open blocks if it fits, else a spooled one that can shrink."""
        memory = self._blocks.memory
        for chunk in memory.large:
            if any(owner is not None and not owner.sealed_by for owner in chunk.owners):
                if self.spool.has_room(chunk.nbytes):
                    return chunk
                break
        return next((chunk for chunk in memory.sparse if self.spool.has_room(chunk.live_bytes, spare=False)), None)

    async def _spool(self, chunk: Chunk) -> None:
        if chunk.file is not None and chunk.live_bytes < SMALL:
            chunk.rewrite()
            return
        kept, slices = chunk.kept()
        work = self.spool.threads.submit(self._write, slices, spare=chunk.file is None)
        rows, file = await asyncio.wrap_future(work)
        if chunk.live:
            chunk.move(rows, kept, file)
        else:
            file.release()

    def _write(self, slices: Sequence[pa.RecordBatch], *, spare: bool) -> tuple[pa.RecordBatch, SpoolFile]:
        self._resident.release_unused()  # what was spooled before
        return self.spool.write(slices[0] if len(slices) == 1 else concat(slices), spare=spare)
