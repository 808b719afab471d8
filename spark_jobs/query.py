"""SQL over an archive, to the terminal, CSV, JSON, Parquet or NATS.

    jetcapture spark query URL STREAM "SELECT …"          or python -m spark_jobs.query, or spark-submit with this file
    jetcapture spark query --config FILE "SELECT …"

The stream's messages are the view `archive`; those that could not be decoded are the view `quarantine`.
With --by, the view `latest` has the newest row of each key.
"""

from __future__ import annotations

import csv
import logging
import sys
from collections.abc import Mapping
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Annotated, Any, Literal

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # spark-submit put this directory there

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql import types as st
from typer import Argument, Option

from jetcapture_py import options as opt
from jetcapture_py.reading.output import table, target
from jetcapture_py.text import plural
from spark_jobs import job
from spark_jobs.job import EngineOption, NoSurvey, command, session
from spark_jobs.reading.location import in_spark
from spark_jobs.reading.row_json import is_nested, json_of, row_of
from spark_jobs.replay import logging_to_stderr, replay
from spark_jobs.replaying.origin import origin_of
from spark_jobs.sql import ArchiveQuery


def _query(
    words: Annotated[
        list[str] | None,
        Argument(metavar="URL STREAM SQL", help="Such as 'SELECT key, count(*) FROM archive GROUP BY key'."),
    ] = None,
    config: opt.ConfigOption = None,
    stream: opt.OneStream = None,
    options: opt.StoreOptions = None,
    start: opt.Start = None,
    end: opt.End = None,
    event_start: opt.EventStart = None,
    event_end: opt.EventEnd = None,
    keys: opt.Keys = None,
    complete_only: opt.CompleteOnly = False,
    dedupe: opt.DedupeOption = "auto",
    parquet_only: opt.ParquetOnly = False,
    by: opt.By = None,
    order: opt.Order = "_nats_seq",
    deleted: opt.Deleted = None,
    engine: EngineOption = "spark",
    form: Annotated[Literal["table", "csv", "json", "parquet"], Option("--format", help="Output format.")] = "table",
    output: Annotated[
        str | None, Option(metavar="FILE", help="Output file; with --format parquet a directory or URL.")
    ] = None,
    to_nats: Annotated[
        str | None, Option(metavar="SUBJECT", help='Publish the rows to JetStream, for example to "sums.{key}".')
    ] = None,
    nats: opt.NatsFile = None,
    context: opt.Context = None,
    servers: opt.Servers = None,
    no_survey: NoSurvey = False,
) -> None:
    """Run SQL over an archive with Spark: print, write or publish the rows.

    The views are archive, and quarantine for messages that could not be decoded; with --by also latest, the newest row
    of each key.
    With --to-nats, files of a login are read on every executor.
    """
    opt.refuse(
        (form == "parquet" and output is None, "--format parquet needs --output"),
        (
            to_nats is not None and (output is not None or form != "table"),
            "--to-nats cannot be combined with --format or --output",
        ),
        (to_nats is None and nats, "--nats needs --to-nats"),
        (to_nats is None and context is not None, "--context needs --to-nats"),
        (to_nats is None and servers, "--servers needs --to-nats"),
        (to_nats is None and no_survey, "--no-survey needs --to-nats"),
    )
    archive = opt.chosen_archive(words, options, stream, config=config, sql="SQL")
    query = ArchiveQuery(
        archive=archive,
        selection=opt.selection_of(start, end, keys, event_start, event_end),
        complete_only=complete_only,
        dedupe=dedupe,
        parquet_only=parquet_only,
        engine=engine,
        latest=opt.latest_of(by, order, deleted),
    )
    target = None if to_nats is None else opt.login(nats, context, servers, default=archive.login)
    spark = session("jetcapture query", query.url, output if form == "parquet" else None)
    frame = query.run(spark, archive.statement or "")
    if target is None or to_nats is None:
        write(frame, form, output, archive.options)
        return
    origin = origin_of(archive.url, archive.stream, archive.options)
    with logging_to_stderr("query", logging.WARNING):
        done = replay(frame, target, to_nats, origin=origin, survey=not no_survey)
    sys.stdout.write(f"published {plural(done.published, 'message')}\n")


COMMAND = command("query", _query, **opt.SQL_MAY_BEGIN_WITH_A_COMMENT)
main = partial(job.main, COMMAND)


def write(frame: DataFrame, format: str, output: str | None, options: Mapping[str, Any] | None = None) -> None:  # noqa: A002 - named as the option is
    """Write the result as a table, CSV, JSON lines or Parquet, to a file or standard output.

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
        return sf.regexp_replace(sf.base64(value), r"\s", "")  # Spark breaks lines of base64
    return value.cast("string")


if __name__ == "__main__":
    sys.exit(main())
