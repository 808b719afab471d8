"""SQL over an archive: create the views that a statement names, and find the columns that it needs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame, SparkSession

from jetcapture_py.options import ChosenArchive
from jetcapture_py.reading.plan import Dedupe
from jetcapture_py.reading.selection import Latest, Selection, complete_end
from jetcapture_py.store.archive import open_archive
from spark_jobs.archive import Engine, archive_view, read_latest
from spark_jobs.reading.columns import named_in

_VIEWS = ("archive", "quarantine")
_LATEST = "latest"
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
    latest: Latest | None = None
    """What the view `latest` is; None without one."""

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
        named = {view for view in (*_VIEWS, _LATEST) if re.search(rf"\b{view}\b", sql, re.IGNORECASE)}
        for view in _VIEWS:
            if view in named:
                part = {"quarantine": True, "keys": None} if view == "quarantine" else {}
                archive_view(spark, archive.url, archive.stream, view, **common | part)
        if _LATEST in named and (latest := self.latest) is not None:
            rows = read_latest(
                spark,
                archive.url,
                archive.stream,
                by=latest.by,
                order=latest.order,
                deleted=latest.deleted,
                **common,
            )
            rows.createOrReplaceTempView(_LATEST)
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
    return named_in(text)
