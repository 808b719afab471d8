"""Parse and format durations, sizes and times, and make text safe to show on one line.

    duration = seconds | [n "d"] [n "h"] [n "m"] [n "s"] [n "ms"]      "1h30m"  "15m"  "500ms"  "1.5h"  90  "90"
    size     = bytes   | n ("B" | "KB" | "kB" | "MB" | "GB" | "TB" | "KiB" | "MiB" | "GiB" | "TiB")      "128MiB"  1024
    n        = digits ["." digits]

Units are case-sensitive; a duration's units come largest first and once each; spaces and signs are not allowed. KB, MB,
GB and TB are powers of 1000, KiB, MiB, GiB and TiB powers of 1024; "64k" and "1G" are refused because tools disagree on
their meaning. A number without a unit is seconds or bytes, as a number or as text, so
that an environment variable can hold it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, date, datetime, time, timedelta
from fractions import Fraction

from jetcapture_py.text import escaped

MAX_SECONDS = 36_500 * 86_400
"""Maximum duration: a hundred years, which fits into 64 bits as nanoseconds."""
MAX_BYTES = 2**63 - 1

_NUMBER = r"[0-9]{1,19}(?:\.[0-9]{1,9})?"
_SECONDS = {"d": Fraction(86_400), "h": Fraction(3_600), "m": Fraction(60), "s": Fraction(1), "ms": Fraction(1, 1_000)}
_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_PARTS = "".join(f"(?:{_NUMBER}{unit})?" for unit in _SECONDS)

DURATION_PATTERN = rf"^(?:{_NUMBER}|(?=.){_PARTS})$"
"""The grammar of a duration as a regular expression that Python and JSON Schema read alike."""
SIZE_PATTERN = rf"^{_NUMBER}(?:B|[Kk]B|[MGT]B|[KMGT]iB)?$"
"""The grammar of a size as a regular expression that Python and JSON Schema read alike."""

DAY_PATTERN = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
"""A day that exists, as YYYY-MM-DD; Python and Arrow read this expression alike, and Arrow parses what it matches."""
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
RFC3339_PATTERN = rf"({DAY_PATTERN}[Tt ]{_CLOCK})(\.[0-9]+)?([Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
"""A time with its zone, in a day that exists: date and clock, fraction, zone."""
RFC3339 = re.compile(RFC3339_PATTERN)

_DURATION = re.compile(DURATION_PATTERN.removesuffix("$") + r"\Z")
_DURATION_PART = re.compile(rf"({_NUMBER})(ms|[dhms])")
_SIZE = re.compile(rf"({_NUMBER})(B|[Kk]B|[MGT]B|[KMGT]iB)?")
_AMBIGUOUS_SIZE = re.compile(rf"{_NUMBER}([kKmMgGtT])i?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_AGO = re.compile(rf"-?(?:{_NUMBER}(?:ms|[dhms]))+")
_DAYS_AGO = {"today": 0, "yesterday": 1}
_MAX_SHOWN = 80
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]+")


def parse_duration(value: object) -> float:
    """Return a duration in seconds. Raises ValueError with the expected form in one line; `got` adds the value."""
    return float(_duration(value))


def parse_nanoseconds(value: object) -> int:
    """Return a duration in nanoseconds. Raises ValueError as `parse_duration`."""
    nanoseconds = _duration(value) * 10**9
    if nanoseconds.denominator != 1:
        raise ValueError("expected a whole number of nanoseconds")
    return int(nanoseconds)


def _duration(value: object) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("expected a duration such as 15m")
    if isinstance(value, str):
        seconds = _seconds(value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a duration such as 15m")
    else:
        seconds = Fraction(value)
    if seconds < 0:
        raise ValueError("expected a duration of at least 0")
    if seconds > MAX_SECONDS:
        raise ValueError("expected a duration of at most 36500d")
    return seconds


def parse_size(value: object) -> int:
    """Return a size in bytes. Raises ValueError as `parse_duration`."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("expected a size such as 128MiB")
    size = _bytes(value) if isinstance(value, str) else Fraction(value)
    if size < 0:
        raise ValueError("expected a size of at least 0")
    if size > MAX_BYTES:
        raise ValueError("expected a size below 8388608TiB")
    if size.denominator != 1:
        raise ValueError("expected a whole number of bytes")
    return int(size)


