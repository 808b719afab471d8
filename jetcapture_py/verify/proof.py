"""Prove that an archive is complete: it has every message of the stream up to the consumer's ack floor.

The ack floor is read before the archive is listed, so everything below it was stored before. Sequences up to there that
the archive lacks are looked up in the stream: a message that exists there is a hole. Where the stream has no messages
any more, the archive only has gaps that cannot be proven.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing
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
from jetcapture_py.verify.findings import Finding, Kind, Report, Severity, are, not_checked, time_text
from jetcapture_py.verify.holes import Details, Missing, find_gaps
from jetcapture_py.verify.lost import find_losses, unselected
from jetcapture_py.verify.ranges import Sequences
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
    mark, mark_findings = await asyncio.to_thread(_read_watermark, storage, config.source.stream)
    findings: list[Finding] = []
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
            findings.append(not_checked(f"the stream: {error}; only the archive itself was checked", Severity.FAILURE))
        scope = Scope.of(known, mark)
        found = await _survey(storage, config.source.stream, scope, writer, progress, deep=deep)
        details = details or Details()
        details.archived = found.sequences
        promised = scope.promised_seq, scope.promised_time
        missing = Missing(found.sequences, scope.floor, seq=promised[0], time=promised[1], details=details)
        history = _history(known, mark) if known else None
        start = (
            await _ask(
                session, config.source.stream, scope, known, history, found.sequences, missing, findings, progress
            )
            if known and session and history
            else None
        )
        differences = (
            await _compare(session, config.source.stream, known, mark, storage, scope, found, findings, progress)
            if content and known and session
            else None
        )
        lost = await find_losses(session, config.source.stream, known, found, mark, findings, differences)
    if history is not None and known is not None and known.state.retention not in GONE_ONCE_ACKED:
        lost = (*lost, *unselected(details.uncertain, history, max(scope.start, known.state.first), scope.top))
    end = (found.sequences.last or 0) if start is None else min(start - 1, scope.top)
    stored = found.sequences.count(scope.start, scope.top) if known else len(found.sequences)
    failed = any(finding.severity is Severity.FAILURE for finding in findings)
    if start is not None and not failed and scope.start <= scope.top < start and not stored and not missing.count:
        findings.append(not_checked(f"any message: neither stream nor archive has one up to {end}", Severity.FAILURE))
    return Report(
        stream=config.source.stream,
        consumer=config.source.consumer,
        stream_created=known.state.created if known else None,
        deep=deep,
        ack_floor=scope.floor if known else None,
        up_to=scope.floor if known else found.sequences.last,
        up_to_time=moment_of(found.newest) if found.newest else None,
        stored=stored,
        quarantined=len(found.quarantined),
        older=found.older,
        objects=found.objects,
        bytes=found.size,
        compared=differences.compared if differences else None,
        layouts=found.layout_counts(),
        filters=tuple(history.lines()) if history is not None and history.changed else (),
        watermark=mark,
        findings=(
            *missing.findings(stored=stored > 0),
            *lost,
            *found.findings(),
            *find_gaps(found.sequences, max(scope.start, found.sequences.first or end + 1), end),
            *mark_findings,
            *_promises(scope, mark, missing),
            *findings,
            *_not_checked(scope, found.sequences.first, start, mark),
        ),
    )


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
    findings: list[Finding],
    progress: Progress | None,
) -> Differences | None:
    """Compare the content of messages; add to `findings` what could not be compared."""
    if scope.life is None:
        return None
    bounds, filters = (known.state.first, known.state.last), filters_of(known.consumer.config)
    before = mark.filters if mark is not None and mark.created == known.state.created else ()
    if not before or before[0].after or any(each.subjects != tuple(sorted(filters)) for each in before):
        filters = ()  # the archive may have other messages as well
    try:
        result = await compare(session, stream, filters, storage, scope.life, found, bounds, progress)
    except SourceError as error:
        findings.append(not_checked(f"the content of messages: {error}"))
        return None
    if result.not_compared:
        objects = plural(result.not_compared, "object")
        findings.append(not_checked(f"content of {objects} not compared: not Parquet, removed, or unreadable"))
    if result.no_payload:
        messages = plural(result.no_payload, "message")
        findings.append(not_checked(f"the payloads of {messages}: the archive does not have them"))
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


def _read_watermark(storage: ArchiveFiles, stream: str) -> tuple[watermark.Watermark | None, list[Finding]]:
    """Read the watermark; return it, or a finding if that fails."""
    try:
        return (None if storage.divided else watermark.read(storage.read_note, stream)), []
    except JetcaptureError as error:
        return None, [_wrong_mark(str(error), Severity.WARNING)]


async def _ask(
    session: ReadSession,
    stream: str,
    scope: Scope,
    known: ServerState,
    history: FilterHistory,
    sequences: Sequences,
    missing: Missing,
    findings: list[Finding],
    progress: Progress | None,
) -> int:
    """Look up in the stream what the archive lacks; return the stream's first sequence after that."""
    first, top = max(scope.start, known.state.first), min(scope.top, known.state.last)
    retention = known.state.retention
    if retention in GONE_ONCE_ACKED:
        findings.append(not_checked(f"the stream: it deletes acknowledged messages (retention {retention})"))
        return scope.top + 1
    first = max(first, _started(sequences, *known.unsure))
    if known.note:
        findings.append(not_checked(known.note))
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
        findings.append(not_checked(f"the stream: {error}", Severity.FAILURE))
        return scope.top + 1
    if now.created != known.state.created:
        findings.append(not_checked("the stream: it was deleted and recreated meanwhile", Severity.FAILURE))
    return now.first


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


