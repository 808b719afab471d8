"""A declarative pipeline of Spark: the large orders of an archive and its stream, published to NATS.

The pipeline's specification, spark-pipeline.yml, names this file and a directory for checkpoints:

    name: orders
    storage: file:///var/lib/spark/storage
    libraries: [{glob: {include: pipeline.py}}]

`spark-pipelines run --spec spark-pipeline.yml` publishes the rows that are there and ends; the next run continues.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()
dp.create_sink("large_orders", "nats", {"servers": "nats://127.0.0.1:4222", "subject": "large.{region}"})


@dp.append_flow(target="large_orders", name="to_nats")
def to_nats() -> DataFrame:
    """Return the rows to publish."""
    orders = spark.readStream.format("jetcapture").option("config", "/etc/jetcapture/config.yaml").load()
    return orders.where("amount > 1000").select("region", "amount")
