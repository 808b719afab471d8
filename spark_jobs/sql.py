"""SQL over an archive: create the views `archive` and `quarantine` and find the columns that a query needs."""

from __future__ import annotations

import re
from collections.abc import Callable

from pyspark.sql import DataFrame, SparkSession

from jetcapture_py.reading.selection import complete_end
from jetcapture_py.store.archive import open_archive
from spark_jobs.archive import archive_view
from spark_jobs.arguments import QueryArguments

_VIEWS = ("archive", "quarantine")
_UNNAMED = re.compile(r"\b(natural|table|pivot|unpivot|identifier|describe|desc|show|explain)\b")


def query(spark: SparkSession, chosen: QueryArguments) -> DataFrame:
    """Run `chosen.sql` over the archive; open only the views that it names."""
    end = chosen.end
    if chosen.complete_only:
        end = complete_end(open_archive(chosen.url, chosen.options), chosen.stream, end)
    common = {
        "start": chosen.start,
        "end": end,
        "event_start": chosen.event_start,
        "event_end": chosen.event_end,
        "dedupe": chosen.dedupe,
        "parquet_only": chosen.parquet_only,
        "options": chosen.options,
        "engine": chosen.engine,
        "columns": columns_in(chosen.sql) if chosen.engine == "arrow" else None,
    }
    for view in _VIEWS:
        if re.search(rf"\b{view}\b", chosen.sql, re.IGNORECASE):
            part = {"quarantine": True} if view == "quarantine" else {"keys": chosen.keys}
            archive_view(spark, chosen.url, chosen.stream, view, **common, **part)
    return spark.sql(chosen.sql)


def columns_in(sql: str) -> Callable[[str], bool] | None:
    """Return a predicate for the columns that a query may use, to fetch only these; None if it may use all.

    A column whose name occurs anywhere in the text counts as used. That is safe unless SQL can refer to columns without
    naming them: with a star, with `FROM` in a query without `SELECT`, and with some keywords.
    """
    text = re.sub(r"\bcount\s*\(\s*\*\s*\)", "", sql.casefold())
    selects, sources = (len(re.findall(rf"\b{word}\b", text)) for word in ("select", "from"))
    if "*" in text or "|>" in text or _UNNAMED.search(text) or sources > selects:
        return None
    return lambda name: name.casefold().replace("`", "``") in text
