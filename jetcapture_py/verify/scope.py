"""Determine the scope of a proof: the server's state before the archive is scanned, and the range of sequences."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from jetcapture_py.archive import watermark
from jetcapture_py.config.model import SourceConfig
from jetcapture_py.config.units import microseconds_of
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.ack_subject import ack_numbers
from jetcapture_py.jetstream.admin import ConsumerState, consumer_state
from jetcapture_py.jetstream.range_reader import RangeReader, StreamRange
from jetcapture_py.jetstream.read_session import ReadSession, StreamState
from jetcapture_py.jetstream.wire.inbox import REPLY, SUBJECT

GONE_ONCE_ACKED = ("workqueue", "interest")
"""Retention policies that delete acknowledged messages."""
MARGIN = timedelta(seconds=5)
"""Time after a consumer's creation in which only the server knows its first message."""
_MICROSECOND = timedelta(microseconds=1)
_LATER = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """The stream's current incarnation: its creation time as sent by the server, and in microseconds since the epoch.

    A recreated stream counts from 1 again, so only messages of this incarnation can be compared with the stream. With
    `mirror`, messages may be older than the stream. A stream that was restored from a backup may be newer than its
    messages up to the sequence `restored`, of which the first is from `oldest`: they are those of the earlier stream.
    """

    created: str
    since: int
    mirror: bool
    restored: int = 0
    oldest: int = 0

    @classmethod
    def of(cls, created: str, *, mirror: bool, restored: int = 0, oldest: int = 0) -> Incarnation:
        """Parse a creation time. Raises ValueError."""
        since = microseconds_of(datetime.fromisoformat(created))
        return cls(created=created, since=since, mirror=mirror, restored=restored, oldest=oldest)

    def includes(self, seqs: Any, times: Any) -> Any:
        """Return a mask of the messages of this incarnation; times in microseconds, as int64 arrays."""
        mask = times >= self.since
        if self.restored:
            mask |= (times >= self.oldest) & (seqs <= self.restored)
        return mask

    def holds(self, created: str, low: int | None, high: int | None) -> bool | None:
        """Whether all (True) or none (False) of an object's messages are of it; None: some or unknown.

        `created` is from the object's footer, "" without one; compaction joins several with commas. `low` and `high`
        are the object's earliest and latest timestamp. They decide if the footer does not, as for objects of several
        incarnations that compaction has merged. The footer takes precedence: a server's clock may go backward.
        """
        if created == self.created:
            return True
        if self.mirror:
            return created == "" or self.created in created.split(",")
        if low is None or high is None or low < self.since <= high:
            return None
        if self.restored and self.oldest <= high < self.since:
            return None
        return low >= self.since


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """The server's state before the archive was scanned. `start` is the consumer's first sequence.

    `aged` is the last sequence stored at or before the watermark's time, None if unknown. `restored` is the last one
    stored before the stream was created: it was restored from a backup, or was a mirror. 0 without any.
    """

    state: StreamState
    consumer: ConsumerState
    start: int
    note: str
    unsure: tuple[int, int]
    """Range of sequences in which the consumer may have started."""
    aged: int | None
    restored: int


async def known_state(session: ReadSession, source: SourceConfig, mark: watermark.Watermark | None) -> ServerState:
    """Ask the server. Raises SourceError."""
    consumer = consumer_state(await session.request(f"CONSUMER.INFO.{source.stream}.{source.consumer}"))
    state = await session.state(source.stream)
    start, moment, note = start_of(consumer)
    unsure = (1, 0)
    if moment is not None and state.retention not in GONE_ONCE_ACKED:
        start = await session.first_at(source.stream, moment)
        if note:
            unsure = (start, await session.first_at(source.stream, moment + MARGIN) - 1)
    aged = await _aged(session, source.stream, state, consumer, mark)
    restored = await restored_to(session, source.stream, state)
    return ServerState(
        state=state, consumer=consumer, start=start, note=note, unsure=unsure, aged=aged, restored=restored
    )


async def restored_to(session: ReadSession, stream: str, state: StreamState) -> int:
    """Return the last sequence stored before the stream was created; 0 without any, or if it cannot be known."""
    created = datetime.fromisoformat(state.created)
    if state.mirror or state.retention in GONE_ONCE_ACKED or state.first_time >= created:
        return 0
    return await session.first_at(stream, created) - 1


async def _aged(
    session: ReadSession, stream: str, state: StreamState, consumer: ConsumerState, mark: watermark.Watermark | None
) -> int | None:
    """Return the last sequence that the watermark covers by its time; 0 if it is of another incarnation."""
    if mark is None or mark.created not in ("", state.created):
        return 0
    if state.retention in GONE_ONCE_ACKED:
        return None
    moment = min(mark.time, consumer.asked + _LATER)  # servers reject some distant times
    with suppress(SourceError):
        return await session.first_at(stream, moment + _MICROSECOND) - 1
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What to check: the incarnation's messages from `start` to the ack `floor`, and to the watermark's sequence `top`.

    The watermark covers everything up to the sequence `promised_seq` and the time `promised_time` (microseconds).
    """

    life: Incarnation | None
    start: int
    floor: int
    top: int
    known: ServerState | None
    promised_seq: int = 0
    promised_time: int = 0

    @classmethod
    def of(cls, known: ServerState | None, mark: watermark.Watermark | None) -> Scope:
        """Return the scope of a proof; `known` is None if the stream is unavailable."""
        life: Incarnation | None = None
        if known is None:
            with suppress(ValueError):
                life = Incarnation.of(mark.created, mirror=False) if mark is not None else None
            return cls(life=life, start=1, floor=0, top=1 << 62, known=None)
        state, floor = known.state, known.consumer.ack_floor
        seq = mark.seq if mark is not None and mark.created == state.created else 0
        time = microseconds_of(mark.time) if mark is not None and known.aged else 0
        top = max(floor, min(max(seq, known.aged or 0), state.last))
        oldest = microseconds_of(state.first_time)
        life = Incarnation.of(state.created, mirror=state.mirror, restored=known.restored, oldest=oldest)
        return cls(
            life=life,
            start=known.start,
            floor=floor,
            top=top,
            known=known,
            promised_seq=seq,
            promised_time=time,
        )


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
