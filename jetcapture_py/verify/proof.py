"""Prove that an archive is complete: it has every message of the stream up to the consumer's ack floor.

The ack floor is read before the archive is listed, so everything below it was already stored. Missing sequences up to
the ack floor are looked up in the stream: an existing message is a hole. If the stream no longer has messages there,
the gaps cannot be explained.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Event

from jetcapture_py.archive.block_writer import UserWriter, make_writer
from jetcapture_py.archive.watermark import MARGIN, ConsumerWatermark, Stretch, Watermark, union
from jetcapture_py.capture.watermark import abandoned
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import moment_of
from jetcapture_py.errors import ConfigError, JetcaptureError, SourceError
from jetcapture_py.jetstream.consumer import filters_of
from jetcapture_py.jetstream.range_reader import StreamRange
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.text import plural
from jetcapture_py.threads import in_thread
from jetcapture_py.verify.content import Differences, compare
from jetcapture_py.verify.examine import ObjectExaminer
from jetcapture_py.verify.filters import FilterHistory, selected
from jetcapture_py.verify.findings import (
    Finding,
    Kind,
    Progress,
    Report,
    Severity,
    are,
    ignore,
    not_checked,
    time_text,
)
from jetcapture_py.verify.holes import HoleFinder, find_gaps
from jetcapture_py.verify.lost import find_losses, unselected
from jetcapture_py.verify.ranges import Sequences
from jetcapture_py.verify.scan import ArchiveScan, survey
from jetcapture_py.verify.scope import GONE_ONCE_ACKED, Removed, Scope, ServerState, read, server_state

SERVER_TIMEOUT_S = 10.0
"""Seconds without a server's answer, or without progress in a range, after which the stream counts as unavailable."""
MAX_READ_ON = 20_000
"""Distance in sequences up to which reading on is cheaper than starting a new range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A proof's report, and the sequences behind it."""

    report: Report
    accounted: Sequences
    """Archived messages of the stream, and messages removed on purpose."""
    missing: Sequences
    """Messages of the stream that are missing from the archive."""
    doubtful: Sequences
    """Messages possibly skipped near a change of the consumer's filters."""


async def verify(config: Config, *, deep: bool = False, content: bool = False, progress: Progress = ignore) -> Report:
    """Return the report of `prove`."""
    return (await prove(config, deep=deep, content=content, progress=progress)).report


async def prove(config: Config, *, deep: bool = False, content: bool = False, progress: Progress = ignore) -> Evidence:
    """Compare the stream of `config` with its archive and quarantine.

    `deep` reads every byte of every object; `content` compares every message in the stream with the archive. `progress`
    is called with a stage and its progress. Raises ConfigError, and StoreError if the archive cannot be listed;
    an unavailable stream is noted in the report.
    """
    stream, consumer = config.source.stream, config.source.consumer
    suffix = own_suffix(config)
    storage = ArchiveFiles(config.store.url, config.store.options)
    archived, findings = await in_thread(_read_watermark, storage, stream)
    mark = None if archived is None else archived.of(consumer)
    session = history = differences = start = None
    async with AsyncExitStack() as stack:
        server: ServerState | None = None
        try:
            name = f"jetcapture verify {stream}/{consumer}"
            session = await stack.enter_async_context(
                ReadSession(config.nats, name, timeout=SERVER_TIMEOUT_S, connect_timeout=SERVER_TIMEOUT_S / 2)
            )
            server = await server_state(session, stream, consumer, archived)
            if archived is not None:
                lines = await abandoned(session.api, archived, consumer, config.store.url, config.store.options)
                findings += [
                    Finding(kind=Kind.CONSUMER, severity=Severity.NOTE, summary=line) for line in lines.values()
                ]
        except SourceError as error:
            findings.append(not_checked(f"the stream: {error}; only the archive itself was checked", Severity.FAILURE))
        scope = Scope.of(server, mark)
        erased = await in_thread(storage.erased, stream)
        reader = ObjectExaminer(storage, scope.incarnation, erased)
        scan = await _survey(reader, stream, scope.top, progress, own_suffix=suffix, deep=deep)
        example = await in_thread(scan.rescued_example, storage)
        removed = await in_thread(Removed.read, storage, stream, scope.incarnation)
        kept = Sequences.union(scan.sequences, removed.expired)
        accounted = Sequences.union(kept, removed.erased)
        holes = HoleFinder(kept, removed.tombstones, scope.floor, seq=scope.promised_seq, time=scope.promised_time)
        if session is not None and server is not None:
            history = FilterHistory.of(server.mark, server.consumer)
            comparison = _Comparison(session, stream, server, scope, scan, history, holes, progress)
            start = await comparison.find_holes()
            differences = await comparison.compare_content(storage) if content else None
            findings += comparison.findings
        findings += await find_losses(session, stream, scope, scan, mark, differences)
    if server is not None and history is not None and server.state.retention not in GONE_ONCE_ACKED:
        findings += unselected(holes.doubtful, history, max(scope.start, server.state.first), scope.top)
    end = (scan.sequences.last or 0) if server is None else scope.top
    end = end if start is None else min(start - 1, end)
    stored = len(scan.sequences) if server is None else scan.sequences.count(scope.start, scope.top)
    unavailable = any(finding.is_unproven for finding in findings)
    none = not accounted.count(scope.start, scope.top) and not holes.count
    if start is not None and not unavailable and scope.start <= scope.top < start and none:
        findings.append(not_checked(f"any message: neither stream nor archive has one up to {end}", Severity.FAILURE))
    findings += holes.findings(stored=stored > 0)
    findings += scan.findings()
    findings += removed.findings(scan.sequences, scan.totals.erased, scan.unerased)
    findings += find_gaps(accounted, max(scope.start, accounted.first or end + 1), end)
    findings += _promises(scope, mark, holes)
    findings += _not_checked(scope, accounted.first, start, mark)
    report = Report(
        stream=stream,
        consumer=consumer,
        stream_created=server.state.created if server is not None else None,
        deep=deep,
        ack_floor=scope.floor if server is not None else None,
        up_to=scope.floor if server is not None else scan.sequences.last,
        up_to_time=moment_of(scan.newest) if scan.newest else None,
        stored=stored,
        quarantined=len(scan.quarantined) - len(scan.copies.in_both),
        older=scan.totals.older,
        rescued=scan.totals.rescued,
        rescued_example=example,
        objects=scan.totals.objects,
        bytes=scan.totals.size,
        compared=differences.compared if differences else None,
        layouts=scan.layout_counts(),
        filters=tuple(history.lines()) if history is not None and history.changed else (),
        watermark=mark,
        findings=tuple(sorted(findings, key=lambda finding: [*Kind].index(finding.kind))),
    )
    return Evidence(report=report, accounted=accounted, missing=holes.missing, doubtful=holes.doubtful)


