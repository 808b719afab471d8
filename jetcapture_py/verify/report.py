"""The result of a proof, as JSON and as text. Names are escaped, so they cannot affect a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from itertools import pairwise

from jetcapture_py.config.units import format_time
from jetcapture_py.text import escaped, plural
from jetcapture_py.verify.copies import Copy
from jetcapture_py.verify.lost import FAILING, FILTERS, STRICT, UNKNOWN_FILTERS, Loss
from jetcapture_py.verify.scan import Problem

MOST_RANGES = 10_000
"""Maximum ranges of each kind that are kept; all are counted."""
SHOWN = 20
"""Maximum lines of each kind in the text."""
_count = partial(plural, grouped=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRange:
    """Sequences `first` to `last` (inclusive) with `messages` messages in the stream, None if unknown.

    The times are those of the first and last message, UTC.
    """

    first: int
    last: int
    messages: int | None
    first_time: datetime | None
    last_time: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkFinding:
    """The archive's watermark, and its problem, "" without one."""

    seq: int | None
    time: datetime | None
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCount:
    """`objects` in one layout: in this number of bundles, under their keys if it is 0; None if it is unknown."""

    bundles: int | None
    objects: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a proof.

    `complete`: the stream was available, and every message up to the ack floor is stored intact. `proven`: the stream
    was available, and there was something to compare. `up_to` is the last sequence checked, and `up_to_time` the latest
    timestamp stored up to there. `stored` counts distinct messages of the current incarnation up to there; `missing`
    those in `holes`, of which there are `hole_ranges`, only the first of them listed. `gaps` are sequences that the
    archive skips where the stream no longer has messages. `duplicates` counts further copies, `read_twice` messages
    with copies under different keys or buckets, which readers do not compare (the first are in `copies`), and
    `also_quarantined` those in both archive and quarantine. `quarantined` and `older` (of earlier incarnations) count
    messages; `bytes` is the size of all `objects`; `unsigned` objects have no checksums. `layouts` are those of objects
    outside the quarantine. `losses` is what the server lost or removed of what is archived, `content_compared` counts
    messages compared with the stream, None without a comparison. `unchecked` lists what was not checked, and why.
    """

    stream: str
    consumer: str
    stream_created: str | None
    deep: bool
    complete: bool
    proven: bool
    ack_floor: int | None
    up_to: int | None
    up_to_time: datetime | None
    stored: int
    missing: int
    holes: tuple[SequenceRange, ...]
    hole_ranges: int
    gaps: tuple[SequenceRange, ...]
    gap_ranges: int
    gap_sequences: int
    duplicates: int
    read_twice: int
    copies: tuple[Copy, ...]
    also_quarantined: int
    damaged: tuple[Problem, ...]
    damaged_objects: int
    foreign: tuple[str, ...]
    foreign_files: int
    unsigned: tuple[str, ...]
    unsigned_objects: int
    objects: int
    bytes: int
    quarantined: int
    older: int
    watermark: WatermarkFinding | None
    unchecked: tuple[str, ...]
    layouts: tuple[LayoutCount, ...] = ()
    losses: tuple[Loss, ...] = ()
    content_compared: int | None = None
    undecided: bool = False
    """Nothing is known to be missing, but a change of filters may have skipped messages that the archive lacks."""
    filters: tuple[str, ...] = ()
    """If filters were changed, which subjects the consumer selected where."""

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 0 for a complete archive without messages that are read twice and a server without losses, else 1.

        With `strict`, gaps, foreign files, objects without checksums, forks, a wrong watermark, and doubts about the
        consumer's filters are also failures.
        """
        wrong = self.watermark is not None and bool(self.watermark.problem)
        kinds = {each.kind for each in self.losses}
        doubts = self.gap_ranges or self.foreign_files or self.unsigned_objects or wrong or not STRICT.isdisjoint(kinds)
        failed = not (self.complete or self.undecided) or self.read_twice or not FAILING.isdisjoint(kinds)
        return 1 if failed or (strict and doubts) else 0

    def as_json(self) -> str:
        """Return one JSON object on one line."""
        return json.dumps(asdict(self), default=_plain).replace("\x7f", "\\u007f")

    def as_text(self) -> str:
        """Return the verdict and its details as lines of text."""
        return "\n".join(_lines(self))


