"""The memory of captures: how many bytes there are for messages, and who holds them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Literal

from jetcapture_py.config.shares import CAPTURE_BYTES, ENCODING_SHARE, MAX_CAPTURES_SHARE, OPEN_SHARE

Holder = Literal["asked", "waiting", "decoding", "open", "sealed", "encoding", "encoded"]


class Memory:
    """`limits.memory` of one capture, or of several that share it: the sums over their ledgers.

    Captures that share it ask for messages in equal parts, so that together they ask for no more than one alone would.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.captures = 0
        """Captures that share it."""
        self.bytes: Counter[Holder] = Counter()
        self._turn = asyncio.Lock()
        self._freed = asyncio.Condition()

    @property
    def limit(self) -> int:
        """Maximum bytes for messages: all, less what captures need besides messages."""
        others = CAPTURE_BYTES * max(0, self.captures - 1)
        return self._limit - min(others, self._limit // MAX_CAPTURES_SHARE)

    @property
    def part(self) -> int:
        """Bytes of one capture's equal part."""
        return self.limit // max(1, self.captures)

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Wait, first come, first served, until `size` bytes more may be used for encoding; larger ones run alone.

        They are to be entered in a ledger at once.
        """
        async with self._turn, self._freed:
            limit = int(self.limit / ENCODING_SHARE)
            await self._freed.wait_for(lambda: self.bytes["encoding"] + size <= limit or not self.bytes["encoding"])
            yield

    async def freed(self) -> None:
        """Let others encode, after bytes of encoding were taken out of a ledger."""
        async with self._freed:
            self._freed.notify_all()


class Ledger:
    """The bytes that the messages of one capture take, by who holds them; only the holder changes an entry.

        asked     open pulls may still bring them
        waiting   received, not taken from the source
        decoding  taken, and being decoded and routed
        open      rows of open blocks
        sealed    rows of sealed blocks
        encoding  making objects of blocks takes them
        encoded   objects that are not stored

    `unacked` counts the messages that were taken from the source and are not acknowledged.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.unacked = 0
        self._bytes: Counter[Holder] = Counter()

    def __getitem__(self, holder: Holder) -> int:
        return self._bytes[holder]

    def __setitem__(self, holder: Holder, size: int) -> None:
        self.memory.bytes[holder] += size - self._bytes[holder]
        self._bytes[holder] = size

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Count the capture among those that share its memory, and what it holds, inside the block."""
        shared = self.memory
        shared.captures += 1
        try:
            yield
        finally:
            shared.captures -= 1
            shared.bytes.subtract(self._bytes)
            self.memory = Memory(shared.limit)  # of its own
            self.memory.bytes.update(self._bytes)

    @property
    def held(self) -> int:
        """Bytes of messages that have been received."""
        return self._bytes.total() - self._bytes["asked"]

    @property
    def total(self) -> int:
        """Bytes of messages received or asked for."""
        return self._bytes.total()

    @property
    def free(self) -> int:
        """Bytes that neither this capture nor one that shares its memory holds or asks for; less than 0 if too many."""
        return self.memory.limit - self.memory.bytes.total()

    @property
    def elsewhere(self) -> int:
        """Bytes that other captures hold or ask for."""
        return self.memory.bytes.total() - self._bytes.total()

    @property
    def may_open(self) -> int:
        """Maximum bytes of open blocks: what others leave of their share, and at least an equal part of it."""
        others = self.memory.bytes["open"] - self._bytes["open"]
        return max(self.memory.part // OPEN_SHARE, self.memory.limit // OPEN_SHARE - others)

    @asynccontextmanager
    async def encoding(self, size: int) -> AsyncIterator[None]:
        """Wait for `size` bytes of the memory for making objects, and hold them inside the block."""
        memory = self.memory
        async with memory.turn(size):
            self["encoding"] += size
        try:
            yield
        finally:
            self["encoding"] -= size
            await memory.freed()
