"""Installed as the top-level module `pyspark_nats`, by which Spark discovers the data source `nats`."""

from spark_jobs.datasource import NatsDataSource as DefaultSource

__all__ = ["DefaultSource"]
