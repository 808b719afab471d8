"""Decode and route received messages in a thread, in pieces whose columns fit the memory."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

from jetcapture_py.config.shares import DECODE_SHARE, FIRST_DECODED_MESSAGES, MAX_DECODED_BYTES, PREPARING_COPIES
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.ledger import Ledger
from jetcapture_py.threads import in_pool
from jetcapture_py.transform.batch import BatchTooWideError
from jetcapture_py.transform.prepare import Prepared, Preparer


class Decoding:
    """The decoder and its thread. `batch` has the received messages that are in no block yet."""

    def __init__(self, preparer: Preparer, ledger: Ledger) -> None:
        self.preparer = preparer
        self.batch = Received()
        self._ledger = ledger
        self._messages = FIRST_DECODED_MESSAGES  # to decode at once; adapted to the size of their columns
        self._since: float | None = None
        self._threads = ThreadPoolExecutor(1, "decode")

    @property
    def seconds(self) -> float:
        """Seconds that the current piece has spent in the decoder and the key function; 0 without one."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    async def pieces(self, received: Received) -> AsyncGenerator[Prepared]:
        """Yield decoded messages in pieces. The caller puts each into blocks before the next one."""
        self._take(received)
        while self.batch:
            piece, rest = self.batch.split(self._messages)
            self._since = time.monotonic()
            try:
                prepared = await in_pool(self._threads, self.preparer, piece)
            except BatchTooWideError:
                self._messages = max(1, len(piece) // 2)
                continue
            finally:
                self._since = None
            size = min(self._ledger.memory.part // DECODE_SHARE, MAX_DECODED_BYTES)
            self._messages = max(1, len(piece) * size // max(prepared.rows.nbytes, 1))
            self._take(rest)
            yield prepared

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _take(self, batch: Received) -> None:
        self._ledger.unacked += len(batch) - len(self.batch)
        self._ledger["decoding"] = batch.memory * PREPARING_COPIES
        self.batch = batch
