"""Merge the small and overlapping objects of closed time slices into sorted ones of a target size.

    python -m spark_jobs.compact URL STREAM [--target-size 128MiB] [--older-than 1h] [--grace 1h] [--dry-run]

`jetcapture_py.maintain.compact` describes the guarantees, and does the same on one machine without Spark.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # spark-submit put this directory there

import pyarrow as pa
from pyspark.sql import SparkSession
from typer import Option

from jetcapture_py import options as opt
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.summary import Summary, failure, report, waiting_line
from jetcapture_py.compaction.unit import CompactionSpec, Outcome, compact_unit
from jetcapture_py.config.units import parse_duration, parse_size
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.maintain.compact import Compaction, CompactionSettings
from jetcapture_py.store.archive import ArchiveFiles
from spark_jobs import job
from spark_jobs.job import JobArchive, command, session
from spark_jobs.reading.location import ArchiveLocation

_TASKS = 1000


def compact(
    spark: SparkSession,
    url: str,
    stream: str,
    settings: CompactionSettings | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> Summary:
    """Compact the archive of `stream` under `url`, or its quarantine. `tell` gets progress messages.

    `options` are `store.options`, here and on the executors. Raises JetcaptureError if the archive cannot be listed;
    failures of single groups are in the summary's errors.
    """
    archive = ArchiveLocation.open(url, options or {}).files
    compaction = Compaction(archive, stream, settings or CompactionSettings(), tell=tell)
    if not compaction.listed:
        kind = "Parquet " if compaction.others else ""
        raise JetcaptureError(f"no {kind}objects of stream {stream} under {archive.shown}")
    compaction.add(_run(spark, archive, compaction))
    compaction.remove()
    if waiting := sum(len(outcome.removable) for outcome in compaction.waiting):
        tell(waiting_line(waiting))
    return compaction.summary()


def _run(spark: SparkSession, archive: ArchiveFiles, compaction: Compaction) -> Iterator[Outcome]:
    """Compact every unit that needs it, on the executors."""
    work = [(pickle.dumps(sources),) for sources in compaction.work()]
    if not work:
        return
    frame = spark.createDataFrame(work, "unit binary").repartition(min(len(work), _TASKS))
    for row in frame.mapInArrow(_task(archive, compaction.spec), "outcome binary").collect():
        yield pickle.loads(row[0])  # noqa: S301  of our own tasks


def _task(archive: ArchiveFiles, spec: CompactionSpec) -> Callable[[Iterable[pa.RecordBatch]], Any]:
    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for unit in batch.column(0).to_pylist():
                outcomes = compact_unit(Files(archive), spec, pickle.loads(unit))  # noqa: S301  of our own driver
                yield pa.RecordBatch.from_pydict({"outcome": [pickle.dumps(outcome) for outcome in outcomes]})

    return run


def _compact(
    words: JobArchive = None,
    config: opt.ConfigOption = None,
    stream: opt.OneStream = None,
    options: opt.StoreOptions = None,
    start: opt.Start = None,
    end: opt.End = None,
    keys: opt.Keys = None,
    quarantine: Annotated[bool, Option("--quarantine", help="Compact the quarantine instead of the messages.")] = False,
    target_size: Annotated[str, Option(metavar="SIZE", help="Size of objects to aim for.")] = "128MiB",
    older_than: Annotated[
        str, Option(metavar="DURATION", help="Only time slices that ended at least this long ago.")
    ] = "1h",
    grace: Annotated[
        str, Option(metavar="DURATION", help="How long to keep replaced objects for running readers.")
    ] = "1h",
    incomplete: Annotated[
        bool, Option("--incomplete", help="Also compact time slices that the watermark has not passed yet.")
    ] = False,
    dry_run: opt.DryRun = False,
    as_json: Annotated[bool, Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Merge the small and overlapping objects of closed time slices."""
    settings = CompactionSettings(
        target=opt.value_of("--target-size", parse_size, target_size),
        after=opt.value_of("--older-than", parse_duration, older_than),
        grace=opt.value_of("--grace", parse_duration, grace),
        quarantine=quarantine,
        selection=opt.selection_of(start, end, keys),
        incomplete=incomplete,
        dry_run=dry_run,
    )
    archive = opt.chosen_archive(words, options, stream, config=config)
    summary = compact(
        session("jetcapture compact"),
        archive.url,
        archive.stream,
        settings,
        options=archive.options,
        tell=lambda line: sys.stderr.write(f"compact: {line}\n"),
    )
    lines = [json.dumps(asdict(summary))] if as_json else report(archive.stream, summary)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    if summary.errors:
        raise JetcaptureError(failure(summary.errors))


COMMAND = command("compact", _compact)
main = partial(job.main, COMMAND)


if __name__ == "__main__":
    sys.exit(main())
