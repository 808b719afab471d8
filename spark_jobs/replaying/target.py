"""Query the target streams of a replay: their settings, and the messages that they already have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.config.stream import origins
from jetcapture_py.config.subjects import overlaps
from jetcapture_py.errors import MissingError
from jetcapture_py.jetstream.connection import Api
from jetcapture_py.jetstream.consumer import filters_of
from jetcapture_py.jetstream.range_reader import RangeReader, StreamRange
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.jetstream.wire.inbox import HEADERS
from spark_jobs.publishing.prepare import FROM_ROW, FROM_SEQ, FROM_STREAM, FROM_TIME, REPLAY, ROW, SEQ, TIME

STREAM = "stream"
"""Column of `Target.replayed` with a message's original stream, besides `SEQ`, `TIME` and `ROW`."""

_NANOSECOND = 1_000_000_000
_CONNECT_TIMEOUT = 3.0
"""Seconds to keep trying unreachable servers."""
_TIMEOUT = 60.0
"""Seconds without a message after which reading a stream fails: the server may search long for the next match."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A target stream; `window` is its duplicate window in seconds, `last` its last sequence. `keeps_nothing`: it has
    interest retention and no consumer. `feeds`: the streams that it sources or mirrors, with the subjects from each."""

    name: str
    subjects: tuple[str, ...]
    created: str
    window: float
    last: int
    keeps_nothing: bool
    feeds: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """An archive's stream, the stream's creation times, and the consumers that captured it."""

    stream: str
    created: tuple[str, ...] = ()
    consumers: tuple[str, ...] = ()


class Target:
    """Requests to the target's JetStream. Every method opens its own connection and raises SourceError."""

    def __init__(self, login: NatsConfig) -> None:
        self.login = login
        self.where = ", ".join(login.servers)

    def streams(self, pattern: str) -> list[Stream]:
        """List the streams with subjects that overlap `pattern`."""
        return self._run(lambda session: _streams(session.api, pattern))

    def ingested(self, streams: Sequence[Stream], origin: Origin) -> dict[str, tuple[str, ...]]:
        """Return the `streams` that the archive's capture consumes, with the subjects from each.

        They include streams that the captured one sources or mirrors, directly or through others.
        """
        return self._run(lambda session: _ingested(session.api, streams, origin))

    def replayed(self, streams: Sequence[Stream], pattern: str, replay_id: str) -> pa.Table:
        """Read the messages of this replay in the streams, as the columns `STREAM`, `SEQ`, `TIME` and `ROW`."""

        async def read(session: ReadSession) -> pa.Table:
            parts = [_NOTHING.empty_table()]
            for stream in streams:
                end = (await session.state(stream.name)).last + 1  # with messages stored since the listing
                wanted = StreamRange(stream=stream.name, first=1, end=end, subjects=(pattern,), headers_only=True)
                async with aclosing(RangeReader(session, wanted).messages()) as messages:
                    async for _, received in messages:
                        parts.append(replayed_identities(received.columns(HEADERS)[0], replay_id))
            return pa.concat_tables(parts)

        return self._run(read)

    def _run(self, work: Callable[[ReadSession], Coroutine[Any, Any, T]]) -> T:
        async def run() -> T:
            name = "jetcapture replay"
            async with ReadSession(self.login, name, timeout=_TIMEOUT, connect_timeout=_CONNECT_TIMEOUT) as session:
                return await work(session)

        return asyncio.run(run())


def stream_of(info: dict[str, Any]) -> Stream:
    """Parse the server's STREAM.INFO answer."""
    config = info["config"]
    return Stream(
        name=config["name"],
        subjects=tuple(config.get("subjects") or ()),
        created=info["created"],
        window=config.get("duplicate_window", 0) / _NANOSECOND,
        last=info["state"]["last_seq"],
        keeps_nothing=config.get("retention") == "interest" and not info["state"].get("consumer_count"),
        feeds=_feeds(config),
    )