def _not_checked(
    scope: Scope, first: int | None, start: int | None, mark: watermark.Watermark | None
) -> Iterator[Finding]:
    """Yield what of the `scope` could not be checked; the archive starts at `first`, the stream now at `start`."""
    if start is not None and first is not None and scope.start < (end := min(start, first)) <= scope.top:
        yield not_checked(
            f"sequences {scope.start} to {end - 1}: the stream no longer has them; the archive starts at {first}"
        )
    if scope.known is not None and (max_deliver := scope.known.consumer.config.get("max_deliver", -1)) > 0:
        yield not_checked(
            f"whether the server gave up on messages: with max_deliver {max_deliver}, the consumer's ack "
            "floor also passes messages that were never stored"
        )
    if scope.known is not None and mark is not None and scope.known.aged is None:
        yield not_checked("whether messages older than the watermark are missing: the stream could not be read")


def _promises(scope: Scope, mark: watermark.Watermark | None, missing: Missing) -> Iterator[Finding]:
    """Yield what the watermark promises and is not stored, or does not exist yet."""
    if mark is None:
        return
    known = scope.known
    if known is not None and mark.created == known.state.created:
        promise = f"it promises everything up to {mark.seq}"
        first_missing = missing.listed[0].first if missing.listed else None
        if missing.promised:
            count = plural(missing.promised, "message", grouped=True)
            yield _wrong_mark(
                f"{promise}, but {count} after the ack floor {scope.floor} {are(missing.promised)} not stored"
            )
        if mark.seq > known.state.last:
            yield _wrong_mark(f"{promise}, but the stream ends at {known.state.last}", Severity.WARNING)
        elif not missing.promised and first_missing is not None and first_missing <= mark.seq:
            yield _wrong_mark(f"{promise}, but {first_missing} is not stored", Severity.WARNING)
    if missing.overdue:
        yield _wrong_mark(
            f"it promises everything up to {time_text(mark.time)}, but "
            f"{plural(missing.overdue, 'earlier message', grouped=True)} of the stream {are(missing.overdue)} not "
            f"stored, starting with {missing.first_overdue}"
        )
    now = known.consumer.asked if known is not None else datetime.now(UTC)
    if mark.time > now + watermark.MARGIN:
        yield _wrong_mark(f"its time, {time_text(mark.time)}, is in the future: a server's clock was wrong")


def _wrong_mark(summary: str, severity: Severity = Severity.FAILURE) -> Finding:
    return Finding(kind=Kind.WATERMARK, severity=severity, summary=summary)
