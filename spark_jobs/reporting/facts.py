"""Collect the report's facts. As in every reader, a message counts once, regardless of its copies."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from itertools import accumulate
from typing import Any, Literal

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.removed import Expired
from jetcapture_py.archive.watermark import Watermark
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.reading.reasons import NUMBERS, QUOTED
from jetcapture_py.reading.selection import no_watermark
from spark_jobs.reporting.coverage import IncarnationCoverage, coverage
from spark_jobs.reporting.source import ReportSource, Stored

Dedupe = Literal["auto", "full", "none"]

MAX_REASONS = 15
MAX_ERROR, MAX_SUBJECT = 300, 120
_SECOND = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The part of the archive to describe: buckets that overlap `start` to `end`, and keys; None for all.

    `complete` excludes buckets that may still grow: those that end after the watermark's time, and those of event time.
    """

    start: datetime | None = None
    end: datetime | None = None
    keys: Sequence[str | None] | None = None
    complete: bool = False

    def has(self, stored: Stored, mark: Watermark | None) -> bool:
        """Whether it includes the object. Keys do not apply to the quarantine."""
        if self.complete and (stored.name.event_time or mark is None or stored.end > mark.time.timestamp()):
            return False
        if self.start is not None and stored.end <= self.start.timestamp():
            return False
        if self.end is not None and stored.name.bucket >= self.end.timestamp():
            return False
        return self.keys is None or stored.name.quarantine or stored.name.key in self.keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Redelivered messages, and messages outside their bucket's time range. Lateness is in seconds."""

    redelivered: int = 0
    early: int = 0
    """Messages that reached the stream before their bucket's start."""
    late: int = 0
    """Messages that reached the stream after their bucket's end."""
    median: float = 0.0
    """Median lateness of the late messages."""
    most: float = 0.0
    """95th percentile of their lateness."""
    worst: float = 0.0
    """Greatest lateness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why messages are in quarantine, with one of them as the example. Times are in microseconds."""

    stage: str
    """Where the messages failed, such as `decode`."""
    error: str
    """The error, with numbers and quoted text replaced."""
    messages: int
    first: int
    """Time of the oldest message."""
    last: int
    """Time of the newest message."""
    seq: int
    """Sequence of the example, the lowest one."""
    at: int
    """Time of the example."""
    subject: str
    """Subject of the example."""
    example: str
    """Error of the example, cut at `MAX_ERROR` characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts about one archive."""

    stream: str
    url: str
    """The archive's URL without credentials."""
    generated: datetime
    """When the archive was examined, in UTC."""
    choice: Choice
    dedupe: Dedupe
    objects: Sequence[Stored]
    """The objects of decoded messages that `choice` selects."""
    quarantine: Sequence[Stored]
    """The objects of the quarantine that `choice` selects."""
    copies: Mapping[ObjectName, int]
    """Number of an object's messages that other objects have as well: for one of the quarantine, also those of the
    archive."""
    mark: Watermark | None
    """The stream's watermark; None without one."""
    incarnations: Sequence[IncarnationCoverage]
    """Coverage of the whole stream, whatever `choice` selects, newest incarnation first."""
    older_incarnations: int
    """Number of older incarnations, which were not examined."""
    delivery: Delivery
    reasons: Sequence[Reason]
    """The most frequent reasons of the quarantine."""
    others: int = 0
    """Number of objects in other formats than Parquet, which are not examined."""
    expired: Expired | None = None
    """What has expired of the stream; None if nothing has."""
    erased: int = 0
    """Number of erased messages."""

    def messages(self, objects: Iterable[Stored]) -> int:
        """Return the number of distinct messages in these objects."""
        return sum(stored.messages - self.copies.get(stored.name, 0) for stored in objects)


