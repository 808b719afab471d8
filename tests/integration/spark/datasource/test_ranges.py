"""A range of a stream is read whole and in order, whatever the messages' sizes and whatever happens meanwhile.

Messages that disappear before a task has read them are an error, or what could be had, but never silence.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import product
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from nats.js.api import ConsumerConfig, DeliverPolicy, RetentionPolicy, StreamConfig

from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream import range_reader
from jetcapture_py.jetstream.connection import Api
from spark_jobs.datasource.read import BatchReader, fetch
from spark_jobs.datasource.session import Session
from tests.integration.spark.live import ENVELOPE, Live, Reading
from tests.support.examples import examples
from tests.support.links import Link
from tests.support.nats_server import NatsServer
from tests.support.replays import ask
from tests.support.running import STREAM, connection

MESSAGES = 6000
LARGE = "max_payload: 64MB\nmax_pending: 128MB"


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few messages at a time: whatever is done to the stream meets a task that has most of its range before it."""
    monkeypatch.setattr(range_reader, "BATCH", 200)
    monkeypatch.setattr(range_reader, "ENOUGH", 100)
    monkeypatch.setattr(range_reader, "WAITING", 20_000)


def restart(live: Live) -> None:
    live.server.kill()
    live.server.start()


def remove_consumer(live: Live) -> None:
    (consumer,) = live.consumers()
    live.do(lambda stream: stream.delete_consumer(STREAM, consumer))


@pytest.mark.usefixtures("small_steps")
def test_a_server_that_is_killed_and_a_consumer_that_vanishes_lose_and_repeat_nothing(live: Live) -> None:
    live.fill(MESSAGES)
    for meanwhile, start in ((restart, "earliest"), (remove_consumer, "earliest"), (restart, "last_per_subject")):
        reading = Reading(live, 0, lambda: meanwhile(live))  # noqa: B023
        assert reading.batch(startingOffsets=start, minPartitions="1") == list(range(1, MESSAGES + 1))
        assert live.consumers() == []


@pytest.mark.usefixtures("small_steps")
def test_a_server_that_stays_away_or_sends_nothing_but_signs_of_life_is_one_clear_error(live: Live) -> None:
    live.fill(MESSAGES)

    def pause() -> None:
        (consumer,) = live.consumers()
        body = {"pause_until": "2099-01-01T00:00:00Z"}
        assert ask(live.server.url, f"CONSUMER.PAUSE.{STREAM}.{consumer}", body)["paused"]

    for meanwhile, error in (
        (pause, "no message from stream ORDERS for 1 s: the server answers, but sends no"),
        (live.server.kill, "NATS did not respond for 1 s: the connection is lost"),
    ):
        with pytest.raises(SourceError, match=error):
            Reading(live, 0, meanwhile).batch(timeout="1s", minPartitions="1")


def test_a_bounded_read_begins_and_ends_as_told_and_takes_what_is_there(live: Live) -> None:
    live.send([(f"orders.{name}", b"") for name in "aabcca"])
    moment = datetime.now(UTC).isoformat()
    live.send([("orders.d.x", b""), ("orders.b", b"")])
    for options, expected in (
        ({}, range(1, 9)),
        ({"startingOffsets": "3", "endingOffsets": "6"}, [3, 4, 5]),  # the end is exclusive, as Kafka's is
        ({"startingOffsets": "3", "endingOffsets": "3"}, []),
        ({"startingOffsets": "9"}, []),
        ({"startingOffsets": "last"}, [8]),
        ({"startingOffsets": "last", "subjects": "orders.a, orders.c"}, [6]),
        ({"startingOffsets": "last_per_subject"}, [5, 6, 7, 8]),
        ({"startingOffsets": "last_per_subject", "subjects": "orders.a,orders.b"}, [6, 8]),
        ({"startingTimestamp": moment}, [7, 8]),
        ({"endingTimestamp": moment}, range(1, 7)),
        ({"subjects": "orders.*.x, orders.c", "minPartitions": "3"}, [4, 5, 7]),
        ({"subjects": "orders.none"}, []),
    ):
        assert live.read(**options) == list(expected), options
    live.delete(2, 4, 5, 8)
    for first, end in ((1, 9), (2, 3), (3, 6), (7, 9), (8, 9)):
        bounds = {"startingOffsets": str(first), "endingOffsets": str(end), "failOnDataLoss": "false"}
        assert live.read(**bounds) == [seq for seq in (1, 3, 6, 7) if first <= seq < end]


