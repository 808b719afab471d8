"""Render in Spark which entries of a KV bucket are there at a moment: `jetcapture_py.reading.bucket` has the rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as sf
from pyspark.sql.window import WindowSpec

from jetcapture_py.archive import layout
from jetcapture_py.config.buckets import COLUMNS, OPERATIONS, PUT, REASONS
from jetcapture_py.config.units import microseconds_of
from jetcapture_py.reading.bucket import (
    EXPIRES,
    KEY,
    MAX_SECONDS,
    NUMBER,
    OPERATION,
    REVISION,
    UNIT,
    UNITS,
    BucketIncarnation,
    BucketLimits,
)
from spark_jobs.reading.columns import header, quoted

_QUARANTINED, _RANK = "_nats_quarantined", "_nats_rank"


def current(
    frame: DataFrame, known: Sequence[BucketIncarnation], until: datetime | None
) -> tuple[BucketIncarnation, DataFrame]:
    """Return the incarnation at a time, and its entries; `until` None: the newest.

    A bucket that was created again starts its revisions again. A mirror that was created again and a restored bucket
    continue theirs, and so all older entries belong to them.
    """
    seq, time = sf.col(layout.SEQ), sf.unix_micros(layout.TIMESTAMP)
    known = [each for each in known if until is None or each.created <= microseconds_of(until)] or list(known[:1])
    anew = max((each.created for each in known[1:] if not each.continues), default=0)
    if anew:
        frame = frame.where(time >= anew)
    starts = [each.created for each in known[1:] if each.created > anew]
    if not starts:
        return known[-1], frame
    before = [sf.max(sf.when(time < start, seq)).alias(f"before{start}") for start in starts]
    after = [sf.min(sf.when(time >= start, seq)).alias(f"after{start}") for start in starts]
    found: Any = frame.agg(*before, *after).first()
    for start in reversed(starts):
        newest, oldest = found[f"before{start}"], found[f"after{start}"]
        if newest is not None and oldest is not None and oldest <= newest:
            return known[-1], frame.where(time >= start)
    return known[-1], frame


def time_of(frame: DataFrame, revision: int) -> int | None:
    """Return when the newest entry up to a revision was stored, in microseconds since 1970; None without one."""
    newest = sf.max_by(sf.unix_micros(layout.TIMESTAMP), sf.col(layout.SEQ))
    row = frame.where(sf.col(layout.SEQ) <= revision).agg(newest).first()
    return None if row is None else row[0]


def entries(good: DataFrame, quarantined: DataFrame) -> DataFrame:
    """Return all entries, decoded or not, without the columns that `described` adds.

    Of a bucket that was captured as a stream, fields of values may be called like these, and get `_` appended.
    """
    captured = set(COLUMNS) <= {name.lower() for name in good.columns}
    left_out = {*layout.PARTITIONS, *(COLUMNS if captured else ())}
    good = good.select(
        *(
            sf.col(quoted(name)).alias(f"{name}_" if name.lower() in COLUMNS else name)
            for name in good.columns
            if name.lower() not in left_out
        )
    )
    bad = quarantined.select(*(name for name in quarantined.columns if name.startswith("_nats_")))
    return good.withColumn(_QUARANTINED, sf.lit(col=False)).unionByName(
        bad.withColumn(_QUARANTINED, sf.lit(col=True)), allowMissingColumns=True
    )


def described(frame: DataFrame, limits: BucketLimits) -> DataFrame:
    """Add key, operation, revision, and when the entry expires; leave out messages that are no entry of a bucket."""
    key = sf.regexp_extract(layout.SUBJECT, r"^\$KV\.[^.]+\.(.+)$", 1)
    told, reason = map(header, ("KV-Operation", "Nats-Marker-Reason"))
    unmarked = sf.coalesce(told, sf.lit("")) == ""
    operation = sf.when(unmarked, _meaning(reason, REASONS)).otherwise(_meaning(told, OPERATIONS))
    return frame.select(
        key.alias(KEY),
        sf.coalesce(operation, sf.lit(PUT)).alias(OPERATION),
        sf.col(layout.SEQ).alias(REVISION),
        sf.timestamp_micros(_ends(limits)).alias(EXPIRES),
        *(sf.col(quoted(name)) for name in frame.columns),
    ).where(sf.col(KEY) != "")


def _ends(limits: BucketLimits) -> Column:
    """When an entry expires, in microseconds since 1970; null for never."""
    time, ttl = sf.unix_micros(layout.TIMESTAMP), header("Nats-TTL")
    ends = time + _seconds(ttl) * 1_000_000 if limits.ttls else sf.lit(None).cast("bigint")
    if limits.max_age:
        ages = sf.coalesce(sf.lower(ttl), sf.lit("")) != "never"
        ends = sf.least(ends, sf.when(ages, time + limits.max_age))
    return ends


def _meaning(text: Column, meanings: Mapping[str, str]) -> Column:
    """The meaning of a text; null for others."""
    found = sf.lit(None).cast("string")
    for word, meaning in meanings.items():
        found = sf.when(text == word, meaning).otherwise(found)
    return found


def _seconds(ttl: Column) -> Column:
    """The seconds of a TTL, which is a number of them or a duration of Go, cut off; null for none and for never."""

    units = sf.create_map(*(sf.lit(each) for pair in UNITS.items() for each in pair))

    def seconds_of(part: Column) -> Column:
        return sf.regexp_extract(part, NUMBER, 0).cast("double") * units[sf.regexp_extract(part, f"{UNIT}$", 0)]

    parts = sf.regexp_extract_all(ttl, sf.lit(NUMBER + UNIT), sf.lit(0))
    duration = sf.round(sf.aggregate(parts, sf.lit(0.0), lambda total, part: total + seconds_of(part)), 9)
    number = sf.regexp_extract(ttl, "^[0-9]+$", 0)
    found = sf.when(number != "", number.cast("double")).otherwise(duration)
    return sf.when((found >= 1) & (found < MAX_SECONDS), sf.floor(found))


def whole_history(found: DataFrame) -> DataFrame:
    """Return every entry once."""
    return _first(found, Window.partitionBy(KEY, REVISION, layout.TIMESTAMP).orderBy(_QUARANTINED)).drop(_QUARANTINED)


def at(found: DataFrame, limits: BucketLimits, moment: int) -> DataFrame:
    """Return what clients could get at a moment, in microseconds since 1970: an entry of each key that had one."""
    put = sf.col(OPERATION) == PUT
    if limits.per_key > 1 and (limits.ttls or limits.max_age):
        there = found.where(put).join(
            _newest(found, limits.per_key, moment), [KEY, REVISION, _QUARANTINED], "left_semi"
        )
    else:
        newest = _first(found, Window.partitionBy(KEY).orderBy(sf.desc(REVISION), _QUARANTINED))
        there = newest.where(put & _after(sf.unix_micros(EXPIRES), sf.lit(moment)))
    return there.select(*(sf.col(quoted(name)) for name in found.columns if name != _QUARANTINED))


def _newest(found: DataFrame, per_key: int, moment: int) -> DataFrame:
    """Return key, revision and whether it is quarantined of each key's newest entry that has not expired.

    Older entries become the newest of their keys again when newer ones expire first. The history of each such key is
    followed: with each new entry, expired ones go, and the oldest beyond the limit.
    """
    marked = sf.coalesce(header("Nats-Marker-Reason"), sf.lit("")) != ""
    entry = sf.struct(
        sf.col(REVISION).alias("seq"),
        sf.unix_micros(layout.TIMESTAMP).alias("at"),
        (~sf.col(_QUARANTINED)).alias("decoded"),
        sf.unix_micros(EXPIRES).alias("ends"),
        (marked | sf.coalesce(header("Nats-Rollup") == "sub", sf.lit(col=False))).alias("clears"),
    )
    narrow = found.select(KEY, entry.alias("entry"))
    history = narrow.withColumn("last", sf.max("entry").over(Window.partitionBy(KEY)))
    covered = _after(sf.col("last.ends"), sf.lit(moment)) & (sf.col("entry.seq") < sf.col("last.seq"))
    listed = history.where(~covered).groupBy(KEY).agg(sf.array_sort(sf.collect_set("entry")).alias("all"))

    def kept(stored: Column, new: Column) -> Column:
        def stays(old: Column) -> Column:
            copied = (old["seq"] == new["seq"]) & (old["at"] == new["at"])
            return ~new["clears"] & ~copied & _after(old["ends"], new["at"])

        both = sf.concat(sf.filter(stored, stays), sf.array(new))
        return sf.slice(both, sf.greatest(sf.lit(1), sf.size(both) - per_key + 1), sf.lit(per_key))

    stored = sf.aggregate("all", sf.slice("all", 1, 0), kept)
    left = sf.filter(stored, lambda old: _after(old["ends"], sf.lit(moment)))
    newest = listed.select(KEY, sf.get(left, sf.size(left) - 1).alias("newest"))
    return newest.select(KEY, sf.col("newest.seq").alias(REVISION), (~sf.col("newest.decoded")).alias(_QUARANTINED))


def _first(rows: DataFrame, window: WindowSpec) -> DataFrame:
    """Return the rows with the lowest rank; rows of one message have the same."""
    return rows.withColumn(_RANK, sf.rank().over(window)).where(sf.col(_RANK) == 1).drop(_RANK)


def _after(ends: Column, moment: Column) -> Column:
    return ends.isNull() | (ends > moment)
