"""A program for a test: a write whose task fails in its first attempt, after most of its rows were published.

python -m tests.integration.spark.write_with_a_failing_task URL ROWS
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession


def main(url: str, rows: str) -> None:
    """Write `ROWS` rows to `orders.a` in two partitions, with tasks that may fail twice."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[1,3]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
        .getOrCreate()
    )

    def fail_once(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        task = TaskContext.get()
        assert task is not None
        if task.attemptNumber() == 0:
            raise RuntimeError("the first attempt fails")

    frame = spark.range(int(rows), numPartitions=2).mapInArrow(fail_once, "id long")
    frame.write.format("nats").option("servers", url).option("subject", "orders.a").mode("append").save()


if __name__ == "__main__":
    main(*sys.argv[1:])
