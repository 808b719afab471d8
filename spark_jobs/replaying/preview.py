"""Describe a replay before it publishes: counts, subjects, times, and the effect on its target streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as sf

from jetcapture_py.archive import layout
from jetcapture_py.config.units import format_duration, format_time, moment_of
from jetcapture_py.text import plural, size
from spark_jobs.publishing.prepare import INSTRUCTED, PAYLOAD, SUBJECT, TIME
from spark_jobs.reading.columns import quoted
from spark_jobs.replaying.target import Stream

SAFE_WINDOW = 120.0
"""Seconds; warn about a shorter duplicate window, because Spark may retry a lost task after minutes."""

_SHOWN = 5
_SLICE = 10_000_000
"""Length of an interval, in microseconds, in which a stream's sequences are compared."""


def describe(messages: DataFrame, streams: Sequence[Stream], *, archived: bool) -> Iterator[str]:
    """Yield lines about the effect of prepared messages. Runs two jobs."""
    subjects = messages.groupBy(SUBJECT).agg(
        sf.count("*").alias("messages"),
        sf.sum(sf.length(PAYLOAD)).alias("size"),
        sf.min(TIME).alias("first"),
        sf.max(TIME).alias("last"),
        sf.count_if(INSTRUCTED).alias("instructed"),
    )
    (total,) = subjects.agg(
        sf.count("*").alias("subjects"),
        *(sf.coalesce(sf.sum(name), sf.lit(0)).alias(name) for name in ("messages", "size", "instructed")),
        sf.min("first").alias("first"),
        sf.max("last").alias("last"),
    ).collect()
    yield f"would replay {plural(total['messages'], 'message')} with {size(total['size'])}"
    frequent = subjects.select(sf.decode(SUBJECT, "UTF-8"), "messages").orderBy(sf.desc("messages"), SUBJECT)
    if shown := [f"{subject} ({count:,})" for subject, count in frequent.limit(_SHOWN).collect()]:
        others = ", …" if total["subjects"] > len(shown) else ""
        yield f"to {plural(total['subjects'], 'subject')}: {', '.join(shown)}{others}"
    if total["first"] is not None:
        yield f"from {_time(total['first'])} to {_time(total['last'])}"
    if total["instructed"]:
        count = plural(total["instructed"], "message")
        yield f"without headers that are instructions to a server, in {count}"
    for stream in streams:
        yield f"into stream {stream.name} ({', '.join(stream.subjects)})"
    for warning in warnings(streams, archived=archived):
        yield f"warning: {warning}"


def _time(microseconds: int) -> str:
    return format_time(moment_of(microseconds), precision="microseconds")


def warnings(streams: Iterable[Stream], *, archived: bool) -> Iterator[str]:
    """Yield possible surprises of each stream. Rows that are `archived` messages get ids."""
    for stream in streams:
        if stream.keeps_nothing:
            yield f"stream {stream.name} would store nothing: it has interest retention and no consumer"
        if archived and stream.window < SAFE_WINDOW:
            yield (
                f"stream {stream.name} remembers message ids for only {format_duration(stream.window)} "
                f"(duplicate_window); {format_duration(SAFE_WINDOW)} would be safe: messages that a retried task "
                "republishes later are stored twice"
            )


def is_recreated(messages: DataFrame, names: Sequence[str]) -> bool:
    """Whether the rows span several incarnations of a stream: a later message has a lower sequence.

    `names` are the columns of stream, sequence and timestamp. Compares intervals of time, and the lowest and highest
    sequence in each, to avoid sorting.
    """
    columns = [sf.col(quoted(name)).alias(column) for name, column in zip(names, layout.IDENTITY, strict=True)]
    rows = messages.select(*columns).withColumn(layout.TIMESTAMP, sf.unix_micros(layout.TIMESTAMP))
    seq, time = sf.col(layout.SEQ), sf.col(layout.TIMESTAMP)
    late, early = sf.max(sf.struct(-seq, time)), sf.max(sf.struct(seq, -time))
    slices = rows.groupBy(layout.STREAM, sf.floor(time / _SLICE).alias("slice")).agg(
        sf.min(seq).alias("low"),
        sf.max(seq).alias("high"),
        (late[layout.TIMESTAMP] > sf.min(time)).alias("low_is_late"),
        (-early["col2"] < sf.max(time)).alias("high_is_early"),
    )
    window = Window.partitionBy(layout.STREAM).orderBy("slice").rowsBetween(Window.unboundedPreceding, -1)
    odd = (sf.col("low") <= sf.col("before")) | sf.col("low_is_late") | sf.col("high_is_early")
    return not slices.withColumn("before", sf.max("high").over(window)).where(odd).isEmpty()
