"""Prove that an archive is complete: it has every message of the stream up to the consumer's ack floor.

The ack floor is read before the archive is listed, so everything below it was stored before. Sequences up to there that
the archive lacks are looked up in the stream: a message that exists there is a hole. Where the stream has no messages
any more, the archive only has gaps that cannot be proven.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from threading import Event

from jetcapture_py.archive import watermark
from jetcapture_py.archive.block_writer import UserWriter, make_writer
from jetcapture_py.config.model import Config, SourceConfig
from jetcapture_py.config.units import microseconds_of, moment_of
from jetcapture_py.errors import ConfigError, JetcaptureError, SourceError
from jetcapture_py.jetstream.admin import ConsumerState, consumer_state, filters_of
from jetcapture_py.jetstream.read_session import ReadSession, StreamState
from jetcapture_py.store.reader import ObjectStorage
from jetcapture_py.text import plural
from jetcapture_py.verify.holes import Missing, list_gaps
from jetcapture_py.verify.incarnation import Incarnation
from jetcapture_py.verify.ranges import Sequences
from jetcapture_py.verify.report import LayoutCount, Report, WatermarkFinding, time_text
from jetcapture_py.verify.scan import ArchiveScan, Progress, survey
from jetcapture_py.verify.stream import MARGIN, read, start_of

TIMEOUT = 10.0
"""Seconds without a server's answer, or without progress in a range, after which the stream counts as unavailable."""
CLOSE = 20_000
"""Distance in sequences up to which reading on is cheaper than starting a new range."""
_GONE_ONCE_ACKED = ("workqueue", "interest")
_MICROSECOND = timedelta(microseconds=1)
_LATER = timedelta(days=1)


async def verify(config: Config, *, deep: bool = False, progress: Progress | None = None) -> Report:
    """Compare the stream of `config` with its archive and quarantine.

    `deep` reads every byte of every object. `progress` is called with a stage, and how much of it is done. Raises
    ConfigError, and StoreError if the archive cannot be listed; an unavailable stream is noted in the report.
    """
    writer = _user_writer(config)
    storage = ObjectStorage(config.store.url, config.store.options)
    mark, mark_problem = await asyncio.to_thread(_watermark, storage, config.source.stream)
    notes: list[str] = []
    name = f"jetcapture verify {config.source.stream}/{config.source.consumer}"
    async with AsyncExitStack() as stack:
        known: _Known | None = None
        try:
            session = await stack.enter_async_context(
                ReadSession(config.nats, name, timeout=TIMEOUT, connect_timeout=TIMEOUT / 2)
            )
            known = await _known(session, config.source, mark)
        except SourceError as error:
            notes.append(f"the stream: {error}; only the archive itself was checked")
        scope = _Scope.of(known, mark)
        found = await _survey(storage, config.source.stream, scope, writer, progress, deep=deep)
        missing = Missing(found.sequences, scope.floor, seq=scope.promised_seq, time=scope.promised_time)
        asked = (
            await _ask(session, config.source.stream, scope, known, found.sequences, missing, notes, progress)
            if known
            else None
        )
    return _report(config, scope, found, missing, asked, notes, (mark, mark_problem), deep=deep)


async def _survey(
    storage: ObjectStorage,
    stream: str,
    scope: _Scope,
    writer: UserWriter | None,
    progress: Progress | None,
    *,
    deep: bool,
) -> ArchiveScan:
    """Scan the archive in a thread, which ends soon after this is canceled."""
    cancelled = Event()

    def step(stage: str, done: int, total: int) -> None:
        if cancelled.is_set():
            raise JetcaptureError("cancelled")
        if progress is not None:
            progress(stage, done, total)

    try:
        return await asyncio.to_thread(
            survey, storage, stream, scope.life, scope.top, deep=deep, progress=step, writer=writer
        )
    except asyncio.CancelledError:
        cancelled.set()
        raise


def _user_writer(config: Config) -> UserWriter | None:
    """The user's writer that the configuration names. Raises ConfigError."""
    try:
        writer = make_writer(config.block.format, config.block.compression)
    except ValueError as error:
        raise ConfigError(f"block.format: {error}") from error
    return writer if isinstance(writer, UserWriter) else None


def _watermark(storage: ObjectStorage, stream: str) -> tuple[watermark.Watermark | None, str]:
    """Read the watermark; return it, and an error message if that fails."""
    try:
        data = None if storage.divided else storage.note(watermark.path(stream))
        return (None if data is None else watermark.decode(data, stream)), ""
    except JetcaptureError as error:
        return None, str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
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


async def _known(session: ReadSession, source: SourceConfig, mark: watermark.Watermark | None) -> _Known:
    consumer = consumer_state(await session.request(f"CONSUMER.INFO.{source.stream}.{source.consumer}"))
    state = await session.state(source.stream)
    start, moment, note = start_of(consumer)
    unsure = (1, 0)
    if moment is not None and state.retention not in _GONE_ONCE_ACKED:
        start = await session.first_at(source.stream, moment)
        if note:
            unsure = (start, await session.first_at(source.stream, moment + MARGIN) - 1)
    aged = await _aged(session, source.stream, state, consumer, mark)
    restored = await _restored(session, source.stream, state)
    return _Known(state=state, consumer=consumer, start=start, note=note, unsure=unsure, aged=aged, restored=restored)


