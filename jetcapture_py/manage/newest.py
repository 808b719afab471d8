"""Read the newest messages that a configuration's filters match, without affecting its consumer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jetcapture_py.config.model import Config
from jetcapture_py.config.subjects import matches
from jetcapture_py.jetstream.range_reader import (
    FEW_AT_ONCE,
    NOBODY,
    RangeReader,
    StreamRange,
    next_at_once,
    received_of,
    requested,
)
from jetcapture_py.jetstream.read_session import ReadSession, StreamState
from jetcapture_py.jetstream.wire.inbox import Received

Part = tuple[str, Received]
"""The name of the consumer in the ack subjects of messages, and the messages."""

_MAX_SKIPPED = 1_000
"""Sequences without a matching message after which the search message by message ends."""
_NARROW = 4
"""Maximum messages read for each wanted one, unless they are close together."""


async def newest(session: ReadSession, config: Config, count: int) -> list[Part]:
    """Return the newest messages, at least `count` of them unless there are fewer. Raises SourceError."""
    stream, filters = config.source.stream, config.source.filter_subjects
    state = await session.state(stream)
    if state.last < state.first:
        return []
    if state.retention != "limits":
        # A work queue allows no further consumer. With retention interest, the end of one makes the server delete what
        # no other consumer needs.
        return await _one_by_one(session, stream, filters, state, count)
    first = await _start(session, stream, filters, state, count)
    wanted = StreamRange(stream=stream, first=first, end=state.last + 1, subjects=filters)
    return [part async for part in RangeReader(session, wanted).messages()]


async def _start(session: ReadSession, stream: str, filters: Sequence[str], state: StreamState, count: int) -> int:
    """Return a sequence with at least `count` matching messages from there on, and not many more."""
    if not filters and not state.gaps:
        return max(state.first, state.last - count + 1)
    enough, too_few, distance = state.first, state.last + 1, count
    while (first := state.last + 1 - distance) > state.first:
        if await matching(session, stream, filters, {"opt_start_seq": first}) >= count:
            enough = first
            break
        too_few, distance = first, distance * 4
    while too_few - enough > count:
        middle = (enough + too_few) // 2
        found = await matching(session, stream, filters, {"opt_start_seq": middle})
        if found < count:
            too_few = middle
            continue
        enough = middle
        if found <= _NARROW * count:
            break
    return enough


async def matching(session: ReadSession, stream: str, filters: Sequence[str], start: dict[str, Any]) -> int:
    """Count the matching messages from `opt_start_seq` or `opt_start_time` on."""
    policy = "by_start_sequence" if "opt_start_seq" in start else "by_start_time"
    config = {"deliver_policy": policy, "filter_subjects": tuple(filters), **start}
    name, answer = await session.retry(lambda: session.create_consumer(stream, config))
    await session.delete_consumer(stream, name)
    return int(answer["num_pending"])


async def _one_by_one(
    session: ReadSession, stream: str, filters: Sequence[str], state: StreamState, count: int
) -> list[Part]:
    found: list[dict[str, Any]] = []
    skipped, last, at_once = 0, state.last, FEW_AT_ONCE
    while last >= state.first and len(found) < count and skipped < _MAX_SKIPPED:
        seqs = range(last, max(state.first, last - at_once + 1) - 1, -1)
        messages = await requested(session, stream, seqs)
        last, at_once = seqs[-1] - 1, next_at_once(at_once, messages)
        matching = [message for message in messages if matches(message["subject"], filters)]
        found += matching
        skipped += len(seqs) - len(matching)
    return [(NOBODY, received_of(stream, found[count - 1 :: -1]))] if found else []
