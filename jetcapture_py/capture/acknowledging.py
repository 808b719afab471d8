"""Acknowledge the messages of stored blocks, and check at the end that the server has counted them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pyarrow as pa

from jetcapture_py.backoff import delays
from jetcapture_py.capture.blocks import Block
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.errors import DrainError
from jetcapture_py.jetstream.acks import AckResult

ATTEMPTS = 5
"""Attempts that a reachable consumer may leave unanswered."""
FIRST_RETRY, LONGEST_RETRY = 0.2, 2.0


async def acknowledge(state: CaptureState, blocks: Sequence[Block]) -> bool:
    """Acknowledge every message of `blocks`, which are stored; return whether the server confirmed it."""
    replies = pa.concat_arrays([replies for block in blocks for replies in block.replies()])
    confirmed = await _confirmed(state, replies)
    if not confirmed:
        state.unconfirmed_at = asyncio.get_running_loop().time()
    return confirmed


async def _confirmed(state: CaptureState, replies: pa.BinaryArray) -> bool:
    """Acknowledge until the server confirms, or until retrying is pointless."""
    unanswered = 0
    for delay in delays(FIRST_RETRY, LONGEST_RETRY):
        result = await state.source.ack(replies)
        if result is AckResult.CONFIRMED:
            return True
        state.stats.unconfirmed_acks += 1
        unanswered += result is AckResult.UNCONFIRMED
        if result is AckResult.REFUSED or unanswered == ATTEMPTS:
            return False
        await asyncio.sleep(delay)
    raise AssertionError("the delays have no end")


async def check_drained(state: CaptureState, *, pulls_ended: bool) -> None:
    """Raise DrainError if messages that were delivered here may be unacknowledged at the server.

    `pulls_ended` says whether every pull ended, so that no message can have been in flight.
    """
    source = state.source
    since = asyncio.get_running_loop().time() - state.unconfirmed_at
    doubtful = not pulls_ended or since < source.state.ack_wait  # older ones were redelivered and acknowledged
    if source.failure is not None or not doubtful:
        return
    if not (source.connected and await source.refresh() and source.state.unacked == 0):
        reason = "the server did not confirm the acknowledgements" if pulls_ended else "the connection to NATS was lost"
        raise DrainError(f"drain: {reason}; unconfirmed messages are redelivered after ack_wait")