def own_suffix(config: Config) -> str:
    """Return the suffix of a custom writer's objects; "" for a built-in format.

    Raises ConfigError.
    """
    try:
        writer = make_writer(config.block.format, config.block.compression)
    except ValueError as error:
        raise ConfigError(f"block.format: {error}") from error
    return writer.suffix if isinstance(writer, UserWriter) else ""


def _read_watermark(storage: ArchiveFiles, stream: str) -> tuple[Watermark | None, list[Finding]]:
    """Read the watermark; return it, or a finding if that fails."""
    try:
        return storage.watermark(stream, future=True), []
    except JetcaptureError as error:
        return None, [_wrong_mark(str(error), Severity.WARNING)]


async def _survey(
    reader: ObjectExaminer, stream: str, bound: int, progress: Progress, *, own_suffix: str, deep: bool
) -> ArchiveScan:
    """Scan the archive in a thread, which ends soon after a cancellation."""
    cancelled = Event()

    def step(stage: str, done: int, total: int) -> None:
        if cancelled.is_set():
            raise JetcaptureError("cancelled")
        progress(stage, done, total)

    try:
        return await in_thread(survey, reader, stream, bound, own_suffix=own_suffix, deep=deep, progress=step)
    except asyncio.CancelledError:
        cancelled.set()
        raise