def parse_time(value: object) -> datetime:
    """Return the time of a datetime with a time zone, a date, or text: RFC 3339, `today`, `yesterday`, or a duration
    before now, such as 1h or -1h.

    A date is its beginning in UTC, and text without a zone is in UTC. A datetime without a zone is refused, because
    Python takes it for local time. Raises ValueError with the expected form in one line.
    """
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"{value.isoformat()} has no time zone")
        return value
    if isinstance(value, date):
        return datetime.combine(value, time(), UTC)
    if value in _DAYS_AGO:
        return datetime.combine(datetime.now(UTC), time(), UTC) - timedelta(days=_DAYS_AGO[str(value)])
    if isinstance(value, str) and _AGO.fullmatch(value):
        return datetime.now(UTC) - timedelta(seconds=parse_duration(value.removeprefix("-")))
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        moment = None
    if moment is None:
        raise ValueError("expected a time such as 2026-05-01T12:00:00Z, a date, today, yesterday or -1h")
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def format_time(moment: datetime, *, precision: str = "auto") -> str:
    """Format a time as RFC 3339 in UTC, as NATS does; `precision` as in `isoformat`."""
    return moment.astimezone(UTC).isoformat(timespec=precision).replace("+00:00", "Z")


def moment_of(microseconds: int) -> datetime:
    """Return the UTC time of microseconds since the epoch."""
    return _EPOCH + timedelta(microseconds=microseconds)


def microseconds_of(moment: datetime) -> int:
    """Return a time in microseconds since the epoch."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def format_duration(seconds: float) -> str:
    """Format seconds for `parse_duration`, to the millisecond: 5400.0 is "1h30m"."""
    rest = round(seconds * 1_000)
    text = ""
    for unit, factor in _SECONDS.items():
        count, rest = divmod(rest, int(factor * 1_000))
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def format_nanoseconds(nanoseconds: int) -> str:
    """Format nanoseconds for `parse_nanoseconds`, exactly."""
    if nanoseconds % 10**6 == 0:
        return format_duration(nanoseconds // 10**6 / 1_000)
    whole, rest = divmod(nanoseconds, 10**9)
    return f"{whole}.{rest:09}".rstrip("0") + "s"


def format_size(size: int) -> str:
    """Format bytes for `parse_size`, exactly, in the unit with the smallest number: "128MiB"."""
    unit = min((unit for unit, factor in _BYTES.items() if size % factor == 0), key=lambda unit: size // _BYTES[unit])
    return f"{size // _BYTES[unit]}{unit}"


def quoted(value: object) -> str:
    """Quote a value for a message, shortened to one line."""
    if isinstance(value, str):
        return f'"{escaped(value[:_MAX_SHOWN])}{"…" if len(value) > _MAX_SHOWN else ""}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value) if abs(value) < 10**_MAX_SHOWN else "a huge number"
    if isinstance(value, float):
        return str(value)
    return kind(value)


def got(reason: str, value: object) -> str:
    """Add the value to what was expected: `expected X; hint` becomes `expected X, got "Y"; hint`."""
    expected, semicolon, hint = reason.partition("; ")
    return f"{expected}, got {quoted(value)}{semicolon}{hint}" if reason.startswith("expected ") else reason


def dotted(path: Iterable[int | str]) -> str:
    """Format a setting's path for messages: `nats.servers[0]`, `decode.columns["a b"]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_NAME.fullmatch(part):
            text += f".{part}"
        else:
            text += f"[{quoted(part)}]"
    return text.removeprefix(".")


def kind(value: object) -> str:
    """Return the type of a value in the terms of a configuration file."""
    if value is None:
        return "nothing"
    words = ((bool, "true or false"), (str, "text"), (int | float, "a number"), (dict, "a mapping"))
    for types, word in words:
        if isinstance(value, types):
            return word
    if isinstance(value, list | tuple | set | frozenset):
        return "a list" if value else "an empty list"
    return f"a {type(value).__name__}"


def _seconds(text: str) -> Fraction:
    if _DURATION.match(text):
        parts = _DURATION_PART.findall(text)
        return (
            sum((Fraction(number) * _SECONDS[unit] for number, unit in parts), Fraction()) if parts else Fraction(text)
        )
    if text.startswith("-") and _DURATION.match(text[1:]):
        raise ValueError("expected a duration of at least 0")
    units = " (units d, h, m, s and ms, largest first)" if text[:1].isdigit() else ""
    raise ValueError(f"expected a duration such as 15m{units}")


def _bytes(text: str) -> Fraction:
    if match := _SIZE.fullmatch(text):
        return Fraction(match[1]) * _BYTES[(match[2] or "B").replace("k", "K")]
    if text.startswith("-") and _SIZE.fullmatch(text[1:]):
        raise ValueError("expected a size of at least 0")
    if match := _AMBIGUOUS_SIZE.fullmatch(text):
        unit = match[1].upper()
        raise ValueError(f"expected a size in {unit}iB (1024s) or {unit}B (1000s)")
    units = " (units B, KB, MB, GB, TB, KiB, MiB, GiB and TiB)" if text[:1].isdigit() else ""
    raise ValueError(f"expected a size such as 128MiB{units}")
