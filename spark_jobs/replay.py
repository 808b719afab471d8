"""Publish archived messages, or any rows, to JetStream from the executors and wait for all acknowledgements.

    jetcapture spark replay URL STREAM --servers nats://…        or python -m spark_jobs.replay, or spark-submit
    jetcapture spark replay --config FILE --subject "replay.{key}" --key eu --from 2026-05-01
    jetcapture spark replay --config FILE --missing

A row of the archive is published with its original bytes and headers, and a message id of the form
`<stream>:<seq>:<replay id>`, so messages republished within the target stream's duplicate window are stored once. Four
headers record the origin: Jetcapture-Stream, Jetcapture-Sequence, Jetcapture-Timestamp and Jetcapture-Replay; `resume`
uses them to find what the target already has, regardless of age. Any other row, such as an aggregate, is published as
JSON.

Order: one task publishes all messages of a target subject, by timestamp and sequence; different subjects are published
in parallel. With a pace, a single task keeps one order across all subjects. A task keeps the order even if the server
restarts (`jetcapture_py.jetstream.publish.publisher` names the exceptions). When Spark retries a task, stored messages
stay in place and the rest follows in order. Rows without a timestamp are published in the order of their partition,
partitions in parallel.
"""

from __future__ import annotations

import logging
import re
import sys
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # spark-submit put this directory there

import pyarrow as pa
from pyspark.errors import PythonException
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from jetcapture_py.archive import layout
from jetcapture_py.config.model import NatsConfig
from jetcapture_py.config.units import format_time
from jetcapture_py.errors import JetcaptureError, SourceError
from jetcapture_py.jetstream.publish.publisher import WINDOW
from jetcapture_py.text import duration, plural
from spark_jobs.job import guarded, leave, session, spark_error
from spark_jobs.publishing.instructions import describe_removed, keepable
from spark_jobs.publishing.login import login_at
from spark_jobs.reading.location import ArchiveLocation
from spark_jobs.replaying.arguments import ReplayCommand, pace_of, parse, selected
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
from spark_jobs.replaying.preview import (
    Preview,
    describe,
    is_certain,
    is_recreated,
    short_window,
    take_preview,
    warnings,
)
from spark_jobs.replaying.rows import ReplayRows, rows_of
from spark_jobs.replaying.target import Origin, Stream, Target
from spark_jobs.replaying.task import RESULT, ROW, SEQ, STREAM, TIMESTAMP, Pace, Task
from spark_jobs.sql import query

log = logging.getLogger("jetcapture.replay")

