"""SQL over an archive: `python -m spark_jobs.query URL STREAM "SELECT …"`, or spark-submit with this file.

The stream's messages are the view `archive`, what could not be decoded is the view `quarantine`.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # spark-submit put this directory there: it hides `nats`

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql import types as st

from spark_jobs.archive import archive_view
from spark_jobs.job import archive_arguments, guarded, session

FORMATS = ("table", "csv", "json", "parquet")
_VIEWS = ("archive", "quarantine")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when the query gave its result, 1 with one line of text when it did not."""
    parser = argparse.ArgumentParser(prog="query", description="SQL over an archive, as the view `archive`.")
    archive_arguments(parser, arguments)
    parser.add_argument("sql", metavar="SQL", help='for example "SELECT key, count(*) FROM archive GROUP BY key"')
    parser.add_argument("--format", choices=FORMATS, default="table")
    parser.add_argument("--output", help="a file; with --format parquet a directory or URL that Spark writes")
    chosen = parser.parse_args(arguments)
    if chosen.format == "parquet" and chosen.output is None:
        parser.error("--format parquet needs --output")
    return guarded("query", lambda: write(query(session("jetcapture query"), chosen), chosen.format, chosen.output))


def query(spark: SparkSession, chosen: argparse.Namespace) -> DataFrame:
    """The result of `chosen.sql` over the archive that the arguments name. Views it does not name are not opened."""
    common = {"start": chosen.start, "end": chosen.end, "dedupe": chosen.dedupe, "options": chosen.options}
    keys = chosen.keys and [key or None for key in chosen.keys]
    for view in _VIEWS:
        if re.search(rf"\b{view}\b", chosen.sql, re.IGNORECASE):
            part = {"quarantine": True} if view == "quarantine" else {"keys": keys}
            archive_view(spark, chosen.url, chosen.stream, view, **common, **part)
    return spark.sql(chosen.sql)


def write(frame: DataFrame, format: str, output: str | None) -> None:  # noqa: A002 - named as the option is
    """Write the result as a table, CSV, JSON lines or Parquet, to a file or to standard output."""
    if format == "parquet":
        frame.write.parquet(output or "")
        return
    with _target(output) as file:
        if format == "json":
            line = sf.to_json(sf.struct("*"), {"ignoreNullFields": "false"})
            file.writelines(f"{row[0]}\n" for row in frame.select(line).toLocalIterator())
            return
        rows = (tuple(row) for row in frame.select(*map(_text, frame.schema)).toLocalIterator())
        if format == "csv":
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(frame.columns)
            writer.writerows(rows)
        else:
            file.writelines(f"{line}\n" for line in table(frame.columns, rows))


@contextmanager
def _target(output: str | None) -> Iterator[TextIO]:
    """Standard output, or a file that gets its name only when it is complete."""
    if output is None:
        yield sys.stdout
        return
    path = Path(output)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _text(field: st.StructField) -> Column:
    column = sf.col("`" + field.name.replace("`", "``") + "`")
    if isinstance(field.dataType, st.StructType | st.ArrayType | st.MapType):
        return sf.to_json(column)
    if isinstance(field.dataType, st.BinaryType):
        return sf.base64(column)
    return column.cast("string")


def table(names: Sequence[str], rows: Iterable[Sequence[str | None]]) -> Iterator[str]:
    """Lines of a table with aligned columns; a line break in a value is shown as \\n."""
    lines = [tuple(names), *(tuple("NULL" if value is None else value for value in row) for row in rows)]
    lines = [tuple(value.replace("\n", "\\n") for value in line) for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for number, line in enumerate(lines):
        yield "  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)).rstrip()
        if number == 0:
            yield "  ".join("-" * width for width in widths)


if __name__ == "__main__":
    sys.exit(main())
