"""A program for a test: a read of the format `jetcapture` whose last objects are merged after it was planned.

python -m tests.integration.spark.read_beside_maintenance ROOT CONFIG
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from jetcapture_py.archive import layout
from spark_jobs.datasource.combined import JetcaptureDataSource
from tests.support.archives import merge
from tests.support.running import objects


def main(root: str, config: str) -> None:
    """Print how many distinct messages are read, and how many rows, by one task that may fail twice."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[1,3]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    spark.dataSource.register(JetcaptureDataSource)
    frame = spark.read.format("jetcapture").options(config=config, minPartitions=1).load().select(layout.SEQ)
    planned = frame._jdf.queryExecution().toRdd().getNumPartitions()
    merge(Path(root), sorted(objects(Path(root)), key=lambda name: name.first_seq)[-2:])
    seqs = [row[0] for row in frame.collect()]
    print(planned, len(set(seqs)), len(seqs))


if __name__ == "__main__":
    main(*sys.argv[1:])