def _lines(report: Report) -> Iterator[str]:
    yield _verdict(report)
    checked = "every byte read" if report.deep else "every footer read"
    quarantined = f", {_count(report.quarantined, 'message')} in quarantine" if report.quarantined else ""
    yield f"archive: {_count(report.objects, 'object')}, {report.bytes:,} bytes, {checked}{quarantined}"
    if report.content_compared is not None:
        yield f"content: {_count(report.content_compared, 'message')} compared with the stream"
    if len(report.layouts) > 1:
        parts = ", ".join(_layout(each) for each in report.layouts)
        yield f"layouts: {parts}; readers treat all objects of a bucket with several layouts as one group"
    if report.holes:
        yield "holes: messages in the stream that are missing from the archive"
        yield from (f"  {line}" for line in _holes(report))
    if report.holes and report.stored:
        yield "cause: objects were removed, or another capture of this consumer stores what it receives elsewhere"
    for loss in report.losses:
        yield f"{loss.kind.replace('_', ' ')}: {escaped(loss.summary)}"
        yield from _some([_range(*each) for each in loss.ranges], loss.range_count)
        yield f"  {loss.action}"
    if report.damaged:
        yield "damaged: objects that are not counted until they are restored"
        yield from _some([f"{each.path}: {each.reason}" for each in report.damaged], report.damaged_objects)
    if report.foreign:
        yield "foreign: files that are not objects of this archive"
        yield from _some(list(report.foreign), report.foreign_files)
    if report.unsigned:
        yield "without checksums: objects not written by jetcapture"
        yield from _some(list(report.unsigned), report.unsigned_objects)
    if report.read_twice:
        yield (
            f"read twice: {_count(report.read_twice, 'message')} with copies under different keys or buckets, which "
            'readers return separately; read_archive(dedupe="full") reads them once'
        )
        yield from _some([_copy(each) for each in report.copies], report.read_twice)
    if report.also_quarantined:
        are = "message is" if report.also_quarantined == 1 else "messages are"
        yield f"quarantine: {report.also_quarantined:,} {are} also in the archive and read once from each"
    if report.duplicates:
        dropped = "readers drop those under one key and bucket" if report.read_twice else "readers drop them"
        yield f"duplicates: {_count(report.duplicates, 'further copy', 'further copies')}; {dropped}"
    if report.gaps:
        yield (
            f"unverifiable gaps: {_count(report.gap_sequences, 'sequence')} that the archive skips and the stream "
            "cannot show; deleted messages and messages of other subjects also leave such gaps"
        )
        yield from _some([_range(each.first, each.last) for each in report.gaps], report.gap_ranges)
    if report.filters:
        yield "filters: changed; every range was checked by the subjects that the consumer selected at its time"
        yield from _some(list(report.filters), len(report.filters))
    if report.watermark is not None:
        seq, problem = report.watermark.seq, report.watermark.problem
        yield (
            f"watermark: {escaped(problem)}" if problem else f"watermark: {seq} ({time_text(report.watermark.time)})"
        )
    if report.unchecked:
        yield "not checked:"
        yield from _some(list(report.unchecked), len(report.unchecked))


def _layout(each: LayoutCount) -> str:
    where = "an unknown number of bundles" if each.bundles is None else plural(each.bundles, "bundle", grouped=True)
    return f"{_count(each.objects, 'object')} {f'in {where}' if each.bundles != 0 else 'under keys'}"


def _verdict(report: Report) -> str:
    place = f"up to sequence {report.up_to or 0}" + (f" ({time_text(report.up_to_time)})" if report.up_to_time else "")
    faults = []
    if report.missing:
        faults.append(f"{_count(report.missing, 'message')} in {_count(report.hole_ranges, 'hole')}")
    if report.damaged_objects:
        faults.append(_count(report.damaged_objects, "damaged object"))
    if faults:
        return f"NOT complete: {' and '.join(faults)}, {place}"
    if not report.proven:
        return f"NOT proven: {_count(report.stored, 'message')} {place} are stored, but could not be compared"
    if report.undecided:
        others = _count(sum(loss.messages for loss in report.losses if loss.kind == FILTERS), "other")
        return (
            f"NOT proven: {_count(report.stored, 'message')} {place} are stored; {others} may be missing, "
            "or skipped by a change of filters"
        )
    if not report.complete:
        return f"NOT complete: the watermark promises messages that are not stored; everything {place} is"
    if not report.stored:
        return f"complete: nothing to store {place}"
    every = f"every one of {_count(report.stored, 'message')} {place} is stored"
    buts = [_twice(report)] if report.read_twice else []
    if not FAILING.isdisjoint(each.kind for each in report.losses):
        buts.append("the server has lost messages")
    if UNKNOWN_FILTERS in {loss.kind for loss in report.losses}:
        buts.append("the consumer's earlier filters are unknown")
    return f"complete, but {' and '.join(buts)}: {every}" if buts else f"complete: {every}"


def _twice(report: Report) -> str:
    return f"{report.read_twice:,} {'message is' if report.read_twice == 1 else 'messages are'} read twice"


def _holes(report: Report) -> Iterator[str]:
    """Yield lines for the holes; if there are many, combine the closest ones."""
    holes = report.holes
    distances = [after.first - before.last for before, after in pairwise(holes)]
    close = sorted(distances, reverse=True)[SHOWN - 1] if len(distances) >= SHOWN else 0
    breaks = [index for index, distance in enumerate(distances, 1) if distance > close]
    for start, end in pairwise([0, *breaks, len(holes)]):
        some = holes[start:end]
        line = f"{_range(some[0].first, some[-1].last)}, {_count(sum(each.messages or 0 for each in some), 'message')}"
        line += f" in {len(some):,} holes" if len(some) > 1 else ""
        yield f"{line}, {_times(some[0].first_time, some[-1].last_time)}"
    if report.hole_ranges > len(holes):
        yield f"and {_count(report.hole_ranges - len(holes), 'more hole')} beyond"


def _copy(copy: Copy) -> str:
    return f"{copy.seq} ({time_text(copy.time)}): {', '.join(copy.paths)}"


def _some(lines: list[str], count: int) -> Iterator[str]:
    yield from (f"  {escaped(line)}" for line in lines[:SHOWN])
    if count > SHOWN:
        yield f"  and {count - SHOWN:,} more"


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _times(first: datetime | None, last: datetime | None) -> str:
    return time_text(first) if first == last else f"{time_text(first)} to {time_text(last)}"


def time_text(moment: datetime | None) -> str:
    """Format a time in UTC."""
    return format_time(moment) if moment else "unknown time"


def _plain(value: object) -> str:
    return time_text(value) if isinstance(value, datetime) else str(value)