def test_nothing_of_other_ranges_is_asked_for(live: Live) -> None:
    live.fill(1000)
    options = live.read_options(startingOffsets="101", endingOffsets="201")
    (part,) = BatchReader(options, ENVELOPE).partitions()
    with Session(options, "test") as session:
        assert sum(len(chunk) for _, chunk in fetch(session, options, part, bare=False)) == 100


def test_an_interest_stream_is_refused_because_the_end_of_a_reader_would_delete_messages(live: Live) -> None:
    """The server keeps such messages when a stream's retention changes, until some consumer has read them or ends."""
    live.fill(30)
    reader = BatchReader(live.read_options(), ENVELOPE)
    (part,) = reader.partitions()
    needed = ConsumerConfig(durable_name="other", filter_subject="orders.*", deliver_policy=DeliverPolicy.ALL)
    live.do(lambda stream: stream.add_consumer(STREAM, needed))
    live.fill(10, "orders.unneeded.{}")
    interest = StreamConfig(name=STREAM, subjects=["orders.>"], retention=RetentionPolicy.INTEREST)
    live.do(lambda stream: stream.update_stream(interest))
    with pytest.raises(SourceError, match=r"^stream ORDERS cannot be read: with retention interest, reading deletes"):
        list(reader.read(part))
    assert live.do(lambda stream: stream.stream_info(STREAM)).state.messages == 40
    assert live.consumers() == ["other"]


# ---------------------------------------------------------------------- sizes


def check_sizes(live: Live, sizes: list[int], **options: str) -> None:
    reading = Reading(live)
    assert reading.batch(**options) == list(range(1, len(sizes) + 1))
    assert reading.sizes == sizes


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server for all examples of a property."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield Live(server)


SIZES = st.one_of(st.sampled_from([0, 1, 100, 5_000, 20_000, 100_000]), st.integers(0, 40_000))


@examples(cost=4)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=60),
    batch=st.integers(1, 100),
    pull_bytes=st.integers(1, 200_000),
    waiting=st.integers(0, 300_000),
    enough=st.integers(1, 100),
    parts=st.sampled_from([1, 3]),
)
def test_every_message_is_read_for_any_sizes_and_any_bounds_on_what_waits(
    shared: Live, sizes: list[int], batch: int, pull_bytes: int, waiting: int, enough: int, parts: int
) -> None:
    shared.recreate()
    shared.send([("orders.a", b"x" * size) for size in sizes])
    bounds = {"BATCH": batch, "PULL_BYTES": pull_bytes, "WAITING": waiting, "ENOUGH": enough}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in bounds.items():
            patch.setattr(range_reader, name, value)
        check_sizes(shared, sizes, minPartitions=str(parts), timeout="30s")


def test_messages_larger_than_a_pull_are_read(nats_server: Callable[..., NatsServer]) -> None:
    live = Live(nats_server(LARGE))
    sizes = [0, 8 << 20, 5, 17 << 20, 30 << 20, 20 << 20, 3, 3, 31 << 20, 1, 8 << 20]
    live.send([("orders.a", bytes(size)) for size in sizes])
    check_sizes(live, sizes)
    live.server.stop()
    live.server.extra_config = ""  # what the server accepts now is less than what it holds
    live.server.start()
    check_sizes(live, sizes)


def test_a_message_may_take_longer_than_the_server_may_be_silent(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "SILENCE", 0.5)
    monkeypatch.setattr(range_reader, "HEARTBEAT", 0.2)
    sizes = [10, 1_000_000, 10]
    live.send([("orders.a", bytes(size)) for size in sizes])
    with Link(live.server.port, answer_rate=700_000) as link:
        check_sizes(live, sizes, servers=f"nats://127.0.0.1:{link.port}")


def test_a_limit_of_the_server_on_pulls_is_kept(nats_server: Callable[..., NatsServer]) -> None:
    live = Live(nats_server("jetstream { limits { max_request_batch: 7 } }"))
    live.fill(100)
    assert live.read(timeout="10s") == list(range(1, 101))


def update(live: Live, **limits: Any) -> None:
    """Give the stream a limit, which the server applies at once, or within seconds to what is too old."""
    live.do(lambda stream: stream.update_stream(name=STREAM, subjects=["orders.>"], **limits))


def expire(live: Live) -> None:
    """Let all messages become too old, and wait until they are gone."""
    update(live, max_age=0.2)

    async def gone() -> None:
        async with connection(live.server.url) as client:
            while (await client.jetstream().stream_info(STREAM)).state.messages:
                await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(gone(), 60))


def recreate(live: Live) -> None:
    live.recreate()
    live.fill(50)


def purge_beside_consumer(live: Live) -> None:
    live.purge(keep=900)
    with contextlib.suppress(Exception):
        for name in live.consumers():
            live.do(lambda stream: stream.delete_consumer(STREAM, name))  # noqa: B023


