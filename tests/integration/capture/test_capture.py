"""The pipeline against a real server and a real file system, in this process."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pyarrow as pa
import pytest
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.writer import EncodedBlock
from jetcapture_py.capture.side_tasks import KEEP_ALIVE_PER_WAIT
from jetcapture_py.errors import DrainError, PermanentStoreError, StoreError
from jetcapture_py.jetstream import acks, shared
from jetcapture_py.jetstream.pulls import PullTiming
from jetcapture_py.jetstream.wire.client import Connection
from jetcapture_py.jetstream.wire.parser import FrameParser
from jetcapture_py.log import FIELDS
from jetcapture_py.store import LocalStore
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
    until,
)
from tests.support.stores import ThenStore

Start = Callable[..., NatsServer]


def plain(count: int, subject: str = "orders.eu") -> list[Message]:
    return [(subject, b"payload %d" % index, None) for index in range(count)]


def leaves(group: BaseException) -> list[BaseException]:
    if isinstance(group, BaseExceptionGroup):
        return [leaf for error in group.exceptions for leaf in leaves(error)]
    return [group]


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


def test_no_ack_leaves_before_the_store_has_returned_success(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, plain(500))
        heard: list[tuple[float, bytes]] = []
        listener = await acks_of(server.url, heard)
        store = GatedStore(tmp_path / "archive", StoreError("not today"))
        settings = config(server.url, tmp_path / "archive", block={"max_age": "0.2s"}, store={"concurrency": 1})
        async with running(settings, store=store):
            await until(lambda: store.attempts >= 3, "the store was tried again")
            assert [body for _, body in heard if body == b"+ACK"] == []
            assert (await consumer(server.url)).num_ack_pending == 500
            store.error = None
            await until(lambda: len([body for _, body in heard if body == b"+ACK"]) == 500, "all are acknowledged")
        await listener.close()
        assert min(at for at, body in heard if body == b"+ACK") > store.returned[0]
        assert (await consumer(server.url)).num_ack_pending == 0
        assert [row[layout.SEQ] for row in rows(tmp_path / "archive")] == list(range(1, 501))

    asyncio.run(scenario())


def test_a_refusing_store_is_reported_and_nothing_is_lost_when_the_process_gives_up(
    nats_server: Start, tmp_path: Path
) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, plain(100))
        settings = config(
            server.url, tmp_path / "archive", block={"max_age": "0.1s"}, store={"retry_for": "0.5s"}, drain_timeout="5s"
        )
        store = GatedStore(tmp_path / "archive", PermanentStoreError("access denied"))
        with pytest.raises(BaseExceptionGroup) as caught:
            await capture_all(settings, store=store)
        assert [str(error) for error in leaves(caught.value)] == ["access denied"]
        assert store.attempts > 1
        store.error = None
        began = time.monotonic()
        await capture_all(settings, store=store)
        assert time.monotonic() - began < 60, "what was given back came again at once, not after ack_wait"
        assert len(rows(tmp_path / "archive")) == 100

    asyncio.run(scenario())


def test_messages_held_longer_than_ack_wait_are_not_delivered_again(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those in an open block nor those on their way to a store that fails."""

    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [*plain(300, "orders.sealed"), *plain(100, "orders.open")])
        store = GatedStore(tmp_path / "archive", StoreError("down"))
        settings = config(
            server.url, tmp_path / "archive", block={"max_messages": 300}, source={"ack_wait": "2s"}, key="{subject[1]}"
        )
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
        assert len(rows(tmp_path / "archive")) == 400

    asyncio.run(scenario())


def test_a_limit_on_unacked_messages_smaller_than_a_block_does_not_stall(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, plain(1000))
        settings = config(server.url, tmp_path / "archive", source={"max_ack_pending": 50})
        async with running(settings) as capture:
            await until(lambda: capture.stats.received == 1000, "all are received, though no block was old or full")
            assert set(capture.archiver.sealed_by) == {"pressure"}
        assert len(rows(tmp_path / "archive")) == 1000

    asyncio.run(scenario())


