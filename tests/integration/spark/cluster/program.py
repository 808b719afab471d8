"""A driver that runs the jobs that are written to its standard input, as JSON, and writes what they return.

python -m tests.integration.spark.cluster.program MASTER
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from jetcapture_py.archive import layout
from jetcapture_py.maintain.compact import CompactionSettings
from spark_jobs import query
from spark_jobs.archive import read_archive, read_stream
from spark_jobs.compact import compact
from spark_jobs.datasource import NatsDataSource
from spark_jobs.datasource.combined import JetcaptureDataSource
from spark_jobs.replay import replay
from tests.support.running import STREAM


def seen(frame: DataFrame) -> list[int]:
    """Rows, distinct sequences and the last one."""
    counts = frame.agg(sf.count("*"), sf.count_distinct(layout.SEQ), sf.max(layout.SEQ)).collect()[0]
    return [int(number) for number in counts]


def _streamed(spark: SparkSession, format_: str, directory: str, **options: str) -> list[int]:
    options["maxOffsetsPerTrigger"] = "5000"
    frame = spark.readStream.format(format_).options(**options).load().select(layout.SEQ, layout.PAYLOAD)
    writer = frame.writeStream.option("checkpointLocation", f"{directory}/checkpoint")
    writer.trigger(availableNow=True).start(f"{directory}/files").awaitTermination()
    return seen(spark.read.parquet(f"{directory}/files"))


def _query(_: SparkSession, url: str, output: str) -> str:
    sql = "SELECT key, count(*) AS n FROM archive GROUP BY key ORDER BY key"
    assert query.main([url, STREAM, sql, "--format", "csv", "--output", output]) == 0
    return Path(output).read_text()


def _compact(spark: SparkSession, url: str) -> list[int]:
    done = compact(spark, url, STREAM, CompactionSettings(after=-86_400, grace=0, incomplete=True))
    assert not done.errors, done.errors
    return [done.objects_before, done.objects_after]


def _write(spark: SparkSession, url: str, servers: str) -> None:
    columns = "concat('written.', _nats_seq) AS subject", "_nats_payload AS payload"
    rows = read_archive(spark, url, STREAM).selectExpr(*columns)
    rows.write.format("nats").options(servers=servers).mode("append").save()


def _replay(spark: SparkSession, url: str, servers: str) -> list[int]:
    done = replay(read_archive(spark, url, STREAM), servers, "replayed.{_nats_seq}", survey=False, tasks=4)
    return [done.published, done.skipped]


JOBS: dict[str, Callable[..., Any]] = {
    "read_archive": lambda spark, url: seen(read_archive(spark, url, STREAM)),
    "read_archive, engine arrow": lambda spark, url: seen(read_archive(spark, url, STREAM, engine="arrow")),
    "read_stream": lambda spark, config: seen(read_stream(spark, config=config)),
    "query": _query,
    "compact": _compact,
    "replay": _replay,
    "nats, batch": lambda spark, url: seen(spark.read.format("nats").options(servers=url, stream=STREAM).load()),
    "nats, streaming": lambda spark, url, directory: _streamed(spark, "nats", directory, servers=url, stream=STREAM),
    "nats, write": _write,
    "jetcapture, batch": lambda spark, config: seen(spark.read.format("jetcapture").options(config=config).load()),
    "jetcapture, streaming": lambda spark, path, directory: _streamed(spark, "jetcapture", directory, config=path),
}
"""The jobs and sources, by their names in the documents."""


def _watch(spark: SparkSession, ended: threading.Event) -> None:
    """Write `running` when a task runs."""
    tracker = spark.sparkContext.statusTracker()
    while not ended.is_set():
        stages = (tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds())
        if any(stage is not None and stage.numActiveTasks for stage in stages):
            print("running", flush=True)
            return
        time.sleep(0.005)


def main(master: str) -> None:
    """Run jobs until the input ends."""
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.log.level": "ERROR",
        "spark.executor.memory": "512m",
        "spark.sql.warehouse.dir": tempfile.gettempdir(),
        "spark.sql.session.timeZone": "UTC",
        "spark.executorEnv.PYTHONPATH": str(Path.cwd()),
        "spark.executorEnv.SPARK_LOCAL_IP": "127.0.0.1",
    }
    builder = SparkSession.builder.appName("cluster").master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.dataSource.register(NatsDataSource)
    spark.dataSource.register(JetcaptureDataSource)
    for line in sys.stdin:
        job, *arguments = json.loads(line)
        ended = threading.Event()
        watching = threading.Thread(target=_watch, args=(spark, ended))
        watching.start()
        try:
            result = JOBS[job](spark, *arguments)
        finally:
            ended.set()
            watching.join()
        print("result", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
