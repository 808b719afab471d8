"""Format values and text for people."""

from __future__ import annotations

from datetime import UTC, datetime

from jetcapture_py import text

_SIZES = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def visible(value: str) -> str:
    """Return the text with unprintable characters escaped, except line breaks."""
    if value.isprintable():
        return value
    return "".join(char if char.isprintable() or char == "\n" else f"\\u{ord(char):04x}" for char in value)


def clipped(value: str, longest: int) -> str:
    """Return the text on one line, cut off after `longest` characters."""
    value = " ".join(value.split())
    return value if len(value) <= longest else f"{value[: longest - 1]}…"


def plural(count: int, one: str, many: str | None = None) -> str:
    """Return the count with its noun: "1 object", "2,000 objects"."""
    return text.plural(count, one, many, grouped=True)


def short(count: float) -> str:
    """Return a count for an axis: "1.5k", "20M"."""
    for factor, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= factor:
            return f"{count / factor:.3g}{unit}"
    return f"{count:g}"


def size(count: float) -> str:
    """Return a number of bytes in a fitting unit: "1.5 MiB"."""
    unit = 0
    while count >= 1023.5 and unit + 1 < len(_SIZES):
        count /= 1024
        unit += 1
    if unit == 0:
        return plural(round(count), "byte")
    digits = f"{count:.1f}".removesuffix(".0") if count < 99.95 else f"{count:.0f}"
    return f"{digits} {_SIZES[unit]}"


def share(part: float, whole: float) -> str:
    """Return a percentage; 0 % and 100 % only if exact."""
    if not whole or not part:
        return "0 %"
    if part == whole:
        return "100 %"
    percent = 100 * part / whole
    if percent < 0.1:
        return "< 0.1 %"
    return f"{percent:.1f} %" if percent <= 99.9 else "> 99.9 %"


def duration(seconds: float) -> str:
    """Return a length of time in one or two units: "0.3 s", "14 min 3 s", "2 d 4 h"."""
    sign, seconds = ("-" if seconds < 0 else ""), abs(seconds)
    if seconds < 59.95:
        digits = 0 if seconds == int(seconds) else 1 if seconds >= 0.1 else 3
        return f"{sign}{seconds:.{digits}f} s"
    for factor, unit, inner, inner_unit in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if round(seconds / inner) * inner >= factor:
            whole, rest = divmod(round(seconds / inner), factor // inner)
            return f"{sign}{whole:,} {unit}" + (f" {rest} {inner_unit}" if rest and whole < 100 else "")
    raise AssertionError(seconds)


def moment(at: float | datetime | None, *, seconds: bool = True) -> str:
    """Return a time in UTC; a number is in microseconds since the epoch."""
    if at is None:
        return "unknown"
    time = at if isinstance(at, datetime) else utc(at / 1_000_000)
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S}" if seconds else f"{time.astimezone(UTC):%Y-%m-%d %H:%M}"


def day(seconds: float, *, year: bool = False) -> str:
    """Return a day: "1 May"."""
    time = utc(seconds)
    return f"{time.day} {_MONTHS[time.month - 1]}" + (f" {time.year}" if year else "")


def utc(seconds: float) -> datetime:
    """Return the time at `seconds` after the epoch."""
    return datetime.fromtimestamp(seconds, UTC)
