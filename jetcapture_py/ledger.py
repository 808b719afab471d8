"""Account for the memory of captures: the bytes for messages, by holder."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Literal

from jetcapture_py.config.shares import CAPTURE_BYTES, ENCODING_SHARE, MAX_CAPTURES_SHARE, OPEN_SHARE

Holder = Literal["asked", "waiting", "decoding", "open", "sealed", "encoding", "encoded"]


class Memory:
    """`limits.memory` of one or several captures, summed over their ledgers.

    Captures that share it request messages in equal parts, so that together they request no more than one alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.captures = 0
        """Number of captures that share it."""
        self.bytes: Counter[Holder] = Counter()
        self._turn = asyncio.Lock()
        self._freed = asyncio.Condition()

    @property
    def limit(self) -> int:
        """Maximum bytes for messages: the limit less the captures' other needs."""
        others = CAPTURE_BYTES * max(0, self.captures - 1)
        return self._limit - min(others, self._limit // MAX_CAPTURES_SHARE)

    @property
    def part(self) -> int:
        """One capture's equal share, in bytes."""
        return self.limit // max(1, self.captures)

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Wait, first come, first served, for `size` bytes of encoding memory; a larger size runs alone.

        The caller enters them in a ledger at once.
        """
        async with self._turn, self._freed:
            limit = int(self.limit / ENCODING_SHARE)
            await self._freed.wait_for(lambda: self.bytes["encoding"] + size <= limit or not self.bytes["encoding"])
            yield

    async def freed(self) -> None:
        """Let others encode after a ledger's encoding bytes have shrunk."""
        async with self._freed:
            self._freed.notify_all()


class Ledger:
    """The bytes of one capture's messages by holder; only the holder changes an entry.

        asked     open pulls may still deliver them
        waiting   received, not taken from the source
        decoding  taken, and being decoded and routed
        open      rows of open blocks
        sealed    rows of sealed blocks
        encoding  used for making objects of blocks
        encoded   objects that are not stored

    `unacked` counts the messages taken from the source and not acknowledged.
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
        """Inside the `with` block, count the capture and its bytes in the shared memory."""
        shared = self.memory
        shared.captures += 1
        try:
            yield
        finally:
            shared.captures -= 1
            shared.bytes.subtract(self._bytes)
            self.memory = Memory(shared.limit)  # no longer shared
            self.memory.bytes.update(self._bytes)

    @property
    def held(self) -> int:
        """Bytes of received messages."""
        return self._bytes.total() - self._bytes["asked"]

    @property
    def total(self) -> int:
        """Bytes of messages received or asked for."""
        return self._bytes.total()

    @property
    def free(self) -> int:
        """Bytes not held or requested by any capture that shares the memory; negative if exceeded."""
        return self.memory.limit - self.memory.bytes.total()

    @property
    def elsewhere(self) -> int:
        """Bytes held or requested by other captures."""
        return self.memory.bytes.total() - self._bytes.total()

    @property
    def may_open(self) -> int:
        """Maximum bytes of open blocks: the rest of their common share, and at least an equal part of it."""
        others = self.memory.bytes["open"] - self._bytes["open"]
        return max(self.memory.part // OPEN_SHARE, self.memory.limit // OPEN_SHARE - others)

    @asynccontextmanager
    async def encoding(self, size: int) -> AsyncIterator[None]:
        """Reserve `size` bytes of encoding memory."""
        memory = self.memory
        async with memory.turn(size):
            self["encoding"] += size
        try:
            yield
        finally:
            self["encoding"] -= size
            await memory.freed()
