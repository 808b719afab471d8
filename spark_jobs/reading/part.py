"""Validate the arguments `start`, `end` and `keys` that select a part of an archive."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime
from typing import Any, NamedTuple, cast

from jetcapture_py.config.units import parse_time, quoted
from jetcapture_py.errors import JetcaptureError

Moment = datetime | date | str
"""A datetime with a time zone, a date, or text; see `jetcapture_py.config.units.parse_time`."""
Keys = Iterable[str | None] | str
"""One key or several; None is for messages without a key."""


class Part(NamedTuple):
    """Messages from `start` (inclusive) to `end` (exclusive) with these `keys`; None for no limit.

    `event_start` and `event_end` limit the time that buckets are made of.
    """

    start: datetime | None
    end: datetime | None
    keys: list[str | None] | None
    event_start: datetime | None = None
    event_end: datetime | None = None

    @property
    def by_event(self) -> bool:
        """Whether there is a bound of the time that buckets are made of."""
        return self.event_start is not None or self.event_end is not None

    @classmethod
    def of(
        cls,
        start: Moment | None,
        end: Moment | None,
        keys: Keys | None,
        event_start: Moment | None = None,
        event_end: Moment | None = None,
    ) -> Part:
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
    found: list[Any] = [keys] if one else list(cast("Iterable[Any]", keys))
    for key in found:
        if key is not None and not isinstance(key, str):
            shown = repr(key) if isinstance(key, bytes) else quoted(key)
            raise JetcaptureError(f"keys: expected text, or None for messages without a key, got {shown}")
    return [key or None for key in found]
