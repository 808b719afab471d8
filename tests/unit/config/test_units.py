"""Durations, sizes, and text that is safe to show."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
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


def test_durations_and_sizes_read_as_numbers() -> None:
    durations: dict[object, float] = {"15m": 900, "1h30m": 5400, "500ms": 0.5, "1.5h": 5400, "1d2h3m4s5ms": 93_784.005}
    durations |= {"90": 90, "0.25": 0.25, 90: 90, 0.5: 0.5, "0s": 0}
    assert {text: parse_duration(text) for text in durations} == durations
    sizes: dict[object, int] = {"128MiB": 128 << 20, "1GB": 10**9, "1.5KiB": 1536, "64kB": 64_000, "64KB": 64_000}
    sizes |= {"1024": 1024, 1024: 1024, "7B": 7}
    assert {text: parse_size(text) for text in sizes} == sizes


def refusal(parse: Callable[[object], float], value: object) -> str:
    with pytest.raises(ValueError, match=r"^expected ") as caught:
        parse(value)
    return got(str(caught.value), value)


UNITS = "a duration such as 15m (units d, h, m, s and ms, largest first)"
WRONG = ("15min", "15M", "30m1h", "1h 30m", "15:00", "5m\n", "٣m")


def test_a_wrong_duration_or_size_says_what_was_expected() -> None:
    for problem, values in {
        "a duration such as 15m": {"abc": '"abc"', "": '""', None: "nothing", True: "true", math.nan: "nan"},
        UNITS: {text: quoted(text) for text in WRONG},
        "a duration of at least 0": {"-5m": '"-5m"', -1: "-1"},
        "a duration of at most 36500d": {"36501d": '"36501d"', 10**400: "a huge number"},
    }.items():
        for value, shown in values.items():
            assert refusal(parse_duration, value) == f"expected {problem}, got {shown}"
    for problem, values in {
        "a size such as 128MiB": {"abc": '"abc"', "": '""', True: "true", 1.5: "1.5", math.nan: "nan"},
        "a size in KiB (1024s) or KB (1000s)": {"64k": '"64k"'},
        "a size in MiB (1024s) or MB (1000s)": {"512Mi": '"512Mi"'},
        "a size such as 128MiB (units B, KB, MB, GB, TB, KiB, MiB, GiB and TiB)": {"5 MB": '"5 MB"'},
        "a size of at least 0": {"-1MB": '"-1MB"', -1: "-1"},
        "a whole number of bytes": {"1.5": '"1.5"'},
        "a size below 8388608TiB": {"9999999999TiB": '"9999999999TiB"'},
    }.items():
        for value, shown in values.items():
            assert refusal(parse_size, value) == f"expected {problem}, got {shown}"


@given(st.integers(0, MAX_SECONDS * 1000), st.integers(0, MAX_BYTES))
def test_every_duration_and_size_reads_back_from_its_text(milliseconds: int, size: int) -> None:
    text = format_duration(milliseconds / 1000)
    assert parse_duration(text) == milliseconds / 1000
    assert re.search(DURATION_PATTERN, text)
    assert parse_size(format_size(size)) == size
    assert re.search(SIZE_PATTERN, format_size(size))


@given(st.text())
def test_escaped_text_is_printable_and_cannot_leave_its_quotes(text: str) -> None:
    shown = escaped(text)
    assert shown.isprintable()
    assert '"' not in re.sub(r"\\.", "", shown)


def test_shown_values_are_short_and_on_one_line() -> None:
    assert quoted("a\nb\x1b[2J\u202e") == r'"a\nb\u001b[2J\u202e"'
    assert quoted("x" * 200) == f'"{"x" * 80}…"'
    assert [quoted(value) for value in (True, 5, 0.5)] == ["true", "5", "0.5"]
    kinds = ["nothing", "true or false", "text", "a number", "a mapping", "an empty list", "a bytes"]
    assert [kind(value) for value in (None, True, "a", 1, {}, [], b"")] == kinds


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
