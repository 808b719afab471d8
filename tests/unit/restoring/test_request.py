from __future__ import annotations

from typing import Any

import pytest

from jetcapture_py.commands import restore
from jetcapture_py.errors import ConfigError
from jetcapture_py.restoring.request import parse_consumer, parse_nanoseconds, parse_prefix

SECOND = 1_777_636_800
"""2026-05-01T12:00:00Z."""


def test_a_time_has_nanoseconds() -> None:
    for text, nanoseconds in [
        ("2026-05-01T12:00:00Z", 0),
        ("2026-05-01T12:00:00.123456789Z", 123_456_789),
        ("2026-05-01T12:00:00.1234567Z", 123_456_700),
        ("2026-05-01T14:00:00.000001+02:00", 1_000),
    ]:
        assert parse_nanoseconds(text) == SECOND * 10**9 + nanoseconds


def test_consumers_and_prefixes_are_read() -> None:
    assert [parse_consumer("a=0"), parse_consumer("b=8")] == [("a", 0), ("b", 8)]
    assert [parse_prefix("x.y."), parse_prefix("x")] == ["x.y.", "x."]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"first": 9, "last": 8}, "--to-seq is less than --from-seq"),
    ({"until": "lately"}, "--to-time: "),
    ({"consumers": ["a"]}, '--consumer: expected NAME=SEQ, got "a"'),
    ({"consumers": ["a.b=1"]}, "--consumer: expected a name without spaces"),
    ({"consumers": ["a=1", "a=2"]}, "--consumer: a name is given twice"),
    ({"prefix": "a..b"}, "--subject-prefix: "),
    ({"prefix": "$JS.API"}, "--subject-prefix: "),
    ({"target": "a b"}, "--as: expected a name without spaces"),
    ({"allow_drops": True, "without_limits": True}, "--without-limits cannot be combined with --allow-drops"),
    ({"with_schedules": True, "target": "COPY"}, "--with-schedules cannot be combined with another name"),
    ({"with_schedules": True, "prefix": "copy"}, "--with-schedules cannot be combined with another name"),
]


def test_what_cannot_be_meant_is_refused() -> None:
    for options, message in REFUSED:
        with pytest.raises(ConfigError) as refused:
            restore(["file:///a", "ORDERS"], dry_run=True, **options)
        assert str(refused.value).startswith(message)
