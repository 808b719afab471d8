"""Keep work within its share of a budget: when blocks are sealed early, and what may be done at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol
from weakref import WeakSet

from jetcapture_py.capture.blocks import Block, Blocks
from jetcapture_py.capture.spool import Spooling
from jetcapture_py.config.model import LimitsConfig
from jetcapture_py.config.shares import (
    CAPTURE_BYTES,
    ENCODING_SHARE,
    LARGE_BLOCKS_WAITING,
    MAX_CAPTURES_SHARE,
    OPEN_SHARE,
    OPEN_UNACKED_SHARE,
    SEALED_BLOCKS_SHARE,
    SEALED_MEMORY_SHARE,
    SEALED_UNACKED_SHARE,
    SMALL_BLOCK,
    TOGETHER,
)

_UNLIMITED = 1 << 62
_FRESH = 0.05
"""Seconds for which the sums over captures that share memory are cached."""


def seal(
    blocks: Blocks,
    limits: LimitsConfig,
    unacked_limit: int = _UNLIMITED,
    *,
    open_bytes: int | None = None,
    starved: bool = False,
    idle: bool = True,
    spooling: Spooling | None = None,
    room: int = _UNLIMITED,
) -> list[Block]:
    """Seal the largest open blocks, so that each budget has room for what is being stored; at most `room` blocks.

    `open_bytes` is the maximum memory of open blocks, by default their share of `limits.memory`.

    `starved` says that a pull waits for memory only: a few large messages can fill the budget. Then all are sealed,
    unless spooling frees memory, or what is not `idle`: blocks on their way to the store, and messages into blocks.
    """
    spools = spooling is not None and spooling.begin(starved=starved)
    starved = starved and (spooling is None or idle)
    messages = blocks.messages - unacked_limit // OPEN_UNACKED_SHARE
    most = limits.memory // OPEN_SHARE if open_bytes is None else open_bytes
    size = blocks.resident if starved else blocks.resident - most
    count = blocks.open - limits.open_blocks
    return blocks.seal_largest(
        messages=messages + unacked_limit // SEALED_UNACKED_SHARE if messages > 0 else 0,
        size=size + limits.memory // SEALED_MEMORY_SHARE if size > 0 and not spools else 0,
        blocks=count + limits.open_blocks // SEALED_BLOCKS_SHARE if count > 0 else 0,
        limit=room,
    )


def room(workers: int, waiting: int, waiting_bytes: int) -> int:
    """Return how many more blocks may wait for the store, where so many do."""
    small = waiting_bytes < workers * TOGETHER * SMALL_BLOCK
    return workers * (TOGETHER if small else LARGE_BLOCKS_WAITING) - waiting


class WeightedSemaphore:
    """Admit work up to a total weight of `limit`, first come, first served; heavier work runs alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._turn = asyncio.Lock()
        self._left = asyncio.Condition()

    @asynccontextmanager
    async def acquire(self, weight: int) -> AsyncIterator[None]:
        """Wait for room; inside the block it is taken."""
        async with self._turn, self._left:
            await self._left.wait_for(lambda: self.taken + weight <= self.limit or not self.taken)
            self.taken += weight
        try:
            yield
        finally:
            self.taken -= weight
            async with self._left:
                self._left.notify_all()


class HoldsMemory(Protocol):
    """A capture that holds memory."""

    def held(self) -> tuple[int, int]:
        """Return the bytes held or asked for, and those of open blocks."""
        ...


class CaptureMemory:
    """The memory of one capture, or of several that share it: `limit` bytes, less what captures need besides messages.

    Captures that share it ask for messages in equal parts, so that together they ask for no more than one alone would.
    Open blocks may take what the others leave of the share of open blocks, and at least an equal part. Captures may be
    made, and join, in another thread than that in which they run.
    """

    def __init__(self, limit: int) -> None:
        self._all = limit
        self.encoding = WeightedSemaphore(int(limit / ENCODING_SHARE))
        self._members: WeakSet[HoldsMemory] = WeakSet()
        self._changing = threading.Lock()
        self._sums: dict[int, tuple[int, int]] = {}
        self._total = 0, 0
        self._counted = 0.0

    def join(self, member: HoldsMemory) -> None:
        with self._changing:
            self._members.add(member)
        self.encoding.limit = int(self.limit / ENCODING_SHARE)

    def leave(self, member: HoldsMemory) -> None:
        """Remove a capture, if it has joined."""
        with self._changing:
            self._members.discard(member)
        self.encoding.limit = int(self.limit / ENCODING_SHARE)

    @property
    def limit(self) -> int:
        """Maximum bytes for messages."""
        others = CAPTURE_BYTES * max(0, len(self._members) - 1)
        return self._all - min(others, self._all // MAX_CAPTURES_SHARE)

    @property
    def part(self) -> int:
        """Bytes of one capture's equal part."""
        return self.limit // max(1, len(self._members))

    @property
    def captures(self) -> int:
        """Number of captures that share it."""
        return len(self._members)

    def elsewhere(self, member: HoldsMemory) -> int:
        """Return the bytes that other captures hold or ask for."""
        return self._others(member)[0]

    def open_bytes(self, member: HoldsMemory) -> int:
        """Return the maximum bytes of a capture's open blocks."""
        return max(self.part // OPEN_SHARE, self.limit // OPEN_SHARE - self._others(member)[1])

    def _others(self, member: HoldsMemory) -> tuple[int, int]:
        """Return the bytes that other captures hold or ask for, and those of their open blocks."""
        if len(self._members) < 2:
            return 0, 0
        if (now := time.monotonic()) - self._counted >= _FRESH:
            with self._changing:
                members = list(self._members)
            self._sums, self._counted = {id(each): each.held() for each in members}, now
            self._total = sum(held for held, _ in self._sums.values()), sum(opened for _, opened in self._sums.values())
        held, opened = self._sums.get(id(member), (0, 0))
        return self._total[0] - held, self._total[1] - opened
