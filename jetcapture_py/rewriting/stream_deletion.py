"""Delete erased messages from their stream, and list copies of the stream that are out of reach.

A message is fetched before it is deleted, and its timestamp compared, because a recreated or rewound stream reuses
sequences. Afterwards every sequence is requested once more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import numpy as np

from jetcapture_py.archive.messages import runs
from jetcapture_py.archive.removed import Erased
from jetcapture_py.config.model import Config
from jetcapture_py.config.stream import origins
from jetcapture_py.errors import ApiError, SourceError
from jetcapture_py.jetstream.range_reader import FEW_AT_ONCE, nanoseconds, next_at_once, requested
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.jetstream.streams import stream_lists
from jetcapture_py.text import plural
from jetcapture_py.verify.findings import Progress

_TIMEOUT = 20.0
"""Timeout for answers of NATS, in seconds."""
_NOTE = "raft logs of the stream's replicas, its backups, and streams of other accounts or servers that copy it"


@dataclass(slots=True, kw_only=True)
class StreamDeletion:
    """The effect of deleting from the stream, or its dry run."""

    deleted: int = 0
    """Number of deleted messages."""
    remains: list[str] = field(default_factory=list)
    """Places that still have messages, or may have."""
    notes: tuple[str, ...] = (_NOTE,)
    """Copies that cannot be checked."""


async def delete_from_stream(config: Config, erased: Erased, *, dry_run: bool, progress: Progress) -> StreamDeletion:
    """Delete every erased message that the stream still has; with `dry_run`, only count them. Raises SourceError."""
    stream, done = config.source.stream, StreamDeletion()
    async with ReadSession(config.nats, f"jetcapture erase {stream}", timeout=_TIMEOUT) as session:
        settings = (await session.request(f"STREAM.INFO.{stream}"))["config"]
        refusal = next((name for name in ("sealed", "deny_delete") if settings.get(name)), "")
        errors: dict[str, None] = {}
        seen = 0
        async for seqs in _present(session, stream, erased):
            seen += len(seqs)
            progress("in the stream", seen, len(erased))
            if not (dry_run or refusal):
                answers = await asyncio.gather(*(_delete(session, stream, seq) for seq in seqs))
                errors |= dict.fromkeys(filter(None, answers))
        left = seen if dry_run or refusal else await _count(session, stream, erased)
        done.deleted = seen if dry_run and not refusal else seen - left
        if refusal and left:
            done.remains.append(
                f"stream {stream} has {plural(left, 'message')} of them: it is {refusal}, and deletes none"
            )
        elif left and not dry_run:
            reason = f": {next(iter(errors))}" if errors else ""
            done.remains.append(f"stream {stream} still has {plural(left, 'message')} of them{reason}")
        if origin := [str(source["name"]) for source in origins(settings)]:
            done.remains.append(
                f"stream {stream} copies from {', '.join(origin)}, which may have them: delete them there"
            )
        try:
            done.remains += [copy async for copy in _copies(session, stream, erased)]
        except SourceError as error:
            done.notes = (*done.notes, f"the streams that mirror or source {stream} are not known: {error}")
    return done


async def _delete(session: ReadSession, stream: str, seq: int) -> str | None:
    """Delete a message and overwrite its bytes; return the reason of a failure. Raises SourceError without an
    answer."""

    async def request() -> str | None:
        try:
            await session.api.request(f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": False})
        except ApiError as error:  # also after a lost answer: the message is then gone
            return str(error)
        return None

    return await session.retry(request)


async def _present(session: ReadSession, stream: str, erased: Erased) -> AsyncIterator[list[int]]:
    """Yield the sequences of erased messages in the stream, in batches."""
    state = await session.state(stream)
    spans = deque(
        range(max(first, state.first), min(last, state.last) + 1)
        for first, last in runs(np.unique(erased.seqs))
        if last >= state.first and first <= state.last
    )
    count = FEW_AT_ONCE
    while spans:
        chunk = list(_taken(spans, count))
        messages = await requested(session, stream, chunk)
        count = next_at_once(count, messages)
        if not messages:  # skip deleted messages
            following = await session.next_match(stream, chunk[-1] + 1, ())
            while spans and (following is None or spans[0].stop <= following):
                spans.popleft()
            if spans and following is not None:
                spans[0] = range(max(spans[0].start, following), spans[0].stop)
            continue
        seqs = np.array([message["seq"] for message in messages], np.int64)
        times = np.array([nanoseconds(message["time"]) // 1000 for message in messages], np.int64)
        if held := seqs[erased.contains(seqs, times)].tolist():
            yield held


def _taken(spans: deque[range], count: int) -> Iterator[int]:
    """Take up to `count` sequences from the first spans."""
    while spans and count:
        span = spans.popleft()
        if len(span) > count:
            spans.appendleft(span[count:])
        yield from span[:count]
        count -= min(len(span), count)


async def _count(session: ReadSession, stream: str, erased: Erased) -> int:
    return sum([len(seqs) async for seqs in _present(session, stream, erased)])


async def _copies(session: ReadSession, stream: str, erased: Erased) -> AsyncIterator[str]:
    """Yield streams of the account with possible copies. Raises SourceError, also without permission."""
    async for answer in stream_lists(session):
        for other in (info["config"] for info in answer.get("streams") or ()):
            name = other["name"]
            if (other.get("mirror") or {}).get("name") == stream:
                if count := await _count(session, name, erased):
                    yield f"stream {name}, a mirror of {stream}, has {plural(count, 'message')} of them"
            elif any(origin["name"] == stream for origin in origins(other)):
                yield f"stream {name} sources {stream} and may have copies under other sequences"
