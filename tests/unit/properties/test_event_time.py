"""The time of a message is read from a batch as from the message alone: by a plain reference, value by value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
from hypothesis import example, given

from jetcapture_py.transform.event_time import END, microseconds

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
IN_A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
RFC3339 = re.compile(r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(\.\d+)?([Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)", re.ASCII)


def sane(microseconds: int) -> int | None:
    return microseconds if 0 <= microseconds < END * 10**6 else None


def of_number(number: Fraction, unit: str) -> int | None:
    return sane(math.floor(number * 10**6 / IN_A_SECOND[unit]))


def of_text(text: str, unit: str | None) -> int | None:
    if match := RFC3339.fullmatch(text):
        day, clock, fraction, zone = match.groups()
        digits = f"{(fraction or '.')[1:]:0<6}"[:6]
        try:
            moment = datetime.fromisoformat(f"{day}T{clock}.{digits}{zone.upper()}")
        except ValueError:
            return None
        try:
            return sane((moment - EPOCH) // timedelta(microseconds=1))
        except OverflowError:
            return None
    if unit is not None and re.fullmatch(r"[0-9]{1,19}(\.[0-9]+)?", text, re.ASCII):
        return of_number(Fraction(text), unit)
    return None


def of_float(number: float, unit: str) -> int | None:
    if math.isnan(number) or not 0 <= number < END * IN_A_SECOND[unit]:
        return None
    return sane(round(number * (10**6 / IN_A_SECOND[unit])))


units = st.sampled_from([*IN_A_SECOND])
moments = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31)).map(lambda moment: moment.isoformat())
zones = st.sampled_from(["Z", "z", "+00:00", "-00:00", "+05:30", "-12:00", "+23:59", "+24:00", "+5:30", "", "+0530"])
texts = st.one_of(
    st.builds(lambda moment, zone: f"{moment}{zone}", moments, zones),
    st.builds(lambda moment, digits, zone: f"{moment[:19]}.{digits}{zone}", moments, st.text("0123456789"), zones),
    st.integers(-(10**19), 10**20).map(str),
    st.decimals(0, 10**19, places=9).map(lambda number: f"{number:f}"),
    st.text(max_size=30),
    st.sampled_from(
        [
            *("", " ", "0", "NaN", "-1", "1e9", "2024-02-30T00:00:00Z", "2023-02-29T00:00:00Z", "2024-02-29t00:00:00z"),
            *("0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "1969-12-31T23:59:59.999999Z", "1970-01-01T00:00:00Z"),
            *("2199-12-31T23:59:59.999999999Z", "2200-01-01T00:00:00Z", "2024-01-01T24:00:00Z", "2024-01-01T00:00:60Z"),
            *("2024-01-01", "2024-01-01T00:00Z", "2024-01-01T00Z", "2024-01-01T00:00:00", "2024-01-01T00:00:00.Z"),
            *("1970-01-01T05:00:00+06:00", "2200-01-01T00:00:00+01:00", "٢٠٢٤-01-01T00:00:00Z"),
            "2024-01-01T00:00:00Z\n",
        ]
    ),
)


def check(values: list[Any], kind: pa.DataType, unit: str | None, reference: Callable[[Any], int | None]) -> None:
    array = pa.array([None, *values, None], kind).slice(1)  # an offset must not matter
    found = microseconds(array, unit)
    assert found.type == pa.int64()
    assert found.to_pylist() == [None if value is None else reference(value) for value in [*values, None]]


@given(st.lists(st.none() | texts), st.none() | units)
@example(["2024-01-01T00:00:00.123456789Z", "nonsense", "2024-02-30T00:00:00Z"], None)
@example(["1700000000.1234567899999", "1700000000", "9999999999999999999"], "s")
def test_texts_are_read_as_one_by_one(values: list[str | None], unit: str | None) -> None:
    check(values, pa.string(), unit, lambda text: of_text(text, unit))
    for kind in (pa.large_string(), pa.string_view()):
        check(values, kind, unit, lambda text: of_text(text, unit))
    repeated = pa.array(values, pa.string()).dictionary_encode()
    assert microseconds(repeated, unit).equals(microseconds(pa.array(values, pa.string()), unit))


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 8 * 10**18)), units)
@example([-1, 0, END - 1, END, END * 1000 - 1, END * 1000], "ms")
def test_whole_numbers_are_read_as_one_by_one(values: list[int], unit: str) -> None:
    check(values, pa.int64(), unit, lambda number: of_number(Fraction(number), unit))
    small = [number for number in values if 0 <= number < 2**31]
    check(small, pa.int32(), unit, lambda number: of_number(Fraction(number), unit))
    check(
        [abs(number) * 2 - 1 for number in values if number], pa.uint64(), unit, lambda n: of_number(Fraction(n), unit)
    )


@given(st.lists(st.floats() | st.floats(0, 8e9)), units)
@example([math.nan, math.inf, -math.inf, -0.0, 1700000000.123, float(END)], "s")
def test_floats_are_read_as_one_by_one(values: list[float], unit: str) -> None:
    check(values, pa.float64(), unit, lambda number: of_float(number, unit))


@given(st.lists(st.decimals(-(10**11), 10**11, places=7)), units)
def test_decimals_are_read_as_one_by_one(values: list[Decimal], unit: str) -> None:
    check(values, pa.decimal128(20, 7), unit, lambda number: None if number < 0 else of_number(Fraction(number), unit))


@given(st.lists(st.integers(-(2**62), 2**62)), st.sampled_from(["s", "ms", "us", "ns"]), st.sampled_from([None, "UTC"]))
def test_timestamps_are_read_as_one_by_one(values: list[int], unit: str, zone: str | None) -> None:
    numbers = pa.array(values, pa.int64())
    found = microseconds(numbers.cast(pa.timestamp(unit, zone)), None).to_pylist()
    assert found == [of_number(Fraction(value), unit) for value in values]


@given(st.lists(st.dates(date(1, 1, 1), date(9999, 12, 31))))
def test_dates_begin_in_utc(values: list[date]) -> None:
    def reference(day: date) -> int | None:
        return sane((day - date(1970, 1, 1)).days * 86_400 * 10**6)

    check(values, pa.date32(), None, reference)
    check(values, pa.date64(), None, reference)