_REPLAY_ID = re.compile(r"[!-9;-~]{1,100}")
_BROADCAST = 5_000_000
"""Maximum number of identities of a resumed replay to broadcast; Spark chooses the join for more."""


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
    own columns.

    `replay_id` (default: random) is part of the message ids; `resume` skips messages of this replay that the target
    streams already have. `window` limits the unacknowledged messages of each task. `tasks` defaults to Spark's
    parallelism, at most 8. With a `pace` there is one task.

    `into` is the only stream that may take the messages.

    Headers that are instructions to a server (`publishing.instructions`) are removed, except `keep_headers`.

    `origin` is where the archive comes from (`replaying.origin.origin_of`). With it, a replay that the archive's own
    capture would capture again is refused unless `allow_loop`, and message ids distinguish the incarnations of a
    recreated stream.

    Before anything is published, `survey` reads all rows once: rows without a valid subject are an error. Without it, a
    replay starts immediately and fails at the first invalid row; rows are still read first if the subject template
    alone does not determine the stream.
    """
    replay_id = replay_id or uuid.uuid4().hex[:12]
    if not _REPLAY_ID.fullmatch(replay_id):
        raise JetcaptureError(f"replay id {replay_id!r} must be a plain word")
    rows = rows_of(frame, subject, payload)
    if pace is not None and pace.speed is not None and not rows.ordered:
        raise JetcaptureError(f"--policy original needs the columns {', '.join(layout.IDENTITY)}")
    if resume and not rows.messages:
        raise JetcaptureError(f"only rows with the columns {layout.STREAM} and {layout.SEQ} can be resumed")
    target = Target(servers if isinstance(servers, NatsConfig) else login_at(servers))
    streams, ingested = _streams(rows, target, None if allow_loop else origin, into)
    if survey or not is_certain(rows.pattern, streams, ingested):
        take_preview(rows, streams, ingested)
        rows = rows.surveyed()
    for line in warnings(streams):
        log.warning("%s", line)
    if rows.messages and (warning := short_window(streams)) is not None:
        log.warning("%s", warning)
    left, skipped = _left(rows, target.replayed(streams, rows.pattern, replay_id)) if resume else (rows, 0)
    task = Task(
        login=target.login,
        replay_id=replay_id,
        window=window,
        recreated=into is not None or (len(origin.created) > 1 if origin is not None else is_recreated(rows)),
        apart=rows.apart,
        stored=rows.stored,
        pace=pace,
        kept=tuple(map(_keepable, keep_headers)),
    )
    if rows.messages and into is None:
        log.info("replay id %s; if interrupted, continue with --resume %s", replay_id, replay_id)
    began = time.monotonic()
    ordered = left.in_order(1 if pace is not None else tasks)
    try:
        counts = ordered.mapInArrow(task.function(), RESULT).collect()
    except PythonException as error:
        raise SourceError(f"{spark_error(error)}; replay id {task.replay_id}") from error
    return Replayed(
        published=sum(row["published"] for row in counts),
        duplicates=sum(row["duplicates"] for row in counts),
        replay_id=replay_id,
        skipped=skipped,
        seconds=time.monotonic() - began,
    )


def preview(
    frame: DataFrame,
    servers: str | Sequence[str] | NatsConfig,
    subject: str = "{subject}",
    *,
    payload: str | None = None,
    origin: Origin | None = None,
    allow_loop: bool = False,
    keep_headers: Collection[str] = (),
) -> tuple[Preview, list[Stream]]:
    """Return what `replay` would publish, and the target streams. Raises what it would raise before publishing."""
    target = Target(servers if isinstance(servers, NatsConfig) else login_at(servers))
    rows = rows_of(frame, subject, payload)
    streams, ingested = _streams(rows, target, None if allow_loop else origin)
    return take_preview(rows, streams, ingested, details=True, keep_headers=keep_headers), streams


def _keepable(name: str) -> str:
    try:
        return keepable(name)
    except ValueError as error:
        raise JetcaptureError(f"keep_headers: {error}") from None


def _streams(
    rows: ReplayRows, target: Target, origin: Origin | None, into: str | None = None
) -> tuple[list[Stream], dict[str, tuple[str, ...]]]:
    """Return the possible target streams, and the subjects that the archive's capture consumes from them."""
    streams = [stream for stream in target.streams(rows.pattern) if into in (None, stream.name)]
    if not streams and into is not None:
        raise SourceError(f"stream {into} at {target.where} listens on no subject; nothing was published")
    if not streams:
        raise SourceError(f"no stream at {target.where} listens on {rows.pattern}; nothing was published")
    return streams, target.ingested(streams, origin) if origin is not None else {}


