"""Determine the scope of a proof: the server's state before the archive is scanned, and the range of sequences."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa

from jetcapture_py.archive.arrays import Nanos, Seqs
from jetcapture_py.archive.incarnations import Incarnation
from jetcapture_py.archive.removed import Erased, Expired
from jetcapture_py.archive.watermark import ConsumerWatermark, Watermark
from jetcapture_py.capture.watermark import observed
from jetcapture_py.config.units import microseconds_of
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.acks import ack_numbers
from jetcapture_py.jetstream.consumer import ConsumerState, consumer_state, is_consumer_of
from jetcapture_py.jetstream.range_reader import RangeReader, StreamRange
from jetcapture_py.jetstream.read_session import ReadSession, StreamState
from jetcapture_py.jetstream.wire.inbox import REPLY, SUBJECT
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.text import plural
from jetcapture_py.verify.findings import FileList, Finding, Kind, Severity, are, time_text
from jetcapture_py.verify.ranges import Sequences

GONE_ONCE_ACKED = ("workqueue", "interest")
"""Retention policies that delete acknowledged messages."""
MARGIN = timedelta(seconds=5)
"""Time after a consumer's creation in which only the server knows its first message."""
_MICROSECOND = timedelta(microseconds=1)
_LATER = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """The server's state before the archive was scanned."""

    state: StreamState
    consumer: ConsumerState
    incarnation: Incarnation
    start: int
    """The consumer's first sequence."""
    note: str
    """Doubt about its first messages; "" if none."""
    unsure: tuple[int, int]
    """Range of possible start sequences of the consumer."""
    mark: ConsumerWatermark | None
    """The consumer's watermark, if of the current incarnation."""
    aged: int | None
    """The last sequence stored at or before the watermark's time; None if unknown."""


async def server_state(session: ReadSession, stream: str, consumer: str, archived: Watermark | None) -> ServerState:
    """Ask the server. Raises SourceError."""
    consumer_now = consumer_state(await session.request(f"CONSUMER.INFO.{stream}.{consumer}"))
    mark = None if archived is None else archived.of(consumer)
    if archived is not None:
        origin, progressed = (mark or archived).origin, mark is not None and is_consumer_of(consumer_now, mark)
        session.know(stream, origin, progressed=progressed)
    state = await session.state(stream)
    start, moment, note = _start(consumer_now)
    present = mark if mark is not None and mark.created == state.created else None
    if present is not None and consumer_now.config.get("deliver_policy") != "last_per_subject":
        history = observed(present, consumer_now).filters
        if len({entry.consumer for entry in history}) > 1:  # recreated: the earlier consumer's selection counts too
            start, moment, note = min(start, history[0].after + 1), None, ""
    unsure = (1, 0)
    if moment is not None and state.retention not in GONE_ONCE_ACKED:
        start = await session.first_at(stream, moment)
        if note:
            unsure = (start, await session.first_at(stream, moment + MARGIN) - 1)
    return ServerState(
        state=state,
        consumer=consumer_now,
        aged=await _aged(session, stream, state, consumer_now, mark),
        incarnation=await current_incarnation(session, stream, state),
        start=start,
        note=note,
        unsure=unsure,
        mark=present,
    )


async def current_incarnation(session: ReadSession, stream: str, state: StreamState) -> Incarnation:
    """Return the stream's current incarnation. Raises SourceError."""
    restored, oldest = await restored_to(session, stream, state), microseconds_of(state.first_time)
    return Incarnation.of(state.created, mirror=state.mirror, restored=restored, oldest=oldest)


async def restored_to(session: ReadSession, stream: str, state: StreamState) -> int:
    """Return the last sequence stored before the stream was created; 0 if none or unknown."""
    created = datetime.fromisoformat(state.created)
    if state.mirror or state.retention in GONE_ONCE_ACKED or state.first_time >= created:
        return 0
    return await session.first_at(stream, created) - 1


