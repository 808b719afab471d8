"""An archive in a notebook, over Spark Connect.

    python examples/notebook.py sc://spark.example.com:15002 s3://example-archive/nats ORDERS

Here it needs `jetcapture[connect,s3]`, and no Java. The server reads the objects itself: it needs the file system of
the store (for S3, `start-connect-server.sh --packages org.apache.hadoop:hadoop-aws:…`) and credentials of its own.
With `engine="arrow"` its Python workers read them, and need `jetcapture[s3]` instead.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta

from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from spark_jobs.archive import archive_view, read_archive

remote, url, stream = sys.argv[1:]
spark = SparkSession.builder.remote(remote).getOrCreate()

# Each message once, as a DataFrame like any other. Whole objects outside of the range and of the keys are never opened.
week = datetime.now(UTC) - timedelta(days=7)
recent = read_archive(spark, url, stream, start=week)
recent.groupBy("date", "key").agg(sf.count("*").alias("messages")).orderBy("date", "key").show()

# The same for plain SQL. What could not be decoded is an archive of its own.
archive_view(spark, url, stream, "messages")
archive_view(spark, url, stream, "bad", quarantine=True)
spark.sql("SELECT stage, error, count(*) AS n FROM bad GROUP BY stage, error ORDER BY n DESC").show(truncate=False)
spark.sql("SELECT _nats_subject, max(_nats_timestamp) AS last FROM messages GROUP BY _nats_subject").show(
    truncate=False
)
