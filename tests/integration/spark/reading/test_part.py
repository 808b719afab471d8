"""The arguments of `read_archive` and `archive_view`: what they accept, and how they refuse the rest."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

import pytest

from jetcapture_py.errors import JetcaptureError
from spark_jobs.archive import archive_view, read_archive
from spark_jobs.compact import compact
from spark_jobs.report import report
from tests.integration.spark.conftest import HOUR, Archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

DAY = 86_400
A_TIME = "a time such as 2026-05-01T12:00:00Z, a date, today, yesterday or -1h"
A_KEY = "text, or None for messages without a key"


@pytest.fixture
def days(archive: Archive) -> Archive:
    """A message at noon of each of three days, from 2026-05-01 on."""
    for number, key in enumerate(("eu", "us", None)):
        archive.write([number + 1], key, bucket=HOUR + number * DAY)
    return archive


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"start": "2026-05-02"}, [2, 3]),
        ({"start": date(2026, 5, 2), "end": date(2026, 5, 3)}, [2]),
        ({"start": "2026-05-02T12:00:00.000003", "end": "2026-05-03T17:46+05:45"}, [3]),
        ({"start": datetime(2026, 5, 3, tzinfo=UTC)}, [3]),
        ({"start": "today"}, []),
        ({"keys": "eu"}, [1]),
        ({"keys": ("us", None)}, [2, 3]),
        ({"columns": "_nats_seq"}, [1, 2, 3]),
    ],
    ids=str,
)
def test_times_may_be_dates_or_text_and_keys_may_be_one_string(
    spark: SparkSession, days: Archive, asked: dict[str, Any], expected: list[int]
) -> None:
    rows = read_archive(spark, days.url, "ORDERS", **asked).select("_nats_seq").collect()
    assert sorted(row[0] for row in rows) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (
            {"start": "bogus"},
            f'start: expected {A_TIME}, got "bogus"',
        ),
        ({"end": 5}, f"end: expected {A_TIME}, got 5"),
        ({"start": datetime(2026, 5, 1)}, "start: 2026-05-01T00:00:00 has no time zone"),
        ({"keys": [5]}, f"keys: expected {A_KEY}, got 5"),
        ({"keys": 5}, f"keys: expected {A_KEY}, got 5"),
        ({"keys": b"eu"}, f"keys: expected {A_KEY}, got b'eu'"),
    ],
    ids=str,
)
def test_a_wrong_time_or_key_is_refused_with_the_name_of_its_argument(
    spark: SparkSession, archive: Archive, asked: dict[str, Any], expected: str
) -> None:
    for function in (read_archive, compact, report):
        with pytest.raises(JetcaptureError) as raised:
            function(spark, archive.url, "ORDERS", **asked)
        assert str(raised.value) == expected


def test_a_stream_without_objects_is_told_apart_from_a_missing_stream(spark: SparkSession, days: Archive) -> None:
    (days.root / "EMPTY").mkdir()
    days.write([1], stream="BAD", quarantine=True)
    hint = "could not be decoded: select FROM quarantine, or read it with quarantine=True"
    for stream, expected in (
        ("EMPTY", f"the archive of stream EMPTY under {days.url} has no objects"),
        ("BAD", f"the archive of stream BAD under {days.url} has only a quarantine, of messages that {hint}"),
        ("NONE", f"no archive of stream NONE under {days.url}; there are: EMPTY, ORDERS"),
    ):
        with pytest.raises(JetcaptureError) as raised:
            read_archive(spark, days.url, stream)
        assert str(raised.value) == expected


@pytest.mark.parametrize(
    ("stream", "name"),
    [("ü", "_"), ("1", "_1"), ("1e5", "_1e5"), ("orders-eu", "orders_eu"), ("日本x", "__x"), ("select", "select")],
)
def test_the_view_of_any_stream_has_a_name_that_plain_sql_finds(
    spark: SparkSession, archive: Archive, stream: str, name: str
) -> None:
    archive.write([1, 2], stream=stream)
    archive_view(spark, archive.url, stream)
    try:
        assert spark.sql(f"SELECT count(*) FROM {name}").collect() == [(2,)]
    finally:
        spark.catalog.dropTempView(name)


@pytest.mark.parametrize("name", ["ü", "1", "a`b", "a.b"])
def test_a_view_may_have_any_name(spark: SparkSession, archive: Archive, name: str) -> None:
    archive.write([1, 2])
    archive_view(spark, archive.url, "ORDERS", name)
    quoted = f"`{name.replace('`', '``')}`"
    try:
        assert spark.sql(f"SELECT count(*) FROM {quoted}").collect() == [(2,)]
    finally:
        spark.catalog.dropTempView(quoted)
