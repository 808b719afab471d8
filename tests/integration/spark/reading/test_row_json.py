"""Every job and the data source's writer turn rows into the same JSON."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from datetime import date, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.reading.convert import convert
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
    map({AT}, 1) AS by_time,
    map(7, array({AT})) AS by_number,
    map(X'00FF', map(true, 1.50)) AS by_bytes,
    map(named_struct('a', 1), 2) AS by_struct,
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
    "by_time": {"2026-05-01T12:00:00.123456Z": 1},
    "by_number": {"7": ["2026-05-01T12:00:00.123456Z"]},
    "by_bytes": {"AP8=": {"true": 1.5}},
    "by_struct": {'{"a":1}': 2},
    "bytes": "AP8=",
    "small": 1.5e-09,
    "large": 12345678901234567890123456789.5,
    "whole": 9007199254740993,
    "v": {"a": None, "b": [1, 2.5, "x"]},
    "vs": [1],
    "text": 'é"\n',
    "nothing": None,
}
NESTED = ("s", "floats", "doubles", "by_time", "by_number", "by_bytes", "by_struct", "v", "vs")
ZONES = ("UTC", "America/New_York", "Asia/Kathmandu")
QUICK = (("UTC", "true"), ("Asia/Kathmandu", "false"))


@pytest.fixture(
    params=[
        pytest.param((zone, ansi), id=f"{zone}-{ansi}", marks=[] if (zone, ansi) in QUICK else pytest.mark.exhaustive)
        for zone in ZONES
        for ansi in ("true", "false")
    ]
)
def settings(request: pytest.FixtureRequest, spark: SparkSession) -> Any:
    """A session with another time zone and ANSI mode."""
    zone, ansi = request.param
    before = {name: spark.conf.get(name) for name in ("spark.sql.session.timeZone", "spark.sql.ansi.enabled")}
    spark.conf.set("spark.sql.session.timeZone", zone)
    spark.conf.set("spark.sql.ansi.enabled", ansi)
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


@pytest.fixture
def orders(archive: Archive) -> Archive:
    archive.write([1])
    return archive


def payloads(live: Live) -> list[bytes]:
    """What the stream holds."""
    return [each.payload for each in asyncio.run(read_stream(live.server.url, "ORDERS"))]


@pytest.mark.usefixtures("settings")
def test_query_prints_rows_as_json(orders: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([orders.url, "ORDERS", ROW, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == EXPECTED


@pytest.mark.parametrize("form", ["csv", "table"])
def test_query_prints_nested_columns_as_json(orders: Archive, capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert main([orders.url, "ORDERS", f"SELECT {', '.join(NESTED)} FROM ({ROW})", "--format", form]) == 0
    out = capsys.readouterr().out
    if form == "csv":
        (row,) = csv.DictReader(io.StringIO(out))
        assert {name: json.loads(value) for name, value in row.items()} == {name: EXPECTED[name] for name in NESTED}
    else:
        shown = out.splitlines()[2]
        assert '{"at":"2026-05-01T12:00:00.123456Z","x":"NaN","none":null}' in shown
        assert '{"a":null,"b":[1,2.5,"x"]}' in shown


@pytest.mark.exhaustive
def test_rows_are_published_as_the_same_json(spark: SparkSession, live: Live) -> None:
    replay(spark.sql(ROW), live.server.url, "orders.replayed")
    replay(spark.sql(ROW), live.server.url, "orders.column", payload="s")
    frame = spark.sql(f"SELECT 'orders.written' AS subject, * FROM ({ROW})")
    frame.write.format("nats").option("servers", live.server.url).mode("append").save()
    replayed, column, written = map(json.loads, payloads(live))
    assert (replayed, column, written) == (EXPECTED, EXPECTED["s"], EXPECTED)


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


def map_by(keys: pa.Array) -> pa.Array:
    """Maps with one entry each."""
    offsets = pa.array(range(len(keys) + 1), pa.int32())
    return pa.MapArray.from_arrays(offsets, keys, pa.nulls(len(keys), pa.int8()))


DOUBLES = [1e10, 1.0, 0.1, 1e-5, 1e-3, 9e-4, 9999999.5, 1e7, 123456789.125, 5e-324, -0.0, 0.0, 1.7976931348623157e308]
DOUBLES += [float("nan"), float("inf"), float("-inf"), -1.5e-9, 100.0]
FLOATS = [1e10, 1.1, 3.4e38, 1e-45, 16777216.0, 1e-3, 1e7, 0.1, float("nan")]
DECIMALS = [Decimal("1.50"), Decimal("0.0000001"), Decimal(0), Decimal("-12345678901234567890.1234567"), Decimal(100)]
DAYS = [date(1, 1, 1), date(1969, 12, 31), date(9999, 12, 31)]
INSTANTS = [-1, 0, -1_500_000, MICROS, -62_135_596_800_000_000]
TEXTS = ["", '"\\/', "\b\t\n\f\r\x00\x1f\x7f", "é\u2028😀", "\\u00ff"]
TIMES = [time(12, 34, 56, 500_000), time(0), time(23, 59, 59, 999_999)]
UTC = pa.timestamp("us", "UTC")
LIST, MAP = pa.list_(UTC), pa.map_(pa.string(), UTC)
STRUCT = pa.struct({"é": pa.struct({"x": pa.null()}), "A": pa.list_(pa.struct({"y": pa.binary()}))})
SCALARS: dict[str, pa.Array] = {
    "doubles": pa.array(DOUBLES),
    "floats": pa.array(FLOATS, pa.float32()),
    "decimals": pa.array(DECIMALS, pa.decimal128(38, 8)),
    "small": pa.array([Decimal("0.00000000"), Decimal("0.00000012")], pa.decimal128(12, 8)),
    "days": pa.array(DAYS),
    "years": pa.array([3_000_000, -800_000], pa.int32()).cast(pa.date32()),
    "instants": pa.array(INSTANTS, UTC),
    "local": pa.array(INSTANTS, pa.timestamp("us")),
    "millis": pa.array([-1, 1_500], pa.timestamp("ms", "Europe/Berlin")),
    "clocks": pa.array(TIMES, pa.time64("us")),
    "bytes": pa.array([b"", b"text", "é".encode(), b"\x00\xff"]),
    "flags": pa.array([True, False]),
    "bytes_of_text": pa.array([-1, 127], pa.int8()),
    "unsigned": pa.array([0, 2**64 - 1], pa.uint64()),
    "texts": pa.array(TEXTS),
}
HARD: dict[str, pa.Array] = {
    **{name: values for name, values in SCALARS.items() if name != "texts"},
    "bytes": SCALARS["bytes"].slice(0, 3),  # Spark's text of other bytes is not UTF-8
    **{f"in_{name}": pa.StructArray.from_arrays([values], ["v"]) for name, values in SCALARS.items()},
    **{f"by_{name}": map_by(values) for name, values in SCALARS.items()},
    "by_struct": pa.array([[({"a": 1, "b": [None]}, 2)]], pa.map_(pa.struct({"a": pa.int8(), "b": LIST}), UTC)),
    "lists": pa.array([[], [None], [[1.5, None], None], None], pa.list_(pa.list_(pa.float64()))),
    "maps": pa.array([[], [("a", [("b", None)])], [("", None), ('"', [])], None], pa.map_(pa.string(), MAP)),
    "structs": pa.array([{}, {"é": {"x": None}}, {"A": [{"y": b"\xff"}]}, None], STRUCT),
}
"""Values whose texts engines write in different ways."""


def test_text_without_spark_is_the_text_that_spark_writes(spark: SparkSession, archive: Archive) -> None:
    rows = max(map(len, HARD.values()))
    columns = {name: pa.concat_arrays([v, pa.nulls(rows - len(v), v.type)]) for name, v in HARD.items()}
    archive.write(range(1, rows + 1), columns=columns)
    archive.write([rows + 1], columns={name: ["text"] for name in HARD})
    before = spark.conf.get("spark.sql.timeType.enabled", "false")
    spark.conf.set("spark.sql.timeType.enabled", "true")
    try:
        frame = read_archive(spark, archive.url, "ORDERS", columns=[*HARD, layout.SEQ]).orderBy(layout.SEQ)
        expected = frame.toArrow()
    finally:
        spark.conf.set("spark.sql.timeType.enabled", before)
    found = {name: convert(values, pa.string(), str).to_pylist() for name, values in columns.items()}
    assert found == {name: expected[name].to_pylist()[:rows] for name in columns}
