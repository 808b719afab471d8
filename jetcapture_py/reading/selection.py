"""Select messages of an archive, and the objects that may have some: by path, name and footer."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from functools import lru_cache
from math import inf
from typing import Any, cast

from jetcapture_py.archive import layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.archive.incarnations import moment
from jetcapture_py.archive.info import ObjectInfo
from jetcapture_py.archive.layout import MAX_INTERVAL, ObjectName
from jetcapture_py.config.units import format_time, got, microseconds_of, parse_time, quoted
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store.archive import ArchiveFiles

Moment = datetime | date | str
"""A datetime with a time zone, a date, or text; see `jetcapture_py.config.units.parse_time`."""
Keys = Iterable[str | None] | str
"""One key or several; None is for messages without a key."""

_BUCKET_DIGITS = len("20260501T120000")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The messages to read; None for no limit."""

    start: datetime | None = None
    """Earliest timestamp in the stream, inclusive."""
    end: datetime | None = None
    """Latest timestamp in the stream, exclusive."""
    keys: list[str | None] | None = None
    event_start: datetime | None = None
    """Earliest time by `block.time`, inclusive."""
    event_end: datetime | None = None
    """Latest time by `block.time`, exclusive."""
    seqs: tuple[int, int] | None = None
    """First and last sequence, inclusive."""
    _times: tuple[float, float] = field(init=False, repr=False, compare=False)
    """`start` and `end` in seconds since the epoch."""
    _event_times: tuple[float, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_times", _seconds(self.start, self.end))
        object.__setattr__(self, "_event_times", _seconds(self.event_start, self.event_end))

    @classmethod
    def of(
        cls,
        start: Moment | None = None,
        end: Moment | None = None,
        keys: Keys | None = None,
        event_start: Moment | None = None,
        event_end: Moment | None = None,
    ) -> Selection:
        """Validate the arguments of `read_archive`. Raises JetcaptureError."""
        return cls(
            start=_moment("start", start),
            end=_moment("end", end),
            keys=_keys(keys),
            event_start=_moment("event_start", event_start),
            event_end=_moment("event_end", event_end),
        )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `of` for this selection, without `seqs`."""
        names = ("start", "end", "keys", "event_start", "event_end")
        return {name: getattr(self, name) for name in names}

    @property
    def by_event(self) -> bool:
        """Whether the time by `block.time` is bounded."""
        return self.event_start is not None or self.event_end is not None

    def needs_times(self, name: ObjectName) -> bool:
        """Whether `may_hold` needs this object's decoded footer."""
        return name.event_time and (self.start is not None or self.end is not None)

    def may_hold_path(self, path: str) -> bool:
        """Whether a file may have messages of the selection, by the bucket in its path.

        Parsing the whole path takes ten times as long, and most objects of a large archive are of other days.
        """
        name = path[path.rfind("/") + 1 :]
        try:
            bucket = datetime.fromisoformat(f"{name[:_BUCKET_DIGITS]}Z").timestamp()
        except ValueError:
            return True
        return self._may_hold_bucket(bucket, MAX_INTERVAL, event_time=name.startswith("E", _BUCKET_DIGITS))

    def may_hold_name(self, name: ObjectName, interval: float = MAX_INTERVAL) -> bool:
        """Whether an object may have messages of the selection, by its name and the length of its bucket in seconds."""
        if self.keys is not None and not name.bundle and (name.quarantine or name.key not in self.keys):
            return False
        if self.seqs is not None and (name.first_seq > self.seqs[1] or name.last_seq < self.seqs[0]):
            return False
        return self._may_hold_bucket(name.bucket, interval, event_time=name.event_time)

    def may_hold(self, info: ObjectInfo) -> bool:
        """Whether an object may have messages of the selection, by its name and its footer."""
        name = info.name
        if not self.may_hold_name(name, info.interval):
            return False
        if self.needs_times(name) and (times := info.details.times) is not None:
            if self.start is not None and times[1] < microseconds_of(self.start):
                return False
            if self.end is not None and times[0] >= microseconds_of(self.end):
                return False
        return self.keys is None or not info.bundles or name.bundle in _bundles_of(tuple(self.keys), info.bundles)

    def _may_hold_bucket(self, bucket: float, interval: float, *, event_time: bool) -> bool:
        start, end = self._event_times
        if bucket + interval <= start or bucket >= end:
            return False
        start, end = self._times
        return event_time or (bucket + interval > start and bucket < end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """The newest row of each key; all fields but `order` are SQL of the engine that reads."""

    by: Sequence[str]
    """The key: rows with equal values, nulls included, are versions of one row."""
    order: str = layout.SEQ
    """The row with the greatest value is the newest; null is the lowest. `_nats_seq` is the order of the stream, in
    which a message is newer than all those before the stream was created again. Rows with equal values follow by
    timestamp, sequence and row."""
    deleted: str | None = None
    """Whether a newest row means that its key is gone."""

    def __post_init__(self) -> None:
        """Raises JetcaptureError."""
        object.__setattr__(self, "by", [self.by] if isinstance(self.by, str) else list(self.by))
        if self.order.strip(' "`').lower() == layout.SEQ:
            object.__setattr__(self, "order", layout.SEQ)
        if not self.by or not all(expression.strip() for expression in self.by):
            raise JetcaptureError("by: expected at least one column or expression")

    def lives(self, files: ArchiveFiles, stream: str) -> list[int]:
        """Return when the stream was created again and began its sequences anew, in microseconds since 1970.

        None in another order. Raises JetcaptureError.
        """
        if self.order != layout.SEQ:
            return []
        return [moment(config.created) for config in files.stream_configs(stream)[1:] if not config.continues]


def _seconds(start: datetime | None, end: datetime | None) -> tuple[float, float]:
    return -inf if start is None else start.timestamp(), inf if end is None else end.timestamp()


@lru_cache(maxsize=8)
def _bundles_of(keys: tuple[str | None, ...], bundles: int) -> frozenset[str]:
    return frozenset(bundle_of(key, bundles) for key in keys)


def _moment(name: str, value: Moment | None) -> datetime | None:
    try:
        return None if value is None else parse_time(value)
    except ValueError as error:
        raise JetcaptureError(f"{name}: {got(str(error), value)}") from None


def _keys(keys: object) -> list[str | None] | None:
    if keys is None:
        return None
    one = isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable)
    values: list[Any] = [keys] if one else list(cast("Iterable[Any]", keys))
    for key in values:
        if key is not None and not isinstance(key, str):
            shown = repr(key) if isinstance(key, bytes) else quoted(key)
            raise JetcaptureError(f"keys: expected text, or None for messages without a key, got {shown}")
    return [key or None for key in values]


def check_stream(stream: str) -> None:
    """Raise JetcaptureError for an invalid stream name, which could be a path."""
    if not stream or "/" in stream:
        raise JetcaptureError(f"stream={quoted(stream)}: expected the name of a stream")


def complete_end(files: ArchiveFiles, stream: str, end: datetime | None) -> datetime:
    """Return the end of the complete range by the watermark, or `end` if that is earlier.

    Prints a notice if that is before `end`. Raises JetcaptureError.
    """
    watermark = files.watermark(stream)
    if watermark is None:
        raise no_watermark(files, stream)
    complete = watermark.time + timedelta(microseconds=1)  # an end is exclusive
    if end is not None and end <= complete:
        return end
    if end is not None:
        sys.stderr.write(f"complete only up to {format_time(watermark.time)}: later messages are left out\n")
    return complete


def no_watermark(files: ArchiveFiles, stream: str) -> JetcaptureError:
    """Return the error for `--complete-only` in an archive without a watermark for the stream."""
    return JetcaptureError(f"{files.shown} has no watermark for stream {stream}, which --complete-only needs: omit it")
