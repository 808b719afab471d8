"""The `tap` command: show how the configuration decodes the newest messages. Store and acknowledge nothing."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.text import Text

from jetcapture_py.archive import layout
from jetcapture_py.capture.inferred import learn_archived
from jetcapture_py.capture.parts import preparer
from jetcapture_py.config.model import Config
from jetcapture_py.config.subjects import matches
from jetcapture_py.config.units import format_time
from jetcapture_py.jetstream.consumer import pending_of
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
from jetcapture_py.manage.cases import MessageOutcome, outcomes, plain
from jetcapture_py.manage.many import CommandResult
from jetcapture_py.text import escaped, is_text, plural
from jetcapture_py.threads import in_thread

Part = tuple[str, Received]
"""The consumer's name in the ack subjects, and the messages."""

_MAX_SKIPPED = 1_000
"""Sequences without a matching message after which the search message by message ends."""
_NARROW = 4
"""Maximum messages read per requested one, unless they are close together."""


async def newest(session: ReadSession, config: Config, count: int) -> list[Part]:
    """Return the newest messages: at least `count`, or all. Raises SourceError."""
    stream, filters = config.source.stream, config.source.filter_subjects
    state = await session.state(stream)
    if state.last < state.first:
        return []
    if state.retention != "limits":
        # A work queue allows no further consumer. With retention interest, the end of one makes the server delete what
        # no other consumer needs.
        return await _one_by_one(session, stream, filters, state, count)
    first = await _start(session, stream, filters, state, count)
    range_ = StreamRange(stream=stream, first=first, end=state.last + 1, subjects=filters)
    return [part async for part in RangeReader(session, range_).messages()]


async def _start(session: ReadSession, stream: str, filters: Sequence[str], state: StreamState, count: int) -> int:
    """Return a sequence from which on there are at least `count` matching messages, and not many more."""
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
        matched = await matching(session, stream, filters, {"opt_start_seq": middle})
        if matched < count:
            too_few = middle
            continue
        enough = middle
        if matched <= _NARROW * count:
            break
    return enough


async def matching(session: ReadSession, stream: str, filters: Sequence[str], start: dict[str, Any]) -> int:
    """Count the matching messages from `opt_start_seq` or `opt_start_time` on."""
    policy = "by_start_sequence" if "opt_start_seq" in start else "by_start_time"
    config = {"deliver_policy": policy, "filter_subjects": tuple(filters), **start}
    name, answer = await session.retry(lambda: session.create_consumer(stream, config))
    await session.delete_consumer(stream, name)
    return pending_of(answer)


async def _one_by_one(
    session: ReadSession, stream: str, filters: Sequence[str], state: StreamState, count: int
) -> list[Part]:
    selected: list[dict[str, Any]] = []
    skipped, last, at_once = 0, state.last, FEW_AT_ONCE
    while last >= state.first and len(selected) < count and skipped < _MAX_SKIPPED:
        seqs = range(last, max(state.first, last - at_once + 1) - 1, -1)
        messages = await requested(session, stream, seqs)
        last, at_once = seqs[-1] - 1, next_at_once(at_once, messages)
        matching = [message for message in messages if matches(message["subject"], filters)]
        selected += matching
        skipped += len(seqs) - len(matching)
    return [(NOBODY, received_of(stream, selected[count - 1 :: -1]))] if selected else []


TIMEOUT = 10.0
_MAX_TEXT = 200
"""Maximum characters of a value or payload to show."""


def run(config: Config, count: int) -> CommandResult:
    """Show the outcome of the newest `count` messages. Raises ConfigError, SourceError."""
    results = asyncio.run(tap(config, count))
    nothing = f"stream {config.source.stream} has no message that the filters match"
    return CommandResult(
        summary=plural(len(results), "message"),
        lines=[shown(outcome, config) for outcome in results] or [nothing],
        records=map(fields, results),
    )


async def tap(config: Config, count: int) -> list[MessageOutcome]:
    """Return the outcome of the newest `count` messages, oldest first. Raises ConfigError, SourceError."""
    prepare = replace(preparer(config, None, None), keep_payload=True)
    async with ReadSession(config.nats, f"jetcapture tap {config.source.stream}", timeout=TIMEOUT) as session:
        parts = await newest(session, config, count)
    await in_thread(learn_archived, prepare.decoder, config)
    by_seq: dict[int, MessageOutcome] = {}
    for name, received in parts:
        made = await in_thread(outcomes, replace(prepare, consumer=name), received)
        by_seq |= {outcome.seq: outcome for outcome in made}
    return [by_seq[seq] for seq in sorted(by_seq)[-count:]]


def fields(outcome: MessageOutcome) -> dict[str, Any]:
    """Return an outcome as JSON values."""
    text = _text(outcome.payload)
    payload = {"payload": text} if text is not None else {"payload_base64": base64.b64encode(outcome.payload).decode()}
    head = {
        "sequence": outcome.seq,
        "timestamp": format_time(outcome.timestamp),
        "subject": outcome.subject,
        "headers": outcome.headers,
        **payload,
        "bucket": format_time(outcome.bucket),
    }
    if outcome.quarantine is not None:
        stage, error = outcome.quarantine
        return {**head, "quarantine": {"stage": stage, "error": error}}
    if len(outcome.rows) == 1:
        return {**head, "key": outcome.key, "columns": plain(outcome.rows[0])}
    return {**head, "key": outcome.key, "rows": plain(outcome.rows)}


def _text(payload: bytes) -> str | None:
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return None


def shown(outcome: MessageOutcome, config: Config) -> Text:
    """Return an outcome as text: key, time slice and columns, or the reason of quarantine and its payload."""
    declared = {layout.field_name(name) for name in config.decode.columns}
    text = Text()
    text.append(f"{outcome.seq}", "bold")
    text.append(f"  {format_time(outcome.timestamp)}  {escaped(outcome.subject)}")
    if outcome.quarantine is None:
        key = "no key" if outcome.key is None else f'key "{escaped(outcome.key)}"'
        text.append(f"  {key}  time slice {format_time(outcome.bucket)}", "green")
    else:
        stage, error = outcome.quarantine
        text.append(f"  quarantine ({escaped(stage)}): {escaped(error)}", "red")
    for line in _lines(outcome, declared):
        text.append(f"\n    {line}")
    return text


def _lines(outcome: MessageOutcome, declared: Collection[str]) -> Iterator[str]:
    """Yield each row's columns: declared ones and ones with a value; else the payload."""
    rows = [
        {name: value for name, value in row.items() if value is not None or name in declared} for row in outcome.rows
    ]
    for number, row in enumerate(rows):
        head = f"row {number}: " if len(rows) > 1 else ""
        if row:
            yield head + "  ".join(f"{escaped(name)}={_short(plain(value))}" for name, value in row.items())
    if outcome.quarantine is not None or all(value is None for row in rows for value in row.values()):
        size, text = len(outcome.payload), _text(outcome.payload[:_MAX_TEXT])
        yield f"{size} bytes" if not size or text is None or not is_text(text) else f"{size} bytes: {escaped(text)}"


def _short(value: object) -> str:
    text = escaped(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"