def collect(
    spark: SparkSession, url: str, stream: str, choice: Choice, dedupe: Dedupe, options: Mapping[str, Any]
) -> Facts:
    """Examine the archive. Raises JetcaptureError if there is none, VanishedError if objects disappear meanwhile."""
    if dedupe not in ("auto", "full", "none"):
        raise JetcaptureError(f"dedupe={dedupe!r}: expected auto, full or none")
    source = ReportSource.open(spark, url, stream, options)
    if choice.complete and source.mark is None:
        raise no_watermark(source.files, stream)
    every = source.objects()
    if choice.keys is not None and any(stored.name.bundle for stored in every):
        raise JetcaptureError(
            f"{source.files.shown} has bundles, whose objects hold many keys: a report cannot select keys; omit --key"
        )
    shared = _shared(every, dedupe)
    copies: dict[ObjectName, int] = {}
    doubtful: Collection[ObjectName] = {stored.name for group in shared for stored in group}
    if dedupe != "none":
        copies = _copies(source, shared, dedupe)
    if dedupe == "auto":  # copies in a set were not counted per incarnation
        mixed = (group for group in shared if len({stored.created for stored in group}) > 1)
        doubtful = {stored.name for group in mixed for stored in group}
    expired, erased = source.files.expired(stream), source.files.erased(stream)
    incarnations, older = coverage(source, every, copies, doubtful, source.mark, expired, erased)
    known = sum(part.present + part.forked for part in incarnations)
    both: dict[ObjectName, int] = {}
    if dedupe != "none" and sum(stored.messages - copies.get(stored.name, 0) for stored in every) > known:
        both = _in_both(source, every)
        copies |= {name: copies.get(name, 0) + count for name, count in both.items()}
    chosen = [stored for stored in every if choice.has(stored, source.mark)]
    objects = [stored for stored in chosen if not stored.name.quarantine]
    quarantine = [stored for stored in chosen if stored.name.quarantine]
    return Facts(
        stream=stream,
        url=source.files.shown,
        generated=datetime.now(UTC),
        choice=choice,
        dedupe=dedupe,
        objects=objects,
        quarantine=quarantine,
        copies=copies,
        mark=source.mark,
        incarnations=incarnations,
        older_incarnations=older,
        delivery=_delivery(source, objects),
        reasons=_reasons(source, quarantine, _beside(every, both)) if quarantine else (),
        others=source.others,
        expired=expired,
        erased=len(erased),
    )


def _shared(objects: Sequence[Stored], dedupe: Dedupe) -> list[list[Stored]]:
    """Return sets of objects that may share messages; with `full`, all objects of each group."""
    of_name = {stored.name: stored for stored in objects}
    bundles = {stored.name: stored.bundles for stored in objects if stored.bundles is not None}
    if dedupe != "full":
        clusters = layout.clusters(of_name, bundles)
        return [[of_name[name] for name in cluster] for cluster in clusters if len(cluster) > 1]
    group_of = layout.groups(of_name, bundles)
    groups: dict[layout.Group, list[Stored]] = defaultdict(list)
    for stored in objects:
        groups[group_of(stored.name)].append(stored)
    return list(groups.values())


def _copies(source: ReportSource, shared: Sequence[Sequence[Stored]], dedupe: Dedupe) -> dict[ObjectName, int]:
    """Return the number of copies in each set, keyed by the set's first object."""
    if not shared:
        return {}
    rows = source.rows(dict(enumerate(shared)), ["seq", "at"])
    # with `full`, a copy may be in another set: the message counts in the first
    distinct = rows.groupBy("seq", "at").agg(sf.min("part").alias("part")) if dedupe == "full" else rows.distinct()
    counted = distinct.groupBy("part").agg(sf.count("*").alias("messages")).collect()
    found = {row["part"]: row["messages"] for row in counted}
    stored = [sum(each.messages for each in group) for group in shared]
    return {group[0].name: stored[part] - found.get(part, 0) for part, group in enumerate(shared)}


def _in_both(source: ReportSource, every: Sequence[Stored]) -> dict[ObjectName, int]:
    """Return the number of messages of each object of the quarantine that the archive has as well.

    One that several objects of the quarantine have counts in the first of them.
    """
    quarantine = [stored for stored in every if stored.name.quarantine]
    beside = _beside(every, [stored.name for stored in quarantine])
    if not beside:
        return {}
    rows = source.rows({number: [stored] for number, stored in enumerate(quarantine)}, ["seq", "at"])
    first = rows.groupBy("seq", "at").agg(sf.min("part").alias("part"))
    shared = first.join(source.rows({0: beside}, ["seq", "at"]), ["seq", "at"], "left_semi")
    counted = shared.groupBy("part").agg(sf.count("*").alias("messages")).collect()
    return {quarantine[row["part"]].name: row["messages"] for row in counted}


