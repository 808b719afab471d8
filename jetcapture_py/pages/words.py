"""Format figures and foreign text for people: on the status page and in reports."""

from __future__ import annotations

from datetime import UTC, datetime

from jetcapture_py.text import age as age
from jetcapture_py.text import duration as duration
from jetcapture_py.text import plural as plural
from jetcapture_py.text import size as size

_COUNTS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_FULL = 10_000
"""Counts below this are shown in full."""
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def visible(value: str, longest: int = 400, *, keep: str = "") -> str:
    """Cut the text off after `longest` characters; unprintable ones, unless in `keep`, become U+FFFD."""
    value = value if len(value) <= longest else f"{value[: longest - 1]}…"
    if value.isprintable():
        return value
    return "".join(char if char.isprintable() or char in keep else "\ufffd" for char in value)


def clipped(value: str, longest: int) -> str:
    """Return the text on one line, cut off after `longest` characters."""
    value = " ".join(value.split())
    return value if len(value) <= longest else f"{value[: longest - 1]}…"


def short(count: float) -> str:
    """Return a count in a few characters: "950", "9,500", "95k", "9.5M"."""
    if count < _FULL:
        return f"{count:,.0f}"
    factor, unit = next(scale for scale in _COUNTS if count >= scale[0])
    scaled = count / factor
    return (f"{scaled:.1f}".removesuffix(".0") if scaled < 9.95 else f"{scaled:.0f}") + unit


def rate(per_second: float) -> str:
    """Return messages a second: "12/s", "0.3/s"."""
    return f"{per_second:.1f}/s" if 0 < per_second < 10 and per_second % 1 >= 0.05 else f"{short(per_second)}/s"


def share(part: float, whole: float) -> str:
    """Return a percentage; 0 % and 100 % only if exact."""
    if not whole or not part:
        return "0 %"
    if part == whole:
        return "100 %"
    percent = 100 * part / whole
    if percent < 0.1:
        return "< 0.1 %"
    return "> 99.9 %" if 99.9 < percent < 100 else f"{percent:.1f} %"


def utc(seconds: float) -> datetime:
    """Return the time at `seconds` after the epoch."""
    return datetime.fromtimestamp(seconds, UTC)


def moment(at: float | datetime | None, *, seconds: bool = True) -> str:
    """Return date and time in UTC; a number is in microseconds since the epoch."""
    if at is None:
        return "unknown"
    time = at.astimezone(UTC) if isinstance(at, datetime) else utc(at / 1_000_000)
    return f"{time:%Y-%m-%d %H:%M:%S}" if seconds else f"{time:%Y-%m-%d %H:%M}"


def clock(time: datetime, now: datetime) -> str:
    """Return the time of day, UTC, with the date unless it is that of `now`."""
    time, now = time.astimezone(UTC), now.astimezone(UTC)
    return f"{time:%H:%M:%S}" if time.date() == now.date() else moment(time)


def day(seconds: float, *, year: bool = False) -> str:
    """Return a day: "1 May"."""
    time = utc(seconds)
    return f"{time.day} {_MONTHS[time.month - 1]}" + (f" {time.year}" if year else "")
