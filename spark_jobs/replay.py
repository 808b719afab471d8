"""Publish archived messages, or any rows, to JetStream from the executors and wait for all acknowledgements.

    jetcapture spark replay URL STREAM --servers nats://…        or python -m spark_jobs.replay, or spark-submit
    jetcapture spark replay --config FILE --subject "replay.{key}" --key eu --from 2026-05-01
    jetcapture spark replay --config FILE --missing

A row of the archive is published with its original bytes and headers, four headers that record its origin, which
`resume` looks for, and a message id of the form `<stream>:<seq>:<replay id>`, so messages republished within the target
stream's duplicate window are stored once. Any other row, such as an aggregate, is published as JSON.

Order: one task publishes all messages of a target subject, by timestamp and sequence; different subjects are published
in parallel. With a pace, a single task keeps one order across all subjects. A task keeps the order even if the server
restarts (`jetcapture_py.jetstream.publish.publisher` names the exceptions). When Spark retries a task, stored messages
stay in place and the rest follows in order.
"""

from __future__ import annotations

import logging
import re
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # spark-submit put this directory there

from pyspark.errors import PythonException
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as sf
from typer import Option

from jetcapture_py import options as opt
from jetcapture_py.archive import layout
from jetcapture_py.config.model import NatsConfig
from jetcapture_py.config.subjects import check_pattern, covers, overlaps, regex_of
from jetcapture_py.config.units import format_time, parse_duration
from jetcapture_py.errors import JetcaptureError, SourceError
from jetcapture_py.jetstream.publish.publisher import WINDOW
from jetcapture_py.text import duration, plural
from spark_jobs import job
from spark_jobs.job import EngineOption, JobArchive, NoSurvey, command, session, spark_error
from spark_jobs.publishing.instructions import keepable
from spark_jobs.publishing.login import login_at
from spark_jobs.publishing.prepare import NOTHING, Archived, Targets
from spark_jobs.reading.location import ArchiveLocation
from spark_jobs.replaying.missing import (
    REPLAY_ID,
    check_overwritten,
    describe_missing,
    describe_published,
    find_missing,
    read_tail,
    select_missing,
    whole_messages,
    without_erased,
)
from spark_jobs.replaying.origin import origin_of
from spark_jobs.replaying.preview import describe, is_recreated, warnings
from spark_jobs.replaying.source import Source
from spark_jobs.replaying.target import Origin, Stream, Target
from spark_jobs.replaying.task import RESULT, Pace, Task
from spark_jobs.sql import ArchiveQuery

log = logging.getLogger("jetcapture.replay")

