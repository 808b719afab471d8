"""Make foreign text safe for logs, terminals and the quarantine: short, printable, without credentials.

Errors of libraries and user code may contain addresses with passwords, whole payloads and control characters. Every
error that is stored or logged passes through `one_line`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

MAX_LENGTH = 300
"""Maximum length of an error that is stored or becomes part of another error."""
MAX_LOGGED = 2000
"""Maximum length of an error in the log; the reason may follow long paths."""

_MAX_READ = 1 << 16
_MAX_PARTS = 10
"""Maximum errors of a group that are shown."""

_USERINFO = re.compile(r"""//(?:[^/\s"'<>]*|[^/\s"'<>@:]*:(?!\d+[/?#])(?:/?[^/\s"'<>])*/?)@""")
"""User and password in a URL; a slash in the password should be escaped, but may not be."""
_NAMES = ("pass", "pwd", "secret", "token", "key", "credential", "sig", "seed", "authorization")
_VALUE = r"""(?:(?:[bu]|[A-Z]\w{0,20}\()?(?:"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?)|[^\s"']+)"""
_NAMED = re.compile(
    rf"""
    ( (?: password|passwd|passphrase|pwd|secret )[\w-]{{0,20}}["']?[ ]?[=:][ ]?
    | (?: token|(?:api|access|account|private)[_-]?key(?:[_-]?id)?|credentials?|signature|(?<![a-z])sig|(?<![a-z])seed )
      (?: ["'][ ]?[=:] | [ ]?= )[ ]?
    | authorization["']?[ ]?[=:][ ]?(?:(?:basic|bearer)[ ])?
    ) {_VALUE}""",
    re.IGNORECASE | re.VERBOSE,
)
"""A value with a name that suggests a secret, as in a query string, connection string, header, JSON or repr."""
_SHAPED = re.compile(r"\bS[ACNOUX][A-Z2-7]{56}\b|\beyJ[\w-]{10,}\.[\w-]+\.?[\w-]*")
"""NKey seeds and JSON Web Tokens."""
_SHORTEST = 16
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_UNITS = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def one_line(error: object, limit: int = MAX_LENGTH) -> str:
    """Describe an error in one printable line of at most `limit` characters, without credentials.

    Exceptions become `Type: text`, groups include their errors; other objects become their text. Never raises.
    """
    text = _text(error).lstrip()
    words = text[:_MAX_READ].split()
    if len(text) > _MAX_READ and len(words) > 1:
        words.pop()  # a truncated credential might not be recognized
    line = without_credentials(" ".join(words))
    if not line.isprintable():
        line = "".join(character if character.isprintable() else "\ufffd" for character in line)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def without_credentials(text: str) -> str:
    """Replace apparent credentials by `***`."""
    if "@" in text:
        text = _USERINFO.sub("//***@", text)
    lowered = text.lower()
    if any(name in lowered for name in _NAMES):  # much faster than the regular expression
        text = _NAMED.sub(r"\1***", text)
    return _SHAPED.sub("***", text) if len(text) > _SHORTEST else text


def is_text(value: str) -> bool:
    """Whether a string can be encoded as UTF-8, so has no surrogates, which JSON and YAML can express."""
    return value.isascii() or not _SURROGATE.search(value)


def plural(count: int, one: str, many: str | None = None) -> str:
    """Return the count with its noun: "1 object", "2,000 objects"."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


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


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """Yield the lines of a table with columns as wide as their widest cell; columns in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, range(len(row)), strict=True)
        yield "  ".join(cell.rjust(width) if n in right else cell.ljust(width) for cell, width, n in cells).rstrip()


def sentence(text: str) -> str:
    """Return the text as a sentence, with a capital letter and one mark at its end."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '?', '!', '…')) else '.'}"


def escaped(text: str) -> str:
    """Escape unprintable characters, quotes and backslashes.

    The result cannot break lines, control a terminal, or end quotes around it.
    """
    return "".join(char if char.isprintable() and char not in '"\\' else _escape(char) for char in text)


def _text(error: object) -> str:
    try:
        if not isinstance(error, BaseException):
            return str(error)
        text = str(error)
        if isinstance(error, BaseExceptionGroup):
            parts = "; ".join(one_line(part) for part in error.exceptions[:_MAX_PARTS])
            more = "; …" if len(error.exceptions) > _MAX_PARTS else ""
            text = f"{error.message} [{parts}{more}]"
    except BaseException:  # user-defined methods may raise anything
        text = ""
    name = type(error).__name__
    return f"{name}: {text}" if text.strip() else name


def _escape(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char)
    return short or (f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}")


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Show bars on standard error, if that is a terminal.

    Yields a function that takes a stage, the amount done, and the total, from any thread.
    """
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        stages: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage)
            bars.update(stages[stage], completed=min(done, total), total=total)

        yield show
