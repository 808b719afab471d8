"""SQL over an archive: the views `archive` and `quarantine`, and the columns that a query needs."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import cast

from pyspark.sql import DataFrame, SparkSession

from jetcapture_py.archive import watermark
from jetcapture_py.errors import JetcaptureError
from spark_jobs.archive import archive_view
from spark_jobs.reading.place import Place

_VIEWS = ("archive", "quarantine")
_UNNAMED = re.compile(r"\b(natural|table|pivot|unpivot|identifier|describe|desc|show|explain)\b")


def query(spark: SparkSession, chosen: argparse.Namespace) -> DataFrame:
    """The result of `chosen.sql` over the archive that the arguments name. Views it does not name are not opened."""
    end = _complete(chosen) if chosen.complete_only else chosen.end
    common = {
        "start": chosen.start,
        "end": end,
        "dedupe": chosen.dedupe,
        "options": chosen.options,
        "engine": chosen.engine,
        "columns": columns_in(chosen.sql) if chosen.engine == "arrow" else None,
    }
    keys = chosen.keys and [key or None for key in chosen.keys]
    for view in _VIEWS:
        if re.search(rf"\b{view}\b", chosen.sql, re.IGNORECASE):
            part = {"quarantine": True} if view == "quarantine" else {"keys": keys}
            archive_view(spark, chosen.url, chosen.stream, view, **common, **part)
    return spark.sql(chosen.sql)


def columns_in(sql: str) -> Callable[[str], bool] | None:
    """Which columns a query may be about, for an engine that fetches what it is told; None when it may be all.

    A column counts that the text has anywhere. That is sound unless the text can mean columns without naming them:
    with a star, with `FROM` where a query has no `SELECT`, and with some words.
    """
    text = re.sub(r"\bcount\s*\(\s*\*\s*\)", "", sql.casefold())
    selects, sources = (len(re.findall(rf"\b{word}\b", text)) for word in ("select", "from"))
    if "*" in text or "|>" in text or _UNNAMED.search(text) or sources > selects:
        return None
    return lambda name: name.casefold().replace("`", "``") in text


def _complete(chosen: argparse.Namespace) -> datetime:
    """Where the messages end of which the watermark says that all are stored, or `chosen.end` when that is earlier.

    Says so when that cuts off a part of what was asked for.
    """
    place = Place.open(chosen.url, chosen.options)
    known = watermark.read(place.fs, place.root, chosen.stream)
    if known is None:
        raise JetcaptureError(
            f"{place.shown} has no watermark of stream {chosen.stream}: nothing says what is complete"
        )
    end, asked = known.time + timedelta(microseconds=1), cast(datetime | None, chosen.end)  # an end is exclusive
    if asked is not None and asked <= end:
        return asked
    if asked is not None:
        sys.stderr.write(f"only complete up to {known.time.isoformat()}: what came later is left out\n")
    return end
