"""Find archived messages that a stream has lost: by a rewind, a fork, or damage that the server reports.

Messages removed by limits, purges or clients are not lost. A message of the stream's incarnation counts as lost if the
stream does not have it, and

- its sequence is beyond the stream's last one: the server rewound the stream;
- or a later message got its sequence or a lower one: after a rewind, the stream took new messages;
- or the server itself reports its sequence as lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Seqs
from jetcapture_py.archive.incarnations import Incarnation
from jetcapture_py.archive.messages import MessageSet, bounds_of
from jetcapture_py.archive.removed import Erased
from jetcapture_py.config.model import NatsConfig
from jetcapture_py.config.units import moment_of
from jetcapture_py.errors import JetcaptureError, MissingStreamError, SourceError
from jetcapture_py.jetstream.acks import positions
from jetcapture_py.jetstream.range_reader import RangeReader, StreamRange
from jetcapture_py.jetstream.read_session import ReadSession, StreamState
from jetcapture_py.jetstream.wire.inbox import HEADERS, REPLY
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.text import plural
from jetcapture_py.threads import in_thread
from jetcapture_py.verify.examine import ObjectExaminer
from jetcapture_py.verify.lost import StreamContents, contents
from jetcapture_py.verify.scan import survey
from jetcapture_py.verify.scope import GONE_ONCE_ACKED, current_incarnation
from spark_jobs.publishing.instructions import instructs
from spark_jobs.publishing.prepare import FROM_SEQ, FROM_TIME, REPLAY, SEQ, TIME
from spark_jobs.reading.columns import header
from spark_jobs.replaying.target import replayed_identities

REPLAY_ID = "missing"
"""The same id for every run, so that a run finds the messages published by earlier ones."""

_OURS = f"\r\n{REPLAY}: {REPLAY_ID}\r\n".encode()
_ROLLUP = "Nats-Rollup"
"""Header of a message that removes all earlier ones of its subject, or of the stream."""
ROLLUP = "rollup"
_TIMEOUT = 60.0
_CONNECT_TIMEOUT = 20.0
_MAX_SHOWN = 5
_MAX_SEQ = 1 << 62
_EVERYTHING = (layout.STREAM, layout.SUBJECT, layout.SEQ, layout.TIMESTAMP, layout.HEADERS, layout.PAYLOAD)
_OPTIONAL = {layout.ROW: "int", layout.STAGE: "string", layout.RAW_HEADERS: "binary"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTail:
    """The part of a stream that may have lost messages."""

    stream: str
    incarnation: Incarnation
    first: int
    """First sequence; nothing is lost before it."""
    last: int
    """Last sequence of the stream."""
    messages: MessageSet
    """The stream's messages from `first` on."""
    replayed: pa.Table
    """Messages that an earlier replay has published to the stream."""
    newest: int
    """The latest timestamp; of a replayed message, its original one."""
    lost: Seqs
    """Sequences that the server reports as lost."""
    keeps_latest: bool
    """Whether the stream keeps a limited number of messages per subject."""


def read_tail(
    login: NatsConfig, stream: str, url: str, options: Mapping[str, Any], first: int | None = None
) -> StreamTail:
    """Compare a stream with the archive's names and footers, and read the part of it that may have lost messages.

    With `first`, read everything from that sequence on. Raises JetcaptureError, also if no message can be published to
    this stream again.
    """
    return asyncio.run(_read_tail(login, stream, ArchiveFiles(url, options), first))


async def _read_tail(login: NatsConfig, stream: str, storage: ArchiveFiles, first: int | None) -> StreamTail:
    async with ReadSession(login, "jetcapture replay", timeout=_TIMEOUT, connect_timeout=_CONNECT_TIMEOUT) as session:
        try:
            with suppress(JetcaptureError):  # a damaged one is ignored
                if (mark := await in_thread(storage.watermark, stream)) is not None:
                    session.know(stream, mark.origin)
            state, now = await session.state(stream), await contents(session, stream)
        except MissingStreamError as error:
            raise SourceError(f"stream {stream} does not exist: jetcapture restore creates it") from error
        if state.mirror or state.retention in GONE_ONCE_ACKED:
            kind = "is a mirror" if state.mirror else f"has retention {state.retention}"
            raise SourceError(f"stream {stream} {kind}: replay --missing cannot tell what it should have")
        incarnation = await current_incarnation(session, stream, state)
        suspected = await _first(session, stream, storage, incarnation, now)
        return await _tail(session, stream, incarnation, first or suspected, state, now)


