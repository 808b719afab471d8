"""The `nats` data source."""

from spark_jobs.datasource.source import NatsDataSource

__all__ = ["NatsDataSource"]
