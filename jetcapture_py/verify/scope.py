"""What a proof checks: the server's state before the archive is scanned, and the range of sequences."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from jetcapture_py.archive import watermark
from jetcapture_py.config.model import SourceConfig
from jetcapture_py.config.units import microseconds_of
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.admin import ConsumerState, consumer_state
from jetcapture_py.jetstream.read_session import ReadSession, StreamState
from jetcapture_py.verify.incarnation import Incarnation
from jetcapture_py.verify.stream import MARGIN, start_of

GONE_ONCE_ACKED = ("workqueue", "interest")
"""Retention policies that delete acknowledged messages."""
_MICROSECOND = timedelta(microseconds=1)
_LATER = timedelta(days=1)


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
