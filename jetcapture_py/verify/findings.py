"""The result of a proof: a list of findings as JSON or text; the worst one decides the exit code.

Names are escaped, so they cannot affect a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum, StrEnum
from itertools import pairwise
from typing import Any

from jetcapture_py.archive.watermark import NEVER, ConsumerWatermark
from jetcapture_py.config.units import format_time
from jetcapture_py.text import escaped, plural, size

MAX_LISTED = 10_000
"""Maximum ranges or paths listed by a finding; all are counted."""
MAX_SHOWN = 20
"""Maximum lines of a finding in the text."""

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the amount done, and the total. From any thread."""


def ignore(stage: str, done: int, total: int) -> None:
    """Show no progress."""


class Severity(IntEnum):
    """The effect of a finding on the exit code."""

    NOTE = 0
    WARNING = 1
    """Fails a strict proof."""
    FAILURE = 2
    """Fails every proof."""


class Kind(StrEnum):
    """The subject of a finding, in the order of the report."""

    HOLES = "holes"
    """Acknowledged messages of the stream that are not in the archive."""
    REWIND = "rewind"
    """The stream ends before the archive does."""
    FORK = "fork"
    """Sequences of two different messages each."""
    LATE_HOLE = "late_hole"
    """Archived messages missing from a stream with damaged data."""
    REMOVED = "removed"
    """Archived messages missing from the stream, deleted by a client or lost: the server does not record which."""
    LOST_STREAM = "lost_stream"
    """The archive has messages of a stream that no longer exists."""
    CONTENT = "content"
    """Messages that differ between stream and archive."""
    FILTERS = "filters"
    """Messages that the consumer may have skipped when its filters were changed."""
    UNKNOWN_FILTERS = "unknown_filters"
    """The consumer's filters are unknown for some messages."""
    DAMAGED = "damaged"
    """Objects that have changed since they were stored, or were not written by jetcapture."""
    FOREIGN = "foreign"
    """Files that are not objects of the archive."""
    READ_TWICE = "read_twice"
    """Messages with copies that readers do not compare."""
    QUARANTINE = "quarantine"
    """Messages in both archive and quarantine."""
    DUPLICATES = "duplicates"
    """Further copies of messages."""
    EXPIRED = "expired"
    """Messages that were removed with buckets older than `maintain.keep`."""
    ERASED = "erased"
    """Messages that were erased; a failure if they can still be read."""
    GAPS = "unverifiable_gaps"
    """Sequences that the archive skips where the stream no longer has messages."""
    WATERMARK = "watermark"
    """A watermark that is unreadable, or promises too much."""
    CONSUMER = "consumer"
    """Messages that the server deleted with the consumer, or would delete with it."""
    TABLE = "table"
    """Differences between the table and the archive."""
    NOT_CHECKED = "not_checked"
    """Skipped checks with the reason. A failure if the proof is void without the check."""


class Verdict(StrEnum):
    """The result of a proof in one word."""

    COMPLETE = "complete"
    """Every message up to the ack floor is stored intact."""
    INCOMPLETE = "incomplete"
    """Messages are missing or damaged, or the watermark promises more than is stored."""
    UNPROVEN = "unproven"
    """The stream was not available, there was nothing to compare, or messages may have been skipped."""


LOSSES = frozenset({Kind.REWIND, Kind.LATE_HOLE, Kind.CONTENT})
"""Losses of the server. Forks and lost streams are history: they cannot be undone."""
_GONE = {Kind.EXPIRED: ("expired", "expired"), Kind.ERASED: ("was erased", "were erased")}


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRange:
    """A range of sequences."""

    first: int
    last: int
    """Inclusive."""
    messages: int | None = None
    """Messages of the stream in it, None if unknown."""
    first_time: datetime | None = None
    """Timestamp of the first message, UTC."""
    last_time: datetime | None = None
    """Timestamp of the last message, UTC."""
    paths: tuple[str, ...] = ()
    """Objects that have the range, for messages that are read twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePath:
    """An object or another file."""

    path: str
    """Relative to the archive's root."""
    reason: str = ""
    """Reason for listing it, unless the finding has it."""


