"""Spark's own reader of Iceberg reads a table right, which knows nothing of jetcapture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyiceberg.table import Table

from jetcapture_py.archive import layout
from tests.integration.maintain.test_table import (
    KEYS,
    Counts,
    World,
    truth,
    values,
    write_every_layout,
)
from tests.integration.maintain.test_table import without_plugin as without_plugin  # a fixture
from tests.support.iceberg_engines import SparkIceberg

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("without_plugin")]


def by_spark(spark: SparkIceberg, table: Table, condition: str = "true") -> Counts:
    rows = spark.ask(
        f"SELECT key, unix_micros({layout.TIMESTAMP}) div 3600000000 AS hour, count(*), sum({layout.SEQ})"
        f" FROM jetcapture.nats.orders VERSION AS OF {table.metadata.current_snapshot_id}"
        f" WHERE {condition} GROUP BY key, hour"
    )
    return {(key, hour): (count, total) for key, hour, count, total in rows}


@contextmanager
def spark_reading(world: World) -> Iterator[SparkIceberg]:
    process = SparkIceberg(Path(world.catalog["uri"].removeprefix("sqlite:///")))
    try:
        yield process
    finally:
        process.close()


def test_spark_reads_each_message_once_in_every_layout_and_every_type(tmp_path: Path) -> None:
    world = World(tmp_path)
    write_every_layout(world)
    world.write([8001], hour=3, amount=[1], at=[{"x": 1}])
    world.write([8002], hour=4, amount=["two"], at=[{"x": 2.5, "y": "new"}])
    world.commit()
    table, expected = world.load(), truth(world)
    amounts = [(1, None, 1, None, None), (None, "two", None, 2.5, "new")]
    assert values(table, "amount", "amount_string")[-2:] == [row[:2] for row in amounts]
    with spark_reading(world) as spark:
        assert by_spark(spark, table) == expected
        for key in (*KEYS, "bundled", "too", "long"):
            condition = "key IS NULL" if key is None else f"key = '{key}'"
            assert by_spark(spark, table, condition) == {group: v for group, v in expected.items() if group[0] == key}
        names = "amount, amount_string, at.x, at.x_double, at.y"
        sql = f"SELECT {names} FROM jetcapture.nats.orders WHERE {layout.SEQ} > 8000 ORDER BY {layout.SEQ}"
        assert [tuple(row) for row in spark.ask(sql)] == amounts
