"""Prove that an archive is complete: it has every message of the stream up to the consumer's ack floor.

The ack floor is read before the archive is listed, so everything below it was stored before. Sequences up to there that
the archive lacks are looked up in the stream: a message that exists there is a hole. Where the stream has no messages
any more, the archive only has gaps that cannot be proven.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from threading import Event

from jetcapture_py.archive import watermark
from jetcapture_py.archive.block_writer import UserWriter
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import moment_of
from jetcapture_py.errors import JetcaptureError, SourceError
from jetcapture_py.jetstream.admin import filters_of
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.text import plural
from jetcapture_py.verify.content import Differences, compare
from jetcapture_py.verify.filters import FilterHistory, Stretch
from jetcapture_py.verify.holes import Details, Missing, list_gaps
from jetcapture_py.verify.lost import FILTERS, Loss, are, find_losses, unselected
from jetcapture_py.verify.ranges import Sequences
from jetcapture_py.verify.report import LayoutCount, Report, WatermarkFinding, time_text
from jetcapture_py.verify.scan import ArchiveScan, Progress, survey, user_writer
from jetcapture_py.verify.scope import GONE_ONCE_ACKED, Scope, ServerState, known_state, read

TIMEOUT = 10.0
"""Seconds without a server's answer, or without progress in a range, after which the stream counts as unavailable."""
CLOSE = 20_000
"""Distance in sequences up to which reading on is cheaper than starting a new range."""


async def verify(
    config: Config,
    *,
    deep: bool = False,
    content: bool = False,
    progress: Progress | None = None,
    details: Details | None = None,
) -> Report:
    """Compare the stream of `config` with its archive and quarantine.

    `deep` reads every byte of every object, `content` compares every message in the stream with it. `progress` is
    called with a stage, and how much of it is done. `details` gets sequences. Raises ConfigError, and StoreError if the
    archive cannot be listed; an unavailable stream is noted in the report.
    """
    writer = user_writer(config.block)
    storage = ArchiveFiles(config.store.url, config.store.options)
    mark, mark_problem = await asyncio.to_thread(_watermark, storage, config.source.stream)
    notes: list[str] = []
    name = f"jetcapture verify {config.source.stream}/{config.source.consumer}"
    async with AsyncExitStack() as stack:
        known: ServerState | None = None
        session: ReadSession | None = None
        try:
            session = await stack.enter_async_context(
                ReadSession(config.nats, name, timeout=TIMEOUT, connect_timeout=TIMEOUT / 2)
            )
            known = await known_state(session, config.source, mark)
        except SourceError as error:
            notes.append(f"the stream: {error}; only the archive itself was checked")
        scope = Scope.of(known, mark)
        found = await _survey(storage, config.source.stream, scope, writer, progress, deep=deep)
        details = details or Details()
        details.archived = found.sequences
        promised = scope.promised_seq, scope.promised_time
        missing = Missing(found.sequences, scope.floor, seq=promised[0], time=promised[1], details=details)
        history = _history(known, mark) if known else None
        asked = (
            await _ask(session, config.source.stream, scope, known, history, found.sequences, missing, notes, progress)
            if known and session and history
            else None
        )
        differences = (
            await _compare(session, config.source.stream, known, mark, storage, scope, found, notes, progress)
            if content and known and session
            else None
        )
        lost = await find_losses(session, config.source.stream, known, found, mark, notes, differences)
    if history is not None and known is not None and known.state.retention not in GONE_ONCE_ACKED:
        lost = (*lost, *unselected(details.uncertain, history, max(scope.start, known.state.first), scope.top))
    report = _report(config, scope, found, missing, asked, notes, (mark, mark_problem), lost, deep=deep)
    if history is not None and history.changed:
        report = replace(report, filters=tuple(history.lines()))
    return replace(report, content_compared=differences.compared) if differences else report


def _history(known: ServerState, mark: watermark.Watermark | None) -> FilterHistory:
    """Return which filters selected the messages of the stream's current incarnation."""
    same = mark is not None and mark.created == known.state.created
    return FilterHistory.of(mark if same else None, known.consumer)


