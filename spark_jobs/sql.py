"""SQL over an archive: create the views `archive` and `quarantine`, and find the columns that a query needs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame, SparkSession

from jetcapture_py.options import ChosenArchive
from jetcapture_py.reading.plan import Dedupe
from jetcapture_py.reading.selection import Selection, complete_end
from jetcapture_py.store.archive import open_archive
from spark_jobs.archive import Engine, archive_view

_VIEWS = ("archive", "quarantine")
_UNNAMED = re.compile(r"\b(natural|table|pivot|unpivot|identifier|describe|desc|show|explain)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveQuery:
    """An archive, and how to read it with Spark SQL."""

    archive: ChosenArchive
    selection: Selection
    complete_only: bool
    dedupe: Dedupe
    parquet_only: bool
    engine: Engine

    @property
    def url(self) -> str | None:
        """The URL that Spark itself reads."""
        return self.archive.url if self.engine == "spark" else None

    def run(self, spark: SparkSession, sql: str) -> DataFrame:
        """Run the statement; open only the views that it names."""
        archive, selection = self.archive, self.selection
        if self.complete_only:
            end = complete_end(open_archive(archive.url, archive.options), archive.stream, selection.end)
            selection = replace(selection, end=end)
        common = {
            **selection.arguments(),
            "dedupe": self.dedupe,
            "parquet_only": self.parquet_only,
            "options": archive.options,
            "engine": self.engine,
            "columns": columns_in(sql) if self.engine == "arrow" else None,
        }
        for view in _VIEWS:
            if re.search(rf"\b{view}\b", sql, re.IGNORECASE):
                part = {"quarantine": True, "keys": None} if view == "quarantine" else {}
                archive_view(spark, archive.url, archive.stream, view, **common | part)
        return spark.sql(sql)


def columns_in(sql: str) -> Callable[[str], bool] | None:
    """Return a predicate for the columns that a query may use, to read only these; None if it may use all.

    A column whose name occurs anywhere in the text counts as used. That is safe unless SQL can refer to columns without
    naming them: with a star, with `FROM` in a query without `SELECT`, and with some keywords.
    """
    text = re.sub(r"\bcount\s*\(\s*\*\s*\)", "", sql.casefold())
    selects, sources = (len(re.findall(rf"\b{word}\b", text)) for word in ("select", "from"))
    if "*" in text or "|>" in text or _UNNAMED.search(text) or sources > selects:
        return None
    return lambda name: name.casefold().replace("`", "``") in text