@dataclass(slots=True)
class FileList:
    """The first files of a kind, and the number of all."""

    paths: list[FilePath] = field(default_factory=list)
    """At most `MAX_LISTED`."""
    count: int = 0
    """Number of all files."""

    def add(self, path: str, reason: str = "") -> None:
        """Count a file, and list it up to the maximum."""
        self.count += 1
        if len(self.paths) < MAX_LISTED:
            self.paths.append(FilePath(path=path, reason=reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A finding of a check."""

    kind: Kind
    severity: Severity
    summary: str
    """Description in one line."""
    action: str = ""
    """Remedy in one line."""
    count: int = 0
    """Number of messages, sequences, objects or files, depending on the kind."""
    ranges: tuple[SequenceRange, ...] = ()
    """The first ranges of sequences."""
    range_count: int = 0
    """Number of all ranges."""
    paths: tuple[FilePath, ...] = ()
    """The first objects or files."""

    @property
    def is_unproven(self) -> bool:
        """Whether the proof is void without this check."""
        return self.kind is Kind.NOT_CHECKED and self.severity is Severity.FAILURE

    def fields(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        listed = {name: [_fields(entry) for entry in values[name]] for name in ("ranges", "paths")}
        return {**values, "severity": self.severity.name.lower(), **listed}

    def lines(self) -> Iterator[str]:
        yield f"{self.kind.replace('_', ' ')}: {escaped(self.summary)}"
        if self.kind is Kind.HOLES:
            yield from _holes(self)
        else:
            yield from indented([_range_text(part) for part in self.ranges], self.range_count)
        files = [f"{file.path}: {file.reason}" if file.reason else file.path for file in self.paths]
        yield from indented(files, self.count if files else 0)
        if self.action:
            yield f"  {self.action}"


def not_checked(summary: str, severity: Severity = Severity.NOTE) -> Finding:
    """Return the finding of a skipped check; a failure if the proof is void without it."""
    return Finding(kind=Kind.NOT_CHECKED, severity=severity, summary=summary)


def file_findings(kind: Kind, severity: Severity, files: FileList, summary: str, action: str = "") -> Iterator[Finding]:
    """Yield a finding of these files, if any."""
    if files.count:
        paths = tuple(sorted(files.paths, key=lambda file: file.path))
        yield Finding(kind=kind, severity=severity, summary=summary, action=action, count=files.count, paths=paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a proof."""

    stream: str
    consumer: str
    stream_created: str | None
    """The stream's creation time; None if it is unavailable."""
    deep: bool
    """Whether every byte was read."""
    ack_floor: int | None
    """The consumer's ack floor; None if it is unavailable."""
    up_to: int | None
    """The last sequence checked; None without any."""
    up_to_time: datetime | None
    """The latest timestamp stored up to `up_to`, UTC."""
    stored: int
    """Distinct messages of the current incarnation up to `up_to`."""
    quarantined: int
    """Messages in quarantine that are not in the archive."""
    older: int
    """Messages of earlier incarnations."""
    objects: int
    bytes: int
    """Size of all objects."""
    rescued: int = 0
    """Rows of Parquet objects with values that did not fit their columns."""
    rescued_example: str | None = None
    """Those values of one of the rows."""
    compared: int | None = None
    """Messages whose content was compared with the stream, None without a comparison."""
    layouts: Mapping[str, int] = field(default_factory=dict)
    """Objects outside the quarantine, by layout: under keys, or in a number of bundles."""
    filters: tuple[str, ...] = ()
    """The selected subjects of each range, if filters were changed."""
    watermark: ConsumerWatermark | None = None
    """The consumer's watermark; None without a readable one."""
    findings: tuple[Finding, ...] = ()
    """All findings of the checks."""

    def of(self, *kinds: Kind) -> tuple[Finding, ...]:
        """Return the findings of these kinds."""
        return tuple(finding for finding in self.findings if finding.kind in kinds)

    def count(self, *kinds: Kind) -> int:
        """Return the total of the findings of these kinds."""
        return sum(finding.count for finding in self.of(*kinds))

    def ranges(self, *kinds: Kind) -> tuple[SequenceRange, ...]:
        """Return the ranges that findings of these kinds list."""
        return tuple(part for finding in self.of(*kinds) for part in finding.ranges)

    def paths(self, *kinds: Kind) -> tuple[FilePath, ...]:
        """Return the files that findings of these kinds list."""
        return tuple(file for finding in self.of(*kinds) for file in finding.paths)

    @property
    def missing(self) -> int:
        """Messages that the stream has and the archive lacks."""
        return self.count(Kind.HOLES)

    @property
    def proven(self) -> bool:
        """Whether the stream was available, and there was something to compare."""
        return not any(finding.is_unproven for finding in self.findings)

    @property
    def verdict(self) -> Verdict:
        if self.of(Kind.HOLES, Kind.DAMAGED):
            return Verdict.INCOMPLETE
        if not self.proven:
            return Verdict.UNPROVEN
        if any(finding.severity is Severity.FAILURE for finding in self.of(Kind.WATERMARK)):
            return Verdict.INCOMPLETE
        return Verdict.UNPROVEN if self.of(Kind.FILTERS) else Verdict.COMPLETE

    @property
    def complete(self) -> bool:
        """Whether every message up to the ack floor is proven to be stored intact."""
        return self.verdict is Verdict.COMPLETE

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 1 if any finding is a failure, or a warning with `strict`; else 0."""
        failing = Severity.WARNING if strict else Severity.FAILURE
        return int(any(finding.severity >= failing for finding in self.findings))

    def as_json(self, *, strict: bool = False, **further: Any) -> str:
        """Return one JSON object on one line, with `further` fields."""
        mark = self.watermark
        fields = {
            "verdict": self.verdict.value,
            "exit_code": self.exit_code(strict=strict),
            "stream": self.stream,
            "consumer": self.consumer,
            "stream_created": self.stream_created,
            "deep": self.deep,
            "ack_floor": self.ack_floor,
            "up_to": self.up_to,
            "up_to_time": self.up_to_time,
            "counts": {
                "stored": self.stored,
                "missing": self.missing,
                "expired": self.count(Kind.EXPIRED),
                "erased": self.count(Kind.ERASED),
                "duplicates": self.count(Kind.DUPLICATES),
                "quarantined": self.quarantined,
                "older": self.older,
                "rescued": self.rescued,
                "compared": self.compared,
                "objects": self.objects,
                "damaged_objects": self.count(Kind.DAMAGED),
                "bytes": self.bytes,
            },
            "layouts": dict(self.layouts),
            "filters": self.filters,
            "watermark": None if mark is None else {"seq": mark.seq, "time": None if mark.time == NEVER else mark.time},
            "findings": [finding.fields() for finding in self.findings],
            **further,
        }
        return json.dumps(fields, default=_plain).replace("\x7f", "\\u007f")

    def as_text(self) -> str:
        """Return the verdict and its details as lines of text."""
        return "\n".join(_lines(self))


def _lines(report: Report) -> Iterator[str]:
    yield _verdict(report)
    checked = "every byte read" if report.deep else "every footer read"
    quarantined = f", {plural(report.quarantined, 'message')} in quarantine" if report.quarantined else ""
    yield f"archive: {plural(report.objects, 'object')}, {size(report.bytes)}, {checked}{quarantined}"
    if report.rescued:
        example = f", such as {report.rescued_example}" if report.rescued_example else ""
        yield f"columns: {plural(report.rescued, 'row')} with values that did not fit, in _nats_rescued{example}"
    if report.compared is not None:
        yield f"content: {plural(report.compared, 'message')} compared with the stream"
    if len(report.layouts) > 1:
        parts = ", ".join(f"{plural(objects, 'object')} {where}" for where, objects in report.layouts.items())
        yield f"layouts: {parts}; readers treat all objects of a time slice with several layouts as one group"
    if report.filters:
        yield "filters: changed; every range was checked by the subjects that the consumer selected at its time"
        yield from indented(report.filters, len(report.filters))
    if report.watermark is not None and not report.of(Kind.WATERMARK):
        time = "" if report.watermark.time == NEVER else f" ({time_text(report.watermark.time)})"
        yield f"watermark: {report.watermark.seq}{time}"
    for finding in report.findings:
        if finding.kind is not Kind.NOT_CHECKED:
            yield from finding.lines()
    if reasons := [finding.summary for finding in report.of(Kind.NOT_CHECKED)]:
        yield "not checked:"
        yield from indented(reasons, len(reasons))


def _verdict(report: Report) -> str:
    end = f"up to sequence {report.up_to or 0}" + (f" ({time_text(report.up_to_time)})" if report.up_to_time else "")
    stored = plural(report.stored, "message")
    are_stored = f"{end} {are(report.stored)} stored"
    faults = [
        f"{plural(hole.count, 'message')} in {plural(hole.range_count, 'hole')}" for hole in report.of(Kind.HOLES)
    ]
    faults += [plural(damage.count, "damaged object") for damage in report.of(Kind.DAMAGED)]
    if faults:
        return f"NOT complete: {' and '.join(faults)}, {end}"
    if not report.proven:
        return f"NOT proven: {stored} {are_stored}, but could not be compared"
    if report.verdict is Verdict.INCOMPLETE:
        return f"NOT complete: the watermark promises messages that are not stored; everything {end} is"
    if report.verdict is Verdict.UNPROVEN:
        others = plural(report.count(Kind.FILTERS), "other")
        return f"NOT proven: {stored} {are_stored}; {others} may be missing, or skipped by a change of filters"
    gone = [plural(report.count(kind), *words) for kind, words in _GONE.items() if report.count(kind)]
    if not report.stored:
        return f"complete: nothing to store {end}" + (f"; {' and '.join(gone)}" if gone else "")
    every = f"every one of {stored} {end} is stored" + (f"; {' and '.join(gone)}" if gone else "")
    twice = report.count(Kind.READ_TWICE)
    buts = [f"{twice:,} {'message is' if twice == 1 else 'messages are'} read twice"] if twice else []
    buts += ["erased messages can still be read"] if any(finding.severity for finding in report.of(Kind.ERASED)) else []
    buts += ["the server has lost messages"] if report.of(*LOSSES) else []
    buts += ["the consumer was deleted meanwhile"] if report.count(Kind.CONSUMER) else []
    buts += ["the consumer's earlier filters are unknown"] if report.of(Kind.UNKNOWN_FILTERS) else []
    return f"complete, but {' and '.join(buts)}: {every}" if buts else f"complete: {every}"


def _holes(finding: Finding) -> Iterator[str]:
    """Yield lines for the holes; if there are many, combine the closest ones."""
    holes = finding.ranges
    distances = [after.first - before.last for before, after in pairwise(holes)]
    close = sorted(distances, reverse=True)[MAX_SHOWN - 1] if len(distances) >= MAX_SHOWN else 0
    breaks = [index for index, distance in enumerate(distances, 1) if distance > close]
    for start, end in pairwise([0, *breaks, len(holes)]):
        some = holes[start:end]
        messages = plural(sum(hole.messages or 0 for hole in some), "message")
        line = f"  {span_text(some[0].first, some[-1].last)}, {messages}"
        line += f" in {len(some):,} holes" if len(some) > 1 else ""
        first, last = time_text(some[0].first_time), time_text(some[-1].last_time)
        yield f"{line}, {first}" if first == last else f"{line}, {first} to {last}"
    if finding.range_count > len(holes):
        yield f"  and {plural(finding.range_count - len(holes), 'more hole')} beyond"


def indented(lines: Sequence[str], count: int) -> Iterator[str]:
    """Yield the first of these `lines`, escaped, and the number of omitted ones out of `count`."""
    yield from (f"  {escaped(line)}" for line in lines[:MAX_SHOWN])
    if count > MAX_SHOWN:
        yield f"  and {count - MAX_SHOWN:,} more"


def _range_text(part: SequenceRange) -> str:
    text = span_text(part.first, part.last)
    return f"{text} ({time_text(part.first_time)}): {', '.join(part.paths)}" if part.paths else text


def span_text(first: int, last: int) -> str:
    """Return a range of sequences as text."""
    return str(first) if first == last else f"{first} to {last}"


def time_text(moment: datetime | None) -> str:
    """Format a time in UTC."""
    return format_time(moment) if moment else "unknown time"


def are(messages: int) -> str:
    """Return "is" or "are" for a count."""
    return "is" if messages == 1 else "are"


def _fields(part: SequenceRange | FilePath) -> dict[str, Any]:
    """Return the known fields of a range or a file."""
    values = ((name, getattr(part, name)) for name in part.__dataclass_fields__)
    return {name: value for name, value in values if value not in (None, (), "")}


def _plain(value: object) -> str:
    return time_text(value) if isinstance(value, datetime) else str(value)
