"""The arguments of `read_archive` and `archive_view`: what they accept, and how they refuse the rest."""

from __future__ import annotations

from datetime import date, datetime
from typing import TYPE_CHECKING, Any

import pytest

from jetcapture_py.errors import JetcaptureError
from spark_jobs.archive import archive_view, read_archive
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


def test_times_may_be_dates_or_text_and_keys_and_columns_one_string(spark: SparkSession, days: Archive) -> None:
    for asked, expected in (
        ({"start": date(2026, 5, 2), "keys": ("us", None)}, [2, 3]),
        ({"end": "2026-05-02T17:46+05:45", "keys": "eu", "columns": "_nats_seq"}, [1]),
        ({"keys": ["unheard of"], "columns": ["_nats_seq", "key"]}, []),
    ):
        rows = read_archive(spark, days.url, "ORDERS", **asked).select("_nats_seq").collect()
        assert sorted(row[0] for row in rows) == expected


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"start": "bogus"}, f'start: expected {A_TIME}, got "bogus"'),
    ({"end": 5}, f"end: expected {A_TIME}, got 5"),
    ({"start": datetime(2026, 5, 1)}, "start: 2026-05-01T00:00:00 has no time zone"),
    ({"keys": [5]}, f"keys: expected {A_KEY}, got 5"),
    ({"keys": 5}, f"keys: expected {A_KEY}, got 5"),
    ({"keys": b"eu"}, f"keys: expected {A_KEY}, got b'eu'"),
    ({"dedupe": "maybe"}, "dedupe='maybe': expected auto, full or none"),
    ({"engine": "duck"}, "engine='duck': expected spark or arrow"),
)


def test_an_argument_that_cannot_be_meant_is_refused_by_name(spark: SparkSession, archive: Archive) -> None:
    for asked, expected in REFUSED:
        with pytest.raises(JetcaptureError) as raised:
            read_archive(spark, archive.url, "ORDERS", **asked)
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


def test_views_have_names_that_plain_sql_finds_or_any_others(spark: SparkSession, archive: Archive) -> None:
    archive.write([1, 2])
    streams = {"ü": "_", "1": "_1", "1e5": "_1e5", "orders-eu": "orders_eu", "日本x": "__x", "select": "select"}
    for stream in streams:
        archive.write([1, 2], stream=stream)
    for stream, given, name in (
        *((stream, None, name) for stream, name in streams.items()),
        *(("ORDERS", name, f"`{name.replace('`', '``')}`") for name in ("ü", "1", "a`b", "a.b")),
    ):
        archive_view(spark, archive.url, stream, given)
        try:
            assert spark.sql(f"SELECT count(*) FROM {name}").collect() == [(2,)]
        finally:
            spark.catalog.dropTempView(name)
