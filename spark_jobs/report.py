"""One HTML page about an archive: volume over time by key, holes, quarantine, lateness, objects and their sizes.

    jetcapture spark report URL STREAM --output report.html   or python -m spark_jobs.report, or spark-submit this file
    jetcapture spark report --config FILE --output report.html

The page needs no other file, no network and no script.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # spark-submit put this directory there

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from typer import Option

from jetcapture_py import options as opt
from jetcapture_py.errors import VanishedError
from jetcapture_py.reading.output import whole_file
from jetcapture_py.reading.selection import Keys, Moment, Selection
from spark_jobs import job
from spark_jobs.job import JobArchive, command, session
from spark_jobs.reporting.facts import Choice, Dedupe, Facts, collect
from spark_jobs.reporting.page import page, verdict

_ATTEMPTS = 3


def report(
    spark: SparkSession,
    url: str,
    stream: str,
    *,
    start: Moment | None = None,
    end: Moment | None = None,
    keys: Keys | None = None,
    complete: bool = False,
    dedupe: Dedupe = "auto",
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return an HTML report about the archive of `stream` under `url`. Raises JetcaptureError.

    `start` (inclusive) and `end` (exclusive) select whole buckets, `keys` selects keys (None: messages without a key),
    `complete` selects buckets that ended before the watermark's time. The search for holes always covers the whole
    stream. `dedupe` as for `read_archive`; with `none`, copies are counted as messages. `options` go to fsspec.
    """
    part = Selection.of(start, end, keys)
    choice = Choice(start=part.start, end=part.end, keys=part.keys, complete=complete)
    return page(_collected(spark, url, stream, choice, dedupe, options or {}))


def _report(
    words: JobArchive = None,
    config: opt.ConfigOption = None,
    stream: opt.OneStream = None,
    options: opt.StoreOptions = None,
    start: opt.Start = None,
    end: opt.End = None,
    keys: opt.Keys = None,
    complete_only: opt.CompleteOnly = False,
    dedupe: opt.DedupeOption = "auto",
    output: Annotated[str, Option(metavar="FILE", help="Output file.")] = "report.html",
) -> None:
    """Write one HTML page about an archive."""
    part = opt.selection_of(start, end, keys)
    archive = opt.chosen_archive(words, options, stream, config=config)
    choice = Choice(start=part.start, end=part.end, keys=part.keys, complete=complete_only)
    spark = session("jetcapture report")  # without Hadoop packages for the store: Arrow reads it
    facts = _collected(spark, archive.url, archive.stream, choice, dedupe, archive.options)
    text = page(facts)
    with whole_file(Path(output)) as file:
        file.write(text)
    sys.stdout.write(f"{output}: {verdict(facts).sentence}\n")


def _collected(
    spark: SparkSession, url: str, stream: str, choice: Choice, dedupe: Dedupe, options: Mapping[str, Any]
) -> Facts:
    """Collect the facts; retry when objects disappear, as they do during compaction."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return collect(spark, url, stream, choice, dedupe, options)
        except VanishedError:
            continue
        except PySparkException as error:
            if VanishedError.__name__ not in str(error):  # raised by a worker
                raise
    return collect(spark, url, stream, choice, dedupe, options)


COMMAND = command("report", _report)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 on success, 1 after printing a one-line error."""
    return job.main(COMMAND, arguments)


if __name__ == "__main__":
    sys.exit(main())