def _feeds(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the streams of this account that a stream sources or mirrors, with the subjects from each."""
    sources: dict[str, tuple[str, ...]] = {}
    for feed in origins(config):
        if not feed.get("external"):
            subjects = (
                feed.get("filter_subject"),
                *(transform.get("src") for transform in feed.get("subject_transforms") or ()),
            )
            sources[feed["name"]] = sources.get(feed["name"], ()) + (tuple(filter(None, subjects)) or (">",))
    return sources


async def _streams(api: Api, pattern: str) -> list[Stream]:
    listed = await _listed(api, {"subject": pattern})
    return [stream for stream in listed if any(overlaps(subject, pattern) for subject in stream.subjects)]


async def _listed(api: Api, request: Mapping[str, Any]) -> list[Stream]:
    streams: list[Stream] = []
    while True:
        answer = await api.request("STREAM.LIST", {**request, "offset": len(streams)})
        part = [stream_of(info) for info in answer.get("streams") or ()]
        streams += part
        if not part or len(streams) >= answer.get("total", 0):
            return streams


async def _ingested(api: Api, streams: Sequence[Stream], origin: Origin) -> dict[str, tuple[str, ...]]:
    subjects_of: dict[str, tuple[str, ...]] = {}
    known = {stream.name: stream for stream in await _listed(api, {})}
    for stream in known.values():
        recorded = stream.created in origin.created
        taken = {stream.name: (), **_upstream(stream, known)}
        if not (recorded or stream.name == origin.stream) or taken.keys().isdisjoint(stream.name for stream in streams):
            continue
        consumers = [await _filters(api, stream.name, consumer) for consumer in origin.consumers]
        filters = [subject for subjects in consumers for subject in subjects or ()]
        if recorded or filters:
            taken[stream.name] += tuple(filters) or (">",)
            subjects_of |= {name: subjects_of.get(name, ()) + subjects for name, subjects in taken.items()}
    return {stream.name: subjects_of[stream.name] for stream in streams if stream.name in subjects_of}


def _upstream(stream: Stream, known: Mapping[str, Stream]) -> dict[str, tuple[str, ...]]:
    """Return the streams that feed this one, with the subjects from each."""
    subjects_of: dict[str, tuple[str, ...]] = {}
    waiting = [stream]
    while waiting:
        for name, subjects in waiting.pop().feeds.items():
            if name not in subjects_of and name in known:
                waiting.append(known[name])
            subjects_of[name] = subjects_of.get(name, ()) + subjects
    return subjects_of


async def _filters(api: Api, stream: str, consumer: str) -> tuple[str, ...] | None:
    """Return the consumer's filters; None if it does not exist."""
    try:
        config = (await api.request(f"CONSUMER.INFO.{stream}.{consumer}"))["config"]
    except MissingError:
        return None
    return filters_of(config) or (">",)


_NOTHING = pa.schema([(STREAM, pa.string()), (SEQ, pa.int64()), (TIME, pa.int64()), (ROW, pa.int32())])


def replayed_identities(blocks: pa.BinaryArray, replay_id: str) -> pa.Table:
    """Parse the original identities from the header blocks of this replay's messages.

    Provenance headers are consecutive lines.
    """
    ours = f"\r\n{REPLAY}: {replay_id}\r\n".encode()
    mine = blocks.filter(pc.match_substring(blocks, ours))
    if not len(mine):
        return _NOTHING.empty_table()
    fields = pc.extract_regex(
        mine,
        rf"\r\n{FROM_STREAM}: (?P<stream>[^\r]*)\r\n{FROM_SEQ}: (?P<seq>\d+)\r\n"
        rf"(?:{FROM_TIME}: (?P<time>[^\rZ]*)Z\r\n)?(?:{FROM_ROW}: (?P<row>\d+)\r\n)?{REPLAY}: ",
    ).drop_null()
    texts = {name: fields.field(name).cast(pa.string()) for name in ("stream", "seq", "time", "row")}
    optional = {name: pc.if_else(pc.equal(texts[name], ""), None, texts[name]) for name in ("time", "row")}
    columns = [
        texts["stream"],
        texts["seq"].cast(pa.int64()),
        pc.replace_substring(optional["time"], "T", " ").cast(pa.timestamp("us")).cast(pa.int64()),
        optional["row"].cast(pa.int32()),
    ]
    return pa.Table.from_arrays(columns, schema=_NOTHING)
