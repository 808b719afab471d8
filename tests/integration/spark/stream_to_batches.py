"""A program that a test kills: a streaming query from an archive and its stream to a directory for each batch.

python -m tests.integration.spark.stream_to_batches CONFIG DIRECTORY [--once]
"""

from __future__ import annotations

import sys

from pyspark.sql import DataFrame

from spark_jobs.datasource.combined import JetcaptureDataSource
from spark_jobs.job import session


def main(config: str, directory: str, *once: str) -> None:
    """Read in small batches until killed; with `--once`, what there is now."""
    spark = session("test")
    spark.dataSource.register(JetcaptureDataSource)

    def store(frame: DataFrame, batch: int) -> None:
        frame.write.mode("overwrite").parquet(f"{directory}/batches/{batch:08}")

    rows = spark.readStream.format("jetcapture").option("config", config).option("maxOffsetsPerTrigger", 2000).load()
    writer = rows.select("_nats_seq", "publisher", "n").writeStream.foreachBatch(store)
    writer = writer.option("checkpointLocation", f"{directory}/checkpoint")
    (writer.trigger(availableNow=True) if once else writer).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