async def _restored(session: ReadSession, stream: str, state: StreamState) -> int:
    """Return the last sequence stored before the stream was created; 0 without any, or if it cannot be known."""
    created = datetime.fromisoformat(state.created)
    if state.mirror or state.retention in _GONE_ONCE_ACKED or state.first_time >= created:
        return 0
    return await session.first_at(stream, created) - 1


async def _aged(
    session: ReadSession, stream: str, state: StreamState, consumer: ConsumerState, mark: watermark.Watermark | None
) -> int | None:
    """Return the last sequence that the watermark covers by its time; 0 if it is of another incarnation."""
    if mark is None or mark.created not in ("", state.created):
        return 0
    if state.retention in _GONE_ONCE_ACKED:
        return None
    moment = min(mark.time, consumer.asked + _LATER)  # servers reject some distant times
    with suppress(SourceError):
        return await session.first_at(stream, moment + _MICROSECOND) - 1
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """What to check: the incarnation's messages from `start` to the ack `floor`, and to the watermark's sequence `top`.

    The watermark covers everything up to the sequence `promised_seq` and the time `promised_time` (microseconds).
    """

    life: Incarnation | None
    start: int
    floor: int
    top: int
    known: _Known | None
    promised_seq: int = 0
    promised_time: int = 0

    @classmethod
    def of(cls, known: _Known | None, mark: watermark.Watermark | None) -> _Scope:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Result of reading the stream: its first sequence now, and whether everything could be read (`whole`)."""

    first: int
    whole: bool


async def _ask(
    session: ReadSession,
    stream: str,
    scope: _Scope,
    known: _Known,
    sequences: Sequences,
    missing: Missing,
    notes: list[str],
    progress: Progress | None,
) -> _Asked:
    """Look up in the stream what the archive lacks."""
    first, top = max(scope.start, known.state.first), min(scope.top, known.state.last)
    retention = known.state.retention
    if retention in _GONE_ONCE_ACKED:
        notes.append(f"the stream: it deletes acknowledged messages (retention {retention})")
        return _Asked(first=scope.top + 1, whole=True)
    first = max(first, _started(sequences, *known.unsure))
    if known.note:
        notes.append(known.note)
    try:
        stretches = list(sequences.stretches(first, top, CLOSE)) if first <= top else []
        async for begins, seqs, times in read(session, stream, filters_of(known.consumer.config), stretches):
            missing.look(seqs, times, first, top, begins=begins)
            if progress is not None:
                progress("stream", min(int(seqs[-1]), top) - first + 1, top - first + 1)
        missing.close()
        now = await session.state(stream)
    except SourceError as error:
        missing.close()
        notes.append(f"the stream: {error}")
        return _Asked(first=scope.top + 1, whole=False)
    if now.created != known.state.created:
        notes.append("the stream: it was deleted and recreated meanwhile")
    return _Asked(first=now.first, whole=now.created == known.state.created)


def _started(sequences: Sequences, low: int, high: int) -> int:
    """Return the first captured sequence from `low` to `high`, where the consumer started; without any, `high` + 1."""
    if not sequences.count(low, high):
        return high + 1
    for starts, ends in sequences.gaps(low, high):
        return int(ends[0]) + 1 if int(starts[0]) == low else low
    return low


def _report(
    config: Config,
    scope: _Scope,
    found: ArchiveScan,
    missing: Missing,
    asked: _Asked | None,
    notes: list[str],
    mark: tuple[watermark.Watermark | None, str],
    *,
    deep: bool,
) -> Report:
    known, sequences = scope.known, found.sequences
    first, last = sequences.first, sequences.last
    end = (last or 0) if asked is None else min(asked.first - 1, scope.top)
    gaps, gap_ranges, gap_sequences = list_gaps(sequences, max(scope.start, first or end + 1), end)
    stored = sequences.count(scope.start, scope.top) if known is not None else len(sequences)
    compared = scope.top < scope.start or stored or missing.count or (asked is not None and asked.first <= scope.top)
    proven = asked is not None and asked.whole and not found.restless and bool(compared)
    return Report(
        stream=config.source.stream,
        consumer=config.source.consumer,
        stream_created=known.state.created if known else None,
        deep=deep,
        complete=proven and not (missing.count or found.damaged_count or _promises_too_much(scope, mark[0], missing)),
        proven=proven,
        ack_floor=scope.floor if known else None,
        up_to=scope.floor if known else last,
        up_to_time=moment_of(found.newest) if found.newest else None,
        stored=stored,
        missing=missing.count,
        holes=tuple(missing.found),
        hole_ranges=missing.ranges,
        gaps=tuple(gaps),
        gap_ranges=gap_ranges,
        gap_sequences=gap_sequences,
        duplicates=found.messages - len(sequences),
        read_twice=found.copies.read_twice,
        copies=tuple(found.copies.listed),
        also_quarantined=found.copies.also_quarantined,
        damaged=tuple(found.damaged),
        damaged_objects=found.damaged_count,
        foreign=tuple(found.foreign),
        foreign_files=found.foreign_count,
        unsigned=tuple(found.unsigned),
        unsigned_objects=found.unsigned_count,
        objects=found.objects,
        bytes=found.size,
        quarantined=found.quarantined,
        older=found.older,
        watermark=_judged(scope, mark, missing),
        unchecked=(*notes, *_unchecked(scope, found, asked, mark[0])),
        layouts=tuple(LayoutCount(bundles=n, objects=found.layouts[n]) for n in sorted(found.layouts, key=str)),
    )


def _unchecked(
    scope: _Scope, found: ArchiveScan, asked: _Asked | None, mark: watermark.Watermark | None
) -> Iterator[str]:
    """Yield what could not be checked, and why."""
    first = found.sequences.first
    if asked is not None and first is not None and scope.start < (end := min(asked.first, first)) <= scope.top:
        yield f"sequences {scope.start} to {end - 1}: the stream no longer has them; the archive starts at {first}"
    if scope.known is not None and (max_deliver := scope.known.consumer.config.get("max_deliver", -1)) > 0:
        yield (
            f"whether the server gave up on messages: with max_deliver {max_deliver}, the consumer's ack "
            "floor also passes messages that were never stored"
        )
    if scope.known is not None and mark is not None:
        if scope.known.aged is None:
            yield "whether messages older than the watermark are missing: the stream could not be read"
        now = filters_of(scope.known.consumer.config)
        if mark.filters and mark.filters[-1].subjects != tuple(sorted(now)):
            before = _all(mark.filters[-1].subjects)
            yield f"the watermark: its consumer selected {before}, but the consumer now selects {_all(now)}"
    if found.by_name:
        yield f"{plural(found.by_name, 'object')} in a format whose writer does not read: only the names were checked"
    if found.copies.unread:
        yield f"{found.copies.unread:,} objects that may hold copies: they could not be reread"
    if found.older:
        yield f"{found.older:,} messages of earlier incarnations of the stream: it no longer has them"
    if found.restless:
        yield "objects that disappeared each time the archive was listed"


def _all(filters: tuple[str, ...]) -> str:
    return ", ".join(filters) or "all subjects"


def _judged(scope: _Scope, mark: tuple[watermark.Watermark | None, str], missing: Missing) -> WatermarkFinding | None:
    """Return the watermark with its problems; None without one."""
    found, problem = mark
    if found is None:
        return WatermarkFinding(seq=None, time=None, problem=problem) if problem else None
    return WatermarkFinding(seq=found.seq, time=found.time, problem="; ".join(_problems(scope, found, missing)))


def _problems(scope: _Scope, mark: watermark.Watermark, missing: Missing) -> Iterator[str]:
    """Yield the watermark's problems."""
    known = scope.known
    if known is not None and mark.created == known.state.created:
        promise = f"it promises everything up to {mark.seq}"
        first_missing = missing.found[0].first if missing.found else None
        if mark.seq > known.state.last:
            yield f"{promise}, but the stream ends at {known.state.last}"
        elif missing.promised:
            yield f"{promise}, but {missing.promised:,} messages after the ack floor {scope.floor} are not stored"
        elif first_missing is not None and first_missing <= mark.seq:
            yield f"{promise}, but {first_missing} is not stored"
            if len(mark.filters) > 1:
                yield f"the consumer's filters were changed after sequence {_changed(mark)}"
    if missing.overdue:
        yield (
            f"it promises everything up to {time_text(mark.time)}, but {missing.overdue:,} earlier messages of the "
            f"stream are not stored, starting with {missing.first_overdue}"
        )
    if _is_ahead(scope, mark):
        yield f"its time, {time_text(mark.time)}, is in the future: a server's clock was wrong"


def _is_ahead(scope: _Scope, mark: watermark.Watermark) -> bool:
    """Whether the watermark's time is in the future."""
    now = scope.known.consumer.asked if scope.known is not None else datetime.now(UTC)
    return mark.time > now + watermark.MARGIN


def _promises_too_much(scope: _Scope, mark: watermark.Watermark | None, missing: Missing) -> bool:
    """Whether the watermark covers messages that are not stored, or do not exist yet."""
    return bool(missing.promised or missing.overdue) or (mark is not None and _is_ahead(scope, mark))


def _changed(mark: watermark.Watermark) -> str:
    """List the sequences after which the consumer's filters changed."""
    pairs = pairwise(mark.filters)
    return ", ".join(str(after.after) for before, after in pairs if before.subjects != after.subjects)
