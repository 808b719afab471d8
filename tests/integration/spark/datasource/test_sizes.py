"""Every read ends with every message, whatever the messages' sizes, and no wait is longer than the timeout."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jetcapture_py.archive import layout
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream import range_reader
from spark_jobs.datasource.options import ReadOptions
from spark_jobs.datasource.read import BatchReader
from tests.integration.spark.live import ENVELOPE, Live
from tests.support.examples import examples
from tests.support.links import Link
from tests.support.nats_server import NatsServer
from tests.support.running import connection

if TYPE_CHECKING:
    pass

LARGE = "max_payload: 64MB\nmax_pending: 128MB"


def read(options: ReadOptions, between: Callable[[], object] = lambda: None) -> Iterator[tuple[int, int]]:
    """Sequence and size of each message that a bounded read gives; something is done once the first ones are there."""
    reader = BatchReader(options, ENVELOPE)
    for part in reader.partitions():
        for batch in reader.read(part):
            sizes = batch.column(layout.PAYLOAD)
            yield from zip(batch.column(layout.SEQ).to_pylist(), (len(each.as_py()) for each in sizes), strict=True)
            between()
            between = lambda: None  # noqa: E731


def numbered(sizes: list[int], first: int = 1) -> list[tuple[int, int]]:
    """The messages of these sizes."""
    return list(enumerate(sizes, first))


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
        assert list(read(shared.read_options(minPartitions=str(parts), timeout="30s"))) == numbered(sizes)


def test_messages_larger_than_a_pull_are_read(nats_server: Callable[..., NatsServer]) -> None:
    live = Live(nats_server(LARGE))
    sizes = [0, 8 << 20, 5, 17 << 20, 30 << 20, 20 << 20, 3, 3, 31 << 20, 1, 8 << 20]
    live.send([("orders.a", bytes(size)) for size in sizes])
    assert list(read(live.read_options())) == numbered(sizes)
    live.server.stop()
    live.server.extra_config = ""  # what the server accepts now is less than what it holds
    live.server.start()
    assert list(read(live.read_options())) == numbered(sizes)


def test_a_message_may_take_longer_than_the_server_may_be_silent(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "SILENCE", 0.5)
    monkeypatch.setattr(range_reader, "HEARTBEAT", 0.2)
    sizes = [10, 1_000_000, 10]
    live.send([("orders.a", bytes(size)) for size in sizes])
    with Link(live.server.port, answer_rate=700_000) as link:
        options = live.read_options(servers=f"nats://127.0.0.1:{link.port}")
        assert list(read(options)) == numbered(sizes)


def test_a_limit_of_the_server_on_pulls_is_kept(nats_server: Callable[..., NatsServer]) -> None:
    live = Live(nats_server("jetstream { limits { max_request_batch: 7 } }"))
    live.fill(100)
    assert [seq for seq, _ in read(live.read_options(timeout="10s"))] == list(range(1, 101))


def test_a_server_that_sends_nothing_but_signs_of_life_is_one_clear_error(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "BATCH", 100)
    monkeypatch.setattr(range_reader, "ENOUGH", 10)
    monkeypatch.setattr(range_reader, "WAITING", 10_000)
    live.fill(1000)

    def pause() -> None:
        async def work() -> Any:
            async with connection(live.server.url) as client:
                (consumer,) = [info.name for info in await client.jetstream().consumers_info("ORDERS")]
                body = json.dumps({"pause_until": "2099-01-01T00:00:00Z"}).encode()
                answer = await client.request(f"$JS.API.CONSUMER.PAUSE.ORDERS.{consumer}", body)
                assert json.loads(answer.data)["paused"]

        asyncio.run(work())

    with pytest.raises(SourceError, match="no message from stream ORDERS for 2 s: the server answers, but sends no"):
        list(read(live.read_options(timeout="2s"), pause))
