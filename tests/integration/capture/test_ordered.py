"""`source.mode: ordered` with a real server: one replica receives, the others take over."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from nats.aio.client import Client

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.captures import CaptureFiles
from jetcapture_py.config.model import Config
from jetcapture_py.errors import ConfigError, DrainError, SourceError
from jetcapture_py.jetstream import acks, ordered_acks
from jetcapture_py.jetstream.consumer import consumer_config
from jetcapture_py.jetstream.ordered_consumer import GROUP, too_old, unsuitable
from jetcapture_py.manage.apply import apply
from jetcapture_py.monitoring.facts import gather, this_process
from jetcapture_py.monitoring.health import health
from jetcapture_py.monitoring.history import History
from jetcapture_py.store import LocalStore
from tests.integration.manage.api import ask_with
from tests.support.nats_server import NatsServer
from tests.support.publishing import Publisher
from tests.support.running import (
    CONSUMER,
    STREAM,
    capture_all,
    config,
    connection,
    consumer,
    objects,
    rows,
    running,
    seqs,
    settings,
    until,
)

ORDERED: dict[str, Any] = {"mode": "ordered"}
IN_ORDER = {"deny_delete": True, "deny_purge": True}
AT_ONCE = {"max_age": "100ms"}


async def send(url: str, payloads: Iterable[bytes], subjects: int = 1) -> None:
    """Publish to a stream of which no message can be removed between others."""
    async with connection(url) as client:
        await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"], **IN_ORDER)
        async with Publisher(client) as publisher:
            for number, payload in enumerate(payloads):
                headers = None if payload else [("A", "1"), ("A", "")]
                await publisher.publish(f"orders.{number % subjects}", payload, headers)
            await publisher.flush()


async def create(client: Client, configuration: Config, **settings: Any) -> None:
    """Create the configuration's consumer with other settings."""
    request = {"stream_name": STREAM, "config": {**consumer_config(configuration.source), **settings}}
    await ask_with(client, f"CONSUMER.CREATE.{STREAM}.{CONSUMER}", request)


async def floor(url: str) -> int:
    return int((await consumer(url)).ack_floor.stream_seq)


async def test_every_message_is_stored_as_it_was_published_and_acknowledged(server: NatsServer, archive: Path) -> None:
    payloads = [*(b"%d" % number for number in range(3_000)), b""]
    await send(server.url, payloads, subjects=7)
    state = await capture_all(config(server.url, archive, source={**ORDERED, "max_ack_pending": 1_000}))
    found = rows(archive)
    assert [row[layout.PAYLOAD] for row in found] == payloads
    assert {row[layout.HEADERS] is None for row in found[:-1]} == {True}
    assert found[-1][layout.HEADERS] == [("A", ["1", ""])]
    assert sum(name.rows for name in objects(archive)) == len(found)  # none of them stored twice
    assert await floor(server.url) == len(found)
    assert state.stats.acked == len(found)
    assert state.archiver.sealed_by["pressure"]  # no block keeps others from being acknowledged


async def test_a_standby_is_ready_holds_nothing_and_takes_over(server: NatsServer, archive: Path) -> None:
    await send(server.url, [b"1"])
    configuration = config(server.url, archive, source=ORDERED, block=AT_ONCE)
    async with running(configuration) as standby:
        await until(lambda: standby.acks.active, "the first replica is active")
        async with running(configuration) as first:
            first, standby = standby, first
            await asyncio.sleep(0)
            await send(server.url, [b"2"])
            await until(lambda: first.stats.acked == 2, "the active replica has stored both messages")
            assert not standby.acks.active
            assert health(standby).ready
            assert gather(History(standby), this_process()).role == "standby"
            assert standby.ledger.held == standby.source.fetched == 0
            await first.acks.stop()  # as SIGTERM does
            await send(server.url, [b"3"])
            await until(lambda: standby.stats.acked == 1, "the standby has taken over")
    assert seqs(archive) == [1, 2, 3]
    assert await floor(server.url) == 3