_REPLAY_ID = re.compile(r"[!-9;-~]{1,100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Result of a replay. `published` messages were acknowledged in `seconds`, `duplicates` of which the stream already
    knew; `skipped` messages were in the target from an earlier run and not published again."""

    published: int
    duplicates: int
    replay_id: str
    skipped: int = 0
    seconds: float = 0.0


def replay(
    frame: DataFrame,
    servers: str | Sequence[str] | NatsConfig,
    subject: str = "{subject}",
    *,
    payload: str | None = None,
    replay_id: str | None = None,
    resume: bool = False,
    pace: Pace | None = None,
    window: int = WINDOW,
    tasks: int | None = None,
    origin: Origin | None = None,
    allow_loop: bool = False,
    survey: bool = True,
    into: str | None = None,
    keep_headers: Collection[str] = (),
) -> Replayed:
    """Publish every row of `frame` and wait for all acknowledgements. Raises JetcaptureError.

    `servers` may be a whole login. `subject` is a template like the capture's keys: `replay.{region}` with a column,
    `{subject}` and `{subject[1]}` with the message's own subject (or the column `subject`), `{header.NAME}`. `payload`
    names the column to publish, by default `_nats_payload`, else `payload`, else the row as JSON without the archive's
    own columns. Instructions to a server (`publishing.instructions`) are removed, except `keep_headers`.

    `resume` skips messages of `replay_id` (default: random) that the target streams already have. `window` limits the
    unacknowledged messages of each task. `tasks` defaults to Spark's parallelism, at most 8. With a `pace` there is one
    task. `into` is the only stream that may take the messages.

    `origin` is where the archive comes from (`replaying.origin.origin_of`). With it, a replay that the archive's own
    capture would capture again is refused unless `allow_loop`, and message ids distinguish the incarnations of a
    recreated stream.

    Messages are prepared and sorted before the first one is published: one without a valid subject is an error, and
    nothing is published. Rows without a timestamp keep the order of their partitions, which are published in parallel;
    for the same reason `survey` reads them once before. Without it, a replay of such rows fails at the first invalid
    one, unless the subject template alone does not determine the stream.
    """
    replay_id = replay_id or uuid.uuid4().hex[:12]
    if not _REPLAY_ID.fullmatch(replay_id):
        raise JetcaptureError(f"replay id {replay_id!r} must be a plain word")
    source = Source.of(frame, subject, payload)
    if pace is not None and pace.speed is not None and not source.ordered:
        raise JetcaptureError(f"--policy original needs the columns {', '.join(layout.IDENTITY)}")
    if resume and not source.archived:
        raise JetcaptureError(f"only rows with the columns {layout.STREAM} and {layout.SEQ} can be resumed")
    target = Target(login_at(servers))
    streams, targets = _targets(source, target, None if allow_loop else origin, into)
    for line in warnings(streams, archived=source.archived):
        log.warning("%s", line)
    left, skipped = source, 0
    if resume:
        left, skipped = source.without(target.replayed(streams, source.rows.pattern, replay_id))
    surveyed = not source.ordered and (survey or targets is not None)
    prepare = Archived(
        rows=left.rows,
        replay_id=replay_id,
        recreated=into is not None or _recreated(source, origin),
        apart=left.apart,
        kept=opt.option("keep_headers", keepable, keep_headers),
        targets=targets,
        before=source.ordered or surveyed,
    )
    messages = left.prepared(prepare)
    if surveyed:
        _collect(messages.agg(sf.count("*")), replay_id)
    if source.archived and into is None:
        log.info("replay id %s; if interrupted, continue with --resume %s", replay_id, replay_id)
    began = time.monotonic()
    task = Task(login=target.login, window=window, apart=left.apart, pace=pace)
    ordered = left.in_order(messages, 1 if pace is not None else tasks)
    counts = _collect(ordered.mapInArrow(task, RESULT), replay_id)
    return Replayed(
        published=sum(row["published"] for row in counts),
        duplicates=sum(row["duplicates"] for row in counts),
        replay_id=replay_id,
        skipped=skipped,
        seconds=time.monotonic() - began,
    )


def _collect(frame: DataFrame, replay_id: str) -> list[Row]:
    """Run a job. Raises SourceError with the replay id, if anything may have been published."""
    try:
        return frame.collect()
    except PythonException as error:
        text = spark_error(error)
        raise SourceError(text if text.endswith(NOTHING) else f"{text}; replay id {replay_id}") from error


def _recreated(source: Source, origin: Origin | None) -> bool:
    if origin is not None:
        return len(origin.created) > 1
    names = [source.rows.find(name) or name for name in layout.IDENTITY]
    return source.ordered and is_recreated(source.frame, names)


def preview(
    frame: DataFrame,
    servers: str | Sequence[str] | NatsConfig,
    subject: str = "{subject}",
    *,
    payload: str | None = None,
    origin: Origin | None = None,
    allow_loop: bool = False,
    keep_headers: Collection[str] = (),
) -> list[str]:
    """Describe a dry run of `replay` in lines. Raises the errors of `replay` before publishing."""
    target, source = Target(login_at(servers)), Source.of(frame, subject, payload)
    streams, targets = _targets(source, target, None if allow_loop else origin)
    prepare = Archived(
        rows=source.rows,
        replay_id="preview",
        recreated=False,
        apart=source.apart,
        kept=opt.option("keep_headers", keepable, keep_headers),
        targets=targets,
        before=True,
    )
    messages = source.prepared(prepare)
    if not source.apart:
        messages = messages.where("coalesce(row, 0) = 0")
    try:
        return list(describe(messages, streams, archived=source.archived))
    except PythonException as error:
        raise SourceError(spark_error(error)) from error


def _targets(
    source: Source, target: Target, origin: Origin | None, into: str | None = None
) -> tuple[list[Stream], Targets | None]:
    """Return the possible target streams, and the check for each subject; None if the template proves enough."""
    pattern = source.rows.pattern
    streams = [stream for stream in target.streams(pattern) if into in (None, stream.name)]
    if not streams and into is not None:
        raise SourceError(f"stream {into} at {target.where} listens on no subject{NOTHING}")
    if not streams:
        raise SourceError(f"no stream at {target.where} listens on {pattern}{NOTHING}")
    ingested = target.ingested(streams, origin) if origin is not None else {}
    taken = any(covers(subject, pattern) for stream in streams for subject in stream.subjects)
    if taken and not any(overlaps(subject, pattern) for filters in ingested.values() for subject in filters):
        return streams, None
    return streams, Targets(streams={stream.name: stream.subjects for stream in streams}, ingested=ingested)


@contextmanager
def logging_to_stderr(command: str, level: int) -> Iterator[None]:
    """Print the log lines of `replay` to standard error, prefixed with the command's name."""
    handler, before = logging.StreamHandler(sys.stderr), log.level
    handler.setFormatter(logging.Formatter(f"{command}: %(message)s"))
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _replay(
    words: JobArchive = None,
    config: opt.ConfigOption = None,
    stream: opt.OneStream = None,
    options: opt.StoreOptions = None,
    start: opt.Start = None,
    end: opt.End = None,
    event_start: opt.EventStart = None,
    event_end: opt.EventEnd = None,
    keys: opt.Keys = None,
    filters: Annotated[
        list[str] | None,
        Option("--filter-subject", metavar="PATTERN", help="Original subjects: orders.*.new or orders.>; repeatable."),
    ] = None,
    from_seq: Annotated[int | None, Option(metavar="N", help="First stream sequence.")] = None,
    to_seq: Annotated[int | None, Option(metavar="N", help="Last stream sequence.")] = None,
    quarantine: Annotated[
        bool, Option("--quarantine", help="Replay the quarantine: messages that could not be decoded, as raw bytes.")
    ] = False,
    sql: Annotated[str | None, Option(metavar="SQL", help="A query over the views archive and quarantine.")] = None,
    complete_only: opt.CompleteOnly = False,
    dedupe: opt.DedupeOption = "auto",
    parquet_only: opt.ParquetOnly = False,
    engine: EngineOption = "spark",
    subject: Annotated[
        str,
        Option(
            metavar="TEMPLATE",
            help='Target subject, such as "replay.{key}"; columns, {subject[1]} and {header.NAME} are replaced. '
            "By default the original subject.",
        ),
    ] = "{subject}",
    payload: Annotated[
        str | None,
        Option(metavar="COLUMN", help="Column to publish. By default the original payload, else the row as JSON."),
    ] = None,
    policy: Annotated[Literal["instant", "original"], Option(help="original: keep the original pauses.")] = "instant",
    speed: Annotated[str | None, Option(metavar="X", help="With --policy original: 10 is ten times as fast.")] = None,
    max_gap: Annotated[str | None, Option(metavar="DURATION", help="The longest pause, after --speed.")] = None,
    rate: Annotated[str | None, Option(metavar="N", help="Maximum messages per second.")] = None,
    window: Annotated[int, Option(metavar="N", min=1, help="Unacknowledged messages per task.")] = WINDOW,
    tasks: Annotated[int | None, Option(metavar="N", min=1, help="Parallel tasks; by default at most 8.")] = None,
    missing: Annotated[
        bool, Option("--missing", help="Publish to the archived stream itself, once and in order, what it has lost.")
    ] = False,
    keep_headers: Annotated[
        list[str] | None,
        Option(
            "--keep-header",
            metavar="NAME",
            help="Publish this header although it is an instruction to a server: Nats-TTL, Nats-Rollup, …; repeatable.",
        ),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be published without publishing.")] = False,
    allow_loop: Annotated[bool, Option("--allow-loop", help="Publish also what the capture will consume.")] = False,
    replay_id: Annotated[str | None, Option(metavar="ID", help="Name of this replay, in ids and headers.")] = None,
    resume: Annotated[str | None, Option(metavar="ID", help="Continue this replay: publish what is missing.")] = None,
    nats: opt.NatsFile = None,
    context: opt.Context = None,
    servers: opt.Servers = None,
    no_survey: NoSurvey = False,
) -> None:
    """Publish an archive's messages, or the rows of a query, to JetStream.

    Publishes messages that match all of --from, --to, --key, --filter-subject, --from-seq and --to-seq, or the rows of
    --sql. Files of a login are read on every executor.
    """
    not_with_missing = {
        "--sql": sql,
        "--quarantine": quarantine,
        "--filter-subject": filters,
        "--key": keys,
        "--from": start,
        "--to": end,
        "--event-from": event_start,
        "--event-to": event_end,
        "--complete-only": complete_only,
        "--subject": subject != "{subject}",
        "--payload": payload,
        "--policy": policy != "instant",
        "--tasks": tasks,
        "--replay-id": replay_id,
        "--resume": resume,
        "--allow-loop": allow_loop,
    }
    opt.refuse(
        (
            sql and (filters or from_seq or to_seq or quarantine),
            "--sql cannot be combined with --filter-subject, --from-seq, --to-seq or --quarantine",
        ),
        (quarantine and keys, "--quarantine cannot be combined with --key: the quarantine has no keys"),
        (policy == "instant" and (speed or max_gap), "--speed and --max-gap need --policy original"),
        (replay_id and resume, "--resume cannot be combined with --replay-id"),
        *((missing and given, f"--missing cannot be combined with {name}") for name, given in not_with_missing.items()),
    )
    pace = None
    if policy == "original" or rate is not None:
        pace = Pace(
            speed=(opt.value_of("--speed", _positive, speed) or 1.0) if policy == "original" else None,
            max_gap=opt.value_of("--max-gap", parse_duration, max_gap),
            rate=opt.value_of("--rate", _positive, rate),
        )
    patterns = opt.option("--filter-subject", check_pattern, filters)
    kept_headers = opt.option("--keep-header", keepable, keep_headers)
    archive = opt.chosen_archive(words, options, stream, config=config)
    query = ArchiveQuery(
        archive=archive,
        selection=opt.selection_of(start, end, keys, event_start, event_end),
        complete_only=complete_only,
        dedupe=dedupe,
        parquet_only=parquet_only,
        engine=engine,
    )
    target = opt.login(nats, context, servers, default=archive.login)
    publish = partial(replay, servers=target, pace=pace, window=window, survey=not no_survey, keep_headers=kept_headers)
    with logging_to_stderr("replay", logging.INFO):
        if missing:
            _publish_missing(query, target, from_seq, to_seq, kept_headers, None if dry_run else publish)
            return
        spark = session("jetcapture replay", query.url)
        files = ArchiveLocation.open(archive.url, archive.options).files
        rows = query.run(spark, sql or ("SELECT * FROM quarantine" if quarantine else "SELECT * FROM archive"))
        frame = without_erased(selected(rows, patterns, from_seq, to_seq), files.erased(archive.stream))
        origin = origin_of(archive.url, archive.stream, archive.options, quarantine=quarantine)
        if dry_run:
            show = partial(preview, frame, target, subject, payload=payload, origin=origin, allow_loop=allow_loop)
            sys.stdout.writelines(f"{line}\n" for line in show(keep_headers=kept_headers))
            return
        publish = partial(publish, frame, subject=subject, payload=payload, origin=origin, allow_loop=allow_loop)
        done = publish(replay_id=resume or replay_id, resume=resume is not None, tasks=tasks)
        sys.stdout.write(f"{_report(done)}\n")


def _publish_missing(
    query: ArchiveQuery,
    target: NatsConfig,
    from_seq: int | None,
    to_seq: int | None,
    keep_headers: Collection[str],
    publish: Callable[..., Replayed] | None,
) -> None:
    """Publish the archived messages that the stream has lost; without `publish`, only tell which."""
    archive = query.archive
    stream = archive.stream
    tail = read_tail(target, stream, archive.url, archive.options, from_seq)
    spark = session("jetcapture replay", query.url)
    frames = [query.run(spark, sql) for sql in ("SELECT * FROM archive", "SELECT * FROM quarantine")]
    files = ArchiveLocation.open(archive.url, archive.options).files
    messages = without_erased(whole_messages(frames, tail), files.erased(stream))
    lost = find_missing(messages, tail, to_seq)
    check_overwritten(tail, lost, keep_headers)
    sys.stdout.write(f"{describe_missing(tail, lost)}\n")
    if (expired := files.expired(stream)) is not None:
        count = plural(expired.messages, "message")
        sys.stdout.write(f"{count} up to {format_time(expired.until)} expired: the archive no longer has them\n")
    if not lost.num_rows or publish is None:
        return
    done = publish(select_missing(messages, lost), replay_id=REPLAY_ID, tasks=1, into=stream)
    (now,) = (candidate for candidate in Target(target).streams(">") if candidate.name == stream)
    sys.stdout.write(f"{_report(done)}\n{describe_published(tail, lost, now.last)}\n")


def selected(
    frame: DataFrame, filters: Sequence[str] = (), from_seq: int | None = None, to_seq: int | None = None
) -> DataFrame:
    """Filter rows by --filter-subject, --from-seq and --to-seq."""
    if filters:
        frame = frame.where(sf.col(layout.SUBJECT).rlike(regex_of(filters)))
    if from_seq is not None:
        frame = frame.where(sf.col(layout.SEQ) >= from_seq)
    if to_seq is not None:
        frame = frame.where(sf.col(layout.SEQ) <= to_seq)
    return frame


def _positive(text: str) -> float:
    with suppress(ValueError):
        if 0 < (number := float(text)) < float("inf"):
            return number
    raise ValueError("expected a number above 0")


def _report(done: Replayed) -> str:
    rate = done.published / max(done.seconds, 0.001)
    text = f"replayed {plural(done.published, 'message')} in {duration(done.seconds)} ({rate:,.0f} messages/s)"
    if done.duplicates:
        text += f", {done.duplicates} already known to the stream"
    if done.skipped:
        text += f"; {done.skipped} already in the target"
    return f"{text}; replay id {done.replay_id}"


COMMAND = command("replay", _replay)
main = partial(job.main, COMMAND)


if __name__ == "__main__":
    sys.exit(main())
