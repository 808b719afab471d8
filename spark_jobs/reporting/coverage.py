"""Find exactly which of a stream's sequences are stored, reading as little as possible.

Overlapping objects form a *run*. By names and footers, a run with as many messages as sequences in its range has no
holes. Only the sequences of other runs are read, and Spark finds the gaps in them. A stream that is deleted and
recreated starts again at sequence 1: each of its incarnations (`IncarnationCoverage`) is examined separately.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import nlargest
from itertools import islice, pairwise, takewhile

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as sf

from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.messages import runs
from jetcapture_py.archive.removed import Erased, Expired
from jetcapture_py.archive.watermark import Watermark
from jetcapture_py.config.units import microseconds_of
from spark_jobs.reporting.source import ReportSource, Stored

CELLS = 240
"""Maximum number of cells of equal width that summarize an incarnation's range."""
MAX_HOLES = 25
MAX_INCARNATIONS = 6

_MAX_CHUNK = 1 << 20
"""Maximum range of sequences that one task sorts."""
_EVERY = (1 << 63) - 1
_AND = ","
"""Separates the creation times where compaction merged objects of several incarnations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """Sequences that are neither in the archive nor in the quarantine."""

    first: int
    """First missing sequence."""
    last: int
    """Last missing sequence."""
    after: int | None
    """Time of the message before it, in microseconds; None if unknown."""
    before: int | None
    """Time of the message after it, in microseconds; None if unknown."""
    open: bool
    """Whether it is beyond the watermark, so that the messages may still arrive."""

    @property
    def missing(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationCoverage:
    """Coverage of the sequences of one incarnation of the stream."""

    created: str
    """Creation time as sent by the server; "" if unknown."""
    first: int
    """First stored sequence."""
    last: int
    """Last stored sequence."""
    oldest: int | None
    """Time of the oldest message in microseconds; None if unknown."""
    newest: int | None
    """Time of the newest message in microseconds; None if unknown."""
    settled: int | None
    """Sequence up to which nothing more will be stored; None if unknown."""
    present: int
    """Stored sequences."""
    holes: int
    """All holes."""
    open_holes: int
    """Holes beyond `settled`."""
    open_missing: int
    """Sequences in holes beyond `settled`."""
    largest: Sequence[Hole]
    """The largest holes, by sequence."""
    cell: int
    """Sequences per cell."""
    cells: Sequence[float]
    """Share of each range of `cell` sequences that is not missing; the last may be shorter."""
    forked: int = 0
    """Sequences with several messages: the server lost the earlier ones."""
    removed: int = 0
    """Sequences that are not stored because they have expired or were erased."""

    @property
    def missing(self) -> int:
        """Other sequences that are not stored."""
        return self.last - self.first + 1 - self.present - self.removed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """A range between two stored messages: number of stored messages and holes."""

    first: int
    last: int
    oldest: int | None
    newest: int | None
    present: int
    holes: int = 0
    open: bool = False
    forked: int = 0
    removed: int = 0

    @property
    def missing(self) -> int:
        """Sequences inside that are not stored, and were not removed on purpose."""
        return self.last - self.first + 1 - self.present - self.removed


Ranges = Sequence[tuple[int, int]]
"""First and last sequences, inclusive, in order, without overlaps."""


def coverage(
    source: ReportSource,
    objects: Iterable[Stored],
    copies: Mapping[ObjectName, int],
    doubtful: Collection[ObjectName],
    mark: Watermark | None,
    expired: Expired | None = None,
    erased: Erased | None = None,
) -> tuple[list[IncarnationCoverage], int]:
    """Return the newest incarnations of the stream, newest first, and the number of older ones not examined.

    `objects` are all objects of the stream, by first sequence. `copies` is the number of messages of an object that
    other objects have as well, unknown for `doubtful` ones. What has `expired` or was `erased` is not missing.
    """
    incarnations: dict[str, list[Stored]] = defaultdict(list)
    for stored in objects:
        for created in stored.created.split(_AND):
            incarnations[created].append(stored)
    newest = sorted(incarnations, key=_moment, reverse=True)
    found = []
    limits = [_EVERY, *map(_micros, newest[:-1]), -_EVERY]  # the oldest has all earlier messages, as of a mirror
    for created, end, begin in list(zip(newest, limits, limits[1:], strict=False))[:MAX_INCARNATIONS]:
        whole, unclear = [], []
        for run in _runs(incarnations[created]):
            segment = _whole(run, copies, doubtful)
            if segment is None:
                unclear.append(run)
            else:
                whole.append(segment)
        removed = _removed(created, (begin, end), expired, erased)
        found.append(_incarnation(source, created, (begin, end), whole, unclear, _settled(created, mark), removed))
    return [incarnation for incarnation in found if incarnation is not None], len(newest[MAX_INCARNATIONS:])


def _moment(created: str) -> datetime:
    try:
        return datetime.fromisoformat(created).astimezone(UTC)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)


def _micros(created: str) -> int:
    return microseconds_of(_moment(created))


def _settled(created: str, mark: Watermark | None) -> int | None:
    """Return the sequence up to which nothing more will arrive in this incarnation."""
    if mark is None:
        return None
    if not created or not mark.created or created == mark.created:
        return mark.seq
    return _EVERY if _moment(created) < _moment(mark.created) else None


def _runs(objects: Iterable[Stored]) -> Iterator[list[Stored]]:
    """Yield runs of objects whose ranges touch; `objects` are sorted by first sequence."""
    run: list[Stored] = []
    end = 0
    for stored in objects:
        if run and stored.name.first_seq > end:
            yield run
            run = []
        run.append(stored)
        end = max(end, stored.name.last_seq)
    yield run


def _whole(
    run: Sequence[Stored], copies: Mapping[ObjectName, int], doubtful: Collection[ObjectName]
) -> _Segment | None:
    """Return the run as a range without holes; None if its rows must be read to know.

    Counts are not sufficient with the quarantine, because a message may have been decoded at its next delivery, with
    objects of several incarnations, or when a sequence may have two messages.
    """
    first, last = run[0].name.first_seq, max(stored.name.last_seq for stored in run)
    present = sum(stored.messages - copies.get(stored.name, 0) for stored in run)
    mixed = len({stored.name.quarantine for stored in run}) > 1 or any(_AND in stored.created for stored in run)
    if present != last - first + 1 or mixed or any(stored.name in doubtful for stored in run) or _is_rewound(run):
        return None
    oldest, newest = _times(run)
    return _Segment(first=first, last=last, oldest=oldest, newest=newest, present=present)


def _is_rewound(run: Iterable[Stored]) -> bool:
    """Whether an object is newer than another one and does not begin above it, as when the server lost messages.

    An object without statistics counts as one.
    """
    starts: list[tuple[int, int, int]] = []
    ends: list[tuple[int, int, int]] = []
    for stored in run:
        if stored.oldest is None or stored.newest is None:
            return True
        starts.append((stored.oldest, 0, stored.name.first_seq))
        ends.append((stored.newest, 1, stored.name.last_seq))  # after the starts of the same microsecond
    highest = 0
    for _, is_end, seq in sorted([*starts, *ends]):
        if is_end:
            highest = max(highest, seq)
        elif seq <= highest:
            return True
    return False


def _times(objects: Iterable[Stored]) -> tuple[int | None, int | None]:
    """Return the times of the oldest and newest message, by the footers."""
    known = [(each.oldest, each.newest) for each in objects if each.oldest is not None and each.newest is not None]
    return min((oldest for oldest, _ in known), default=None), max((newest for _, newest in known), default=None)


def _incarnation(
    source: ReportSource,
    created: str,
    times: tuple[int, int],
    whole: Sequence[_Segment],
    unclear: Sequence[Sequence[Stored]],
    settled: int | None,
    removed: Ranges,
) -> IncarnationCoverage | None:
    """Return the incarnation whose messages came at `times`, in microseconds, the end excluded.

    None when the objects hold no message of it.
    """
    firsts = [*(segment.first for segment in whole), *(run[0].name.first_seq for run in unclear)]
    lasts = [*(segment.last for segment in whole), *(stored.name.last_seq for run in unclear for stored in run)]
    width = max(lasts) - min(firsts) + 1
    chunks = -(-width // (CELLS * _MAX_CHUNK))
    chunk = -(-width // (CELLS * chunks))
    read, inner = _read(source, unclear, times, min(firsts), chunk, settled, removed) if unclear else ([], [])
    segments = sorted([*whole, *read], key=lambda segment: segment.first)
    if not segments:
        return None
    segments = list(_with_removed(segments, removed))
    outer = list(_between(segments, settled))
    open_segments = [segment for segment in segments if segment.open]
    open_holes = [hole for hole in outer if hole.open]
    largest = nlargest(MAX_HOLES, [*outer, *inner], key=lambda hole: (hole.missing, -hole.first))
    return IncarnationCoverage(
        created=created,
        first=segments[0].first,
        last=segments[-1].last,
        oldest=min((segment.oldest for segment in segments if segment.oldest is not None), default=None),
        newest=max((segment.newest for segment in segments if segment.newest is not None), default=None),
        settled=settled,
        present=sum(segment.present for segment in segments),
        holes=len(outer) + sum(segment.holes for segment in segments),
        open_holes=len(open_holes) + sum(segment.holes for segment in open_segments),
        open_missing=sum(hole.missing for hole in open_holes) + sum(segment.missing for segment in open_segments),
        largest=sorted(largest, key=lambda hole: hole.first),
        cell=chunk * chunks,
        cells=_cells(segments, chunk * chunks),
        forked=sum(segment.forked for segment in segments),
        removed=sum(segment.removed for segment in segments),
    )


def _read(
    source: ReportSource,
    runs: Sequence[Sequence[Stored]],
    times: tuple[int, int],
    origin: int,
    chunk: int,
    settled: int | None,
    removed: Ranges,
) -> tuple[list[_Segment], list[Hole]]:
    """Read the runs' sequences; return a segment per chunk and run, and the largest holes.

    Chunks also end at the watermark, so that no hole spans it.
    """
    step, at = sf.col("step"), sf.col("at")
    stored_rows = source.rows(dict(enumerate(runs)), ["seq", "at"]).withColumn("gone", sf.lit(False))  # noqa: FBT003
    rows = _with_removed_rows(stored_rows, runs, removed).withColumns(
        {
            "chunk": sf.expr(f"(seq - {origin}) div {chunk}"),
            "open": sf.col("seq") > sf.lit(_EVERY if settled is None else settled),
        }
    )
    if any(_AND in stored.created for run in runs for stored in run):
        rows = rows.where((at >= times[0]) & (at < times[1]) | sf.col("gone"))
    place = ("part", "chunk", "open")
    order = Window.partitionBy(*place).orderBy("seq", "gone", "at")
    rows = rows.repartition(max(1, sum(stored.messages for run in runs for stored in run) // _MAX_CHUNK), *place)
    steps = rows.withColumns({"step": sf.col("seq") - sf.lag("seq").over(order), "after": sf.lag("at").over(order)})
    hole = sf.struct((step - 1).alias("missing"), (-sf.col("seq")).alias("order"), "after", at.alias("before"), "open")
    found = steps.groupBy(*place).agg(
        sf.min("seq").alias("first"),
        sf.max("seq").alias("last"),
        sf.min("at").alias("oldest"),
        sf.max("at").alias("newest"),
        sf.count_if((step.isNull() | (step > 0)) & ~sf.col("gone")).alias("present"),
        sf.count_if((step.isNull() | (step > 0)) & sf.col("gone")).alias("removed"),
        sf.count_if(step > 1).alias("holes"),
        sf.count_if((step == 0) & (at != sf.col("after"))).alias("forked"),
        sf.slice(sf.sort_array(sf.collect_list(sf.when(step > 1, hole)), asc=False), 1, MAX_HOLES).alias("largest"),
    )
    table = found.toArrow()
    segments = [_Segment(**row) for row in table.drop_columns(["part", "chunk", "largest"]).to_pylist()]
    holes = pa.Table.from_struct_array(pc.list_flatten(table["largest"].combine_chunks()))
    ordered = holes.sort_by([("missing", "descending"), ("order", "descending")])
    return segments, [
        Hole(
            first=-row["order"] - row["missing"],
            last=-row["order"] - 1,
            after=row["after"],
            before=row["before"],
            open=row["open"],
        )
        for row in ordered.slice(0, MAX_HOLES).to_pylist()
    ]


def _removed(
    created: str, times: tuple[int, int], expired: Expired | None, erased: Erased | None
) -> list[tuple[int, int]]:
    """Return what of an incarnation, whose messages came at `times`, is gone on purpose."""
    ranges = [] if expired is None else expired.ranges([created])
    if erased:
        ranges += runs(erased.seqs[(erased.times >= times[0]) & (erased.times < times[1])])
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return joined


def _with_removed_rows(rows: DataFrame, runs: Sequence[Sequence[Stored]], removed: Ranges) -> DataFrame:
    """Add a row for each removed sequence of the runs."""
    inside = []
    for part, run in enumerate(runs):
        first, last = run[0].name.first_seq, max(stored.name.last_seq for stored in run)
        inside += [(part, *span) for span in _within(removed, first, last)]
    if not inside:
        return rows
    spans = rows.sparkSession.createDataFrame(inside, "part long, first long, last long")
    gone = spans.select(
        "part",
        sf.explode(sf.sequence("first", "last")).alias("seq"),
        sf.lit(None).cast("long").alias("at"),
        sf.lit(True).alias("gone"),  # noqa: FBT003
    )
    return rows.unionByName(gone)


def _with_removed(segments: Sequence[_Segment], removed: Ranges) -> Iterator[_Segment]:
    """Yield segments, and between them what was removed on purpose."""
    for left, right in pairwise([*segments, None]):
        if left is not None:
            yield left
        if left is None or right is None:
            continue
        for first, last in _within(removed, left.last + 1, right.first - 1):
            yield _Segment(first=first, last=last, oldest=None, newest=None, present=0, removed=last - first + 1)


def _within(removed: Ranges, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield what ordered ranges have from `low` to `high` (inclusive); there may be millions of them."""
    start = bisect_left(removed, low, key=lambda span: span[1])
    for first, last in takewhile(lambda span: span[0] <= high, islice(removed, start, None)):
        yield max(first, low), min(last, high)


def _between(segments: Sequence[_Segment], settled: int | None) -> Iterator[Hole]:
    """Yield the holes between segments; the watermark splits a hole in two."""
    limit = _EVERY if settled is None else settled
    for left, right in pairwise(segments):
        first, last = left.last + 1, right.first - 1
        for begin, end in ((first, min(last, limit)), (max(first, limit + 1), last)):
            if begin <= end:
                yield Hole(first=begin, last=end, after=left.newest, before=right.oldest, open=begin > limit)


def _cells(segments: Sequence[_Segment], cell: int) -> list[float]:
    """Return the stored share of each cell. A segment with holes never crosses cells, which consist of whole chunks."""
    origin, last = segments[0].first, segments[-1].last
    present = [0.0] * -(-(last - origin + 1) // cell)
    for segment in segments:
        width = segment.last - segment.first + 1
        for index in range((segment.first - origin) // cell, (segment.last - origin) // cell + 1):
            low, high = origin + index * cell, origin + (index + 1) * cell - 1
            within = min(segment.last, high) - max(segment.first, low) + 1
            accounted = segment.present + segment.removed
            present[index] += accounted if within == width else accounted * within / width
    return [count / min(cell, last - origin + 1 - index * cell) for index, count in enumerate(present)]
