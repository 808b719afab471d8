"""Read the newest messages that a configuration's filters match, without affecting its consumer."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from jetcapture_py.config.model import Config
from jetcapture_py.config.subjects import matches
from jetcapture_py.jetstream.ack_subject import first_delivery
from jetcapture_py.jetstream.connection import ApiError
from jetcapture_py.jetstream.range_reader import RangeReader, StreamRange
from jetcapture_py.jetstream.read_session import ReadSession, StreamState
from jetcapture_py.jetstream.wire.inbox import Received

Part = tuple[str, Received]
"""The name of the consumer in the ack subjects of messages, and the messages."""

_NOBODY = "none"
"""The consumer's name in the ack subjects of messages that no consumer delivered."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MOST_SKIPPED = 1_000
"""Sequences without a matching message after which the search message by message ends."""
_AT_ONCE = 50
"""Messages that are requested at once."""
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
    skipped = 0
    for last in range(state.last, state.first - 1, -_AT_ONCE):
        if len(found) >= count or skipped >= _MOST_SKIPPED:
            break
        seqs = range(last, max(state.first, last - _AT_ONCE + 1) - 1, -1)
        for message in await asyncio.gather(*(_message(session, stream, seq) for seq in seqs)):
            if message is not None and matches(message["subject"], filters):
                found.append(message)
            else:
                skipped += 1
    return [(_NOBODY, _received(stream, found[count - 1 :: -1]))] if found else []


async def _message(session: ReadSession, stream: str, seq: int) -> dict[str, Any] | None:
    """Return a stored message as the API has it, None if there is none."""
    try:
        answer = await session.request(f"STREAM.MSG.GET.{stream}", {"seq": seq})
    except ApiError:
        return None
    message: dict[str, Any] = answer["message"]
    return message


def _received(stream: str, messages: Sequence[dict[str, Any]]) -> Received:
    return Received.of(
        [message["subject"].encode() for message in messages],
        [first_delivery(stream, _NOBODY, message["seq"], nanoseconds(message["time"])) for message in messages],
        [base64.b64decode(message.get("hdrs", "")) for message in messages],
        [base64.b64decode(message.get("data", "")) for message in messages],
    )


def nanoseconds(text: str) -> int:
    """Parse a time of the JetStream API to nanoseconds since the epoch."""
    fraction = re.search(r"\.(\d+)", text)
    digits = (fraction[1] if fraction else "").ljust(9, "0")[:9]
    moment = datetime.fromisoformat(text).replace(microsecond=0)
    return (moment - _EPOCH) // timedelta(seconds=1) * 10**9 + int(digits)
