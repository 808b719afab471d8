"""Publishes rows to JetStream, from the executors, with every message acknowledged.

    python -m spark_jobs.replay URL STREAM --servers nats://… --subject "replay.{key}" [--sql "SELECT … FROM archive"]

A row of the archive is published as the message it was: the same bytes, the same headers, and a message id of the
form `<stream>:<seq>:<replay id>`, so that a replay which is run again under its id within the target stream's
duplicate window stores nothing twice. Any other row, of an aggregate for instance, is published as JSON. Partitions
are published at the same time; within one, rows keep their order.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # spark-submit put this directory there: it hides `nats`

import nats
import pyarrow as pa
from pyspark.errors import PythonException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql import types as st

from jetcapture_py import layout
from jetcapture_py.errors import JetcaptureError, SourceError
from jetcapture_py.publish import Publisher
from jetcapture_py.publish_frames import MESSAGE_ID, check_subject
from spark_jobs.job import guarded
from spark_jobs.query import query, query_arguments, query_session

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_STRIPPED = re.compile(r"Nats-(Msg-Id|TTL|Expected-.*|Batch-.*)", re.IGNORECASE)
_RAISED = re.compile(r"^(?:\w+\.)*(?:JetcaptureError|SourceError): (.*)$", re.MULTILINE)
_CONNECT = {"name": "jetcapture replay", "connect_timeout": 5, "reconnect_time_wait": 0.5, "max_reconnect_attempts": 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a replay did: messages acknowledged, how many of them the stream knew already, and the replay's id."""

    published: int
    duplicates: int
    replay_id: str


def replay(
    frame: DataFrame,
    servers: str | Sequence[str],
    subject: str,
    *,
    payload: str | None = None,
    replay_id: str | None = None,
    window: int = 1000,
    connect: Mapping[str, Any] | None = None,
) -> Replayed:
    """Publish every row of `frame`; return when all are acknowledged, raise when one cannot be.

    `subject` may hold columns in braces, `replay.{region}`; `{subject}` is the message's own when there is no such
    column. `payload` names the column to publish, by default `_nats_payload`, else `payload`, else the row as JSON
    without the archive's own columns. `connect` goes to `nats.connect` on the executors: credentials, TLS.
    """
    replay_id = replay_id or uuid.uuid4().hex[:12]
    if not replay_id.isprintable() or " " in replay_id:
        raise JetcaptureError(f"replay id {replay_id!r} is no plain word")
    rows = frame.select(
        _subject(frame, subject).alias("subject"),
        _payload(frame, payload).alias("payload"),
        _message_id(frame, payload, replay_id).alias("id"),
        (_column(layout.HEADERS) if layout.HEADERS in frame.columns else sf.lit(None).cast(_HEADERS)).alias("headers"),
    )
    addresses = [servers] if isinstance(servers, str) else list(servers)
    task = _task(addresses, {**_CONNECT, **(connect or {})}, window)
    try:
        counts = rows.mapInArrow(task, "published long, duplicates long").collect()
    except PythonException as error:
        raised = _RAISED.search(str(error))
        if raised is None:
            raise
        raise SourceError(f"{raised.group(1)}; replay id {replay_id}") from error
    return Replayed(
        published=sum(row["published"] for row in counts),
        duplicates=sum(row["duplicates"] for row in counts),
        replay_id=replay_id,
    )


_HEADERS = st.MapType(st.StringType(), st.ArrayType(st.StringType()))


def _column(name: str) -> Column:
    return sf.col("`" + name.replace("`", "``") + "`")


def _subject(frame: DataFrame, template: str) -> Column:
    """The subject of each row; null where a column in it is, which the task refuses."""
    parts: list[Column] = []
    for position, text in enumerate(_PLACEHOLDER.split(template)):
        if position % 2 == 0:
            parts.append(sf.lit(text))
            continue
        name = layout.SUBJECT if text == "subject" and text not in frame.columns else text
        if name not in frame.columns:
            raise JetcaptureError(
                f"subject {template}: there is no column {text}; there are {', '.join(frame.columns)}"
            )
        parts.append(_column(name).cast("string"))
    check_subject(_PLACEHOLDER.sub("x", template))
    return reduce(lambda left, right: sf.concat(left, right), parts)


def _payload_column(frame: DataFrame, payload: str | None) -> str | None:
    """The name of the column that holds the payloads; None for the row as JSON."""
    if payload is not None and payload not in frame.columns:
        raise JetcaptureError(f"there is no column {payload}; there are {', '.join(frame.columns)}")
    return payload or next((name for name in (layout.PAYLOAD, "payload") if name in frame.columns), None)