async def _first(
    session: ReadSession, stream: str, storage: ArchiveFiles, incarnation: Incarnation, now: StreamContents
) -> int:
    """Return the first possibly lost sequence."""
    scan = await in_thread(survey, ObjectExaminer(storage, incarnation), stream, _MAX_SEQ)
    if scan.sequences.last is None:
        raise JetcaptureError(
            f"the archive has no message of the stream {stream} that was created {incarnation.created}: jetcapture "
            "restore --as NAME creates an earlier one under another name"
        )
    # messages that are not captured yet may have sequences of archived ones
    uncaptured = await session.first_at(stream, moment_of(scan.newest) + timedelta(microseconds=1))
    forked = [] if scan.forked.first is None else [scan.forked.first]
    return int(min(now.last + 1, uncaptured, *now.lost[:1].tolist(), *forked))


async def _tail(
    session: ReadSession, stream: str, incarnation: Incarnation, first: int, state: StreamState, now: StreamContents
) -> StreamTail:
    seqs, times, replayed, newest = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [], 0
    last = (await session.state(stream)).last
    wanted = StreamRange(stream=stream, first=first, end=last + 1, headers_only=True)
    if wanted.first < wanted.end:
        async with aclosing(RangeReader(session, wanted).messages()) as messages:
            async for consumer, received in messages:
                replies, headers = received.columns(REPLY, HEADERS)
                located = positions(stream, consumer, replies)
                seqs.append(located[0])
                times.append(located[1] // 1000)
                replayed.append(replayed_identities(headers, REPLAY_ID))
                own = pc.fill_null(pc.match_substring(headers, _OURS), False).to_numpy(zero_copy_only=False)  # noqa: FBT003
                newest = int(times[-1][~own].max(initial=newest))
    copies = pa.concat_tables([replayed_identities(pa.array([], pa.binary()), REPLAY_ID), *replayed])
    return StreamTail(
        stream=stream,
        incarnation=incarnation,
        first=first,
        last=last,
        messages=MessageSet(np.concatenate(seqs), np.concatenate(times)),
        replayed=copies,
        newest=max(newest, pc.max(copies[TIME]).as_py() or 0),
        lost=now.lost,
        keeps_latest=state.keeps_latest,
    )


def whole_messages(frames: Iterable[DataFrame], tail: StreamTail) -> DataFrame:
    """Return the messages of archive and quarantine from the tail's first sequence on, with all columns to publish."""
    parts = []
    for frame in frames:
        if layout.PAYLOAD not in frame.columns:
            raise JetcaptureError("the archive has no payloads (decode.keep_payload: false)")
        optional = (
            (sf.col(name) if name in frame.columns else sf.lit(None).cast(kind)).alias(name)
            for name, kind in _OPTIONAL.items()
        )
        parts.append(frame.where(sf.col(layout.SEQ) >= tail.first).select(*_EVERYTHING, *optional))
    first, *others = parts
    for part in others:
        first = first.unionByName(part)
    return first


def without_erased(frame: DataFrame, erased: Erased) -> DataFrame:
    """Drop the rows of erased messages; return all rows if sequences and timestamps are missing."""
    types = dict(frame.dtypes)
    if not erased or (types.get(layout.SEQ), types.get(layout.TIMESTAMP)) != ("bigint", "timestamp"):
        return frame
    known = frame.sparkSession.createDataFrame(pa.table({"_erased": erased.seqs, "_time": erased.times}))
    same = (frame[layout.SEQ] == known["_erased"]) & (sf.unix_micros(frame[layout.TIMESTAMP]) == known["_time"])
    return frame.join(known, same, "left_anti")


def find_missing(messages: DataFrame, tail: StreamTail, to_seq: int | None) -> pa.Table:
    """Return the lost ones of the `messages` up to `to_seq`: sequence, timestamp in microseconds, and whether it is a
    rollup."""
    ours = header(REPLAY) == REPLAY_ID
    raw = sf.contains(sf.col(layout.RAW_HEADERS), sf.lit(_ROLLUP.encode()))
    columns = messages.select(
        sf.col(layout.SEQ).alias(SEQ),
        sf.unix_micros(layout.TIMESTAMP).alias(TIME),
        sf.when(ours, header(FROM_SEQ).try_cast("long")).alias("from_seq"),
        sf.when(ours, sf.unix_micros(sf.try_to_timestamp(header(FROM_TIME)))).alias("from_time"),
        (header(_ROLLUP).isNotNull() | sf.coalesce(raw, sf.lit(False))).alias(ROLLUP),  # noqa: FBT003
    ).toArrow()
    seqs, times = columns[SEQ].to_numpy(), columns[TIME].to_numpy()
    own = tail.incarnation.includes(seqs, times)
    copies = columns.select(["from_seq", "from_time"])  # published again, and archived again
    done = MessageSet.union(map(_messages, (tail.replayed.select([SEQ, TIME]), copies)))
    lost = lost_messages(MessageSet(seqs[own], times[own]), tail.messages, tail.last, tail.lost).without(done)
    lost = lost.where(lost.seqs <= (_MAX_SEQ if to_seq is None else to_seq))
    rollups = _messages(columns.filter(columns[ROLLUP]).select([SEQ, TIME]))
    return pa.table({SEQ: lost.seqs, TIME: lost.times, ROLLUP: rollups.contains(lost.seqs, lost.times)})


def lost_messages(archived: MessageSet, stream: MessageSet, last: int, reported: Seqs) -> MessageSet:
    """Return the lost ones of the `archived` messages of one incarnation. `last` is the stream's last sequence, and
    `reported` are sequences that the server reports as lost."""
    both = MessageSet.union([archived, stream])
    again = np.flatnonzero(np.diff(both.seqs) == 0) + 1  # a second message with the same sequence, and later
    latest = np.maximum.accumulate(both.times[again])
    place = np.searchsorted(both.seqs[again], archived.seqs, "right")
    overtaken = np.concatenate([[-1 << 62], latest])[place] > archived.times
    gone = (archived.seqs > last) | overtaken | np.isin(archived.seqs, reported)
    return archived.where(gone).without(stream)


def _messages(table: pa.Table) -> MessageSet:
    """Return the messages of a table's two columns, without rows with a null."""
    return MessageSet(*(column.cast(pa.int64()).to_numpy() for column in table.drop_null().columns))


def check_overwritten(tail: StreamTail, missing: pa.Table, keep_headers: Collection[str]) -> None:
    """Raise JetcaptureError if publishing with `keep_headers` would replace newer messages."""
    oldest = missing[TIME].to_numpy().min(initial=_MAX_SEQ)
    lost = missing.num_rows
    rollups = not instructs(_ROLLUP, keep_headers) and pc.any(missing[ROLLUP]).as_py()
    if tail.newest <= oldest or not (tail.keeps_latest or rollups):
        return
    why = "limits the messages of a subject" if tail.keeps_latest else "has lost rollups"
    raise JetcaptureError(
        f"stream {tail.stream} {why} and has taken new messages since it lost "
        f"{plural(lost, 'message')}: older ones would replace them; jetcapture restore --as NAME "
        "brings them back under another name"
    )


def select_missing(messages: DataFrame, missing: pa.Table) -> DataFrame:
    """Return the rows of the missing messages."""
    known = messages.sparkSession.createDataFrame(missing.select([SEQ, TIME]).rename_columns([layout.SEQ, "_time"]))
    timed = messages.withColumn("_time", sf.unix_micros(layout.TIMESTAMP))
    return timed.join(sf.broadcast(known), [layout.SEQ, "_time"], "left_semi").drop("_time")


def describe_missing(tail: StreamTail, missing: pa.Table) -> str:
    """Describe the missing messages in one line."""
    if not missing.num_rows:
        return f"stream {tail.stream} has lost no archived messages, or has them back"
    ranges = bounds_of(np.unique(missing[SEQ].to_numpy())).tolist()
    shown = ", ".join(f"{low}" if low == high else f"{low} to {high}" for low, high in ranges[:_MAX_SHOWN])
    more = ", …" if len(ranges) > _MAX_SHOWN else ""
    lost = plural(missing.num_rows, "message")
    return f"stream {tail.stream} ends at {tail.last} and has lost {lost} with sequences {shown}{more}"


def describe_published(tail: StreamTail, missing: pa.Table, last: int) -> str:
    """Describe in one line how the published messages differ; the last one has sequence `last`."""
    seqs = missing[SEQ].to_numpy()
    if last == tail.last + len(seqs) and (np.sort(seqs) == np.arange(tail.last + 1, last + 1)).all():
        return "they have the sequences that they had, and new timestamps"
    return (
        f"they have new sequences, after {tail.last}, and new timestamps; the headers {FROM_SEQ} and {FROM_TIME} have "
        "the earlier ones"
    )