WAYS: dict[str, Callable[[Live], object]] = {
    "purge": Live.purge,
    "keep": lambda live: live.purge(keep=900),
    "messages": lambda live: update(live, max_msgs=900),
    "age": expire,
    "delete": lambda live: live.do(lambda stream: stream.delete_stream(STREAM)),
    "recreate": recreate,
    "beside its consumer": purge_beside_consumer,
}
ENDS = r"was deleted and created again|stream not found"


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_is_an_error_or_leaves_all_that_could_be_had(live: Live, way: str) -> None:
    for watched, streaming in product(("true", "false"), (False, True)):
        live.recreate()
        live.fill(MESSAGES)
        reading = Reading(live, 1000, lambda: WAYS[way](live))
        read = partial(reading.stream if streaming else reading.batch, minPartitions="3", failOnDataLoss=watched)
        if watched == "true" or (streaming and way in ("delete", "recreate")):
            with pytest.raises(SourceError, match=rf"are gone: it starts at|{ENDS}" if watched == "true" else ENDS):
                read()
            continue
        seqs = read()
        assert seqs == sorted(set(seqs))
        assert 1000 < len([seq for seq in seqs if seq <= MESSAGES]) < MESSAGES
        assert way in ("delete", "recreate") or {*live.read(failOnDataLoss="false")} <= {*seqs}


DELETED = (MESSAGES - 100, MESSAGES - 50, MESSAGES - 49, MESSAGES - 1)
GONE, ALL = f"are gone: it starts at {MESSAGES + 1}", range(1, MESSAGES + 1)
LAST, LATE = {"startingOffsets": "last_per_subject"}, {"subjects": "orders.late.>"}


def subject_of(seq: int) -> str:
    """Subjects of the messages: all of an end of the stream, every fifth, and those that are different."""
    return f"orders.{'late' if seq > 1000 else 'early'}.{'rare' if seq % 5 == 0 else 'often'}.{seq}"


def open_gaps(live: Live) -> None:
    live.delete(*DELETED)
    live.purge(subject="orders.*.rare.*")


HAPPENS: tuple[tuple[int, Callable[[Live], object], dict[str, str], Collection[int] | str], ...] = (
    (2500, lambda live: live.purge(seq=2400), {}, ALL),  # behind the reader
    (-1, lambda live: live.purge(seq=900), LATE, ALL[1000:]),  # before it begins
    (0, open_gaps, {}, {seq for seq in ALL if seq % 5} - {*DELETED}),
    (0, Live.purge, {"subjects": "orders.*.rare.*,orders.none"}, GONE),
    (0, lambda live: live.purge(keep=10), LAST, f"are gone: it starts at {MESSAGES - 9}"),
)
"""After how many messages what happens, options, and what is read at least or is said."""


@pytest.mark.usefixtures("small_steps")
def test_a_loss_is_one_of_messages_that_were_to_be_read(live: Live) -> None:
    for when, happen, options, expected in HAPPENS:
        live.recreate()
        live.send((subject_of(seq), b"") for seq in ALL)
        reading = Reading(live, when, partial(happen, live))
        if isinstance(expected, str):
            with pytest.raises(SourceError, match=expected):
                reading.batch(minPartitions="1", **options)
            continue
        read = reading.batch(minPartitions="1", **options)
        assert read == sorted(set(read))
        assert set(read) >= {*expected}
        assert len(read) < MESSAGES or expected is ALL


@pytest.mark.usefixtures("small_steps")
def test_newer_messages_of_a_subject_are_no_loss_to_a_read_of_the_last_of_each(live: Live) -> None:
    update(live, max_msgs_per_subject=1)
    live.fill(MESSAGES)
    read = Reading(live, 0, partial(live.fill, MESSAGES - 100)).batch(**LAST)
    assert read == sorted(set(read))
    assert set(read) >= set(range(MESSAGES - 99, MESSAGES + 1))


def test_a_consumer_beside_a_replica_that_lags_is_waited_for(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    live.fill(100)
    request = Api.request

    async def lagging(self: Api, subject: str, body: Any = None) -> dict[str, Any]:
        answer = await request(self, subject, body)
        if subject.startswith("CONSUMER.CREATE"):
            answer["num_pending"] = 0  # as a replica says that has not got the messages yet
        if subject.startswith("STREAM.INFO"):
            answer["config"]["num_replicas"] = 3
        return answer

    monkeypatch.setattr(Api, "request", lagging)
    assert live.read(minPartitions="1") == list(range(1, 101))
