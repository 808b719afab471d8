"""What the stream says for a proof: where the capture's consumer started, and which messages it has."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Any

from jetcapture_py.jetstream.ack_subject import positions
from jetcapture_py.jetstream.admin import ConsumerState
from jetcapture_py.jetstream.range_reader import RangeReader, StreamRange
from jetcapture_py.jetstream.read_session import ReadSession

MARGIN = timedelta(seconds=5)
"""After a consumer was created: which of these messages it began with is known to the server alone."""


async def read(
    session: ReadSession, stream: str, filters: tuple[str, ...], stretches: Iterable[tuple[int, int]]
) -> AsyncGenerator[tuple[bool, Any, Any]]:
    """The messages in these ranges of sequences, which come in order, and some beyond them.

    Each time whether another range begins here, the sequences, and the timestamps in nanoseconds.
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
                    seqs, times = positions(stream, consumer, received.replies)
                    if len(seqs):
                        yield begins, seqs, times
                        begins, read_to = False, int(seqs[-1])
        read_to = max(read_to, last)


def start_of(consumer: ConsumerState) -> tuple[int, datetime | None, str]:
    """Where the consumer started: a sequence, or a time from which on; and what of before cannot be proven."""
    config = consumer.config
    policy = config.get("deliver_policy", "all")
    if policy == "all":
        return 1, None, ""
    if policy == "by_start_sequence":
        return max(1, config.get("opt_start_seq", 0)), None, ""
    if policy == "by_start_time":
        return 1, datetime.fromisoformat(config["opt_start_time"]), ""
    note = (
        f"messages from before the consumer was created at {consumer.created} (deliver_policy {policy}), and those of "
        f"the {MARGIN.seconds} s after it in front of the first one stored: which the consumer began with is not known"
    )
    return 1, datetime.fromisoformat(consumer.created), note
