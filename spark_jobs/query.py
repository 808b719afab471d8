"""SQL over an archive, to the terminal, CSV, JSON, Parquet or NATS.

    jetcapture spark query URL STREAM "SELECT …"          or python -m spark_jobs.query, or spark-submit with this file
    jetcapture spark query --config FILE "SELECT …"

The stream's messages are the view `archive`; those that could not be decoded are the view `quarantine`.
"""

from __future__ import annotations

import csv
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # spark-submit put this directory there

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql import types as st
from typer import Argument, BadParameter, Option

from jetcapture_py.reading.output import table, target
from jetcapture_py.text import plural
from spark_jobs.arguments import LoginArguments, QueryArguments, SurveyArguments, parse
from spark_jobs.job import guarded, leave, session
from spark_jobs.reading.location import in_spark
from spark_jobs.reading.row_json import is_nested, json_of, row_of
from spark_jobs.replay import logging_to_stderr, replay
from spark_jobs.replaying.origin import origin_of
from spark_jobs.sql import query


@dataclass(kw_only=True)
class QueryCommand(LoginArguments, SurveyArguments, QueryArguments):
    """Run SQL over the view `archive`, and `quarantine` for messages that could not be decoded.

    Login files are read on every executor.
    """

    sql: Annotated[str, Argument(metavar="SQL", help="Such as 'SELECT key, count(*) FROM archive GROUP BY key'.")] = ""
    format: Annotated[Literal["table", "csv", "json", "parquet"], Option(help="Output format.")] = "table"
    output: Annotated[
        str | None, Option(metavar="FILE", help="Output file; with --format parquet a directory or URL.")
    ] = None
    to_nats: Annotated[
        str | None, Option(metavar="SUBJECT", help='Publish the rows to JetStream, for example to "sums.{key}".')
    ] = None
    positional: ClassVar[tuple[str, ...]] = ("url", "stream", "sql")

    def __post_init__(self) -> None:
        """Reject options that cannot be combined."""
        super().__post_init__()
        if self.format == "parquet" and self.output is None:
            raise BadParameter("--format parquet needs --output")
        if self.to_nats is not None and (self.output is not None or self.format != "table"):
            raise BadParameter("--to-nats cannot be combined with --format or --output")
        if self.to_nats is None and (self.servers or self.no_survey):
            raise BadParameter(f"{'--servers' if self.servers else '--no-survey'} needs --to-nats")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 on success, 1 after printing a one-line error."""
    return guarded("query", lambda: _run(parse("query", QueryCommand, arguments)))


def _run(chosen: QueryCommand) -> None:
    servers = None if chosen.to_nats is None else chosen.target_login
    output = chosen.output if chosen.format == "parquet" else None
    spark = session("jetcapture query", chosen.url if chosen.engine == "spark" else None, output)
    frame = query(spark, chosen)
    if servers is None:
        write(frame, chosen.format, chosen.output, chosen.options)
        return
    origin = origin_of(chosen.url, chosen.stream, chosen.options)
    with logging_to_stderr("query", logging.WARNING):
        done = replay(frame, servers, chosen.to_nats or "", origin=origin, survey=chosen.survey)
    sys.stdout.write(f"published {plural(done.published, 'message')}\n")


def write(frame: DataFrame, format: str, output: str | None, options: Mapping[str, Any] | None = None) -> None:  # noqa: A002 - named as the option is
    """Write the result as a table, CSV, JSON lines or Parquet, to a file or to standard output.

    `options` are `store.options` for writing Parquet to a URL.
    """
    if format == "parquet":
        url, settings = in_spark(output or "", options or {})
        frame.write.options(**settings).parquet(url)
        return
    names = frame.columns
    numbered = frame.toDF(*(f"c{number}" for number in range(len(names))))  # two columns may have the same name
    values = [(sf.col(field.name), field.dataType) for field in numbered.schema]
    with target(output) as file:
        if format == "json":
            line = row_of([(name, *value) for name, value in zip(names, values, strict=True)])
            file.writelines(f"{row[0]}\n" for row in numbered.select(line).toLocalIterator())
            return
        rows = (tuple(row) for row in numbered.select(*starmap(_text, values)).toLocalIterator())
        if format == "csv":
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(names)
            writer.writerows(rows)
        else:
            file.writelines(f"{line}\n" for line in table(names, rows))


def _text(value: Column, kind: st.DataType) -> Column:
    if is_nested(kind):
        return json_of(value, kind)
    if isinstance(kind, st.BinaryType):
        return sf.regexp_replace(sf.base64(value), r"\s", "")  # it has line breaks
    return value.cast("string")


if __name__ == "__main__":
    leave(main())
