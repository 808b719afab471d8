"""Match NATS subject patterns in Python and in Spark: `*` is one token, `>` at the end is one or more."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import reduce

from pyspark.sql import Column
from pyspark.sql import functions as sf

from jetcapture_py.errors import JetcaptureError
from jetcapture_py.jetstream.publish.frames import MAX_SUBJECT_BYTES, PLAIN_SUBJECT

_TOKEN = re.compile(r"[^\s.]+")
_SUBJECT = r"(?U)^[^\s\x00-\x1f\x7f.]+(\.[^\s\x00-\x1f\x7f.]+)*\z"
_WILDCARD = r"(^|\.)[*>](\.|\z)"
_SERVERS = r"^\$(JS|SYS)\."


def check_pattern(pattern: str) -> str:
    """Return the pattern; raise JetcaptureError if it is invalid."""
    tokens = pattern.split(".")
    if not all(_TOKEN.fullmatch(token) for token in tokens) or ">" in tokens[:-1]:
        raise JetcaptureError(f"{pattern!r} is not a subject pattern such as orders.*.new or orders.>")
    return pattern


def is_odd(subject: Column) -> Column:
    """Whether `publish.frames.check_subject` would reject the subject; false for null."""
    valid = subject.rlike(_SUBJECT) & ~subject.rlike(_WILDCARD) & ~subject.rlike(_SERVERS)
    plain = subject.rlike(PLAIN_SUBJECT)
    return sf.coalesce(~plain & ~valid | (sf.octet_length(subject) > MAX_SUBJECT_BYTES), sf.lit(False))  # noqa: FBT003


def matching(subject: Column, patterns: Iterable[str]) -> Column:
    """Whether the subject matches one of the patterns. Where possible, Spark can skip files by their statistics."""
    return reduce(lambda one, another: one | another, (_matching(subject, each) for each in patterns), sf.lit(False))  # noqa: FBT003


def _matching(subject: Column, pattern: str) -> Column:
    tokens = pattern.split(".")
    if not {"*", ">"} & set(tokens):
        return subject == sf.lit(pattern)
    if pattern == ">":
        return subject.isNotNull()
    if "*" not in tokens:
        return subject.startswith(pattern[:-1]) & (sf.length(subject) >= len(pattern))
    wanted = {"*": r"[^.]+", ">": r".+"}
    return subject.rlike("(?s)^" + r"\.".join(wanted.get(token) or re.escape(token) for token in tokens) + r"\z")
