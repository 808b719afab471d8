"""The pipeline against a real server and a real file system, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nats
import nats.errors
import pyarrow as pa
import pytest
from nats.aio.msg import Msg

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.capture.side_tasks import KEEP_ALIVE_PER_WAIT
from jetcapture_py.errors import DrainError, PermanentStoreError, StoreError
from jetcapture_py.jetstream import acks, shared
from jetcapture_py.jetstream.pulls import SLOTS, PullTiming
from jetcapture_py.jetstream.wire.client import Connection
from jetcapture_py.jetstream.wire.parser import FrameParser
from jetcapture_py.monitoring.health import health
from jetcapture_py.store import LocalStore
from tests.integration.security import leaves
from tests.support.nats_server import NatsServer
from tests.support.running import (
    CONSUMER,
    STREAM,
    Message,
    capture_all,
    config,
    connection,
    consumer,
    objects,
    publish,
    rows,
    running,
    seqs,
    until,
)
from tests.support.stores import ThenStore


def plain(count: int, subject: str = "orders.eu") -> list[Message]:
    return [(subject, b"payload %d" % index, None) for index in range(count)]


class GatedStore(LocalStore):
    """A local store that refuses, or takes its time, until it is told otherwise; it notes when a put has returned."""

    def __init__(self, root: Path, error: StoreError | None = None) -> None:
        super().__init__(str(root))
        self.error = error
        self.attempts = 0
        self.returned: list[float] = []

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        self.attempts += 1
        if self.error is not None:
            raise self.error
        time.sleep(0.3)  # long enough for an ack that does not wait to overtake
        location = super().put(name, data)
        self.returned.append(time.monotonic())
        return location


async def acks_of(url: str, sink: list[tuple[float, bytes]]) -> Any:
    """Listen to everything that is published to the consumer's ack subjects."""
    client = await nats.connect(url)

    async def note(message: Any) -> None:
        sink.append((time.monotonic(), message.data))

    await client.subscribe(f"$JS.ACK.{STREAM}.{CONSUMER}.>", cb=note)
    await client.flush()
    return client


async def test_no_ack_leaves_before_the_store_has_returned_success(server: NatsServer, archive: Path) -> None:
    await publish(server.url, plain(500))
    heard: list[tuple[float, bytes]] = []
    listener = await acks_of(server.url, heard)
    store = GatedStore(archive, StoreError("not today"))
    settings = config(server.url, archive, block={"max_age": "0.2s"}, store={"concurrency": 1})
    async with running(settings, store=store):
        await until(lambda: store.attempts >= 3, "the store was tried again")
        assert [body for _, body in heard if body == b"+ACK"] == []
        assert (await consumer(server.url)).num_ack_pending == 500
        store.error = None
        await until(lambda: len([body for _, body in heard if body == b"+ACK"]) == 500, "all are acknowledged")
    await listener.close()
    assert min(at for at, body in heard if body == b"+ACK") > store.returned[0]
    assert (await consumer(server.url)).num_ack_pending == 0
    assert seqs(archive) == list(range(1, 501))


async def test_a_refusing_store_is_reported_and_nothing_is_lost_when_the_process_gives_up(
    server: NatsServer, archive: Path
) -> None:
    await publish(server.url, plain(100))
    settings = config(server.url, archive, block={"max_age": "0.1s"}, store={"retry_for": "0.5s"}, drain_timeout="5s")
    store = GatedStore(archive, PermanentStoreError("access denied"))
    with pytest.raises(PermanentStoreError, match=r"^access denied$"), leaves():
        await capture_all(settings, store=store)
    assert store.attempts > 1
    store.error = None
    began = time.monotonic()
    await capture_all(settings, store=store)
    assert time.monotonic() - began < 60, "what was given back came again at once, not after ack_wait"
    assert len(rows(archive)) == 100


