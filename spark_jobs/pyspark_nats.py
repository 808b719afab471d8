"""Installed as the top-level module `pyspark_nats`, which is how Spark finds the data source `nats` by itself."""

from spark_jobs.datasource import NatsDataSource as DefaultSource

__all__ = ["DefaultSource"]
