"""A stream for the tests of the data source, and the source's reader driven as Spark drives it, without Spark."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Self, TypeVar

from nats.js import JetStreamContext
from nats.js.errors import NotFoundError, ServerError
from pyspark.sql import types as st

from jetcapture_py.archive import layout
from spark_jobs.datasource.options import ReadOptions, parse
from spark_jobs.datasource.read import StreamReader
from tests.support.nats_server import NatsServer
from tests.support.publishing import Headers, Publisher
from tests.support.running import STREAM, connection

T = TypeVar("T")

ENVELOPE = st.StructType(
    [
        st.StructField(layout.STREAM, st.StringType()),
        st.StructField(layout.SUBJECT, st.StringType()),
        st.StructField(layout.SEQ, st.LongType()),
        st.StructField(layout.TIMESTAMP, st.TimestampType()),
        st.StructField(layout.PAYLOAD, st.BinaryType()),
    ]
)


class Live:
    """A server with the stream ORDERS over `orders.>`."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.options = {"servers": server.url, "stream": STREAM}
        self.do(lambda stream: stream.add_stream(name=STREAM, subjects=["orders.>"]))

    def do(self, work: Callable[[JetStreamContext], Awaitable[T]]) -> T:
        """Do something to the server's streams."""

        async def connected() -> T:
            async with connection(self.server.url) as client:
                return await work(client.jetstream())

        return asyncio.run(connected())

    def send(self, messages: Iterable[tuple[str, bytes] | tuple[str, bytes, Headers]]) -> None:
        """Publish, acknowledged and in order."""

        async def publish() -> None:
            async with connection(self.server.url) as client, Publisher(client) as publisher:
                for message in messages:
                    await publisher.publish(*message)

        asyncio.run(publish())

    def fill(self, count: int, subject: str = "orders.{}") -> None:
        """Publish `count` messages, numbered from 0 in payload and subject."""
        self.send((subject.format(number), b"%d" % number) for number in range(count))

    def delete(self, *seqs: int) -> None:
        """Delete messages."""

        async def work(stream: JetStreamContext) -> None:
            for seq in seqs:
                await stream.delete_msg(STREAM, seq)

        self.do(work)

    def purge(self, **what: Any) -> None:
        """Purge the stream."""
        self.do(lambda stream: stream.purge_stream(STREAM, **what))

    def recreate(self) -> None:
        """Delete the stream, and create an empty one of the same name."""

        async def work(stream: JetStreamContext) -> None:
            while True:  # a server may bring back what was written just before, or fail to create a store
                with suppress(NotFoundError):
                    await stream.delete_stream(STREAM)
                with suppress(ServerError):
                    await stream.add_stream(name=STREAM, subjects=["orders.>"])
                    if (await stream.stream_info(STREAM)).state.last_seq == 0:
                        return

        self.do(work)

    def consumers(self) -> list[str]:
        """The names of the stream's consumers."""

        async def work(stream: JetStreamContext) -> list[str]:
            return [info.name for info in await stream.consumers_info(STREAM)]

        return self.do(work)

    def read_options(self, **options: str) -> ReadOptions:
        """Options for this stream."""
        return parse(ReadOptions, {**self.options, **options})

    def query(self, **options: str) -> Query:
        """A streaming query over this stream."""
        return Query(self.read_options(**options))


class Query:
    """Asks a reader what Spark asks it, in the same order; offsets go through JSON and partitions through pickle."""

    def __init__(self, options: ReadOptions, end: dict[str, Any] | None = None) -> None:
        self.reader = StreamReader(options.for_stream(), ENVELOPE)
        self.end = end  # of the last batch: what a checkpoint knows

    def plan(self) -> bool:
        """Find the end of the next batch; whether there is one."""
        self.start = self.end or _stored(self.reader.initialOffset())
        self.next_end = _stored(self.reader.latestOffset(self.start, self.reader.getDefaultReadLimit()))
        return bool(self.next_end != self.end)

    def run(self) -> list[int]:
        """Read the batch that was planned; the sequences in it."""
        start = self.end or _stored(self.reader.initialOffset())
        found: list[int] = []
        for part in self.reader.partitions(start, self.next_end):
            reader = pickle.loads(pickle.dumps(self.reader))
            for batch in reader.read(pickle.loads(pickle.dumps(part))):
                found += batch.column(layout.SEQ).to_pylist()
        self.end = self.next_end
        return found

    def batch(self) -> list[int] | None:
        """The sequences of the next batch; None when nothing is new."""
        return self.run() if self.plan() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.stop()


def message(error: Exception) -> str:
    """The line of ours in Spark's error. The worker's traceback says nothing to a user, except where Spark needs it."""
    assert ("Traceback" in str(error)) == ("UnboundLocalError" in str(error))
    ours = r"(?:Config|Source|Unavailable|Api|Denied|Missing\w*)Error"
    found = re.findall(rf"(?:^|: )(?:\w+\.)*{ours}: (.*)$", str(error), re.MULTILINE)
    assert found, error
    return str(found[-1])


def _stored(offset: dict[str, Any]) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(json.dumps(offset))
    return stored