def _payload(frame: DataFrame, payload: str | None) -> Column:
    name = _payload_column(frame, payload)
    if name is not None:
        kind = frame.schema[name].dataType
        if isinstance(kind, st.BinaryType | st.StringType):
            return _column(name).cast("binary")
        return (
            sf.to_json(_column(name)).cast("binary")
            if _is_nested(kind)
            else _column(name).cast("string").cast("binary")
        )
    own = [*layout.ENVELOPE, layout.ROW, *(layout.PARTITIONS if _has_identity(frame) else ())]
    fields = [_column(name) for name in frame.columns if name not in own]
    if not fields:
        raise JetcaptureError("the rows have nothing to publish: no payload, and no columns but the archive's own")
    return sf.to_json(sf.struct(*fields), {"ignoreNullFields": "false"}).cast("binary")


def _is_nested(kind: st.DataType) -> bool:
    return isinstance(kind, st.StructType | st.ArrayType | st.MapType)


def _has_identity(frame: DataFrame) -> bool:
    return layout.STREAM in frame.columns and layout.SEQ in frame.columns


def _message_id(frame: DataFrame, payload: str | None, replay_id: str) -> Column:
    if not _has_identity(frame):
        return sf.lit(None).cast("string")
    parts = [_column(layout.STREAM), _column(layout.SEQ).cast("string"), sf.lit(replay_id)]
    if layout.ROW in frame.columns and _payload_column(frame, payload) != layout.PAYLOAD:
        parts.append(_column(layout.ROW).cast("string"))  # several rows of one message, each published for itself
    return sf.concat_ws(":", *parts)


Batches = Iterable[pa.RecordBatch]


def _task(servers: list[str], connect: dict[str, Any], window: int) -> Callable[[Batches], Iterator[pa.RecordBatch]]:
    def publish(batches: Batches) -> Iterator[pa.RecordBatch]:
        published, duplicates = asyncio.run(_publish(iter(batches), servers, connect, window))
        yield pa.RecordBatch.from_pydict({"published": [published], "duplicates": [duplicates]})

    return publish


async def _publish(
    batches: Iterator[pa.RecordBatch], servers: list[str], connect: dict[str, Any], window: int
) -> tuple[int, int]:
    batch = next(batches, None)
    if batch is None:
        return 0, 0

    async def quiet(_: Exception) -> None:
        """What matters ends in an exception of the publisher; the rest is a reconnect."""

    try:
        nc = await nats.connect(servers, **{"error_cb": quiet, **connect})
    except (OSError, TimeoutError, nats.errors.Error) as error:
        where = ", ".join(server.rpartition("@")[2] for server in servers)
        raise SourceError(f"cannot connect to {where}: {error}") from error
    try:
        async with Publisher(nc, window=window) as publisher:
            while batch is not None:
                await _publish_batch(publisher, batch)
                batch = await asyncio.to_thread(next, batches, None)  # Spark may take its time: acks must not wait
            await publisher.flush()
            return publisher.published, publisher.duplicates
    finally:
        with suppress(OSError):  # closing passes on what a dead server did to the socket, over the error that matters
            await nc.close()


async def _publish_batch(publisher: Publisher, batch: pa.RecordBatch) -> None:
    for subject, payload, message_id, headers in zip(*(column.to_pylist() for column in batch.columns), strict=True):
        if subject is None:
            raise SourceError("a row has no subject: a column in it is null")
        if headers is None and message_id is None:
            kept = None
        else:
            kept = replayed_headers(headers or ())
            if message_id is not None:
                kept.append((MESSAGE_ID, message_id))
        await publisher.publish(subject, payload or b"", kept)


def replayed_headers(headers: Iterable[tuple[str, Sequence[str]]]) -> list[tuple[str, str]]:
    """A message's headers without those that tell a server what to do with it: it would do it again."""
    return [(name, value) for name, values in headers if not _STRIPPED.fullmatch(name) for value in values]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when everything is acknowledged, 1 with one line of text when it is not."""
    parser = argparse.ArgumentParser(prog="replay", description="Publishes rows of an archive to a subject.")
    query_arguments(parser, arguments)
    parser.add_argument("--sql", default="SELECT * FROM archive", help="the rows to publish; default: all messages")
    parser.add_argument("--servers", required=True, action="append", help="where to publish; may be repeated")
    parser.add_argument("--subject", required=True, help='for example "replay.{key}"; columns in braces')
    parser.add_argument(
        "--payload", help="the column to publish; default: the message's own bytes, else the row as JSON"
    )
    parser.add_argument("--creds", help="a NATS credentials file, present on every executor")
    parser.add_argument("--replay-id", help="repeat a replay under its id to publish only what is missing")
    parser.add_argument("--window", type=int, default=1000, help="messages under way at once, per partition")
    chosen = parser.parse_args(arguments)

    def job() -> None:
        done = replay(
            query(query_session("jetcapture replay", chosen), chosen),
            chosen.servers,
            chosen.subject,
            payload=chosen.payload,
            replay_id=chosen.replay_id,
            window=chosen.window,
            connect={"user_credentials": chosen.creds} if chosen.creds else None,
        )
        known = f", {done.duplicates} of them known to the stream already" if done.duplicates else ""
        sys.stdout.write(f"replayed {done.published} messages{known}; replay id {done.replay_id}\n")

    return guarded("replay", job)


if __name__ == "__main__":
    sys.exit(main())