async def _compare(
    session: ReadSession,
    stream: str,
    known: ServerState,
    mark: watermark.Watermark | None,
    storage: ArchiveFiles,
    scope: Scope,
    found: ArchiveScan,
    notes: list[str],
    progress: Progress | None,
) -> Differences | None:
    """Compare the content of messages; add to `notes` what could not be compared."""
    if scope.life is None:
        return None
    bounds, filters = (known.state.first, known.state.last), filters_of(known.consumer.config)
    before = mark.filters if mark is not None and mark.created == known.state.created else ()
    if not before or before[0].after or any(each.subjects != tuple(sorted(filters)) for each in before):
        filters = ()  # the archive may have other messages as well
    try:
        result = await compare(session, stream, filters, storage, scope.life, found, bounds, progress)
    except SourceError as error:
        notes.append(f"the content of messages: {error}")
        return None
    if result.untold:
        notes.append(f"the content of {plural(result.untold, 'object')}: not Parquet, gone, or unreadable")
    if result.no_payload:
        notes.append(f"the payloads of {plural(result.no_payload, 'message')}: the archive does not have them")
    return result


async def _survey(
    storage: ArchiveFiles,
    stream: str,
    scope: Scope,
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


def _watermark(storage: ArchiveFiles, stream: str) -> tuple[watermark.Watermark | None, str]:
    """Read the watermark; return it, and an error message if that fails."""
    try:
        return (None if storage.divided else watermark.read(storage.read_note, stream)), ""
    except JetcaptureError as error:
        return None, str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Result of reading the stream: its first sequence now, and whether everything could be read (`whole`)."""

    first: int
    whole: bool


async def _ask(
    session: ReadSession,
    stream: str,
    scope: Scope,
    known: ServerState,
    history: FilterHistory,
    sequences: Sequences,
    missing: Missing,
    notes: list[str],
    progress: Progress | None,
) -> _Asked:
    """Look up in the stream what the archive lacks."""
    first, top = max(scope.start, known.state.first), min(scope.top, known.state.last)
    retention = known.state.retention
    if retention in GONE_ONCE_ACKED:
        notes.append(f"the stream: it deletes acknowledged messages (retention {retention})")
        return _Asked(first=scope.top + 1, whole=True)
    first = max(first, _started(sequences, *known.unsure))
    if known.note:
        notes.append(known.note)
    try:
        for index, parts in enumerate(history.consumers):
            end = top if len(history.consumers) == 1 or index else min(top, scope.floor)
            for part in parts:
                low, high = max(part.first, first), min(part.last, end)
                async with aclosing(_look(session, stream, part, low, high, sequences, missing)) as steps:
                    async for seq in steps:
                        if progress is not None:
                            progress("stream", min(seq, high) - first + 1, top - first + 1)
        now = await session.state(stream)
    except SourceError as error:
        notes.append(f"the stream: {error}")
        return _Asked(first=scope.top + 1, whole=False)
    if now.created != known.state.created:
        notes.append("the stream: it was deleted and recreated meanwhile")
    return _Asked(first=now.first, whole=now.created == known.state.created)


async def _look(
    session: ReadSession, stream: str, part: Stretch, first: int, last: int, sequences: Sequences, missing: Missing
) -> AsyncGenerator[int]:
    """Look up what the archive lacks from `first` to `last`, which lie in `part`; yield sequences that are reached."""
    stretches = list(sequences.stretches(first, last, CLOSE)) if first <= last else []
    if not stretches:
        return
    certain = len(part.candidates) == 1
    if part.telling and not certain:
        async for _, seqs, _, subjects in read(session, stream, part.subjects, [(first, last)]):
            inside = (seqs >= first) & (seqs <= last)
            matches = [mask[inside] for mask in part.matches(subjects)]
            part.learn(seqs[inside], sequences.contains(seqs[inside]), matches)
    try:
        async for begins, seqs, times, subjects in read(session, stream, part.subjects, stretches):
            if certain:
                missing.look(seqs, times, first, last, begins=begins)
            else:
                selected, uncertain = part.judge(seqs, part.matches(subjects))
                either = selected | uncertain
                missing.look(seqs[either], times[either], first, last, begins=begins, uncertain=uncertain[either])
            yield int(seqs[-1])
    finally:
        missing.close()


def _started(sequences: Sequences, low: int, high: int) -> int:
    """Return the first captured sequence from `low` to `high`, where the consumer started; without any, `high` + 1."""
    if not sequences.count(low, high):
        return high + 1
    for starts, ends in sequences.gaps(low, high):
        return int(ends[0]) + 1 if int(starts[0]) == low else low
    return low


def _report(
    config: Config,
    scope: Scope,
    found: ArchiveScan,
    missing: Missing,
    asked: _Asked | None,
    notes: list[str],
    mark: tuple[watermark.Watermark | None, str],
    lost: tuple[Loss, ...],
    *,
    deep: bool,
) -> Report:
    known, sequences = scope.known, found.sequences
    first, last = sequences.first, sequences.last
    end = (last or 0) if asked is None else min(asked.first - 1, scope.top)
    gaps, gap_ranges, gap_sequences = list_gaps(sequences, max(scope.start, first or end + 1), end)
    stored = sequences.count(scope.start, scope.top) if known is not None else len(sequences)
    undecided = any(loss.kind == FILTERS for loss in lost)
    compared = scope.top < scope.start or stored or missing.count or (asked is not None and asked.first <= scope.top)
    proven = asked is not None and asked.whole and not found.restless and bool(compared)
    faulty = missing.count or found.damaged_count or _promises_too_much(scope, mark[0], missing)
    return Report(
        stream=config.source.stream,
        consumer=config.source.consumer,
        stream_created=known.state.created if known else None,
        deep=deep,
        complete=proven and not undecided and not faulty,
        proven=proven,
        undecided=proven and undecided and not faulty,
        ack_floor=scope.floor if known else None,
        up_to=scope.floor if known else last,
        up_to_time=moment_of(found.newest) if found.newest else None,
        stored=stored,
        missing=missing.count,
        holes=tuple(sorted(missing.found, key=lambda hole: hole.first)),
        hole_ranges=missing.ranges,
        gaps=tuple(gaps),
        gap_ranges=gap_ranges,
        gap_sequences=gap_sequences,
        duplicates=found.messages - len(sequences) - len(found.forked),
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
        quarantined=len(found.quarantined),
        older=found.older,
        watermark=_judged(scope, mark, missing),
        unchecked=(*notes, *_unchecked(scope, found, asked, mark[0])),
        losses=lost,
        layouts=tuple(LayoutCount(bundles=n, objects=found.layouts[n]) for n in sorted(found.layouts, key=str)),
    )


def _unchecked(
    scope: Scope, found: ArchiveScan, asked: _Asked | None, mark: watermark.Watermark | None
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
    if scope.known is not None and mark is not None and scope.known.aged is None:
        yield "whether messages older than the watermark are missing: the stream could not be read"
    if found.by_name:
        yield f"{plural(found.by_name, 'object')} in a format whose writer does not read: only the names were checked"
    if found.copies.unread:
        yield f"{found.copies.unread:,} objects that may hold copies: they could not be reread"
    if found.older:
        yield f"{found.older:,} messages of earlier incarnations of the stream: it no longer has them"
    if found.restless:
        yield "objects that disappeared each time the archive was listed"


def _judged(scope: Scope, mark: tuple[watermark.Watermark | None, str], missing: Missing) -> WatermarkFinding | None:
    """Return the watermark with its problems; None without one."""
    found, problem = mark
    if found is None:
        return WatermarkFinding(seq=None, time=None, problem=problem) if problem else None
    return WatermarkFinding(seq=found.seq, time=found.time, problem="; ".join(_problems(scope, found, missing)))


def _problems(scope: Scope, mark: watermark.Watermark, missing: Missing) -> Iterator[str]:
    """Yield the watermark's problems."""
    known = scope.known
    if known is not None and mark.created == known.state.created:
        promise = f"it promises everything up to {mark.seq}"
        first_missing = missing.found[0].first if missing.found else None
        if mark.seq > known.state.last:
            yield f"{promise}, but the stream ends at {known.state.last}"
        elif missing.promised:
            count = plural(missing.promised, "message", grouped=True)
            yield f"{promise}, but {count} after the ack floor {scope.floor} {are(missing.promised)} not stored"
        elif first_missing is not None and first_missing <= mark.seq:
            yield f"{promise}, but {first_missing} is not stored"
    if missing.overdue:
        yield (
            f"it promises everything up to {time_text(mark.time)}, but "
            f"{plural(missing.overdue, 'earlier message', grouped=True)} of the stream {are(missing.overdue)} not "
            f"stored, starting with {missing.first_overdue}"
        )
    if _is_ahead(scope, mark):
        yield f"its time, {time_text(mark.time)}, is in the future: a server's clock was wrong"


def _is_ahead(scope: Scope, mark: watermark.Watermark) -> bool:
    """Whether the watermark's time is in the future."""
    now = scope.known.consumer.asked if scope.known is not None else datetime.now(UTC)
    return mark.time > now + watermark.MARGIN


def _promises_too_much(scope: Scope, mark: watermark.Watermark | None, missing: Missing) -> bool:
    """Whether the watermark covers messages that are not stored, or do not exist yet."""
    return bool(missing.promised or missing.overdue) or (mark is not None and _is_ahead(scope, mark))
