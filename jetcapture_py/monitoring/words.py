"""Figures and foreign text as people read them, on the status page and in the terminal."""

from __future__ import annotations

from datetime import UTC, datetime

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNTS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_FULL = 10_000
"""Counts below this are shown in full."""


def visible(text: str, longest: int = 400) -> str:
    """Return the text on one line, cut off after `longest` characters, without any that is not printable."""
    text = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return text if text.isprintable() else "".join(char if char.isprintable() else "\ufffd" for char in text)


def span(seconds: float) -> str:
    """Return a time span in its two largest units."""
    if seconds < 60:
        return f"{max(seconds, 0):.1f} s"
    rest, parts = int(seconds), []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if rest >= size:
            parts.append(f"{rest // size} {unit}")
            rest %= size
    return " ".join(parts[:2])


def age(seconds: float) -> str:
    """Return a time span in whole seconds, or in its two largest units."""
    return f"{max(int(seconds), 0)} s" if seconds < 60 else span(seconds)


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


def moment(time: datetime) -> str:
    """Return date and time, UTC, to the second."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def clock(time: datetime, now: datetime) -> str:
    """Return the time of day, UTC, with the date unless it is that of `now`."""
    time, now = time.astimezone(UTC), now.astimezone(UTC)
    return f"{time:%H:%M:%S}" if time.date() == now.date() else moment(time)


def share(part: float, whole: float) -> str:
    """Return a percentage without digits, at least "<1 %" for anything above 0."""
    percent = 100 * part / whole if whole else 0.0
    return "<1 %" if 0 < percent < 1 else f"{percent:.0f} %"
