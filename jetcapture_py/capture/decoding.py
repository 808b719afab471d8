"""Decode and route received messages in a thread, in pieces whose columns fit the memory."""

from __future__ import annotations

import time

from jetcapture_py.capture.state import CaptureState
from jetcapture_py.config.shares import DECODE_SHARE, FIRST_BATCH, MAX_DECODED
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.transform.batch import BatchTooWideError
from jetcapture_py.transform.prepare import Prepared, Preparer


class Decoding:
    """Takes its messages from `state.preparing`. After `next`, `rest` is what is left of them."""

    def __init__(self, state: CaptureState, preparer: Preparer) -> None:
        self.rest = Received()
        self._state, self._preparer = state, preparer
        self._messages = FIRST_BATCH  # at once, so that their columns take about so many bytes

    async def next(self) -> Prepared | None:
        """Prepare the next messages; None when they were too many at once: fewer are tried next."""
        state = self._state
        part, self.rest = state.preparing.split(self._messages)
        state.decoding_since = time.monotonic()
        try:
            prepared = await state.in_thread(state.decode_threads, self._preparer, part)
        except BatchTooWideError:
            self._messages = max(1, len(part) // 2)
            return None
        finally:
            state.decoding_since = None
        size = min(state.budget.part // DECODE_SHARE, MAX_DECODED)
        self._messages = max(1, len(part) * size // max(prepared.rows.nbytes, 1))
        for seq, timestamp in prepared.span:
            state.observer.saw(seq, timestamp)
        return prepared
