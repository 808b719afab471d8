"""Every share of a budget, with its reason.

The budgets are `limits.memory` in bytes, `limits.open_blocks`, `drain_timeout`, and the messages that may be
unacknowledged: the consumer's `max_ack_pending`, less what other replicas hold. A `…_SHARE` is a divisor: 4 is a
quarter.
"""

from __future__ import annotations

# ------------------------------------------------------------------ pulling

PULLED_SHARE = 3
"""All pulls together ask for at most this part of the memory; the rest is for messages received earlier."""
MAX_PULLED_BYTES = 24 << 20
"""Bytes that all pulls together ask for. A server drops a client for which 64 MB wait, and delivers these again only
later. Larger values are not faster (measured with messages of 250 bytes to 1 MB)."""
MIN_PULLED_BYTES = 4 << 20
"""Each lost connection halves `MAX_PULLED_BYTES` for a while, but not below this."""
RECEIVE_SHARE, MAX_RECEIVED_BYTES = 8, 256 << 20
"""Received messages are returned in batches of this part of the memory, so that a batch and its copies fit. An Arrow
column of byte strings must stay below 2 GiB."""
DRAIN_SHARE = 4
"""Open pulls may take this part of `drain_timeout` to end; the rest is for storing."""
STALLED_SHARE = 8
"""Unacknowledged messages, as a part of their limit, from which a pause may mean that the limit has been reached."""

CAPTURE_BYTES, MAX_CAPTURES_SHARE = 8 << 20, 2
"""Memory of another capture in a process besides messages (measured with 60: 4 MiB if quiet, up to 11 if all are busy).
Captures that share a limit reserve it, up to this part of the limit."""

# ------------------------------------------------------------------ decoding and blocks

DECODE_SHARE, MAX_DECODED_BYTES = 8, 16 << 20
"""Bytes decoded in one batch: this part of the memory, and no more than one segment of received memory usually has."""
FIRST_DECODED_MESSAGES = 4096
"""Size of the first batch, before any was measured."""
PREPARING_COPIES = 3
"""A batch in preparation is in memory three times: as received, as columns, and as routed columns."""
BLOCK_SHARE = 4
"""Maximum share of the memory for one block, so that one cannot take it all."""
OPEN_SHARE = 2
"""Maximum share of the memory for open blocks; the rest is for blocks being stored."""
SPOOL_SHARE, SPOOL_TARGET_SHARE = 4, 8
"""With a spool, open rows beyond the first share of the memory are spooled, down to the second: well before blocks
would be sealed."""
TEXT_GROWTH = 4
"""Size of uncompressed text that is expected of spooled rows: it repeats the columns' names and spells numbers out."""
OPEN_UNACKED_SHARE = 3
"""Open blocks hold at most this part of the unacknowledged messages. It is smaller than their share of the memory,
because a server with many unacknowledged messages processes acks slowly."""
ORDERED_SHARE = 2
"""In `source.mode: ordered`, a block is sealed when this part of `max_ack_pending` was delivered since its first
message, because no later message can be acknowledged earlier."""
SEALED_UNACKED_SHARE, SEALED_MEMORY_SHARE, SEALED_BLOCKS_SHARE = 32, 8, 8
"""At a limit, this part of the budget more than needed is sealed, so that the limit is not hit again immediately."""

# ------------------------------------------------------------------ storing

ENCODING_SHARE = 8 / 3
"""Share of the memory for encoding blocks at the same time."""
ENCODING_COPIES, ENCODING_PIECES = 3, 4
"""Encoding a block takes up to three times its size: a copy, and an object in memory twice while it grows. An object in
a file takes this many pieces of its rows (measured: 0.4 to 5, most for rows in no order)."""
SMALL_BLOCK_BYTES, SMALL_BLOCKS = 64 << 10, 64
"""Blocks smaller than this share a worker thread's turn, up to this number."""
LARGE_BLOCKS_WAITING = 2
"""Larger blocks that may wait for each worker."""
RELEASE_SHARE = 8
"""Growth of the process, as a share of the memory, after which the allocator returns unused memory."""

# ------------------------------------------------------------------ compacting

COMPACTING_SHARE = 2
"""`jetcapture maintain` compacts units concurrently in this part of the memory; the rest is for the program, and for
memory that the allocator retains."""
