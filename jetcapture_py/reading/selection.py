"""Which messages of an archive to read, and which of its objects may hold some: by path, by name, and by footer."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import date, datetime, timedelta
from functools import lru_cache
from math import floor
from typing import Any, NamedTuple, cast

from jetcapture_py.archive import layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.archive.info import ObjectInfo
from jetcapture_py.archive.layout import MAX_INTERVAL, ObjectName
from jetcapture_py.config.units import format_time, microseconds_of, parse_time, quoted
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store.archive import ArchiveFiles

Moment = datetime | date | str
"""A datetime with a time zone, a date, or text; see `jetcapture_py.config.units.parse_time`."""
Keys = Iterable[str | None] | str
"""One key or several; None is for messages without a key."""

_BUCKET_DIGITS = len("20260501T120000")
_YEAR_1000, _YEAR_9999 = -30_610_224_000, 253_370_764_800
_AFTER_ALL = "~"
"""Sorts after every object's name."""


class Selection(NamedTuple):
    """Messages from `start` (inclusive) to `end` (exclusive) with these `keys`; None for no limit.

    `event_start` and `event_end` limit the time that buckets are made of, and `seqs` the sequences, both inclusive.
    """

    start: datetime | None = None
    end: datetime | None = None
    keys: list[str | None] | None = None
    event_start: datetime | None = None
    event_end: datetime | None = None
    seqs: tuple[int, int] | None = None

    @property
    def by_event(self) -> bool:
        """Whether there is a bound of the time that buckets are made of."""
        return self.event_start is not None or self.event_end is not None

    @classmethod
    def of(
        cls,
        start: Moment | None = None,
        end: Moment | None = None,
        keys: Keys | None = None,
        event_start: Moment | None = None,
        event_end: Moment | None = None,
    ) -> Selection:
        """Validate the arguments. Raises JetcaptureError."""
        return cls(
            _moment("start", start),
            _moment("end", end),
            _keys(keys),
            _moment("event_start", event_start),
            _moment("event_end", event_end),
        )

    @property
    def by_stream_time(self) -> bool:
        """Whether there is a bound of the stream's timestamps."""
        return self.start is not None or self.end is not None

    def may_hold_path(self, path: str) -> bool:
        """Whether a file may be an object with messages of the selection, by its path.

        As `may_hold_name` by buckets, but without parsing: most objects of a large archive are of other days.
        """
        name = path.rpartition("/")[2]
        if name[0] in "._":
            return False
        bucket = name[:_BUCKET_DIGITS]
        first, last = _bucket_texts(self.event_start, self.event_end)
        if not first <= bucket < last:
            return False
        first, last = _bucket_texts(self.start, self.end)
        return first <= bucket < last or name[_BUCKET_DIGITS : _BUCKET_DIGITS + 1] == "E"

    def may_hold_name(self, name: ObjectName, interval: float = MAX_INTERVAL) -> bool:
        """Whether an object may have messages of the selection, by its name and the length of its bucket in seconds."""
        if self.keys is not None and not name.bundle and (name.quarantine or name.key not in self.keys):
            return False
        if self.seqs is not None and (name.first_seq > self.seqs[1] or name.last_seq < self.seqs[0]):
            return False
        if not _reaches(name.bucket, interval, self.event_start, self.event_end):
            return False
        return name.event_time or _reaches(name.bucket, interval, self.start, self.end)

    def may_hold(self, info: ObjectInfo) -> bool:
        """Whether an object may have messages of the selection, by its name and its footer.

        Details are needed of objects with event time, if the selection is `by_stream_time`.
        """
        name = info.name
        if not self.may_hold_name(name, info.interval):
            return False
        if name.event_time and self.by_stream_time and (times := info.details.times) is not None:
            if self.start is not None and times[1] < microseconds_of(self.start):
                return False
            if self.end is not None and times[0] >= microseconds_of(self.end):
                return False
        return self.keys is None or not info.bundles or name.bundle in _bundles_of(tuple(self.keys), info.bundles)


def _reaches(bucket: int, interval: float, start: datetime | None, end: datetime | None) -> bool:
    """Whether a bucket may have times from `start` to `end`."""
    if start is not None and bucket + interval <= start.timestamp():
        return False
    return end is None or bucket < end.timestamp()


@lru_cache(maxsize=8)
def _bucket_texts(start: datetime | None, end: datetime | None) -> tuple[str, str]:
    """Return the first text with which names of objects from `start` to `end` can begin, and one after the last."""

    def text(seconds: float, otherwise: str) -> str:
        four_digits = _YEAR_1000 <= seconds < _YEAR_9999
        return layout.bucket_text(floor(seconds))[:_BUCKET_DIGITS] if four_digits else otherwise

    first = "" if start is None else text(start.timestamp() - MAX_INTERVAL, "")
    last = _AFTER_ALL if end is None else text(end.timestamp() + 1, _AFTER_ALL)
    return first, last


@lru_cache(maxsize=8)
def _bundles_of(keys: tuple[str | None, ...], bundles: int) -> frozenset[str]:
    return frozenset(bundle_of(key, bundles) for key in keys)


def _moment(name: str, value: Moment | None) -> datetime | None:
    try:
        return None if value is None else parse_time(value)
    except ValueError as error:
        raise JetcaptureError(f"{name}: {error}") from None


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
    """Raise JetcaptureError unless it may be a stream's name: other text would be a path."""
    if not stream or "/" in stream:
        raise JetcaptureError(f"stream={quoted(stream)}: expected the name of a stream")


def complete_end(files: ArchiveFiles, stream: str, end: datetime | None) -> datetime:
    """Return the end of the complete range by the watermark, or `end` if that is earlier.

    Prints a notice if that is before `end`. Raises JetcaptureError.
    """
    known = files.watermark(stream)
    if known is None:
        raise no_watermark(files, stream)
    complete = known.time + timedelta(microseconds=1)  # an end is exclusive
    if end is not None and end <= complete:
        return end
    if end is not None:
        sys.stderr.write(f"complete only up to {format_time(known.time)}: later messages are left out\n")
    return complete


def no_watermark(files: ArchiveFiles, stream: str) -> JetcaptureError:
    """Return the error for `--complete-only` in an archive without a watermark for the stream."""
    return JetcaptureError(f"{files.shown} has no watermark for stream {stream}, which --complete-only needs: omit it")