async def test_messages_held_longer_than_ack_wait_are_not_delivered_again(
    server: NatsServer, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(server.url, [*plain(300, "orders.sealed"), *plain(100, "orders.open")])
    store = GatedStore(archive, StoreError("down"))
    settings = config(server.url, archive, block={"max_messages": 300}, source={"ack_wait": "2s"}, key="{subject[1]}")
    async with running(settings, store=store) as capture:
        kept_alive: list[int] = []
        keep_alive = capture.acks.keep_alive

        async def counted(replies: pa.BinaryArray) -> None:
            await keep_alive(replies)
            kept_alive.append(len(set(replies)))

        monkeypatch.setattr(capture.acks, "keep_alive", counted)
        await until(lambda: store.attempts >= 2, "a block is on its way to the store")
        waits = 3 * KEEP_ALIVE_PER_WAIT
        await until(lambda: kept_alive.count(400) > waits, "three times ack_wait has passed")
        state = await consumer(server.url)
        assert (state.num_ack_pending, state.num_redelivered) == (400, 0)
        assert state.delivered.consumer_seq == 400
        store.error = None
    assert capture.stats.redelivered == 0
    assert len(rows(archive)) == 400


@pytest.mark.parametrize(
    ("source", "memory", "seals"),
    [({"max_ack_pending": 50}, "1GiB", {"pressure"}), ({"batch": 50}, "32MiB", set())],
    ids=["unacked", "memory"],
)
async def test_a_limit_that_is_smaller_than_a_block_or_a_message_does_not_stall(
    nats_server: Callable[..., NatsServer], archive: Path, source: dict[str, int], memory: str, seals: set[str]
) -> None:
    server = nats_server("max_payload: 64MB")
    await publish(server.url, plain(1000))
    async with running(config(server.url, archive, source=source, limits={"memory": memory})) as capture:
        await until(lambda: capture.stats.received == 1000, "all are received, though no block was old or full")
        assert set(capture.archiver.sealed_by) == seals
    assert len(rows(archive)) == 1000


@pytest.mark.parametrize("taken", [0, 1])
async def test_a_drain_with_unconfirmed_acks_succeeds_only_if_the_server_has_counted_them(
    server: NatsServer, archive: Path, taken: int
) -> None:
    await publish(server.url, plain(10))
    async with connection(server.url) as client:
        subscription = await client.jetstream().pull_subscribe("orders.>", CONSUMER, STREAM)
        if taken:
            await subscription.fetch(taken)

        def forget_what_the_server_said() -> None:
            capture.acks.unconfirmed_at = loop.time()  # type: ignore[attr-defined]

        loop, settings = asyncio.get_running_loop(), config(server.url, archive)
        refused = pytest.raises(DrainError, match=r"^drain: the server did not confirm the acknowledgements")
        with refused if taken else contextlib.nullcontext(), leaves():
            async with running(settings, store=ThenStore(settings, forget_what_the_server_said)) as capture:
                await until(lambda: capture.stats.received == 10 - taken, "the rest is received")


async def test_an_ack_that_was_lost_with_its_connection_is_sent_again(server: NatsServer, archive: Path) -> None:
    await publish(server.url, plain(100))
    store = GatedStore(archive)
    async with running(config(server.url, archive, block={"max_age": "0.2s"}), store=store) as capture:
        await until(lambda: store.attempts == 1, "the store is at work")
        server.kill()
        await until(lambda: len(store.returned) == 1, "the object is stored while the server is down")
        assert capture.stats.acked == 0
        server.start()
        await until(lambda: capture.stats.acked == 100, "the acknowledgement is confirmed after all")
    assert (await consumer(server.url)).num_ack_pending == 0
    assert len(objects(archive)) == 1


async def test_acks_that_nobody_takes_are_sent_until_somebody_does_with_pauses_between(
    server: NatsServer, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(server.url, plain(100))
    at: list[float] = []
    ask = Connection.ask

    async def nobody(self: Connection, subject: str, payload: bytes, timeout: float) -> Any:
        if subject.startswith("$JS.ACK."):
            at.append(time.monotonic())
            if len(at) <= shared.ACK_ATTEMPTS + 1:
                raise nats.errors.NoRespondersError  # as while the consumer has no leader
        return await ask(self, subject, payload, timeout)

    monkeypatch.setattr(Connection, "ask", nobody)
    settings = config(server.url, archive, source={"ack_wait": "10m"})
    await capture_all(settings)
    assert (await consumer(server.url)).num_ack_pending == 0
    pauses = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert len(pauses) >= shared.ACK_ATTEMPTS + 1
    assert min(pauses) > 0.05


@pytest.mark.parametrize(("result", "attempts"), [("REFUSED", 1), ("UNCONFIRMED", shared.ACK_ATTEMPTS)])
async def test_acks_that_are_refused_or_never_confirmed_are_given_up(
    monkeypatch: pytest.MonkeyPatch, result: str, attempts: int
) -> None:
    async def answer(*_: object) -> acks.AckResult:
        return acks.AckResult[result]

    monkeypatch.setattr(shared.Shared, "_ack", answer)
    monkeypatch.setattr(shared, "FIRST_ACK_RETRY_S", 0.001)
    source: Any = None
    counts: Any = SimpleNamespace(acked=0, unconfirmed_acks=0)
    given = shared.Shared(source, counts)
    await asyncio.wait_for(given.ack(pa.array([b"reply"])), 60)
    assert (counts.acked, counts.unconfirmed_acks, given.unconfirmed_at > 0) == (0, attempts, True)


async def test_acks_that_the_server_does_not_confirm_are_sent_again(
    server: NatsServer, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jetcapture_py.jetstream.acks.CONFIRM_TIMEOUT_S", 0.3)

    await publish(server.url, plain(100))

    paused = []
    settings = config(server.url, archive, block={"max_age": "0.2s"})
    async with running(settings) as capture:
        send = acks.publish

        async def pause(connection: Connection, replies: pa.BinaryArray, body: bytes) -> None:
            if body == b"+ACK" and not paused:  # on a slow machine there may be more than one block
                paused.append(True)
                server.pause()
            await send(connection, replies, body)

        monkeypatch.setattr(acks, "publish", pause)
        await until(lambda: capture.stats.unconfirmed_acks >= 1, "the server did not answer")
        assert capture.stats.acked == 0
        server.resume()
        await until(lambda: capture.stats.acked == 100, "it does now")
    assert (await consumer(server.url)).num_ack_pending == 0
    assert sum(name.rows for name in objects(archive)) == 100


async def test_acks_wait_for_a_server_that_does_not_answer_and_nothing_comes_again(
    server: NatsServer, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jetcapture_py.jetstream.connection._API_TIMEOUT", 0.2)

    await publish(server.url, plain(100))
    paused: list[float] = []

    def pause() -> None:
        if not paused:
            paused.append(time.monotonic())
            server.pause()

    settings = config(server.url, archive, block={"max_age": "0.2s"})
    async with running(settings, store=ThenStore(settings, pause)) as capture:
        try:
            await until(lambda: bool(paused) and time.monotonic() - paused[0] > 2, "it has not answered for long")
            assert (capture.stats.unconfirmed_acks, capture.stats.acked) == (0, 0)
            assert capture.ledger.unacked == 100, "they are kept alive"
        finally:
            server.resume()
        await until(lambda: capture.stats.acked == 100, "it does now")
    assert capture.stats.redelivered == 0
    assert (await consumer(server.url)).num_ack_pending == 0


async def test_an_error_while_receiving_is_logged_and_the_connection_is_made_again(
    server: NatsServer, archive: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receive = FrameParser._take

    def fail_once(*_: Any) -> None:
        monkeypatch.setattr(FrameParser, "_take", receive)
        raise RuntimeError("a bug in the receiver")

    await publish(server.url, [])
    settings = config(server.url, archive, block={"max_age": "0.2s"}, source={"ack_wait": "1s"})
    async with running(settings) as capture:
        await publish(server.url, plain(10))
        await until(lambda: capture.stats.acked == 10, "it works")
        client = await nats.connect(server.url)  # it receives with code of its own
        monkeypatch.setattr(FrameParser, "_take", fail_once)
        for subject, payload, _ in plain(100):
            await client.publish(subject, payload)
        await client.drain()
        await until(lambda: capture.stats.acked >= 110, "all are stored after all")
        assert capture.source.reconnects == 1
    assert len(rows(archive)) == 110
    (failed,) = [record for record in caplog.records if record.msg == "receive.failed"]
    assert "a bug in the receiver" in str(failed.__dict__)


async def test_a_cluster_without_a_leader_at_the_start_is_asked_again(server: NatsServer, tmp_path: Path) -> None:
    """Requests pass through a relay that answers the first ones as a server does while it elects a leader."""
    refusal = {"code": 503, "err_code": 10008, "description": "JetStream system temporarily unavailable"}

    await publish(server.url, [("orders.eu", b"{}", None)])
    refused: list[str] = []
    async with connection(server.url) as client:

        async def relay(message: Msg) -> None:
            subject = message.subject.removeprefix("relay.")
            if subject.startswith("CONSUMER.INFO.") and len(refused) < 2:
                refused.append(subject)
                await message.respond(json.dumps({"error": refusal}).encode())
            else:
                await client.publish(f"$JS.API.{subject}", message.data, reply=message.reply)

        await client.subscribe("relay.>", cb=relay)
        await client.flush()
        configuration = config(server.url, tmp_path, nats={"api_prefix": "relay"})
        state = await capture_all(configuration)
    assert len(refused) == 2
    assert state.stats.acked == 1


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # nats-py's, of connections that break
async def test_a_message_larger_than_the_server_now_allows_is_captured(
    nats_server: Callable[..., NatsServer], archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jetcapture_py.jetstream.pulls.TIMING", PullTiming(expires=0.5))
    server = nats_server("max_payload: 8MB")
    payloads = [b"small", random.Random(1).randbytes(7_000_000), b"small", random.Random(2).randbytes(7_000_000)]
    await publish(server.url, [("orders.a", payload, None) for payload in payloads])
    server.stop()
    server.extra_config = ""
    server.start()
    kept = {"block": {"max_age": "0.2s"}, "source": {"ack_wait": "10m"}}  # what is lost does not come back
    async with running(config(server.url, archive, **kept)) as capture:
        await until(lambda: capture.stats.acked == 4, "all are captured")
        pulls = sum(lane.pull for lane in capture.source.pulls.slots)
        assert pulls < 100, "the same pull is not made again and again"
        assert health(capture).ready
    assert [row[layout.PAYLOAD] for row in rows(archive)] == payloads


async def test_a_quiet_capture_keeps_one_pull_open_until_a_message_comes(
    server: NatsServer, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jetcapture_py.jetstream.pulls.TIMING", PullTiming(expires=0.1, idle=0.5))
    await publish(server.url, [])
    async with running(config(server.url, archive)) as capture:
        slots, most = capture.source.pulls, 0
        await until(lambda: slots.active == 1, "the other pulls have expired")

        def busy() -> bool:
            nonlocal most
            most = max(most, slots.active)
            return most == SLOTS

        await publish(server.url, plain(1))
        await until(busy, "all pulls are open")
        await until(lambda: slots.active == 1, "it is quiet again")
        assert capture.stats.received == 1
