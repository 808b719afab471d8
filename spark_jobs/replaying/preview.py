"""Preview a replay before publishing: message count, time range, and whether every row has a valid target."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from pyspark.sql import Column, Row, Window
from pyspark.sql import functions as sf

from jetcapture_py.config.subjects import covers, overlaps
from jetcapture_py.config.units import format_duration, format_time, moment_of
from jetcapture_py.errors import JetcaptureError, SourceError
from jetcapture_py.jetstream.publish.frames import check_subject
from jetcapture_py.text import plural, size
from spark_jobs.publishing.instructions import describe_removed
from spark_jobs.publishing.subjects import matching
from spark_jobs.replaying.rows import ODD, ReplayRows
from spark_jobs.replaying.target import Stream
from spark_jobs.replaying.task import MISSING, SEQ, STREAM, TIMESTAMP

SAFE_WINDOW = 120.0
"""Seconds; warn about a shorter duplicate window, because Spark may retry a lost task after minutes."""

_SHOWN = 5
_SLICE = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a replay will publish. All but `messages` are only set with details.

    `first` and `last` are the oldest and newest timestamp in microseconds, `size` payload bytes, `subjects` the most
    frequent target subjects, with counts, and `removed` the headers that are not published, with counts of messages.
    """

    messages: int
    first: int | None = None
    last: int | None = None
    size: int = 0
    distinct: int = 0
    subjects: Sequence[tuple[str, int]] = field(default=())
    removed: Mapping[str, int] = field(default_factory=dict)


def is_certain(pattern: str, streams: Sequence[Stream], ingested: Mapping[str, Sequence[str]]) -> bool:
    """Whether the patterns alone prove that every message has a stream and none would be captured again."""
    return any(covers(each, pattern) for stream in streams for each in stream.subjects) and not any(
        overlaps(each, pattern) for filters in ingested.values() for each in filters
    )


def take_preview(
    rows: ReplayRows,
    streams: Sequence[Stream],
    ingested: Mapping[str, Sequence[str]],
    *,
    details: bool = False,
    keep_headers: Collection[str] = (),
) -> Preview:
    """Count the rows; `details` adds bytes, times, subjects and the headers that are removed unless in `keep_headers`.

    Raises JetcaptureError if a row has no subject or an invalid one, if no stream takes it, or if the archive's own
    capture would capture it again.
    """
    subject = sf.col("subject")
    nowhere = ~matching(subject, [each for stream in streams for each in stream.subjects])
    captured = (matching(subject, each.subjects) & matching(subject, ingested.get(each.name, ())) for each in streams)
    back = reduce(or_, captured, sf.lit(False))  # noqa: FBT003
    timed = details and TIMESTAMP in rows.examined.columns
    (found,) = rows.examined.agg(
        sf.count("*").alias("messages"),
        sf.count_if(subject.isNull()).alias("without"),
        sf.min(MISSING).alias("missing"),
        sf.min(sf.when(sf.col(ODD).isNotNull(), sf.struct(subject, ODD))).alias("odd"),
        _first(nowhere).alias("nowhere"),
        _first(back).alias("back"),
        *((sf.min(TIMESTAMP).alias("first"), sf.max(TIMESTAMP).alias("last")) if timed else ()),
        *((sf.sum(sf.length("payload")).alias("size"),) if details else ()),
        *((sf.count_distinct(subject).alias("distinct"),) if details else ()),
    ).collect()
    _check(found, ingested)
    frequent = rows.examined.groupBy("subject").count().orderBy(sf.desc("count"), "subject").limit(_SHOWN)
    return Preview(
        messages=found["messages"],
        first=found["first"] if timed else None,
        last=found["last"] if timed else None,
        size=(found["size"] or 0) if details else 0,
        distinct=found["distinct"] if details else 0,
        subjects=[(row[0], row[1]) for row in frequent.collect()] if details else (),
        removed=rows.removed(keep_headers) if details else {},
    )


