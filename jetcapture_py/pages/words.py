"""Format figures and foreign text for people: on the status page, in the terminal and in reports."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

from jetcapture_py import text

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNTS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_FULL = 10_000
"""Counts below this are shown in full."""
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_UNITS = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))

plural = partial(text.plural, grouped=True)
"""The count with its noun: "1 object", "2,000 objects"."""


def visible(value: str, longest: int = 400, *, keep: str = "") -> str:
    """Return the text cut off after `longest` characters; unprintable ones, unless in `keep`, become U+FFFD."""
    value = value if len(value) <= longest else f"{value[: longest - 1]}…"
    if value.isprintable():
        return value
    return "".join(char if char.isprintable() or char in keep else "\ufffd" for char in value)


def clipped(value: str, longest: int) -> str:
    """Return the text on one line, cut off after `longest` characters."""
    value = " ".join(value.split())
    return value if len(value) <= longest else f"{value[: longest - 1]}…"


def duration(seconds: float) -> str:
    """Return a length of time in one or two units: "0.3 s", "14 min 3 s", "2 d 4 h"."""
    sign, seconds = ("-" if seconds < 0 else ""), abs(seconds)
    if seconds < 59.95:
        digits = 0 if seconds == int(seconds) else 1 if seconds >= 0.1 else 3
        return f"{sign}{seconds:.{digits}f} s"
    for factor, unit, inner, inner_unit in _UNITS:
        if round(seconds / inner) * inner >= factor:
            whole, rest = divmod(round(seconds / inner), factor // inner)
            return f"{sign}{whole:,} {unit}" + (f" {rest} {inner_unit}" if rest and whole < 100 else "")
    raise AssertionError(seconds)


def age(seconds: float) -> str:
    """Return a time span in whole seconds, or in its two largest units."""
    return duration(max(int(seconds), 0))


def size(count: float) -> str:
    """Return bytes in a fitting unit: "1.5 MiB"."""
    unit = 0
    while count >= 1023.5 and unit + 1 < len(_SIZES):
        count /= 1024
        unit += 1
    digits = f"{count:.1f}".removesuffix(".0") if unit and count < 99.95 else f"{count:.0f}"
    return f"{digits} {_SIZES[unit]}"


def short(count: float) -> str:
    """Return a count in a few characters: "950", "9,500", "95k", "9.5M"."""
    if count < _FULL:
        return f"{count:,.0f}"
    factor, unit = next(each for each in _COUNTS if count >= each[0])
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
