"""HTML that cannot be broken by what is put into it, and values as people read them.

Everything that is not `Html` is escaped, control and bidirectional characters are made visible, and only this module
makes `Html`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape

_VOID = frozenset({"meta", "line", "rect", "col"})
_SIZES = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. `class_` is the attribute class, other underscores are hyphens; a None or False is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(visible(str(value)))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Html(f"<{name}{given}>" if name in ("meta", "col") else f"<{name}{given}/>")
    return Html(f"<{name}{given}>{join(*children)}</{name}>")


def join(*children: object) -> Html:
    """One piece of several; None and False are nothing."""
    parts = (child for child in children if child is not None and child is not False)
    return Html("".join(child if isinstance(child, Html) else escape(visible(str(child))) for child in parts))


def trusted(text: str) -> Html:
    """Text of this program's own as it stands: a style sheet, a character."""
    return Html(text)


def visible(text: str) -> str:
    """The text with every character that is not printable, but line breaks, as an escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else f"\\u{ord(char):04x}" for char in text)


def clipped(text: str, longest: int) -> str:
    """The text on one line, its end cut off where it is longer."""
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def plural(count: int, one: str, many: str | None = None) -> str:
    """The count with its noun: "1 object", "2,000 objects"."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def short(count: float) -> str:
    """A count for an axis: "1.5k", "20M"."""
    for factor, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= factor:
            return f"{count / factor:.3g}{unit}"
    return f"{count:g}"


def size(count: float) -> str:
    """Bytes in a unit that gives a small number: "1.5 MiB"."""
    unit = 0
    while count >= 1023.5 and unit + 1 < len(_SIZES):
        count /= 1024
        unit += 1
    if unit == 0:
        return plural(round(count), "byte")
    digits = f"{count:.1f}".removesuffix(".0") if count < 99.95 else f"{count:.0f}"
    return f"{digits} {_SIZES[unit]}"


def share(part: float, whole: float) -> str:
    """A percentage that says 0 % and 100 % only where that is exact."""
    if not whole or not part:
        return "0 %"
    if part == whole:
        return "100 %"
    percent = 100 * part / whole
    if percent < 0.1:
        return "< 0.1 %"
    return f"{percent:.1f} %" if percent <= 99.9 else "> 99.9 %"


def duration(seconds: float) -> str:
    """A length of time in one or two units: "0.3 s", "14 min 3 s", "2 d 4 h"."""
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
    """A time in UTC, `at` in microseconds since the epoch or as it is."""
    if at is None:
        return "unknown"
    time = at if isinstance(at, datetime) else utc(at / 1_000_000)
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S}" if seconds else f"{time.astimezone(UTC):%Y-%m-%d %H:%M}"


def day(seconds: float, *, year: bool = False) -> str:
    """A day: "1 May"."""
    time = utc(seconds)
    return f"{time.day} {_MONTHS[time.month - 1]}" + (f" {time.year}" if year else "")


def utc(seconds: float) -> datetime:
    """The time so many seconds after the epoch."""
    return datetime.fromtimestamp(seconds, UTC)
