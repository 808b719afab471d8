"""The `nats` data source: JetStream live, read and written by Spark, in pure Python.

    spark.read.format("nats").option("servers", "nats://…").option("stream", "ORDERS").load()

A read has the archive's envelope columns, so live and archived messages can be combined with UNION. A streaming query
keeps its progress in Spark's checkpoint and does not touch the stream's consumers. Spark finds this class through the
module `pyspark_nats` if the package is installed on the driver. With --py-files, call
`spark.dataSource.register(NatsDataSource)` or use the session of `spark_jobs.job.session`, which does so.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from spark_jobs.datasource.one_line import one_line_errors

NAME = "nats"


@one_line_errors
class NatsDataSource(DataSource):
    """The entry point for Spark. Modules are imported on demand: every Spark session that looks up any Python data
    source loads this one."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        """Return the columns of a read without a schema."""
        from spark_jobs.datasource import columns, options

        return columns.schema_text(options.parse(options.ReadOptions, self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        from spark_jobs.datasource import options, read

        return read.BatchReader(options.parse(options.ReadOptions, self.options).for_batch(), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        """For `spark.readStream`."""
        from spark_jobs.datasource import options, read

        return read.StreamReader(options.parse(options.ReadOptions, self.options).for_stream(), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """For `df.write` and `INSERT INTO` a temporary view."""
        from spark_jobs.datasource import options, write

        return write.BatchWriter(options.parse(options.WriteOptions, self.options), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """For `df.writeStream`."""
        from spark_jobs.datasource import options, write

        return write.StreamWriter(options.parse(options.WriteOptions, self.options), schema, overwrite=overwrite)
