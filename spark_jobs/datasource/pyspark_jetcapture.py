"""Installed as the top-level module `pyspark_jetcapture`, by which Spark discovers the data source `jetcapture`."""

from spark_jobs.datasource.combined import JetcaptureDataSource as DefaultSource

__all__ = ["DefaultSource"]