def test_no_more_pulls_are_made_than_the_consumer_lets_wait(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, plain(1000))
        async with connection(server.url) as client:
            await client.jetstream().add_consumer(STREAM, durable_name=CONSUMER, ack_policy="explicit", max_waiting=2)
        capture = await capture_all(config(server.url, tmp_path / "archive", source={"batch": 100}))
        assert capture.stats.acked == 1000
        assert [lane.pull > 0 for lane in capture.source.pulls.slots] == [True] * 2 + [False] * 8

    asyncio.run(scenario())


def test_two_replicas_share_the_limit_without_stalling_each_other(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, plain(20_000))
        settings = config(server.url, tmp_path / "archive", source={"max_ack_pending": 2000, "batch": 200})
        async with running(settings) as one, running(settings) as two:
            await until(lambda: one.stats.acked + two.stats.acked >= 18_000, "both make progress")
        assert one.stats.acked > 0
        assert two.stats.acked > 0
        assert one.stats.redelivered == two.stats.redelivered == 0
        assert [row[layout.SEQ] for row in rows(tmp_path / "archive")] == list(range(1, 20_001))

    asyncio.run(scenario())


def test_large_messages_stay_within_the_memory_limit(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server("max_payload: 8MB")
        payloads = [random.Random(seed).randbytes(7_900_000) for seed in range(30)]
        await publish(server.url, [("orders.big", payload, None) for payload in payloads])
        held = 0

        def watch() -> None:
            nonlocal held
            held = max(held, capture.ledger.held)

        settings = config(server.url, tmp_path / "archive", limits={"memory": "64MiB"})
        async with running(settings, store=ThenStore(settings, watch)) as capture:
            await until(lambda: capture.stats.received == 30, "all are received")
        assert 8_000_000 < held < 3 * 64 << 20
        assert [row[layout.PAYLOAD] for row in rows(tmp_path / "archive")] == payloads

    asyncio.run(scenario())


def test_objects_are_not_kept_in_memory_until_they_are_acknowledged(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.a", b"x" * 1000, None)] * 50)
        async with running(config(server.url, tmp_path / "archive", block={"max_messages": 10})) as capture:
            acknowledging, answer = capture.acks.ack, asyncio.Event()

            async def acknowledge(replies: pa.BinaryArray) -> None:
                await answer.wait()
                await acknowledging(replies)

            capture.acks.ack = acknowledge  # type: ignore[method-assign]
            await until(lambda: len(objects(tmp_path / "archive")) == 5, "all blocks are stored")
            await until(lambda: capture.ledger["encoded"] == 0, "none of them counts as held")
            gc.collect()
            stored = {name.path for name in objects(tmp_path / "archive")}
            held = [each for each in gc.get_objects() if isinstance(each, EncodedBlock) and each.name.path in stored]
            answer.set()
            assert not held

    asyncio.run(scenario())


def test_a_memory_limit_below_the_servers_largest_message_does_not_stall(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server("max_payload: 64MB")
        await publish(server.url, plain(1000))
        settings = config(server.url, tmp_path / "archive", limits={"memory": "32MiB"}, source={"batch": 50})
        async with running(settings) as capture:
            await until(lambda: capture.stats.received == 1000, "all are received, though no block was old or full")
        assert len(rows(tmp_path / "archive")) == 1000

    asyncio.run(scenario())


@pytest.mark.parametrize("count", [0, 30_000], ids=["idle", "backlog"])
def test_a_drain_unsubscribes_once_every_pull_has_ended(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    open_pulls: list[int] = []
    unsubscribe = Subscription.unsubscribe

    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, plain(count))
        settings = config(server.url, tmp_path / "archive", source={"max_ack_pending": 1000, "batch": 200})
        async with running(settings) as capture:
            lanes = capture.source.pulls.slots

            async def noted(subscription: Subscription) -> None:
                open_pulls.append(sum(lane.active for lane in lanes))
                await unsubscribe(subscription)

            monkeypatch.setattr(Subscription, "unsubscribe", noted)
            await until(lambda: any(lane.active for lane in lanes) and capture.source.fetched >= count / 10, "it pulls")
        assert open_pulls == [0] * len(lanes)
        state = await consumer(server.url)
        assert state.num_ack_pending == 0
        assert len(rows(tmp_path / "archive")) == state.delivered.stream_seq == capture.source.fetched

    asyncio.run(scenario())


@pytest.mark.parametrize("taken", [0, 1])
def test_a_drain_with_unconfirmed_acks_succeeds_only_if_the_server_has_counted_them(
    nats_server: Start, tmp_path: Path, taken: int
) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, plain(10))
        async with connection(server.url) as client:
            subscription = await client.jetstream().pull_subscribe("orders.>", CONSUMER, STREAM)
            if taken:
                await subscription.fetch(taken)

            loop = asyncio.get_running_loop()

            def forget_what_the_server_said() -> None:
                capture.acks.unconfirmed_at = loop.time()  # type: ignore[attr-defined]

            settings = config(server.url, tmp_path / "archive")
            async with running(settings, store=ThenStore(settings, forget_what_the_server_said)) as capture:
                await until(lambda: capture.stats.received == 10 - taken, "the rest is received")

    if taken:
        with pytest.raises(BaseExceptionGroup) as caught:
            asyncio.run(scenario())
        (error,) = leaves(caught.value)
        assert isinstance(error, DrainError)
        assert str(error).startswith("drain: the server did not confirm the acknowledgements")
    else:
        asyncio.run(scenario())


def test_a_pull_is_open_until_everything_has_come_that_its_status_announces(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jetcapture_py.jetstream.pulls.TIMING", PullTiming(expires=30.0))

    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [])
        async with running(config(server.url, tmp_path / "archive")) as capture:
            lane = capture.source.pulls.slots[0]
            await until(lambda: lane.active, "it pulls")
            inbox, pull = f"{lane.subject}.{lane.pull}", lane.pull
            async with connection(server.url) as client:
                await client.publish(inbox, headers={"Nats-Pending-Messages": str(lane.left - 3)})
                await until(lambda: lane.left == 3, "the status has come")
                assert lane.active
                for left in (2, 1, 0):
                    await client.publish(inbox, b"forged", reply="as.if.by.the.server")
                    await until(lambda left=left: lane.left == left or lane.pull > pull, f"{left} are to come")
                await until(lambda: lane.pull > pull, "it pulls again")
            capture.source.halt()  # the drain need not wait for the pulls

    asyncio.run(scenario())


def test_a_pull_of_which_nothing_more_is_heard_is_made_again(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [])
        async with running(config(server.url, tmp_path / "archive", block={"max_age": "0.2s"})) as capture:
            lanes = capture.source.pulls.slots
            await until(lambda: all(lane.pull for lane in lanes), "every lane has pulled")
            pulls = [lane.pull for lane in lanes]
            for lane in lanes:  # as if the server had forgotten the pulls and never said so
                lane.expires = 0.0
            await until(
                lambda: all(lane.pull > before for lane, before in zip(lanes, pulls, strict=True)),
                "every lane has pulled again",
            )
            await publish(server.url, plain(10))
            await until(lambda: capture.stats.acked == 10, "messages still come, each once")

    asyncio.run(scenario())


def test_an_ack_that_was_lost_with_its_connection_is_sent_again(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, plain(100))
        store = GatedStore(tmp_path / "archive")
        async with running(config(server.url, tmp_path / "archive", block={"max_age": "0.2s"}), store=store) as capture:
            await until(lambda: store.attempts == 1, "the store is at work")
            server.kill()
            await until(lambda: len(store.returned) == 1, "the object is stored while the server is down")
            assert capture.stats.acked == 0
            server.start()
            await until(lambda: capture.stats.acked == 100, "the acknowledgement is confirmed after all")
        assert (await consumer(server.url)).num_ack_pending == 0
        assert len(objects(tmp_path / "archive")) == 1

    asyncio.run(scenario())


def test_acks_that_nobody_takes_are_sent_until_somebody_does_with_pauses_between(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        server = nats_server()
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
        settings = config(server.url, tmp_path / "archive", source={"ack_wait": "10m"})
        await capture_all(settings)
        assert (await consumer(server.url)).num_ack_pending == 0
        pauses = [later - earlier for earlier, later in itertools.pairwise(at)]
        assert len(pauses) >= shared.ACK_ATTEMPTS + 1
        assert min(pauses) > 0.05

    asyncio.run(scenario())


def test_acks_that_the_server_does_not_confirm_are_sent_again(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jetcapture_py.jetstream.acks.CONFIRM_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, plain(100))

        paused = []
        settings = config(server.url, tmp_path / "archive", block={"max_age": "0.2s"})
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
        assert sum(name.rows for name in objects(tmp_path / "archive")) == 100

    asyncio.run(scenario())


def test_acks_wait_for_a_server_that_does_not_answer_and_nothing_comes_again(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jetcapture_py.jetstream.connection._API_TIMEOUT", 0.2)

    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, plain(100))
        paused: list[float] = []

        def pause() -> None:
            if not paused:
                paused.append(time.monotonic())
                server.pause()

        settings = config(server.url, tmp_path / "archive", block={"max_age": "0.2s"})
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

    asyncio.run(scenario())


def test_frames_that_somebody_publishes_to_our_inbox_are_counted_and_left_out(
    nats_server: Start, tmp_path: Path
) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, plain(10))
        async with running(config(server.url, tmp_path / "archive", block={"max_age": "0.3s"})) as capture:
            inbox = f"{capture.source.pulls.slots[0].subject}.77"
            async with connection(server.url) as client:
                await client.publish(inbox, b"forged", reply="more.nonsense")
                await client.publish(inbox, b"forged", reply="nonsense")
                await client.publish(inbox, b"forged")
            await until(lambda: capture.stats.strays == 2, "they are counted")
        assert [row[layout.PAYLOAD] for row in rows(tmp_path / "archive")] == [b"payload %d" % n for n in range(10)]

    asyncio.run(scenario())


def test_messages_that_cannot_be_decoded_one_after_another_do_not_flood_the_log(
    nats_server: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "jetcapture")

    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [])
        async with (
            running(config(server.url, tmp_path / "archive", decode={"format": "json"})) as state,
            connection(server.url) as client,
        ):
            for number in range(10):
                await client.jetstream().publish("orders.x", b"{" if number % 5 else b"[]")
                await until(lambda n=number: state.stats.quarantine.messages == n + 1, "it is in the quarantine")
        lines = [getattr(each, FIELDS) for each in caplog.records if each.msg == "messages.quarantined"]
        assert [line["messages"] for line in lines] == [1, 9], "the first one, and at the end the others"
        assert sorted(lines[1]["reasons"].values()) == [1, 8]

    asyncio.run(scenario())


def test_an_error_while_receiving_is_logged_and_the_connection_is_made_again(
    nats_server: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    receive = FrameParser._take

    def fail_once(*_: Any) -> None:
        monkeypatch.setattr(FrameParser, "_take", receive)
        raise RuntimeError("a bug in the receiver")

    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [])
        settings = config(server.url, tmp_path / "archive", block={"max_age": "0.2s"}, source={"ack_wait": "1s"})
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
        assert len(rows(tmp_path / "archive")) == 110

    asyncio.run(scenario())
    (failed,) = [record for record in caplog.records if record.msg == "receive.failed"]
    assert "a bug in the receiver" in str(failed.__dict__)


def test_a_decoder_and_a_key_may_be_named_in_the_configuration(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_our_own.py").write_text(
        "import pyarrow as pa\n"
        "from jetcapture_py.transform.batch import Decoded\n"
        "class Upper:\n"
        "    def decode(self, batch):\n"
        "        texts = [payload.decode().upper() for payload in batch.column('_nats_payload').to_pylist()]\n"
        "        return Decoded(fields=pa.RecordBatch.from_pydict({'text': texts}))\n"
        "def last_letter(batch, fields):\n"
        "    return pa.array([text[-1] for text in fields.column('text').to_pylist()], pa.string())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.x", b"abc", None), ("orders.x", b"abd", None)])
        named = {"decode": {"format": "of_our_own:Upper"}, "key": "of_our_own:last_letter"}
        await capture_all(config(server.url, tmp_path / "archive", **named))
        assert [(row["text"], row["key"]) for row in rows(tmp_path / "archive")] == [("ABC", "C"), ("ABD", "D")]

    asyncio.run(scenario())


def test_a_cluster_without_a_leader_at_the_start_is_asked_again(nats_server: Start, tmp_path: Path) -> None:
    """Requests pass through a relay that answers the first ones as a server does while it elects a leader."""
    refusal = {"code": 503, "err_code": 10008, "description": "JetStream system temporarily unavailable"}

    server = nats_server()

    async def scenario() -> None:
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

    asyncio.run(scenario())
