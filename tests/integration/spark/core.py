"""The core cases, which every Spark session must get exactly right, whatever its settings are.

Run as a program, it starts a session of its own, checks it, and prints `ok`. MASTER `remote` means Spark Connect:

    python -m tests.integration.spark.core ARCHIVE_URL NATS_URL STREAM MASTER [NAME=VALUE …]
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sf

from jetcapture_py.maintain.compact import CompactionSettings
from spark_jobs.archive import Dedupe, Engine, read_archive
from spark_jobs.compact import compact
from spark_jobs.replay import replay
from tests.integration.spark.conftest import HOUR, Archive
from tests.support.streams import Stored, read_stream

AT = (HOUR * 1_000_000) + 123_456
LATER = AT + 3_600_000_000
TIMES = [AT, AT + 1_000_000, AT + 2_000_000]
RFC3339 = ["2026-05-01T12:00:00.123456Z", "2026-05-01T12:00:01.123456Z", "2026-05-01T12:00:02.123456Z"]
COLUMNS = "n bigint, price decimal(10,2), at timestamp, s struct<at: timestamp>"
PAYLOADS = [
    b'{"n": 1, "price": 1.25, "at": "2026-05-01T12:00:00.123456Z", "s": {"at": "2026-05-01T14:00:00.5+02:00"}}',
    b'{"n": 2}',
]


def fill(archive: Archive) -> None:
    """Write six messages: two of them twice, one without a key, and every decoded column with types that differ.

    The last two are in a bundle, the others under their keys.
    """
    times = pa.array(TIMES, pa.timestamp("us", "UTC"))
    numbers = [pa.array([1.5, 2.5]), pa.array([2.5, 3.5]), pa.array([4])]
    prices = [pa.array([Decimal(1)] * 2, pa.decimal128(9, 2)), pa.array([Decimal(1)] * 2), pa.array([1])]
    texts = [times[:2], times[1:], pa.array(["text"])]
    structs = [pa.StructArray.from_arrays([each], ["at"]) for each in texts[:2]]
    for at, seqs in enumerate(((1, 2), (2, 3))):
        values = {"number": numbers[at], "price": prices[at], "drifted": texts[at], "s": structs[at]}
        payloads = [b"%d\xff" % seq for seq in seqs]
        archive.write(seqs, "eu", timestamps=[TIMES[seq - 1] for seq in seqs], payloads=payloads, columns=values)
    columns = {"number": numbers[2], "price": prices[2], "drifted": texts[2], "s": ["text"]}
    archive.write([4], None, timestamps=[LATER], bucket=HOUR + 3600, payloads=[b"4\xff"], columns=columns)
    for same in ([5, 6], [6]):  # the pair that can be compacted
        Archive(archive.root, bundles=4).write(same, "us", bucket=HOUR + 7200, columns={"number": pa.array(same)})


def check(spark: SparkSession, archive: str, url: str, stream: str) -> None:
    """Check all cases. `stream` is empty and takes `{stream}.>`, in lower case; the archive is not changed."""
    _check_archive(spark, archive)
    with tempfile.TemporaryDirectory() as place:
        copy = shutil.copytree(archive.removeprefix("file://"), Path(place) / "archive")
        done = compact(spark, f"file://{copy}", "ORDERS", CompactionSettings(grace=0))
        _same((done.objects_after, done.duplicates, done.errors), (4, 1, ()))
        _check_archive(spark, f"file://{copy}", engines=("spark",), modes=("auto",))
    _check_live(spark, archive, url, stream)


def _rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in frame.collect()), key=str)


def _check_archive(
    spark: SparkSession,
    url: str,
    engines: Sequence[Engine] = ("spark", "arrow"),
    modes: Sequence[Dedupe] = ("auto", "full"),
) -> None:
    micros = sf.unix_micros("_nats_timestamp").alias("at")
    wanted = ("_nats_seq", micros, "key", "hour", "number", "price", "drifted", "s")
    one = Decimal("1.00")
    expected = [
        (1, TIMES[0], "eu", "12", 1.5, one, RFC3339[0], f'{{"at":"{RFC3339[0]}"}}'),
        (2, TIMES[1], "eu", "12", 2.5, one, RFC3339[1], f'{{"at":"{RFC3339[1]}"}}'),
        (3, TIMES[2], "eu", "12", 3.5, one, RFC3339[2], f'{{"at":"{RFC3339[2]}"}}'),
        (4, LATER, None, "13", 4.0, one, "text", "text"),
        *[(seq, (HOUR + 7200) * 1_000_000 + seq, "us", "14", float(seq), None, None, None) for seq in (5, 6)],
    ]
    for engine in engines:
        for dedupe in modes:
            frame = read_archive(spark, url, "ORDERS", engine=engine, dedupe=dedupe)
            _same(_rows(frame.select(*wanted)), expected)
    part = read_archive(spark, url, "ORDERS", start=RFC3339[1], end="2026-05-01T13:00:00Z", keys=["eu", None])
    _same(_rows(part.select(*wanted[:6])), [row[:6] for row in expected[1:3]])  # in this part, no column has drifted


def _check_live(spark: SparkSession, archive: str, url: str, stream: str) -> None:
    subject = stream.lower()
    server = {"servers": url}
    rows = [Row(subject=f"{subject}.{number}", payload=bytearray(payload)) for number, payload in enumerate(PAYLOADS)]
    spark.createDataFrame(rows).coalesce(1).write.format("nats").options(**server).mode("append").save()
    fields = spark.sql(f"SELECT 'x' AS tail, timestamp_micros({AT}) AS at, CAST(2.5 AS decimal(5, 2)) AS d, 0.1D AS f")
    fields.write.format("nats").options(**server, subject=f"{subject}.{{tail}}").mode("append").save()
    replay(fields, url, f"{subject}.{{tail}}")
    stored = read_archive(spark, archive, "ORDERS", keys=[None])
    replay(stored, url, f"{subject}.{{number}}", replay_id="r")
    written = f'{{"tail":"x","at":"{RFC3339[0]}","d":2.50,"f":0.1}}'.encode()
    found = sorted((*_stored(url, stream),), key=lambda each: each.seq)
    sent = [(f"{subject}.{number}", payload) for number, payload in enumerate(PAYLOADS)]
    _same([each[1::2] for each in found], [*sent, *[(f"{subject}.x", written)] * 2, (f"{subject}.4", b"4\xff")])
    _same(found[-1].headers[2:], ("Jetcapture-Timestamp: 2026-05-01T13:00:00.123456Z", *found[-1].headers[3:]))
    _same(found[-1].headers[-1], "Nats-Msg-Id: ORDERS:4:r")
    reader = spark.read.format("nats").options(**server, stream=stream, subjects=f"{subject}.0,{subject}.1")
    raw = reader.load().select("_nats_seq", "_nats_subject", sf.hex("_nats_payload"))
    _same(_rows(raw), [(seq, f"{subject}.{seq - 1}", PAYLOADS[seq - 1].hex().upper()) for seq in (1, 2)])
    decoded = reader.options(format="json", columns=COLUMNS).load()
    micros = (sf.unix_micros(name).alias(f"micros{at}") for at, name in enumerate(("at", "s.at")))
    _same(
        _rows(decoded.select("n", "price", *micros)),
        [(1, Decimal("1.25"), AT, AT - 123_456 + 500_000), (2, None, None, None)],
    )


def _stored(url: str, stream: str) -> list[Stored]:
    return asyncio.run(read_stream(url, stream))


def _same(found: Any, expected: Any) -> None:
    assert found == expected, f"\n{found}\nis not\n{expected}"


def main(archive: str, url: str, stream: str, master: str, *settings: str) -> None:
    """Start the session, and check it."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["SPARK_TESTING"] = "1"  # a server of Spark Connect has any free port, not always the same
    builder = SparkSession.builder.remote("local[2]") if master == "remote" else SparkSession.builder.master(master)
    chosen = dict(setting.split("=", 1) for setting in settings) | {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": tempfile.gettempdir(),
        "spark.executorEnv.PYTHONPATH": str(Path(__file__).parents[3]),
    }
    for name, value in chosen.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        for name, value in (setting.split("=", 1) for setting in settings):
            if name.startswith("spark.sql."):
                assert spark.conf.get(name) == value, name
        check(spark, archive, url, stream)
    finally:
        spark.stop()
    print("ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
