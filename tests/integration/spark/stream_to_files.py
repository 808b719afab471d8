"""A program that a test kills: a streaming query from a stream to files.

python -m tests.integration.spark.stream_to_files URL STREAM DIRECTORY
"""

from __future__ import annotations

import sys

from spark_jobs.job import session


def main(url: str, stream: str, directory: str) -> None:
    """Read in small batches until killed."""
    rows = (
        session("test")
        .readStream.format("nats")
        .options(servers=url, stream=stream, maxOffsetsPerTrigger="500")
        .load()
        .selectExpr("_nats_seq", "_nats_payload")
    )
    query = rows.writeStream.option("checkpointLocation", f"{directory}/checkpoint").start(f"{directory}/files")
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
