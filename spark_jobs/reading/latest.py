"""Choose the newest row of each key, by SQL expressions.

Spark drops older rows before it shuffles, and sorts the others in bounded memory. A later choice of columns, and a
filter on a column that is a key, reach the objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as sf

from jetcapture_py.archive import layout
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.reading.selection import Latest
from jetcapture_py.text import MAX_LOGGED, one_line

ERROR_LOGGERS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""With these, PySpark also logs the errors that it raises, as JSON with the JVM's traceback."""
_AGE = "_nats_row, from the newest"


def newest(frame: DataFrame, latest: Latest, lives: Sequence[int]) -> DataFrame:
    """Return the newest row of each key; `lives` are its `lives`. Raises JetcaptureError."""
    by = [_expression(frame, "by", text) for text in latest.by]
    order = [_expression(frame, "order", latest.order)]
    if lives:
        stored = sf.unix_micros(layout.TIMESTAMP)
        order.insert(0, reduce(Column.__add__, ((stored >= created).cast("int") for created in lives)))
    order += [sf.col(name) for name in (layout.TIMESTAMP, layout.SEQ, layout.ROW) if name in frame.columns]
    age = sf.row_number().over(Window.partitionBy(*by).orderBy(*map(sf.desc, order)))
    rows = frame.withColumn(_AGE, age).where(sf.col(_AGE) == 1).drop(_AGE)
    if latest.deleted is None:
        return rows
    return rows.where(~sf.coalesce(_expression(frame, "deleted", latest.deleted), sf.lit(col=False)))


def _expression(frame: DataFrame, argument: str, sql: str) -> Column:
    """Parse an expression over the columns of one row. Raises JetcaptureError, which names the argument."""
    try:
        with _unlogged():
            expression = sf.expr(f"({sql}\n)")  # without parentheses, DESC would be an alias
            if argument == "deleted":
                checked = frame.where(expression)
            else:  # its type must have an order
                window = Window.partitionBy(expression).orderBy(expression)
                checked = frame.where(expression.isNull()).select(sf.row_number().over(window))
            _ = checked.schema  # only now does Spark Connect look at it
    except PySparkException as error:
        reason = str(error.getMessage()).strip().split("\n", 1)[0].split(" SQLSTATE:", 1)[0]
        raise JetcaptureError(one_line(f"{argument}: {sql}: {reason}", MAX_LOGGED)) from None
    return expression


@contextmanager
def _unlogged() -> Iterator[None]:
    loggers = [PySparkLogger.getLogger(name) for name in ERROR_LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
