"""One range of a stream is received whole and in order, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from nats.js.api import ConsumerConfig, DeliverPolicy, RetentionPolicy, StreamConfig

from jetcapture_py.archive.incarnations import Origin
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream import range_reader
from jetcapture_py.jetstream.range_reader import RangeReader
from spark_jobs.datasource.columns import MessageColumns
from spark_jobs.datasource.offsets import Positions, StreamPartition
from spark_jobs.datasource.options import ReadOptions
from spark_jobs.datasource.read import fetch
from spark_jobs.datasource.session import Session
from tests.integration.spark.live import ENVELOPE, Live
from tests.support.running import STREAM

MESSAGES = 20_000


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few messages at a time, so that most of a range is still to come when the first ones are there."""
    monkeypatch.setattr(range_reader, "BATCH", 2000)
    monkeypatch.setattr(range_reader, "ENOUGH", 500)
    monkeypatch.setattr(range_reader, "WAITING", 500_000)


def sequences(
    live: Live,
    options: ReadOptions,
    *,
    part: StreamPartition | None = None,
    between: Callable[[], object] = lambda: None,
) -> Iterator[int]:
    """Read a range, by default the whole stream, and do something once its first messages are there."""
    with Session(options, "test") as session:
        state = Positions(session, options).state()
        part = part or StreamPartition(state.first, state.last + 1, Origin(state.created))
        chunks = MessageColumns(options, ENVELOPE).batches(fetch(session, options, part, bare=False), part)
        for number, batch in enumerate(chunks):
            yield from batch.column("_nats_seq").to_pylist()
            if number == 0:
                between()


@pytest.mark.usefixtures("small_steps")
def test_a_server_that_is_killed_loses_and_repeats_nothing(live: Live) -> None:
    live.fill(MESSAGES)

    def restart() -> None:
        live.server.kill()
        live.server.start()

    assert list(sequences(live, live.read_options(), between=restart)) == list(range(1, MESSAGES + 1))


@pytest.mark.usefixtures("small_steps")
def test_a_consumer_that_vanishes_is_replaced(live: Live) -> None:
    live.fill(MESSAGES)

    def vanish() -> None:
        (consumer,) = live.consumers()
        live.do(lambda stream: stream.delete_consumer("ORDERS", consumer))

    assert list(sequences(live, live.read_options(), between=vanish)) == list(range(1, MESSAGES + 1))
    assert live.consumers() == []


@pytest.mark.usefixtures("small_steps")
def test_the_last_of_each_subject_come_once_although_the_server_restarts(live: Live) -> None:
    live.fill(MESSAGES)

    def restart() -> None:
        live.server.stop()
        live.server.start()

    options = live.read_options(startingOffsets="last_per_subject")
    part = StreamPartition(1, MESSAGES + 1, origin(live, options), per_subject=True)
    assert list(sequences(live, options, part=part, between=restart)) == list(range(1, MESSAGES + 1))


@pytest.mark.usefixtures("small_steps")
def test_a_server_that_stays_away_is_one_clear_error(live: Live) -> None:
    live.fill(MESSAGES)
    with pytest.raises(SourceError, match="NATS did not respond for 1 s: the connection is lost"):
        list(sequences(live, live.read_options(timeout="1s"), between=live.server.kill))


def test_nothing_of_other_ranges_is_asked_for(live: Live) -> None:
    live.fill(1000)
    options = live.read_options()
    part = StreamPartition(101, 201, origin(live, options))
    with Session(options, "test") as session:
        received = [chunk for _, chunk in fetch(session, options, part, bare=False)]
    assert sum(map(len, received)) == 100


def test_holes_anywhere_are_no_obstacle(live: Live) -> None:
    live.fill(1000)
    gone = {1, 2, 500, 501, 600, 700, 701, 999, 1000}
    live.delete(*gone)
    options = live.read_options(failOnDataLoss="false")
    for first, end in ((1, 1001), (400, 501), (501, 602), (600, 701), (700, 702), (990, 1001), (999, 1001)):
        read = list(sequences(live, options, part=StreamPartition(first, end, origin(live, options))))
        assert read == [seq for seq in range(first, end) if seq not in gone]


def test_a_stray_message_in_our_inbox_is_ignored(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    live.fill(10)
    options = live.read_options()
    real = RangeReader._attach

    async def attach(self: RangeReader) -> None:
        await real(self)
        stray = "$JS.ACK.ORDERS.another.1.7.7.1700000000000000000.0"
        assert self._consumer is not None
        connection = self._session.connection
        await connection.publish(f"{self._consumer._subject}.1", b"stray", reply=stray)
        await connection.flush()
        await asyncio.sleep(0)

    monkeypatch.setattr(RangeReader, "_attach", attach)
    assert list(sequences(live, options)) == list(range(1, 11))


def test_an_interest_stream_is_refused_because_the_end_of_a_reader_would_delete_messages(live: Live) -> None:
    """The server keeps such messages when a stream's retention changes, until some consumer has read them or ends."""
    live.fill(30)
    options = live.read_options()
    part = StreamPartition(1, 31, origin(live, options))
    needed = ConsumerConfig(durable_name="other", filter_subject="orders.*", deliver_policy=DeliverPolicy.ALL)
    live.do(lambda stream: stream.add_consumer(STREAM, needed))
    live.fill(10, "orders.unneeded.{}")
    interest = StreamConfig(name=STREAM, subjects=["orders.>"], retention=RetentionPolicy.INTEREST)
    live.do(lambda stream: stream.update_stream(interest))
    with pytest.raises(SourceError, match=r"^stream ORDERS cannot be read: with retention interest, reading deletes"):
        list(sequences(live, options, part=part))
    assert live.do(lambda stream: stream.stream_info(STREAM)).state.messages == 40
    assert live.consumers() == ["other"]


def origin(live: Live, options: ReadOptions) -> Origin:
    """The stream."""
    with Session(options, "test") as session:
        return Origin(Positions(session, options).state().created)