async def _aged(
    session: ReadSession, stream: str, state: StreamState, consumer: ConsumerState, mark: ConsumerWatermark | None
) -> int | None:
    """Return the last sequence covered by the watermark's time; 0 for another incarnation."""
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
    """The messages to check."""

    server: ServerState | None
    """None if the stream is unavailable."""
    incarnation: Incarnation | None
    """The stream's, or the watermark's if the stream is unavailable; None if unknown."""
    start: int = 1
    """The consumer's first sequence."""
    floor: int = 0
    """The consumer's ack floor."""
    top: int = 1 << 62
    """The last sequence of the stream that the ack floor or the watermark covers."""
    promised_seq: int = 0
    """The watermark covers everything up to this sequence."""
    promised_time: int = 0
    """The watermark covers everything up to this time, in microseconds."""

    @classmethod
    def of(cls, server: ServerState | None, mark: ConsumerWatermark | None) -> Scope:
        """Return the scope of a proof; `server` is None if the stream is unavailable."""
        incarnation: Incarnation | None = None
        if server is None:
            with suppress(ValueError):
                incarnation = Incarnation.of(mark.created, mirror=False) if mark is not None else None
            return cls(server=None, incarnation=incarnation)
        floor, seq = server.consumer.ack_floor, server.mark.seq if server.mark is not None else 0
        return cls(
            server=server,
            incarnation=server.incarnation,
            start=server.start,
            floor=floor,
            top=max(floor, min(max(seq, server.aged or 0), server.state.last)),
            promised_seq=seq,
            promised_time=microseconds_of(mark.time) if mark is not None and server.aged else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Messages of the current incarnation that were removed from the archive on purpose."""

    expired: Sequences = field(default_factory=Sequences)
    """Messages in buckets older than `maintain.keep`."""
    until: datetime | None = None
    """The latest end of an expired bucket, UTC."""
    erased: Sequences = field(default_factory=Sequences)
    """Sequences in tombstones."""
    tombstones: Erased = field(default_factory=Erased)
    """The tombstones of all incarnations, with timestamps."""

    @classmethod
    def read(cls, storage: ArchiveFiles, stream: str, incarnation: Incarnation | None) -> Removed:
        """Read the records of removals; all incarnations count if the current one is unknown. Raises JetcaptureError.

        Read them after the scan, so that they include objects that vanish during it.
        """
        note, erased, stones = storage.expired(stream), Sequences(), storage.erased(stream)
        erased.add(stones.seqs if incarnation is None else stones.seqs[incarnation.includes(stones.seqs, stones.times)])
        if note is None:
            return cls(erased=erased, tombstones=stones)
        expired = Sequences()
        for firsts, lasts in _expired(note, incarnation):
            expired.add_ranges(firsts, lasts)
        return cls(expired=expired, until=note.until, erased=erased, tombstones=stones)

    def findings(self, archived: Sequences, erased: int, unerased: FileList) -> Iterator[Finding]:
        """Yield findings of removed messages, if any.

        `archived` messages are still stored; `erased` of them, in the objects `unerased`, should not be.
        """
        if len(self.expired):
            count, last = plural(len(self.expired), "message"), self.expired.last
            left = sum(int(self.expired.contains(archived.within(*window)).sum()) for window in archived.windows())
            kept = f"; {left:,} of them {are(left)} stored: the next jetcapture maintain removes them" if left else ""
            yield Finding(
                kind=Kind.EXPIRED,
                severity=Severity.NOTE,
                count=len(self.expired),
                summary=f"{count} up to sequence {last}, in time slices up to {time_text(self.until)}, were removed on "
                f"purpose (maintain.keep){kept}",
            )
        count = plural(len(self.erased), "message")
        if erased:
            copies = plural(erased, "copy of them", "copies of them")
            yield Finding(
                kind=Kind.ERASED,
                severity=Severity.FAILURE,
                count=len(self.erased),
                summary=f"{count}, but {copies} can still be read from {plural(unerased.count, 'object')}",
                action="run jetcapture erase again, with the same selection",
                paths=tuple(sorted(unerased.paths, key=lambda file: file.path)),
            )
        elif len(self.erased):
            yield Finding(kind=Kind.ERASED, severity=Severity.NOTE, count=len(self.erased), summary=count)


def _expired(note: Expired, incarnation: Incarnation | None) -> Iterator[tuple[Seqs, Seqs]]:
    """Yield the expired ranges of an incarnation and of those that it continues."""
    for part in note.incarnations:
        firsts, lasts = part.spans
        oldest = microseconds_of(part.oldest)
        known = part.created or (incarnation is not None and incarnation.since <= oldest < incarnation.until)
        if incarnation is None or incarnation.mirror or known in (True, incarnation.created):
            yield firsts, lasts
        else:
            before = firsts <= incarnation.restored
            yield firsts[before], np.minimum(lasts[before], incarnation.restored)


async def read(
    session: ReadSession, stream: str, filters: tuple[str, ...], stretches: Iterable[tuple[int, int]]
) -> AsyncGenerator[tuple[bool, Seqs, Nanos, pa.BinaryArray]]:
    """Read the messages in these ordered ranges of sequences, and possibly some beyond them.

    Yields a flag for the start of a range, sequences, timestamps in nanoseconds, and subjects.
    """
    read_to = 0
    for first, last in stretches:
        begin = max(first, read_to + 1)
        begins = True
        if begin <= last:
            part = StreamRange(stream=stream, first=begin, end=last + 1, subjects=filters, headers_only=True)
            async with aclosing(RangeReader(session, part).messages()) as messages:
                async for consumer, received in messages:
                    subjects, replies = received.columns(SUBJECT, REPLY)
                    (_, seqs, times), matching = ack_numbers(replies, stream, consumer)
                    if len(seqs):
                        yield begins, seqs, times, subjects if matching is None else subjects.take(pa.array(matching))
                        begins, read_to = False, int(seqs[-1])
        read_to = max(read_to, last)


def _start(consumer: ConsumerState) -> tuple[int, datetime | None, str]:
    """Return the consumer's start, a sequence or a time, and a note about doubtful messages."""
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