def _check(found: Row, ingested: Mapping[str, Sequence[str]]) -> None:
    if found["odd"] is not None:
        try:
            check_subject(found["odd"]["subject"])
        except SourceError as error:
            raise SourceError(f"{error} in {found['odd'][ODD]}; nothing was published") from None
    if found["without"]:
        which = "" if found["missing"] is None else f": {found['missing']}"
        rows = "1 row has" if found["without"] == 1 else f"{found['without']:,} rows have"
        raise SourceError(f"{rows} no subject{which}; nothing was published")
    if found["nowhere"] is not None:
        raise JetcaptureError(f"no stream listens on {found['nowhere']}; nothing was published")
    if found["back"] is not None:
        raise JetcaptureError(
            f"this archive's capture consumes {found['back']} from stream {', '.join(ingested)}, directly or through "
            "sources and mirrors, and would archive its own messages again; choose another --subject, or allow it with "
            "--allow-loop"
        )


def _first(condition: Column) -> Column:
    """Return any subject that meets the condition, else null."""
    return sf.min(sf.when(condition, sf.col("subject")))


def is_recreated(rows: ReplayRows) -> bool:
    """Whether the rows span several incarnations of a stream: a later message has a lower sequence.

    Compares time slices, and the lowest and highest sequence in each, to avoid sorting.
    """
    if not rows.ordered:
        return False
    late, early = sf.max(sf.struct(-sf.col(SEQ), TIMESTAMP)), sf.max(sf.struct(sf.col(SEQ), -sf.col(TIMESTAMP)))
    slices = rows.frame.groupBy(STREAM, sf.floor(sf.col(TIMESTAMP) / _SLICE).alias("slice")).agg(
        sf.min(SEQ).alias("low"),
        sf.max(SEQ).alias("high"),
        (late[TIMESTAMP] > sf.min(TIMESTAMP)).alias("low_is_late"),
        (-early["col2"] < sf.max(TIMESTAMP)).alias("high_is_early"),
    )
    before = sf.max("high").over(Window.partitionBy(STREAM).orderBy("slice").rowsBetween(Window.unboundedPreceding, -1))
    odd = (sf.col("low") <= sf.col("before")) | sf.col("low_is_late") | sf.col("high_is_early")
    return not slices.withColumn("before", before).where(odd).isEmpty()


def describe(found: Preview, streams: Sequence[Stream]) -> Iterator[str]:
    """Yield the preview as lines of text."""
    yield f"would replay {plural(found.messages, 'message', grouped=True)} with {size(found.size)}"
    if found.subjects:
        shown = ", ".join(f"{subject} ({count:,})" for subject, count in found.subjects)
        others = ", …" if found.distinct > len(found.subjects) else ""
        yield f"to {plural(found.distinct, 'subject', grouped=True)}: {shown}{others}"
    if found.first is not None and found.last is not None:
        yield f"from {_time(found.first)} to {_time(found.last)}"
    if (removed := describe_removed(found.removed)) is not None:
        yield removed
    for stream in streams:
        yield f"into stream {stream.name} ({', '.join(stream.subjects)})"
    for warning in warnings(streams):
        yield f"warning: {warning}"


def warnings(streams: Iterable[Stream]) -> Iterator[str]:
    """Yield one line for each stream that would store nothing."""
    for stream in streams:
        if stream.keeps_nothing:
            yield f"stream {stream.name} would store nothing: it has interest retention and no consumer"


def _time(microseconds: int) -> str:
    return format_time(moment_of(microseconds), precision="microseconds")


def short_window(streams: Sequence[Stream]) -> str | None:
    """Return a warning if a duplicate window is too short for retried tasks, else None."""
    worst = min(streams, key=lambda stream: stream.window, default=None)
    if worst is None or worst.window >= SAFE_WINDOW:
        return None
    return (
        f"stream {worst.name} remembers message ids for only {format_duration(worst.window)} (duplicate_window); "
        f"{format_duration(SAFE_WINDOW)} would be safe: messages that a retried task republishes later are stored twice"
    )
