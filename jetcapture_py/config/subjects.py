"""Compare subject patterns: `*` is one token, `>` at the end is one or more."""

from __future__ import annotations

import re
from collections.abc import Iterable

_TOKEN = re.compile(r"[^ \t\r\n.]+")


def check_pattern(pattern: str) -> str:
    """Return the pattern; raise ValueError if it is invalid. Servers also store messages on subjects such as `a.b*`."""
    tokens = pattern.split(".")
    if not all(map(_TOKEN.fullmatch, tokens)) or ">" in tokens[:-1]:
        raise ValueError("expected a subject such as orders.*.new or orders.>")
    return pattern


def covers(pattern: str, other: str) -> bool:
    """Whether `pattern` matches every subject that `other` matches; `other` may be a subject or a pattern."""
    tokens, others = pattern.split("."), other.split(".")
    for index, part in enumerate(tokens):
        if part == ">":
            return len(others) > index
        if index >= len(others) or others[index] == ">" or part not in ("*", others[index]):
            return False
    return len(tokens) == len(others)


def overlaps(pattern: str, other: str) -> bool:
    """Whether some subject matches both patterns."""
    tokens, others = pattern.split("."), other.split(".")
    for one, another in zip(tokens, others, strict=False):
        if ">" in (one, another):
            return True
        if "*" not in (one, another) and one != another:
            return False
    return len(tokens) == len(others)


def matches(subject: str, filters: Iterable[str]) -> bool:
    """Whether any filter matches a subject; without filters, every subject matches."""
    filters = tuple(filters)
    return not filters or any(covers(pattern, subject) for pattern in filters)


def regex_of(patterns: Iterable[str]) -> str:
    """Return a regular expression for subjects that match any of the patterns. Arrow and Java interpret it alike."""
    wildcards = {"*": r"[^.]+", ">": r"(?s:.+)"}
    texts = (
        r"\.".join(wildcards.get(token) or re.escape(token) for token in pattern.split(".")) for pattern in patterns
    )
    return rf"^(?:{'|'.join(texts)})\z"
