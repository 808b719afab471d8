"""What a proof's report says, as tests compare it."""

from __future__ import annotations

from collections.abc import Iterable

from jetcapture_py.verify.findings import Finding, Kind, Report, SequenceRange

_OF_STREAM = (
    *(Kind.REWIND, Kind.FORK, Kind.LATE_HOLE, Kind.LOST_STREAM, Kind.CONTENT),
    *(Kind.REMOVED, Kind.FILTERS, Kind.UNKNOWN_FILTERS),
)


def losses_of(report: Report) -> tuple[Finding, ...]:
    return report.of(*_OF_STREAM)


def unchecked(report: Report) -> list[str]:
    return [finding.summary for finding in report.of(Kind.NOT_CHECKED)]


def spans(ranges: Iterable[SequenceRange]) -> tuple[tuple[int, int], ...]:
    return tuple((part.first, part.last) for part in ranges)


def named_files(report: Report, kind: Kind) -> tuple[str, ...]:
    return tuple(file.path for file in report.paths(kind))


def watermark_problems(report: Report) -> str:
    """What is wrong with the watermark, "" without anything."""
    return "; ".join(finding.summary for finding in report.of(Kind.WATERMARK))
