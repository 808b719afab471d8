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
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sf

from jetcapture_py.maintain.compact import CompactionSettings
from spark_jobs.archive import read_archive, read_latest
from spark_jobs.compact import compact
from spark_jobs.replay import replay
from tests.integration.spark.conftest import HOUR, Archive
from tests.support.streams import read_stream

AT = (HOUR * 1_000_000) + 123_456
LATER = AT + 3_600_000_000
TIMES = [AT, AT + 1_000_000, AT + 2_000_000]
RFC3339 = ["2026-05-01T12:00:00.123456Z", "2026-05-01T12:00:01.123456Z", "2026-05-01T12:00:02.123456Z"]


def fill(archive: Archive) -> None:
    """Write six messages: two of them twice, one without a key, and every decoded column with types that differ.

    The last two are in a bundle, the others under their keys.
    """
    times = pa.array(TIMES, pa.timestamp("us", "UTC"))
    numbers, texts = [pa.array([1.5, 2.5]), pa.array([2.5, 3.5])], [times[:2], times[1:]]
    prices = [pa.array([Decimal(1)] * 2, pa.decimal128(9, 2)), pa.array([Decimal(1)] * 2)]
    for at, seqs in enumerate(((1, 2), (2, 3))):
        structs = pa.StructArray.from_arrays([texts[at]], ["at"])
        values = {"number": numbers[at], "price": prices[at], "drifted": texts[at], "s": structs}
        payloads = [b"%d\xff" % seq for seq in seqs]
        archive.write(seqs, "eu", timestamps=[TIMES[seq - 1] for seq in seqs], payloads=payloads, columns=values)
    columns = {"number": pa.array([4]), "price": pa.array([1]), "drifted": ["text"], "s": ["text"]}
    archive.write([4], None, timestamps=[LATER], bucket=HOUR + 3600, payloads=[b"4\xff"], columns=columns)
    for same in ([5, 6], [6]):  # the pair that can be compacted
        Archive(archive.root, bundles=4).write(same, "us", bucket=HOUR + 7200, columns={"number": pa.array(same)})


def check(spark: SparkSession, archive: str, url: str, stream: str) -> None:
    """Check all cases. `stream` is empty and takes `{stream}.>`, in lower case; the archive is not changed."""
    for engine, dedupe in product(("spark", "arrow"), ("auto", "full")):
        _check_archive(spark, archive, engine=engine, dedupe=dedupe)
    with tempfile.TemporaryDirectory() as place:
        copy = shutil.copytree(archive.removeprefix("file://"), Path(place) / "archive")
        done = compact(spark, f"file://{copy}", "ORDERS", CompactionSettings(grace=0))
        _same((done.objects_after, done.duplicates, done.errors), (4, 1, ()))
        _check_archive(spark, f"file://{copy}")
    _check_live(spark, archive, url, stream)


def _rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in frame.collect()), key=str)


def _check_archive(spark: SparkSession, url: str, **how: Any) -> None:
    micros = sf.unix_micros("_nats_timestamp").alias("at")
    wanted = ("_nats_seq", micros, "key", "hour", "number", "price", "drifted", "s")
    one = Decimal("1.00")
    first = [(seq, at, "eu", "12", seq + 0.5, one) for seq, at in enumerate(TIMES, 1)]
    expected: list[tuple[Any, ...]] = [
        *((*row, text, f'{{"at":"{text}"}}') for row, text in zip(first, RFC3339, strict=True)),
        (4, LATER, None, "13", 4.0, one, "text", "text"),
        *((seq, (HOUR + 7200) * 1_000_000 + seq, "us", "14", float(seq), None, None, None) for seq in (5, 6)),
    ]
    _same(_rows(read_archive(spark, url, "ORDERS", **how).select(*wanted)), expected)
    part = read_archive(spark, url, "ORDERS", start=RFC3339[1], end="2026-05-01T13:00:00Z", keys=["eu", None], **how)
    _same(_rows(part.select(*wanted[:6])), first[1:])  # in this part, no column has drifted
    newest = read_latest(spark, url, "ORDERS", by="key", deleted="number = 4", columns=["_nats_seq"], **how)
    _same(_rows(newest), [(3,), (6,)])


def _check_live(spark: SparkSession, archive: str, url: str, stream: str) -> None:
    subject, server = stream.lower(), {"servers": url}
    payloads = [b'{"n": 1, "price": 1.25, "s": {"at": "2026-05-01T14:00:00.5+02:00"}}', b'{"n": 2}']
    sent = [(f"{subject}.{number}", payload) for number, payload in enumerate(payloads)]
    rows = [Row(subject=name, payload=bytearray(payload)) for name, payload in sent]
    spark.createDataFrame(rows).coalesce(1).write.format("nats").options(**server).mode("append").save()
    fields = spark.sql(f"SELECT 'x' AS tail, timestamp_micros({AT}) AS at, CAST(2.5 AS decimal(5, 2)) AS d, 0.1D AS f")
    fields.write.format("nats").options(**server, subject=f"{subject}.{{tail}}").mode("append").save()
    replay(fields, url, f"{subject}.{{tail}}")
    replay(read_archive(spark, archive, "ORDERS", keys=[None]), url, f"{subject}.{{number}}", replay_id="r")
    written = f'{{"tail":"x","at":"{RFC3339[0]}","d":2.50,"f":0.1}}'.encode()
    found = sorted(asyncio.run(read_stream(url, stream)), key=lambda each: each.seq)
    _same([each[1::2] for each in found], [*sent, *[(f"{subject}.x", written)] * 2, (f"{subject}.4", b"4\xff")])
    _same(found[-1].headers[2], "Jetcapture-Timestamp: 2026-05-01T13:00:00.123456Z")
    _same(found[-1].headers[-1], "Nats-Msg-Id: ORDERS:4:r")
    reader = spark.read.format("nats").options(**server, stream=stream, subjects=f"{subject}.0,{subject}.1")
    raw = reader.load().select("_nats_seq", "_nats_subject", sf.hex("_nats_payload"))
    _same(_rows(raw), [(seq, name, payload.hex().upper()) for seq, (name, payload) in enumerate(sent, 1)])
    decoded = reader.options(format="json", columns="n bigint, price decimal(10,2), s struct<at: timestamp>").load()
    values = decoded.select("n", "price", sf.unix_micros("s.at"))
    _same(_rows(values), [(1, Decimal("1.25"), AT - 123_456 + 500_000), (2, None, None)])


def _same(found: Any, expected: Any) -> None:
    assert found == expected, f"\n{found}\nis not\n{expected}"


def main(archive: str, url: str, stream: str, master: str, *settings: str) -> None:
    """Start the session, and check it."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["SPARK_TESTING"] = "1"  # a server of Spark Connect has any free port, not always the same
    builder = SparkSession.builder.remote("local[2]") if master == "remote" else SparkSession.builder.master(master)
    given = dict(setting.split("=", 1) for setting in settings)
    chosen = given | {
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
        for name, value in given.items():
            assert not name.startswith("spark.sql.") or spark.conf.get(name) == value, name
        check(spark, archive, url, stream)
    finally:
        spark.stop()
    print("ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