def _beside(every: Iterable[Stored], quarantine: Iterable[ObjectName]) -> list[Stored]:
    """Return the objects of the archive that may share messages with these of its quarantine."""
    names = sorted(quarantine, key=lambda name: name.first_seq)
    firsts = [name.first_seq for name in names]
    lasts = list(accumulate((name.last_seq for name in names), max))
    beside = []
    for stored in every:
        at = bisect_right(firsts, stored.name.last_seq) - 1  # the last one that begins before its end
        if not stored.name.quarantine and at >= 0 and lasts[at] >= stored.name.first_seq:
            beside.append(stored)
    return beside


def _delivery(source: ReportSource, objects: Sequence[Stored]) -> Delivery:
    """Read the objects whose footers do not rule out late or redelivered messages."""
    asked: dict[int, dict[int, list[Stored]]] = defaultdict(lambda: defaultdict(list))
    for stored in objects:
        begin, end = stored.name.bucket * _SECOND, stored.end * _SECOND
        times = stored.oldest, stored.newest
        inside = times[0] is not None and times[1] is not None and begin <= times[0] <= times[1] < end
        if stored.redelivered or not inside:
            asked[stored.interval][stored.end].append(stored)
    if not asked:
        return Delivery()
    frames = [
        source.rows(parts, ["seq", "at", "delivered"]).withColumn("interval", sf.lit(interval * _SECOND))
        for interval, parts in asked.items()
    ]
    once = (
        reduce(DataFrame.unionAll, frames)
        .groupBy("seq", "at")
        .agg(
            (sf.col("at") - sf.max("part") * _SECOND).alias("after"),
            sf.max("interval").alias("interval"),
            sf.max("delivered").alias("delivered"),
        )
    )
    late = sf.when(sf.col("after") >= 0, sf.col("after") / _SECOND)
    row = once.agg(
        sf.count_if(sf.col("delivered") > 1).alias("redelivered"),
        sf.count_if(sf.col("after") < -sf.col("interval")).alias("early"),
        sf.count(late).alias("late"),
        *(sf.percentile_approx(late, part, 10_000).alias(name) for name, part in (("median", 0.5), ("most", 0.95))),
        sf.max(late).alias("worst"),
    ).collect()[0]
    return Delivery(**{name: value or 0 for name, value in row.asDict().items()})


def _reasons(source: ReportSource, quarantine: Sequence[Stored], archived: Sequence[Stored]) -> list[Reason]:
    """Return the most frequent reasons. Errors that differ only in numbers or quoted text count as one.

    Messages that the objects `archived` have do not count.
    """
    texts = ("stage", "error", "subject")
    rows = source.rows({0: quarantine}, ["seq", "at", *texts])
    if archived:
        rows = rows.join(source.rows({0: archived}, ["seq", "at"]), ["seq", "at"], "left_anti")
    once = rows.groupBy("seq", "at")
    alike = sf.regexp_replace(sf.regexp_replace("error", QUOTED, '"…"'), NUMBERS, "N")
    example = sf.struct(
        "seq",
        "at",
        sf.substring("subject", 1, MAX_SUBJECT).alias("subject"),
        sf.substring("error", 1, MAX_ERROR).alias("example"),
    )
    reasons = (
        once.agg(*(sf.coalesce(sf.min(name), sf.lit("")).alias(name) for name in texts))
        .groupBy("stage", sf.substring(alike, 1, MAX_ERROR).alias("reason"))
        .agg(
            sf.count("*").alias("messages"),
            sf.min("at").alias("first"),
            sf.max("at").alias("last"),
            sf.min(example).alias("lowest"),
        )
        .orderBy(sf.desc("messages"), "stage", "reason")
        .limit(MAX_REASONS)
        .select("stage", sf.col("reason").alias("error"), "messages", "first", "last", "lowest.*")
    )
    return [Reason(**row.asDict()) for row in reasons.collect()]