@dataclass(slots=True)
class _Comparison:
    """Compares the archive with an available stream."""

    session: ReadSession
    stream: str
    server: ServerState
    scope: Scope
    scan: ArchiveScan
    history: FilterHistory
    """The filters of the stream's current incarnation over time."""
    holes: HoleFinder
    progress: Progress
    findings: list[Finding] = field(default_factory=list)
    """Findings of skipped comparisons."""

    async def find_holes(self) -> int | None:
        """Look up missing sequences in the stream; return its first sequence afterwards, None on failure.

        A stream that deletes acknowledged messages is not read, and counts as empty.
        """
        state, scope = self.server.state, self.scope
        if state.retention in GONE_ONCE_ACKED:
            reason = f"the stream: it deletes acknowledged messages (retention {state.retention})"
            self.findings.append(not_checked(reason))
            return scope.top + 1
        first, top = max(scope.start, state.first), min(scope.top, state.last)
        first = max(first, _started(self.scan.sequences, *self.server.unsure))
        if self.server.note:
            self.findings.append(not_checked(self.server.note))
        try:
            for part in self.history.parts:
                low, high = max(part.first, first), min(part.last, top)
                async with aclosing(self._look_up(part, low, high)) as steps:
                    async for seq in steps:
                        self.progress("stream", min(seq, high) - first + 1, top - first + 1)
            now = await self.session.state(self.stream)
        except SourceError as error:
            reason = str(error)
        else:
            if now.created == state.created:
                return now.first
            reason = "it was deleted and recreated meanwhile"
        summary = f"the stream: {reason}; what the archive lacks could not be compared with it"
        self.findings.append(not_checked(summary, Severity.FAILURE))
        return None

    async def _look_up(self, part: Stretch, first: int, last: int) -> AsyncGenerator[int]:
        """Look up missing sequences from `first` to `last`, inside `part`; yield sequences as progress."""
        gaps = list(self.holes.archived.stretches(first, last, MAX_READ_ON)) if first <= last else []
        if not gaps:
            return
        try:
            async for begins, seqs, times, subjects in read(self.session, self.stream, union(part.candidates), gaps):
                if begins:
                    self.holes.close()
                mask = selected(part, subjects)
                self.holes.compare(seqs[mask], times[mask], first, last, doubtful=part.doubtful)
                yield int(seqs[-1])
        finally:
            self.holes.close()

    async def compare_content(self, storage: ArchiveFiles) -> Differences | None:
        """Compare the content of messages; None on failure."""
        filters, mark = filters_of(self.server.consumer.config), self.server.mark
        before = mark.filters if mark is not None else ()
        if not before or before[0].after or any(entry.subjects != tuple(sorted(filters)) for entry in before):
            filters = ()  # the archive may have other messages as well
        messages = StreamRange(
            stream=self.stream, first=self.server.state.first, end=self.server.state.last + 1, subjects=filters
        )
        try:
            result = await compare(self.session, messages, storage, self.server.incarnation, self.scan, self.progress)
        except SourceError as error:
            self.findings.append(not_checked(f"the content of messages: {error}", Severity.WARNING))
            return None
        reasons = []
        if result.not_compared:
            objects = plural(result.not_compared, "object")
            reasons.append(f"content of {objects} not compared: not Parquet, removed, or unreadable")
        if result.no_payload:
            reasons.append(f"the payloads of {plural(result.no_payload, 'message')}: the archive does not have them")
        if not result.compared and len(self.scan.sequences):
            reasons.append("the content of any message: the stream has none of the archived messages any more")
        self.findings += [not_checked(reason, Severity.WARNING) for reason in reasons]
        return result


def _started(sequences: Sequences, low: int, high: int) -> int:
    """Return the consumer's start: the first captured sequence from `low` to `high`, else `high` + 1."""
    if not sequences.count(low, high):
        return high + 1
    for starts, ends in sequences.gaps(low, high):
        return int(ends[0]) + 1 if int(starts[0]) == low else low
    return low


def _not_checked(
    scope: Scope, first: int | None, start: int | None, mark: ConsumerWatermark | None
) -> Iterator[Finding]:
    """Yield findings of skipped checks in the `scope`; the archive starts at `first`, the stream now at `start`."""
    if start is not None and first is not None and scope.start < (end := min(start, first)) <= scope.top:
        yield not_checked(
            f"sequences {scope.start} to {end - 1}: the stream no longer has them; the archive starts at {first}"
        )
    if scope.server is not None and (max_deliver := scope.server.consumer.config.get("max_deliver", -1)) > 0:
        yield not_checked(
            f"whether the server gave up on messages: with max_deliver {max_deliver}, the consumer's ack "
            "floor also passes messages that were never stored"
        )
    if scope.server is not None and mark is not None and scope.server.aged is None:
        yield not_checked("whether messages older than the watermark are missing: the stream could not be read")


def _promises(scope: Scope, mark: ConsumerWatermark | None, holes: HoleFinder) -> Iterator[Finding]:
    """Yield sequences that the watermark covers but that are not stored, or do not exist yet."""
    if mark is None:
        return
    server = scope.server
    if server is not None and server.mark is not None:
        promise = f"it promises everything up to {mark.seq}"
        first_missing = holes.listed[0].first if holes.listed else None
        if holes.promised:
            count = plural(holes.promised, "message")
            yield _wrong_mark(
                f"{promise}, but {count} after the ack floor {scope.floor} {are(holes.promised)} not stored"
            )
        if mark.seq > server.state.last:
            yield _wrong_mark(f"{promise}, but the stream ends at {server.state.last}", Severity.WARNING)
        elif not holes.promised and first_missing is not None and first_missing <= mark.seq:
            yield _wrong_mark(f"{promise}, but sequence {first_missing} is not stored", Severity.WARNING)
    if len(overdue := holes.overdue):
        yield _wrong_mark(
            f"it promises everything up to {time_text(mark.time)}, but "
            f"{plural(len(overdue), 'earlier message')} of the stream {are(len(overdue))} not "
            f"stored, starting with {overdue[0]}"
        )
    now = server.consumer.asked if server is not None else datetime.now(UTC)
    if mark.time > now + MARGIN:
        yield _wrong_mark(f"its time, {time_text(mark.time)}, is in the future: a server's clock was wrong")


def _wrong_mark(summary: str, severity: Severity = Severity.FAILURE) -> Finding:
    return Finding(kind=Kind.WATERMARK, severity=severity, summary=summary)
