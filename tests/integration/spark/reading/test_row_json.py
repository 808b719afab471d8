"""Every job and the data source's writer turn rows into the same JSON."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from spark_jobs.archive import read_archive
from spark_jobs.query import main
from spark_jobs.replay import replay
from tests.integration.spark.conftest import Archive
from tests.integration.spark.live import Live
from tests.support.streams import read_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

MICROS = 1_777_636_800_123_456  # 2026-05-01T12:00:00.123456Z
AT = "timestamp_micros(1777636800123456)"
ROW = f"""SELECT
    {AT} AS at,
    TIMESTAMP_NTZ '2026-05-01 12:00:00.5' AS local,
    DATE '2026-05-01' AS day,
    TIME '12:34:56.5' AS clock,
    INTERVAL '-1 02:03:04.5' DAY TO SECOND AS took,
    INTERVAL '90' MINUTE AS pause,
    named_struct('at', {AT}, 'x', double('NaN'), 'none', CAST(NULL AS int)) AS s,
    array(float('-Infinity'), float(0.1)) AS floats,
    array(double('Infinity'), 1e300D, 0.1D, NULL) AS doubles,
    map(7, array({AT})) AS by_number,
    X'00FF' AS bytes,
    CAST('0.0000000015' AS decimal(20, 10)) AS small,
    CAST('12345678901234567890123456789.5' AS decimal(38, 1)) AS large,
    9007199254740993 AS whole,
    parse_json('{{"b": [1, 2.5, "x"], "a": null}}') AS v,
    array(parse_json('1')) AS vs,
    'é"\\n' AS text,
    CAST(NULL AS string) AS nothing"""
EXPECTED: dict[str, Any] = {
    "at": "2026-05-01T12:00:00.123456Z",
    "local": "2026-05-01T12:00:00.500000",
    "day": "2026-05-01",
    "clock": "12:34:56.5",
    "took": "INTERVAL '-1 02:03:04.5' DAY TO SECOND",
    "pause": "INTERVAL '90' MINUTE",
    "s": {"at": "2026-05-01T12:00:00.123456Z", "x": "NaN", "none": None},
    "floats": ["-Infinity", 0.1],
    "doubles": ["Infinity", 1e300, 0.1, None],
    "by_number": {"7": ["2026-05-01T12:00:00.123456Z"]},
    "bytes": "AP8=",
    "small": 1.5e-09,
    "large": 12345678901234567890123456789.5,
    "whole": 9007199254740993,
    "v": {"a": None, "b": [1, 2.5, "x"]},
    "vs": [1],
    "text": 'é"\n',
    "nothing": None,
}
NESTED = ("s", "floats", "doubles", "by_number", "v", "vs")


@pytest.fixture
def orders(archive: Archive) -> Archive:
    archive.write([1])
    return archive


def payloads(live: Live) -> list[bytes]:
    """What the stream holds."""
    return [each.payload for each in asyncio.run(read_stream(live.server.url, "ORDERS"))]


def test_query_prints_rows_as_json_whatever_the_session_is_set_to(
    spark: SparkSession, orders: Archive, capsys: pytest.CaptureFixture[str]
) -> None:
    for settings in (
        {"spark.sql.session.timeZone": "UTC", "spark.sql.ansi.enabled": "true"},
        {"spark.sql.session.timeZone": "Asia/Kathmandu", "spark.sql.ansi.enabled": "false"},
    ):
        before = {name: spark.conf.get(name) for name in settings}
        try:
            for name, value in settings.items():
                spark.conf.set(name, value)
            assert main([orders.url, "ORDERS", ROW, "--format", "json"]) == 0
        finally:
            for name, text in before.items():
                spark.conf.set(name, text)
        assert json.loads(capsys.readouterr().out) == EXPECTED


def test_maps_whose_keys_are_not_the_names_of_json_are_refused(
    orders: Archive, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in (AT, "X'00FF'", "named_struct('a', 1)"):
        assert main([orders.url, "ORDERS", f"SELECT array(map({key}, 1)) AS m", "--format", "json"]) == 1
        says = r"query: m has maps with keys of type .*, which JSON lacks: cast them to text with transform_keys\n"
        assert re.fullmatch(says, capsys.readouterr().err)


def test_query_prints_nested_columns_as_json(orders: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    query = [orders.url, "ORDERS", f"SELECT {', '.join(NESTED)} FROM ({ROW})", "--format"]
    assert main([*query, "csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert {name: json.loads(value) for name, value in row.items()} == {name: EXPECTED[name] for name in NESTED}
    assert main([*query, "table"]) == 0
    shown = capsys.readouterr().out.splitlines()[2]
    assert '{"at":"2026-05-01T12:00:00.123456Z","x":"NaN","none":null}' in shown
    assert '{"a":null,"b":[1,2.5,"x"]}' in shown


@pytest.mark.exhaustive
def test_rows_are_published_as_the_same_json(spark: SparkSession, live: Live) -> None:
    replay(spark.sql(ROW), live.server.url, "orders.replayed")
    replay(spark.sql(ROW), live.server.url, "orders.column", payload="s")
    frame = spark.sql(f"SELECT 'orders.written' AS subject, * FROM ({ROW})")
    frame.write.format("nats").option("servers", live.server.url).mode("append").save()
    replayed, column, written = map(json.loads, payloads(live))
    assert column == EXPECTED["s"]
    assert replayed == written == {**EXPECTED, "took": "-P1DT7384.5S", "pause": "PT5400S"}


def test_a_variant_can_be_the_payload(spark: SparkSession, live: Live) -> None:
    frame = spark.sql("""SELECT parse_json('{"a": 1}') AS payload UNION ALL SELECT NULL""")
    replay(frame, live.server.url, "orders.a", payload="payload")
    assert sorted(payloads(live)) == [b"", b'{"a":1}']


def test_a_struct_that_drifted_to_text_keeps_its_values(spark: SparkSession, archive: Archive) -> None:
    times = pa.array([MICROS], pa.timestamp("us", "UTC"))
    fields = {"at": times, "x": pa.array([float("nan")]), "none": pa.array([None], pa.int32())}
    archive.write([1], s=pa.StructArray.from_arrays(list(fields.values()), list(fields)), at=times)
    archive.write([2], s=["text"], at=["text"])
    rows = {row["_nats_seq"]: row for row in read_archive(spark, archive.url, "ORDERS").collect()}
    assert json.loads(rows[1]["s"]) == EXPECTED["s"]
    assert (rows[1]["at"], rows[2]["s"]) == (EXPECTED["at"], "text")
