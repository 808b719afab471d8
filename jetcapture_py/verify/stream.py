"""Read from the stream what a proof needs: the start of the capture's consumer, and messages in ranges."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from jetcapture_py.jetstream.ack_subject import ack_numbers
from jetcapture_py.jetstream.admin import ConsumerState
from jetcapture_py.jetstream.range_reader import RangeReader, StreamRange
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.jetstream.wire.inbox import REPLY, SUBJECT

MARGIN = timedelta(seconds=5)
"""Time after a consumer's creation in which only the server knows its first message."""


async def read(
    session: ReadSession, stream: str, filters: tuple[str, ...], stretches: Iterable[tuple[int, int]]
) -> AsyncGenerator[tuple[bool, Any, Any, pa.BinaryArray]]:
    """Read the messages in these ordered ranges of sequences, and possibly some beyond them.

    Yields whether a new range starts, the sequences, the timestamps in nanoseconds, and the subjects.
    """
    read_to = 0
    for first, last in stretches:
        wanted = StreamRange(
            stream=stream, first=max(first, read_to + 1), end=last + 1, subjects=filters, headers_only=True
        )
        begins = True
        if wanted.first < wanted.end:
            async with aclosing(RangeReader(session, wanted).messages()) as messages:
                async for consumer, received in messages:
                    subjects, replies = received.columns(SUBJECT, REPLY)
                    (_, seqs, times), own = ack_numbers(replies, stream, consumer)
                    if len(seqs):
                        yield begins, seqs, times, subjects if own is None else subjects.take(pa.array(own))
                        begins, read_to = False, int(seqs[-1])
        read_to = max(read_to, last)


def start_of(consumer: ConsumerState) -> tuple[int, datetime | None, str]:
    """Return the consumer's start, a sequence or a time, and a note about messages that cannot be proven."""
    config = consumer.config
    policy = config.get("deliver_policy", "all")
    if policy == "all":
        return 1, None, ""
    if policy == "by_start_sequence":
        return max(1, config.get("opt_start_seq", 0)), None, ""
    if policy == "by_start_time":
        return 1, datetime.fromisoformat(config["opt_start_time"]), ""
    note = (
        f"messages from before the consumer was created at {consumer.created} (deliver_policy {policy}), and those "
        f"before the first stored one in the {MARGIN.seconds} s after it: the consumer's first message is unknown"
    )
    return 1, datetime.fromisoformat(consumer.created), note
