"""Merge the small and overlapping objects of an archive's closed buckets into sorted ones of a target size.

    python -m spark_jobs.compact URL STREAM [--target-size 128MiB] [--older-than 1h] [--grace 5m] [--dry-run]

At all times, even if it is killed, every message is in the archive, and a reader that follows the deduplication rule
of `layout` counts it once:

- New objects appear atomically, next to their sources. While both exist, their sequence ranges overlap, so readers
  compare their messages. The objects written for one unit are disjoint, so later they are read without comparing.
- Sources are removed last: after all new objects have been written, read back and compared with the sources, and after
  a grace period for readers that listed objects earlier. Only objects that were listed and read are removed, not those
  that the capture stores meanwhile; if these overlap the new objects, readers compare them.
- If killed while writing, it leaves more copies than before. The next run keeps new objects that are complete in their
  range and continues with the rest. If killed while waiting or removing, the next run only removes the sources.
- Two compactions at once, even with different targets, may each consider the other's objects redundant. They cannot
  both remove them, because an object is only replaced by objects with more rows (see `compaction.plan`).

With `bundles`, all objects move to that number of bundles: from directories of keys, and from bundles whose number is
a multiple of it. So messages never move back, and an object may give way to one with fewer rows only on this way.

Large objects without overlap are left unchanged, so a second run does nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # spark-submit put this directory there

import pyarrow as pa
from pyspark.sql import SparkSession
from typer import Option

from jetcapture_py.archive import layout
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.plan import TARGET_SIZE, Source, moves, units
from jetcapture_py.compaction.summary import Summary, report, summarize
from jetcapture_py.compaction.unit import CHANGED, CompactionSpec, Outcome, compact_unit
from jetcapture_py.config.block import MAX_BUNDLES
from jetcapture_py.config.units import format_duration, parse_duration, parse_size
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store.archive import SHARE
from jetcapture_py.text import plural
from spark_jobs.arguments import Parsed, PartArguments, parse
from spark_jobs.job import guarded, session
from spark_jobs.reading.location import ArchiveLocation
from spark_jobs.reading.part import Keys, Moment, Part

OLDER_THAN = 3600.0
GRACE = 300.0

_TASKS = 1000
_REMOVERS = 16


def compact(
    spark: SparkSession,
    url: str,
    stream: str,
    *,
    start: Moment | None = None,
    end: Moment | None = None,
    keys: Keys | None = None,
    quarantine: bool = False,
    target_size: int = TARGET_SIZE,
    older_than: float = OLDER_THAN,
    grace: float = GRACE,
    incomplete: bool = False,
    bundles: int = 0,
    dry_run: bool = False,
    options: Mapping[str, Any] | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> Summary:
    """Compact the archive of `stream` under `url`, or its quarantine, to objects of about `target_size` bytes.

    Only buckets that ended more than `older_than` seconds ago and start in [`start`, `end`), and only these `keys`
    (None: messages without a key), which excludes objects in bundles. If the archive has a watermark, only buckets that
    are complete by it, unless `incomplete`. Sources are removed `grace` seconds after the last object that replaces
    them was written; this function waits for that once. `tell` gets progress messages.

    `bundles` moves all objects to this number of bundles, as a capture with the same `block.bundles` stores them; 0
    leaves each in its layout. Objects in bundles whose number is not a multiple of it are left alone.

    `options` go to fsspec, here and on the executors. Raises JetcaptureError if the archive cannot be listed; failures
    of single groups are in the summary's errors.
    """
    if target_size <= 0:
        raise JetcaptureError("the target size must be above 0")
    if quarantine and keys is not None:
        raise JetcaptureError("the quarantine is not divided by key")
    if bundles and (quarantine or keys is not None):
        raise JetcaptureError("bundles cannot be combined with keys or quarantine")
    if not 0 <= bundles <= MAX_BUNDLES:
        raise JetcaptureError(f"bundles: expected 1 to {MAX_BUNDLES}, got {bundles}")
    part = Part.of(start, end, keys)
    archive = ArchiveLocation.open(url, options or {}).files
    files = Files(archive.url, options or {})
    directories = [f"{layout.QUARANTINE}/{stream}" if quarantine else stream]
    if part.keys is not None:
        directories = [f"{stream}/key={layout.escape_key(key)}" for key in part.keys]
    found = files.find(directories)
    listed = [source for source in found if source.name.parquet]
    if len(listed) < len(found):
        tell(f"left alone, because only Parquet is compacted: {plural(len(found) - len(listed), 'other object')}")
    if not listed:
        raise JetcaptureError(f"no {'Parquet ' if found else ''}objects of stream {stream} under {files.shown}")
    chosen = [source for source in listed if _begins_within(source.name.bucket, part.start, part.end)]
    closed = time.time() - older_than
    mark = None if incomplete else archive.watermark(stream)
    if mark is not None and mark.time.timestamp() < closed:
        closed = mark.time.timestamp()
        tell(f"skipping buckets that end after the watermark, {mark.time.isoformat()}: they are incomplete")
    spec = CompactionSpec(target=target_size, closed=closed, dry_run=dry_run, bundles=bundles)
    outcomes = list(_run(spark, archive.url, options or {}, spec, chosen))
    _fail_unseen(files, directories, outcomes)
    removed: frozenset[str] = frozenset()
    errors: list[str] = []
    if not dry_run:
        removed, errors = _remove(files, directories, outcomes, grace, tell)
    return summarize(chosen, outcomes, removed, errors, dry_run)


def _begins_within(bucket: int, start: datetime | None, end: datetime | None) -> bool:
    return (start is None or bucket >= start.timestamp()) and (end is None or bucket < end.timestamp())


def _run(
    spark: SparkSession, url: str, options: Mapping[str, Any], spec: CompactionSpec, chosen: Sequence[Source]
) -> Iterator[Outcome]:
    """Compact every unit that needs it, on the executors."""
    closed = [source for source in chosen if source.name.bucket < spec.closed]
    found: Iterable[Sequence[Source]] = (unit.sources for unit in units(closed, spec.target))
    if spec.bundles:
        found = moves(closed, spec.bundles, spec.target)
    work = [json.dumps([(source.name.path, source.size) for source in sources]) for sources in found]
    if not work:
        return
    frame = spark.createDataFrame([(each,) for each in work], "unit string").repartition(min(len(work), _TASKS))
    for row in frame.mapInArrow(_task(url, dict(options), spec), "outcome string").collect():
        yield Outcome(**json.loads(row[0]))


def _task(url: str, options: dict[str, Any], spec: CompactionSpec) -> Callable[[Iterable[pa.RecordBatch]], Any]:
    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        files = Files(url, options)
        for batch in batches:
            for unit in batch.column(0).to_pylist():
                named = ((layout.parse_path(path), size) for path, size in json.loads(unit))
                sources = [Source(name, size) for name, size in named if name is not None]
                found = [json.dumps(asdict(outcome)) for outcome in compact_unit(files, spec, sources)]
                yield pa.RecordBatch.from_pydict({"outcome": found})

    return run


def _fail_unseen(files: Files, directories: Sequence[str], outcomes: Sequence[Outcome]) -> None:
    """Make it a failure that a worker did not find objects which are all still there."""
    missing = [outcome for outcome in outcomes if outcome.missing]
    present = {source.name.path for source in files.find(directories)} if missing else set()
    for outcome in missing:
        if present.issuperset(outcome.missing):
            count = plural(len(outcome.missing), "object")
            path = f"{files.shown}/{outcome.missing[0]}"
            outcome.failed = True
            outcome.left = f"{outcome.worker} does not see {count} of the archive, such as {path}: {SHARE}"


def _remove(
    files: Files, directories: Sequence[str], outcomes: Sequence[Outcome], grace: float, tell: Callable[[str], object]
) -> tuple[frozenset[str], list[str]]:
    """Remove sources after the grace period if the objects that replace them still exist."""
    ready = [outcome for outcome in outcomes if outcome.removable]
    if not ready:
        return frozenset(), []
    wait = max(outcome.since for outcome in ready) + grace - time.time()
    if wait > 0:
        count = sum(len(outcome.removable) for outcome in ready)
        tell(f"waiting {format_duration(round(wait))} for readers before removing {plural(count, 'object')}")
        time.sleep(wait)
    present = {source.name.path for source in files.find(directories)}
    paths: list[str] = []
    for outcome in ready:
        if present.issuperset(outcome.holders):
            paths += [path for path in outcome.removable if path in present]
        else:
            outcome.left = CHANGED
    with ThreadPoolExecutor(_REMOVERS) as threads:
        failed = dict(zip(paths, threads.map(files.remove, paths), strict=True))
    return frozenset(path for path, error in failed.items() if error is None), list(filter(None, failed.values()))


@dataclass(kw_only=True)
class CompactCommand(PartArguments):
    """Merge the small and overlapping objects of an archive's closed buckets."""

    quarantine: Annotated[bool, Option("--quarantine", help="Compact the quarantine instead of the messages.")] = False
    target_size: Annotated[int, Option(metavar="SIZE", help="[default: 128MiB]"), Parsed(parse_size)] = TARGET_SIZE
    older_than: Annotated[
        float,
        Option(metavar="DURATION", help="Only buckets that ended at least this long ago. [default: 1h]"),
        Parsed(parse_duration),
    ] = OLDER_THAN
    grace: Annotated[
        float,
        Option(metavar="DURATION", help="How long to keep replaced objects for running readers. [default: 5m]"),
        Parsed(parse_duration),
    ] = GRACE
    incomplete: Annotated[
        bool, Option("--incomplete", help="Also compact buckets that the watermark has not passed yet.")
    ] = False
    bundles: Annotated[
        int, Option(metavar="N", help="Move all objects to N bundles, as with block.bundles; 0 leaves them.")
    ] = 0
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be done without doing it.")] = False
    json: Annotated[bool, Option("--json", help="Print the summary as JSON.")] = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 on success, 1 if anything failed."""
    return guarded("compact", lambda: _job(parse("compact", CompactCommand, arguments)))


def _job(chosen: CompactCommand) -> None:
    summary = compact(
        session("jetcapture compact"),
        chosen.url,
        chosen.stream,
        start=chosen.start,
        end=chosen.end,
        keys=chosen.keys,
        quarantine=chosen.quarantine,
        target_size=chosen.target_size,
        older_than=chosen.older_than,
        grace=chosen.grace,
        incomplete=chosen.incomplete,
        bundles=chosen.bundles,
        dry_run=chosen.dry_run,
        options=chosen.options,
        tell=lambda line: sys.stderr.write(f"compact: {line}\n"),
    )
    lines = [json.dumps(asdict(summary))] if chosen.json else report(chosen.stream, summary)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    if summary.errors:
        more = f" (and {plural(len(summary.errors) - 1, 'more failure')})" if len(summary.errors) > 1 else ""
        raise JetcaptureError(f"{summary.errors[0]}{more}")


if __name__ == "__main__":
    sys.exit(main())
