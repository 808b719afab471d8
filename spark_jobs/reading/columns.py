"""Render a plan's columns in Spark: names and types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as sf
from pyspark.sql import types as st
from pyspark.sql.pandas.types import from_arrow_type

from jetcapture_py.archive import layout
from jetcapture_py.errors import JetcaptureError


def quoted(name: str) -> str:
    """Quote a column's name for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def named_in(*sql: str) -> Callable[[str], bool]:
    """Return a predicate for columns whose names occur anywhere in a text."""
    text = "\n".join(sql).casefold()
    return lambda name: name.casefold().replace("`", "``") in text


def find(name: str, names: Sequence[str]) -> str | None:
    """Return the name in `names` that matches `name`, exactly or else in any case; None without one.

    Raises JetcaptureError if several match.
    """
    if name in names:
        return name
    matches = [other for other in names if other.lower() == name.lower()]
    if len(matches) > 1:
        raise JetcaptureError(f"columns {matches[0]} and {matches[1]} differ in case only: rename one with AS")
    return matches[0] if matches else None


def header(name: str) -> Column:
    """Return the first value of a message's header; null without it."""
    return sf.get(sf.col(layout.HEADERS)[name], sf.lit(0))


def spark_schema(fields: Iterable[pa.Field]) -> st.StructType:
    """Return the schema of these fields of a plan's table."""
    return st.StructType([st.StructField(field.name, from_arrow_type(field.type)) for field in fields])
