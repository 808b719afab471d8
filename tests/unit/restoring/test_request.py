from __future__ import annotations

from typing import Any

import pytest

from jetcapture_py.errors import ConfigError
from jetcapture_py.options import ChosenArchive
from jetcapture_py.restoring.request import RestoreRequest, request_of

SECOND = 1_777_636_800
"""2026-05-01T12:00:00Z."""


def asked(**options: Any) -> RestoreRequest:
    archive = ChosenArchive(url="file:///a", stream="ORDERS", options={})
    return request_of(archive, None, **{"target": "ORDERS", **options})


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("2026-05-01T12:00:00Z", 0),
        ("2026-05-01T12:00:00.123456789Z", 123_456_789),
        ("2026-05-01T12:00:00.1234567Z", 123_456_700),
        ("2026-05-01T14:00:00.000001+02:00", 1_000),
    ],
)
def test_a_time_has_nanoseconds(text: str, nanoseconds: int) -> None:
    assert asked(until=text).until == SECOND * 10**9 + nanoseconds


def test_names_consumers_and_prefixes_are_read() -> None:
    request = asked(consumers=["a=0", "b=8"], prefix="x.y.")
    assert (request.target, request.consumers, request.prefix) == ("ORDERS", [("a", 0), ("b", 8)], "x.y.")
    assert asked(target="COPY", prefix="x").prefix == "x."


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        asked(**options)
    assert str(refused.value).startswith(message)
