"""Which messages of an archive to read: the arguments `start`, `end`, `event_start`, `event_end` and `keys`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import date, datetime, timedelta
from typing import Any, NamedTuple, cast

from jetcapture_py.config.units import format_time, parse_time, quoted
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store.archive import ArchiveFiles

Moment = datetime | date | str
"""A datetime with a time zone, a date, or text; see `jetcapture_py.config.units.parse_time`."""
Keys = Iterable[str | None] | str
"""One key or several; None is for messages without a key."""


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
