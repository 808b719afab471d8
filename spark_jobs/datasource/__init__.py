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
        from spark_jobs.datasource.columns import schema_text
        from spark_jobs.datasource.options import ReadOptions, parse

        return schema_text(parse(ReadOptions, self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        from spark_jobs.datasource.options import ReadOptions, parse
        from spark_jobs.datasource.read import BatchReader

        return BatchReader(parse(ReadOptions, self.options).for_batch(), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        """For `spark.readStream`."""
        from spark_jobs.datasource.options import ReadOptions, parse
        from spark_jobs.datasource.read import StreamReader

        return StreamReader(parse(ReadOptions, self.options).for_stream(), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """For `df.write` and `INSERT INTO` a temporary view."""
        from spark_jobs.datasource.options import WriteOptions, parse
        from spark_jobs.datasource.write import BatchWriter

        return BatchWriter(parse(WriteOptions, self.options), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """For `df.writeStream`."""
        from spark_jobs.datasource.options import WriteOptions, parse
        from spark_jobs.datasource.write import StreamWriter

        return StreamWriter(parse(WriteOptions, self.options), schema, overwrite=overwrite)