def _left(rows: ReplayRows, done: pa.Table) -> tuple[ReplayRows, int]:
    """Remove the rows that are in the target already; return the others and the number removed."""
    identity = [STREAM, SEQ, *([TIMESTAMP] if rows.ordered else []), *([ROW] if rows.apart else [])]
    done = done.select(identity).group_by(identity).aggregate([])
    if not done.num_rows:
        return rows, 0
    known = rows.frame.sparkSession.createDataFrame(done)
    if rows.apart:
        known = known.fillna(0, [ROW])  # of a replay before any message had several rows
    known = sf.broadcast(known) if done.num_rows <= _BROADCAST else known
    return replace(rows, frame=rows.frame.join(known, identity, "left_anti")), done.num_rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 when all messages are acknowledged, 1 after printing a one-line error."""
    with logging_to_stderr("replay", logging.INFO):
        return guarded("replay", lambda: _job(parse(arguments)))


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


def _job(chosen: ReplayCommand) -> None:
    if chosen.missing:
        _publish_missing(chosen)
        return
    servers = chosen.target_login
    spark = session("jetcapture replay", chosen.url if chosen.engine == "spark" else None)
    files = ArchiveLocation.open(chosen.url, chosen.options).files
    frame = without_erased(selected(query(spark, chosen), chosen), files.erased(chosen.stream))
    origin = origin_of(chosen.url, chosen.stream, chosen.options, quarantine=chosen.quarantine)
    if chosen.dry_run:
        found, streams = preview(
            frame,
            servers,
            chosen.subject,
            payload=chosen.payload,
            origin=origin,
            allow_loop=chosen.allow_loop,
            keep_headers=chosen.keep_headers,
        )
        sys.stdout.writelines(f"{line}\n" for line in describe(found, streams))
        return
    done = replay(
        frame,
        servers,
        chosen.subject,
        payload=chosen.payload,
        replay_id=chosen.resume or chosen.replay_id,
        resume=chosen.resume is not None,
        pace=pace_of(chosen),
        window=chosen.window,
        tasks=chosen.tasks,
        origin=origin,
        allow_loop=chosen.allow_loop,
        survey=chosen.survey,
        keep_headers=chosen.keep_headers,
    )
    sys.stdout.write(f"{_report(done)}\n")


def _publish_missing(chosen: ReplayCommand) -> None:
    """Publish the archived messages that the stream has lost."""
    servers, stream = chosen.target_login, chosen.stream
    tail = read_tail(servers, stream, chosen.url, chosen.options, chosen.from_seq)
    spark = session("jetcapture replay", chosen.url if chosen.engine == "spark" else None)
    frames = []
    for sql in ("SELECT * FROM archive", "SELECT * FROM quarantine"):
        asked = copy(chosen)
        asked.sql = sql
        frames.append(query(spark, asked))
    files = ArchiveLocation.open(chosen.url, chosen.options).files
    messages = without_erased(whole_messages(frames, tail), files.erased(stream))
    lost = find_missing(messages, tail, chosen.to_seq)
    check_overwritten(tail, lost, chosen.keep_headers)
    sys.stdout.write(f"{describe_missing(tail, lost)}\n")
    if (expired := files.expired(stream)) is not None:
        count = plural(expired.messages, "message", grouped=True)
        sys.stdout.write(f"{count} up to {format_time(expired.until)} expired: the archive no longer has them\n")
    if not lost.num_rows:
        return
    frame = select_missing(messages, lost)
    if chosen.dry_run:
        removed = describe_removed(rows_of(frame, chosen.subject, None).removed(chosen.keep_headers))
        sys.stdout.write("" if removed is None else f"they would be published {removed}\n")
        return
    done = replay(
        frame,
        servers,
        replay_id=REPLAY_ID,
        pace=pace_of(chosen),
        window=chosen.window,
        tasks=1,
        survey=chosen.survey,
        into=stream,
        keep_headers=chosen.keep_headers,
    )
    (now,) = (each for each in Target(servers).streams(">") if each.name == stream)
    sys.stdout.write(f"{_report(done)}\n{describe_published(tail, lost, now.last)}\n")


def _report(done: Replayed) -> str:
    rate = done.published / max(done.seconds, 0.001)
    text = f"replayed {plural(done.published, 'message')} in {duration(done.seconds)} ({rate:,.0f} messages/s)"
    if done.duplicates:
        text += f", {done.duplicates} already known to the stream"
    if done.skipped:
        text += f"; {done.skipped} already in the target"
    return f"{text}; replay id {done.replay_id}"


if __name__ == "__main__":
    leave(main())