@pytest.mark.parametrize("max_ack_pending", [5, 1_000], ids=["as many as the consumer allows", "all of them"])
async def test_on_a_quiet_stream_what_a_dead_replica_holds_is_captured(
    server: NatsServer, archive: Path, max_ack_pending: int
) -> None:
    """The server pins another replica only when it has a message to deliver."""
    await send(server.url, [b"x"] * 10)
    ordered = config(server.url, archive, source={**ORDERED, "takeover": "10m"})
    brief = {"priority_timeout": 200_000_000, "max_ack_pending": max_ack_pending}  # what the server has counts
    async with connection(server.url) as dead:
        await create(dead, ordered, **brief)
        inbox = await dead.subscribe("inbox")
        pull = json.dumps({"batch": 10, "expires": 10**10, "group": GROUP}).encode()
        await dead.publish(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{CONSUMER}", pull, reply="inbox")
        for _ in range(min(10, max_ack_pending)):
            assert (await inbox.next_msg(60)).data
    await capture_all(ordered)
    assert seqs(archive) == list(range(1, 11))
    assert await floor(server.url) == 10


async def test_a_stopping_replica_acknowledges_what_it_stores_before_another_takes_over(
    server: NatsServer, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_acks, "HAND_OVER_S", 600)
    monkeypatch.setattr(ordered_acks, "STILL_S", 0)  # what is in flight while it drains does not arrive
    release = threading.Event()

    class Slow(LocalStore):
        def put(self, name: ObjectName, data: pa.Buffer) -> str:
            release.wait(60)
            return super().put(name, data)

    await send(server.url, [b"x"] * 1_000)
    configuration = config(server.url, archive, source={**ORDERED, "takeover": "10m"})
    stop, first = asyncio.Event(), Capture(configuration, store=Slow(str(archive)))
    draining = asyncio.create_task(first.run(stop))
    await until(lambda: first.archiver.blocks.messages == 1_000, "all are held")
    async with running(configuration) as standby, connection(server.url) as client:
        flow = asyncio.create_task(_flow(client))
        await until(lambda: first.source.unacked > 3_000, "others arrive")
        stop.set()
        await until(lambda: bool(first.archiver.blocks.sealed), "it stores")
        assert not standby.acks.active
        release.set()
        await draining
        await until(lambda: standby.acks.active, "another has taken over", 10)
        assert first.stats.acked == await floor(server.url) == first.acks.ordered.last_seq  # type: ignore[attr-defined]
        flow.cancel()
    assert sum(name.rows for name in objects(archive)) == len(seqs(archive))


async def _flow(client: Client) -> None:
    while True:
        for _ in range(100):
            await client.publish("orders.flow", b"x")
        await client.flush()


async def test_a_drain_whose_last_acknowledgement_fails_says_so(
    server: NatsServer, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unanswered(*_: object) -> acks.AckResult:
        return acks.AckResult.UNCONFIRMED

    await send(server.url, [b"x"] * 10)
    stop, capture = asyncio.Event(), Capture(config(server.url, archive, source=ORDERED))
    draining = asyncio.create_task(capture.run(stop))
    await until(lambda: capture.archiver.blocks.messages == 10, "all are held")
    monkeypatch.setattr(acks, "acknowledge", unanswered)
    stop.set()
    with pytest.raises(ExceptionGroup) as raised:
        await draining
    assert raised.value.subgroup(DrainError) is not None


async def test_after_a_reconnect_what_is_held_is_neither_stored_twice_nor_lost(
    server: NatsServer, archive: Path
) -> None:
    await send(server.url, [b"x"] * 500)
    async with running(config(server.url, archive, source=ORDERED)) as state:
        await until(lambda: state.source.unacked == 500, "all messages are held")
        server.kill()
        await until(lambda: not state.source.connected, "the connection is lost")
        server.start()
        await send(server.url, [b"more"] * 500)
        await until(lambda: state.source.unacked == 1_000, "the others have arrived")
    assert seqs(archive) == list(range(1, 1_001))
    assert sum(name.rows for name in objects(archive)) == 1_000
    assert await floor(server.url) == 1_000


async def test_a_capture_goes_over_to_the_other_mode_without_a_gap_or_a_repetition(
    server: NatsServer, archive: Path
) -> None:
    url = server.url
    await send(url, [b"x"] * 100)
    await capture_all(config(url, archive))
    await send(url, [b"x"] * 100)
    ordered = config(url, archive, source=ORDERED)
    (refused,) = [each.plan.refusal for each in await apply(ordered, dry_run=False) if each.plan.kind == "consumer"]
    assert refused is not None
    assert refused.endswith("start_sequence to its ack floor + 1, which is now 101")
    with pytest.raises(SourceError, match=r"is not one for source\.mode ordered"):
        await capture_all(ordered)
    start = {"consumer": "ordered", "deliver_policy": "by_start_sequence", "start_sequence": 101}
    await capture_all(config(url, archive, source={**ORDERED, **start}))
    assert seqs(archive) == list(range(1, 201))
    assert sum(name.rows for name in objects(archive)) == 200


@pytest.mark.parametrize(
    ("stream", "consumer", "reason"),
    [
        (None, {}, "stream ORDERS does not exist"),
        ({}, {}, r"messages are only removed at its beginning \(deny_delete, deny_purge\)"),
        ({"retention": "workqueue"}, {}, "^a work queue needs an acknowledgement for each message"),
        (IN_ORDER, {"max_deliver": 5}, r"has max_deliver 5; with source\.mode ordered it must be unlimited"),
    ],
)
async def test_what_this_mode_cannot_capture_is_refused(
    server: NatsServer, archive: Path, stream: dict[str, Any] | None, consumer: dict[str, Any], reason: str
) -> None:
    ordered = config(server.url, archive, source=ORDERED)
    async with connection(server.url) as client:
        if stream is not None:
            await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"], **stream)
        if consumer:
            await create(client, ordered, **consumer)
    with pytest.raises(SourceError, match=reason):
        await capture_all(ordered)


def test_everything_that_removes_messages_between_others_is_named() -> None:
    for stream, named in (
        ({"deny_purge": True}, "deny_delete"),
        ({"deny_delete": True}, "deny_purge"),
        ({**IN_ORDER, "allow_msg_ttl": True}, "no allow_msg_ttl"),
        ({**IN_ORDER, "allow_rollup_hdrs": True}, "no allow_rollup_hdrs"),
        ({**IN_ORDER, "allow_msg_schedules": True}, "no allow_msg_schedules"),
        ({**IN_ORDER, "max_msgs_per_subject": 1}, "no max_msgs_per_subject"),
    ):
        assert f"({named}); use source.mode shared" in (unsuitable(stream) or "")
    assert unsuitable({**IN_ORDER, "retention": "interest", "max_msgs_per_subject": -1, "max_age": 1}) is None


def test_servers_that_cannot_reset_a_consumer_are_refused() -> None:
    for version in ("2.10.29", "2.13.9"):
        assert version in (too_old(version) or "")
    for version in ("2.14.0-RC.1", "2.14.0", "2.15.1", "3.0"):
        assert too_old(version) is None
    for version in ("2.14.0", "2.14.3"):
        assert "needs nats-server 2.14.4 or newer" in (too_old(version, imported=True) or "")
    for version in ("2.14.4", "3.0"):
        assert too_old(version, imported=True) is None


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({"consumer_config": {"max_deliver": 5}}, "consumer_config.max_deliver: only with mode shared"),
        ({"consumer_config": {"backoff": ["1s"], "max_deliver": 2}}, "consumer_config.backoff: only with mode shared"),
        ({"ack_wait": "1m"}, "ack_wait: only with mode shared"),
        ({"deliver_policy": "last_per_subject"}, "deliver_policy: last_per_subject only with mode shared"),
    ],
)
def test_a_configuration_that_is_only_for_the_other_mode_is_refused(setting: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"source.{problem}")):
        config("nats://127.0.0.1:4222", "/archive", source={**ORDERED, **setting})


def test_captures_of_the_same_subjects_are_refused_only_in_this_mode(tmp_path: Path) -> None:
    def refused(mode: str, *filters: str) -> str:
        for number, subject in enumerate(filters):
            source = {"mode": mode, "consumer": f"c{number}", "filter_subjects": [subject]}
            text = yaml.safe_dump(settings("nats://127.0.0.1:4222", "/archive", source=source))
            (tmp_path / f"{number}.yaml").write_text(text)
        try:
            CaptureFiles([tmp_path]).select()
        except ConfigError as error:
            return str(error)
        return ""

    assert refused("shared", "orders.*", "orders.a") == ""
    assert refused("ordered", "orders.a", "orders.b") == ""
    problem = "captures some of the same subjects into this archive; set other source.filter_subjects"
    assert refused("ordered", "orders.*", "orders.a") == f"{tmp_path}/1.yaml: {tmp_path}/0.yaml {problem}"
