"""Log lines: a stable event name and fields, one line each, as text for people or JSON for machines.

    2026-01-31T12:00:00.123Z INFO blocks.stored blocks=1 rows=5000
    {"ts": "2026-01-31T12:00:00.123Z", "level": "info", "event": "blocks.stored", "blocks": 1, "rows": 5000}

In a process with several captures, the field `capture` names the line's capture. Unprintable characters are
escaped, so no value can start a line or control a terminal. Exceptions are one line without a traceback. Log lines of
libraries, from level warning on, become the event `library.log`, and Python's warnings `python.warning`.

Without `setup`, as in a program that embeds a capture, the message of a record is the event with its fields as text.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Self, TextIO

from jetcapture_py.text import MAX_LOGGED, escaped, one_line

ROOTS = ("jetcapture", "jetcapture_py")
"""The top-level loggers of this package."""
EVENT, FIELDS = "jetcapture_event", "jetcapture_fields"
"""Attributes of a log record with the event's name and fields."""
CAPTURE: ContextVar[str | None] = ContextVar("capture", default=None)
"""Name of the capture that the current task or thread works for; None if the process has only one."""

_RESERVED = ("ts", "level", "event")
_BARE = re.compile(r'[^\s="\\]+')


def setup(format: str, level: str, stream: TextIO | None = None) -> None:  # noqa: A002  # the setting's name
    """Log to `stream` (default: standard error) as `text`, `json` or `auto`: text on a terminal, else JSON.

    `level` applies to our own events. A second call replaces the first; other handlers stay.
    """
    if format not in ("auto", "text", "json"):
        raise ValueError(f"unknown log format: {format!a}")
    threshold = logging.getLevelNamesMapping().get(level.upper())
    if threshold is None:
        raise ValueError(f"unknown log level: {level!a}")
    target = sys.stderr if stream is None else stream
    handler = _Handler(target)
    as_text = target.isatty() if format == "auto" else format == "text"
    handler.setFormatter(TextFormatter() if as_text else JsonFormatter())
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(threshold, logging.WARNING))
    for name in ROOTS:
        logging.getLogger(name).setLevel(threshold)
    logging.captureWarnings(capture=True)


def event(logger: logging.Logger, level: int, name: str, /, **fields: object) -> None:
    """Log the event `name`, such as "blocks.stored". Fields that are exceptions become one line."""
    logger.log(level, _Event(name, fields), extra={EVENT: name, FIELDS: fields}, stacklevel=2)


class _Event(str):
    """An event's name, which foreign formatters show with its fields."""

    __slots__ = ("fields",)
    fields: Mapping[str, object]

    def __new__(cls, name: str, fields: Mapping[str, object] | None = None) -> Self:
        self = super().__new__(cls, name)
        self.fields = fields or {}
        return self

    def __str__(self) -> str:
        return " ".join([escaped(self[:]), *_pairs(_named(self.fields))])


@contextlib.contextmanager
def about(capture: str | None) -> Iterator[None]:
    """Name the capture in all log lines inside the block, and in tasks created there."""
    token = CAPTURE.set(capture)
    try:
        yield
    finally:
        CAPTURE.reset(token)


class TextFormatter(logging.Formatter):
    """One line for people: time, level, event and `key=value` pairs, quoted if needed."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time(record)} {record.levelname} {escaped(_event(record))}"
        return " ".join([head, *_pairs(_fields(record))])


class JsonFormatter(logging.Formatter):
    """One JSON object: `ts`, `level`, `event` and the fields, which cannot replace these three."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"ts": _time(record), "level": record.levelname.lower(), "event": _event(record)}
        for name, value in _fields(record).items():
            line[f"{name}_" if name in _RESERVED else name] = value
        return json.dumps(line, allow_nan=False)


class _Handler(logging.StreamHandler[TextIO]):
    """A subclass, so that `setup` can find the handler again."""


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _event(record: logging.LogRecord) -> str:
    name: str | None = getattr(record, EVENT, None)
    if name is not None:
        return name
    return "python.warning" if record.name == "py.warnings" else "library.log"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the event's fields, or those of a library's log line, as plain values."""
    given: Mapping[str, object] | None = getattr(record, FIELDS, None)
    if given is None:
        message = one_line(record.getMessage(), MAX_LOGGED)
        given = {"message": message} if record.name == "py.warnings" else {"logger": record.name, "message": message}
    fields = _named(given)
    if record.exc_info and record.exc_info[1] is not None:
        fields.setdefault("error", one_line(record.exc_info[1], MAX_LOGGED))
    return fields


def _named(given: Mapping[str, object]) -> dict[str, Any]:
    """Return fields as plain values, with the name of the capture."""
    capture = CAPTURE.get()
    fields: dict[str, Any] = {} if capture is None else {"capture": capture}
    return fields | {str(name): _plain(value) for name, value in given.items()}


def _pairs(fields: Mapping[str, Any]) -> Iterator[str]:
    return (f"{_bare(name)}={_text(value)}" for name, value in fields.items())


def _plain(value: object) -> Any:
    """Convert to JSON types; other values become text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, BaseException):
        return one_line(value, MAX_LOGGED)
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)


def _text(value: object) -> str:
    if isinstance(value, str):
        return _bare(value)
    return _bare(json.dumps(value, ensure_ascii=False))


def _bare(text: str) -> str:
    """Return the text unchanged if it is one printable word, else escaped and quoted."""
    return text if _BARE.fullmatch(text) and text.isprintable() else f'"{escaped(text)}"'


class LogLimit:
    """Lets one event through every `every` seconds, and counts those held back."""

    def __init__(self, every: float = 10.0) -> None:
        self._every = every
        self._last = float("-inf")
        self._count = 0

    def due(self, now: float, count: int = 1) -> int:
        """Add `count`; return how many events to report now, or 0."""
        self._count += count
        if not self._count or now - self._last < self._every:
            return 0
        self._last, self._count, count = now, 0, self._count
        return count
