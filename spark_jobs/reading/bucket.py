"""A KV bucket at some moment (ADR-8), from the envelope of its archived entries alone.

An entry is in the bucket until its TTL (`Nats-TTL`, ADR-43) or the bucket's `max_age` has run out, or until newer
entries of its key have replaced it: all older ones for a purge, else all but the newest `max_msgs_per_subject`. A
TTL of `never` exempts an entry from `max_age`. The server does all this without a trace in the stream, or with markers
that come later (ADR-48), so the moments follow from the entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as sf
from pyspark.sql.window import WindowSpec

from jetcapture_py.archive import layout, stream_config
from jetcapture_py.config.buckets import COLUMNS, OPERATIONS, PUT, REASONS, is_name
from jetcapture_py.config.units import microseconds_of, parse_nanoseconds, parse_time
from jetcapture_py.config.units import quoted as shown
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store.archive import ArchiveFiles
from spark_jobs.reading.columns import quoted

NEEDED = (layout.SUBJECT, layout.SEQ, layout.TIMESTAMP, layout.HEADERS)
"""Columns of the archive that an entry's key, operation and lifetime follow from."""
EXPIRES = "_nats_expires"
"""When an entry's lifetime ends; null for never."""
KEY, OPERATION, REVISION = COLUMNS
_QUARANTINED, _RANK = "_nats_quarantined", "_nats_rank"
_UNLIMITED = 1 << 30
_LONGEST = 10**10
"""Seconds from which on a TTL counts as never: the server's durations end before."""
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
"""Units of Go's durations, in seconds."""
_NUMBER, _UNIT = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)", "(?:h|ms|m|s|[uµμ]s|ns)"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLimits:
    """How long a bucket keeps entries: `max_age` in microseconds, 0 for no limit, how many of a key, and whether
    entries may have TTLs of their own."""

    max_age: int = 0
    per_key: int = 1
    ttls: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketIncarnation:
    """A bucket from its creation, in microseconds since 1970, until it was created again.

    `continues`: it may have entries of the one before, because it is a mirror, or was restored.
    """

    created: int
    limits: BucketLimits
    continues: bool = False


def check_name(bucket: str) -> None:
    """Raise JetcaptureError unless NATS accepts a bucket of this name."""
    if not is_name(bucket):
        raise JetcaptureError(f"bucket={shown(bucket)}: expected ASCII letters, digits, '-' and '_'")


def incarnations(
    files: ArchiveFiles, stream: str, max_age: str | float | timedelta | None, per_key: int | None
) -> list[BucketIncarnation]:
    """Return the incarnations of the bucket that the capture has recorded, oldest first; at least one.

    `max_age` and `per_key` replace the recorded limits. Raises JetcaptureError.
    """
    age = None if max_age is None else _microseconds(max_age)
    if per_key is not None and per_key < 1:
        raise JetcaptureError(f"max_msgs_per_subject={per_key}: expected at least 1")
    found = []
    for file in files.below(stream_config.directory(stream)):
        if not stream_config.is_path(file.path):
            continue
        known = stream_config.decode(files.read(file), stream, file.path)
        limits = _limits(known.config, age, per_key, continues=known.continues)
        created = microseconds_of(parse_time(known.created))
        found.append(BucketIncarnation(created=created, limits=limits, continues=known.continues))
    found.sort(key=lambda each: each.created)
    return found or [BucketIncarnation(created=0, limits=_limits({"max_msgs_per_subject": 1}, age, per_key))]


def _microseconds(max_age: str | float | timedelta) -> int:
    if isinstance(max_age, timedelta):
        return max_age // timedelta(microseconds=1)
    try:
        return parse_nanoseconds(max_age) // 1000
    except ValueError as error:
        raise JetcaptureError(f"max_age: {error}") from None


def _limits(
    config: Mapping[str, Any], age: int | None, per_key: int | None, *, continues: bool = False
) -> BucketLimits:
    """Return the limits in a stream's configuration, or the given ones in place of them.

    A stream that does not allow TTLs never has, because they cannot be turned off; but one that it continues may have.
    """
    recorded = int(config.get("max_msgs_per_subject", -1))
    return BucketLimits(
        max_age=int(config.get("max_age", 0)) // 1000 if age is None else age,
        per_key=min(per_key or (recorded if recorded > 0 else _UNLIMITED), _UNLIMITED),
        ttls=continues or config.get("allow_msg_ttl") is not False,
    )


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
    told, reason = map(_header, ("KV-Operation", "Nats-Marker-Reason"))
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
    time, ttl = sf.unix_micros(layout.TIMESTAMP), _header("Nats-TTL")
    ends = time + _seconds(ttl) * 1_000_000 if limits.ttls else sf.lit(None).cast("bigint")
    if limits.max_age:
        ages = sf.coalesce(sf.lower(ttl), sf.lit("")) != "never"
        ends = sf.least(ends, sf.when(ages, time + limits.max_age))
    return ends


def _header(name: str) -> Column:
    """The first value of a header; null without it."""
    return sf.get(sf.col(layout.HEADERS)[name], sf.lit(0))


def _meaning(text: Column, meanings: Mapping[str, str]) -> Column:
    """The meaning of a text; null for others."""
    found = sf.lit(None).cast("string")
    for word, meaning in meanings.items():
        found = sf.when(text == word, meaning).otherwise(found)
    return found


def _seconds(ttl: Column) -> Column:
    """The seconds of a TTL, which is a number of them or a duration of Go, cut off; null for none and for never."""

    units = sf.create_map(*(sf.lit(each) for pair in _UNITS.items() for each in pair))

    def seconds_of(part: Column) -> Column:
        return sf.regexp_extract(part, _NUMBER, 0).cast("double") * units[sf.regexp_extract(part, f"{_UNIT}$", 0)]

    parts = sf.regexp_extract_all(ttl, sf.lit(_NUMBER + _UNIT), sf.lit(0))
    duration = sf.round(sf.aggregate(parts, sf.lit(0.0), lambda total, part: total + seconds_of(part)), 9)
    number = sf.regexp_extract(ttl, "^[0-9]+$", 0)
    found = sf.when(number != "", number.cast("double")).otherwise(duration)
    return sf.when((found >= 1) & (found < _LONGEST), sf.floor(found))


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
    marked = sf.coalesce(_header("Nats-Marker-Reason"), sf.lit("")) != ""
    entry = sf.struct(
        sf.col(REVISION).alias("seq"),
        sf.unix_micros(layout.TIMESTAMP).alias("at"),
        (~sf.col(_QUARANTINED)).alias("decoded"),
        sf.unix_micros(EXPIRES).alias("ends"),
        (marked | sf.coalesce(_header("Nats-Rollup") == "sub", sf.lit(col=False))).alias("clears"),
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
