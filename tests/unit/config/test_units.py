"""Durations, sizes, and text that is safe to show."""

from __future__ import annotations

import math
import re
from datetime import UTC, date, datetime, time, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetcapture_py.config.units import (
    DURATION_PATTERN,
    MAX_BYTES,
    MAX_SECONDS,
    SIZE_PATTERN,
    format_duration,
    format_size,
    got,
    kind,
    parse_duration,
    parse_size,
    parse_time,
    quoted,
)
from jetcapture_py.text import escaped


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("15m", 900.0),
        ("1h30m", 5400.0),
        ("500ms", 0.5),
        ("2d", 172_800.0),
        ("90s", 90.0),
        ("1.5h", 5400.0),
        ("1d2h3m4s5ms", 93_784.005),
        ("90", 90.0),
        ("0.25", 0.25),
        (90, 90.0),
        (0.5, 0.5),
        ("0s", 0.0),
    ],
)
def test_durations_read_as_seconds(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("128MiB", 128 << 20),
        ("1GB", 10**9),
        ("1.5KiB", 1536),
        ("64kB", 64_000),
        ("64KB", 64_000),
        ("1024", 1024),
        (1024, 1024),
        ("7B", 7),
    ],
)
def test_sizes_read_as_bytes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("abc", 'expected a duration such as 15m, got "abc"'),
        ("", 'expected a duration such as 15m, got ""'),
        (None, "expected a duration such as 15m, got nothing"),
        (True, "expected a duration such as 15m, got true"),
        (math.nan, "expected a duration such as 15m, got nan"),
        (math.inf, "expected a duration such as 15m, got inf"),
        ([], "expected a duration such as 15m, got a list"),
        ("15min", 'expected a duration such as 15m (units d, h, m, s and ms, largest first), got "15min"'),
        ("15M", 'expected a duration such as 15m (units d, h, m, s and ms, largest first), got "15M"'),
        ("30m1h", 'expected a duration such as 15m (units d, h, m, s and ms, largest first), got "30m1h"'),
        ("1h 30m", 'expected a duration such as 15m (units d, h, m, s and ms, largest first), got "1h 30m"'),
        ("15:00", 'expected a duration such as 15m (units d, h, m, s and ms, largest first), got "15:00"'),
        ("-5m", 'expected a duration of at least 0, got "-5m"'),
        (-1, "expected a duration of at least 0, got -1"),
        ("36501d", 'expected a duration of at most 36500d, got "36501d"'),
        pytest.param(10**400, "expected a duration of at most 36500d, got a huge number", id="huge"),
        ("5m\n", 'expected a duration such as 15m (units d, h, m, s and ms, largest first), got "5m\\n"'),
        ("٣m", 'expected a duration such as 15m (units d, h, m, s and ms, largest first), got "٣m"'),
    ],
)
def test_a_wrong_duration_says_what_was_expected(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=r"^expected ") as caught:
        parse_duration(value)
    assert got(str(caught.value), value) == message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("abc", 'expected a size such as 128MiB, got "abc"'),
        ("", 'expected a size such as 128MiB, got ""'),
        (True, "expected a size such as 128MiB, got true"),
        (1.5, "expected a size such as 128MiB, got 1.5"),
        (math.nan, "expected a size such as 128MiB, got nan"),
        ("64k", 'expected a size in KiB (1024s) or KB (1000s), got "64k"'),
        ("1G", 'expected a size in GiB (1024s) or GB (1000s), got "1G"'),
        ("512Mi", 'expected a size in MiB (1024s) or MB (1000s), got "512Mi"'),
        (
            "5 MB",
            'expected a size such as 128MiB (units B, KB, MB, GB, TB, KiB, MiB, GiB and TiB), got "5 MB"',
        ),
        ("-1MB", 'expected a size of at least 0, got "-1MB"'),
        (-1, "expected a size of at least 0, got -1"),
        ("1.5", 'expected a whole number of bytes, got "1.5"'),
        ("9999999999TiB", 'expected a size below 8388608TiB, got "9999999999TiB"'),
    ],
)
def test_a_wrong_size_says_what_was_expected(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=r"^expected ") as caught:
        parse_size(value)
    assert got(str(caught.value), value) == message


@given(st.integers(0, MAX_SECONDS * 1000))
def test_every_duration_reads_back_from_its_text(milliseconds: int) -> None:
    text = format_duration(milliseconds / 1000)
    assert parse_duration(text) == milliseconds / 1000
    assert re.search(DURATION_PATTERN, text)


@given(st.integers(0, MAX_BYTES))
def test_every_size_reads_back_from_its_text(size: int) -> None:
    text = format_size(size)
    assert parse_size(text) == size
    assert re.search(SIZE_PATTERN, text)


def test_texts_are_short_for_round_values() -> None:
    assert [format_duration(value) for value in (0, 0.5, 60, 900, 5400, 86_400)] == [
        "0s",
        "500ms",
        "1m",
        "15m",
        "1h30m",
        "1d",
    ]
    assert [format_size(value) for value in (0, 1000, 1024, 10**9, 128 << 20)] == ["0B", "1KB", "1KiB", "1GB", "128MiB"]


@given(st.text())
def test_escaped_text_is_printable_and_cannot_leave_its_quotes(text: str) -> None:
    shown = escaped(text)
    assert shown.isprintable()
    assert '"' not in re.sub(r"\\.", "", shown)


def test_shown_values_are_short_and_on_one_line() -> None:
    assert quoted("a\nb\x1b[2J\u202e") == r'"a\nb\u001b[2J\u202e"'
    assert quoted("x" * 200) == f'"{"x" * 80}…"'
    assert [quoted(value) for value in (True, 5, 0.5)] == ["true", "5", "0.5"]
    assert [kind(value) for value in (None, True, "a", 1, {}, [], b"")] == [
        "nothing",
        "true or false",
        "text",
        "a number",
        "a mapping",
        "a list",
        "a bytes",
    ]


def test_a_time_is_a_moment_a_date_or_text() -> None:
    moment = datetime(2026, 5, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    assert parse_time(moment) is moment
    midnight = datetime(2026, 5, 1, tzinfo=UTC)
    assert parse_time(date(2026, 5, 1)) == parse_time("2026-05-01") == parse_time("2026-05-01T00:00Z") == midnight
    assert parse_time("2026-05-01T12:00+02:00") == moment
    assert timedelta(days=1) <= parse_time("today") - parse_time("yesterday") <= timedelta(days=2)
    assert parse_time("today").time() == time()
    for ago in ("1h30m", "-1h30m"):
        before = datetime.now(UTC)
        assert before <= parse_time(ago) + timedelta(minutes=90) <= datetime.now(UTC)
    for wrong in ("bogus", "", 5, None, "2026-02-30", "2026-05-01T25:00", "90", "-", "+1h", "1x"):
        with pytest.raises(ValueError, match=r"^expected a time such as "):
            parse_time(wrong)
    with pytest.raises(ValueError, match="2026-05-01T12:00:00 has no time zone"):
        parse_time(datetime(2026, 5, 1, 12))
