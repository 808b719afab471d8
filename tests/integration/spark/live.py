"""A stream for the tests of the data sources, and their readers driven as Spark drives them, without Spark."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError, ServerError
from pyspark.sql import types as st

from jetcapture_py.archive import layout
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.model import Config
from spark_jobs.datasource.combined import CombinedSource, CombinedStreamReader
from spark_jobs.datasource.options import ReadOptions, parse
from spark_jobs.datasource.read import BatchReader, StreamReader
from tests.support.nats_server import NatsServer
from tests.support.publishing import Headers, Publisher
from tests.support.restores import main as restore
from tests.support.running import STREAM, capture_all, config, connection, settings

T = TypeVar("T")

_TYPES = {layout.STREAM: "string", layout.SUBJECT: "string", layout.SEQ: "long", layout.TIMESTAMP: "timestamp"}
ENVELOPE = st.StructType()
for _name, _type in (_TYPES | {layout.PAYLOAD: "binary"}).items():
    ENVELOPE.add(_name, _type)


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

        for seq in seqs:
            self.do(lambda stream: stream.delete_msg(STREAM, seq))  # noqa: B023

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

        return [info.name for info in self.do(lambda stream: stream.consumers_info(STREAM))]

    def read_options(self, **options: str) -> ReadOptions:
        """Options for this stream."""
        return parse(ReadOptions, {**self.options, **options})

    def read(self, **options: str) -> list[int]:
        """The sequences of a bounded read, without Spark."""
        return Reading(self).batch(**options)

    def query(self, end: dict[str, Any] | None = None, **options: str) -> Query:
        """A streaming query over this stream, which goes on from a checkpoint with `end`."""
        return Query(StreamReader(self.read_options(**options).for_stream(), ENVELOPE), end)


class Reading:
    """A read without Spark, whose sequences and sizes of payloads are `seqs` and `sizes`.

    `meanwhile` is done once, when more than `when` messages have been read; with -1, after the plan.
    """

    def __init__(self, live: Live, when: int = 0, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.seqs: list[int] = []
        self.sizes: list[int] = []
        self._live, self._when, self._meanwhile = live, when, meanwhile

    def _happen(self) -> None:
        if len(self.seqs) > self._when:
            self._when = 1 << 62
            self._meanwhile()

    def _read(self, reader: BatchReader | StreamReader, parts: Sequence[Any]) -> None:
        self._happen()
        for part in parts:
            for batch in reader.read(part):
                self.seqs += batch.column(layout.SEQ).to_pylist()
                self.sizes += map(len, batch.column(layout.PAYLOAD).to_pylist())
                self._happen()

    def batch(self, **options: str) -> list[int]:
        """A bounded read."""
        reader = BatchReader(self._live.read_options(**options).for_batch(), ENVELOPE)
        self._read(reader, reader.partitions())
        return self.seqs

    def stream(self, **options: str) -> list[int]:
        """A streaming query until nothing is new."""
        with self._live.query(**options) as query:
            for _ in range(100):
                if not query.plan():
                    return self.seqs
                self._read(query.reader, query.reader.partitions(query.start, query.next_end))
                query.end = query.next_end
        raise AssertionError("it never came to the stream's end")


class Query:
    """Asks a reader what Spark asks it, in the same order; offsets go through JSON and partitions through pickle."""

    def __init__(self, reader: Any, end: dict[str, Any] | None = None) -> None:
        self.reader = reader
        self.end = end  # of the last batch: what a checkpoint knows

    def plan(self) -> bool:
        """Find the end of the next batch; whether there is one."""
        self.start = self.end or _stored(self.reader.initialOffset())
        self.next_end = _stored(self.reader.latestOffset(self.start, self.reader.getDefaultReadLimit()))
        return bool(self.next_end != self.end)

    def rows(self) -> list[tuple[int, bytes]]:
        """Read the batch that was planned; sequences and payloads."""
        start, rows = self.end or _stored(self.reader.initialOffset()), []
        for part in pickle.loads(pickle.dumps(self.reader.partitions(start, self.next_end))):
            for batch in pickle.loads(pickle.dumps(self.reader)).read(part):
                columns = (batch.column(name).to_pylist() for name in (layout.SEQ, layout.PAYLOAD))
                rows += zip(*columns, strict=True)
        self.end = self.next_end
        return rows

    def run(self) -> list[int]:
        """Read the batch that was planned; the sequences in it."""
        return [seq for seq, _ in self.rows()]

    def batch(self) -> list[int] | None:
        """The sequences of the next batch; None when nothing is new."""
        return self.run() if self.plan() else None

    def batches(self) -> list[list[int]]:
        """The sequences of all batches until nothing is new."""
        with self:
            return list(iter(self.batch, None))  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.stop()


@dataclass
class Captured:
    """A stream with a capture that runs when a test says so."""

    live: Live
    root: Path
    sections: dict[str, Any]

    @property
    def config(self) -> Config:
        return config(self.live.server.url, self.root, **self.sections)

    @property
    def path(self) -> str:
        """The configuration as a file."""
        path = self.root.parent / "capture.yaml"
        path.write_text(yaml.safe_dump(settings(self.live.server.url, self.root, **self.sections)))
        return str(path)

    def capture(self) -> Capture:
        return asyncio.run(capture_all(self.config))

    def restore(self, last: int | None = None) -> None:
        """Delete the stream, and restore it from its archive, up to the sequence `last`."""
        self.live.do(lambda stream: stream.delete_stream(STREAM))
        words = [f"file://{self.root}", STREAM, "--as", STREAM, "--servers", self.live.server.url]
        assert restore(words if last is None else [*words, "--to-seq", str(last)]) == 0


class CombinedQuery(Query):
    """A query of the source `jetcapture`."""

    def __init__(self, captured: Captured, end: dict[str, Any] | None = None, **options: str) -> None:
        source = CombinedSource({"config": captured.path, **options})
        super().__init__(CombinedStreamReader(source, source.schema()), end)

    def rows(self) -> list[tuple[int, bytes]]:
        return sorted(super().rows())


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
