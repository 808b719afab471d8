"""`apply` makes no server delete a message, whatever the retention of the stream and whatever is changed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from jetcapture_py.config.model import Managed
from jetcapture_py.config.stream import ConsumerSection, StreamSection
from jetcapture_py.errors import SourceError
from jetcapture_py.manage.apply import Applied, apply, run
from jetcapture_py.manage.many import show_one
from tests.integration.manage.api import ask, ask_with, create
from tests.support.nats_server import NatsServer, cluster_configs
from tests.support.running import connection

Start = Callable[..., NatsServer]
SECOND = 10**9
RETENTIONS = ("limits", "interest", "workqueue")
ALWAYS = frozenset(RETENTIONS)
INTEREST, QUEUE, UNLIMITED = frozenset({"interest"}), frozenset({"workqueue"}), frozenset({"limits"})
STORED = {"limits": 24, "interest": 15, "workqueue": 19}
"""Messages of a stream of `fill`, after its consumers acknowledged a few."""
SOURCE_SETTINGS = {
    "filter_subjects",
    "deliver_policy",
    "start_sequence",
    "start_time",
    "replay_policy",
    "ack_wait",
    "max_ack_pending",
}


@dataclass(frozen=True)
class Change:
    """A change of one setting, with what the server requires with it; NAME in a value is the stream's name."""

    section: str
    setting: str
    value: Any
    refused: frozenset[str] = frozenset()
    """Retentions of streams for which `apply` or the server refuses it."""
    with_it: tuple[tuple[str, Any], ...] = ()


def stream(setting: str, value: Any, refused: Iterable[str] = (), **with_it: Any) -> Change:
    return Change("stream", setting, value, frozenset(refused), tuple(with_it.items()))


def switch(setting: str, refused: Iterable[str] = (), **with_it: Any) -> Change:
    return Change("stream", setting, "true", frozenset(refused), tuple(with_it.items()))


def source(setting: str, value: Any, refused: Iterable[str] = ()) -> Change:
    return Change("source", setting, value, frozenset(refused))


def consumer(setting: str, value: Any, refused: Iterable[str] = ()) -> Change:
    return Change("consumer_config", setting, value, frozenset(refused))


CONSUMER_CHANGES = [
    source("filter_subjects", ["NAME.a"], INTEREST),
    source("filter_subjects", ["NAME.c"], INTEREST | QUEUE),
    source("filter_subjects", ["NAME.d"], INTEREST | QUEUE),
    source("filter_subjects", ["NAME.a", "NAME.b", "NAME.d"], QUEUE),
    source("filter_subjects", ["NAME.a", "NAME.b", "NAME.new"]),
    source("filter_subjects", [], QUEUE),
    source("ack_wait", "1m"),
    source("ack_wait", "1s"),
    source("max_ack_pending", 70),
    source("max_ack_pending", 1),
    source("deliver_policy", "new", ALWAYS),
    source("start_sequence", 5, ALWAYS),
    source("start_time", "2026-01-01T00:00:00Z", ALWAYS),
    source("replay_policy", "original", ALWAYS),
    consumer("description", "new"),
    consumer("max_deliver", 9),
    consumer("max_deliver", 1),
    consumer("backoff", ["1s", "2s"]),
    consumer("sample_freq", "50"),
    consumer("max_waiting", 7, ALWAYS),
    consumer("max_batch", 10),
    consumer("max_expires", "10s"),
    consumer("max_bytes", "1MiB"),
    consumer("inactive_threshold", "1s", INTEREST),
    consumer("num_replicas", 1),
    consumer("mem_storage", "true", ALWAYS),
    consumer("metadata", {"team": "b"}),
    consumer("pause_until", "2100-01-01T00:00:00Z"),
]
STREAM_CHANGES = [
    stream("description", "new"),
    stream("subjects", ["NAME.>", "more.NAME.>"]),
    stream("subjects", ["NAME.a"]),
    stream("retention", "limits", QUEUE),
    stream("retention", "interest", UNLIMITED | QUEUE),
    stream("retention", "workqueue", UNLIMITED | INTEREST),
    stream("max_consumers", 1),
    stream("max_consumers", 20),
    stream("max_msgs", 5000),
    stream("max_msgs", 5, ALWAYS),
    stream("max_msgs", "unlimited"),
    stream("max_bytes", "2MiB"),
    stream("max_bytes", "1KiB", ALWAYS),
    stream("max_bytes", "unlimited"),
    stream("max_age", "12h"),
    stream("max_age", "100ms", ALWAYS),
    stream("max_age", "100ms", ALWAYS, duplicate_window="100ms"),
    stream("max_age", "unlimited"),
    stream("max_msgs_per_subject", 50),
    stream("max_msgs_per_subject", 2, ALWAYS),
    stream("max_msgs_per_subject", 2, ALWAYS, discard="new", discard_new_per_subject=True),
    stream("max_msg_size", 10),
    stream("discard", "new"),
    switch("discard_new_per_subject", discard="new", max_msgs_per_subject=50),
    stream("storage", "memory", ALWAYS),
    stream("num_replicas", 3, ALWAYS),
    switch("no_ack"),
    stream("duplicate_window", "10s"),
    stream("placement", {"cluster": "elsewhere"}),
    stream("mirror", {"name": "ORIGIN"}, ALWAYS),
    stream("sources", [{"name": "ORIGIN"}]),
    stream("compression", "s2"),
    stream("first_seq", 100, ALWAYS),
    stream("subject_transform", {"dest": "x.>"}),
    stream("republish", {"dest": "again.>"}),
    switch("sealed"),
    switch("deny_delete"),
    switch("deny_purge"),
    switch("allow_rollup_hdrs"),
    switch("allow_direct"),
    switch("mirror_direct"),
    switch("allow_msg_ttl"),
    stream("subject_delete_marker_ttl", "1s", allow_msg_ttl=True, allow_rollup_hdrs=True),
    switch("allow_msg_counter", ALWAYS),
    switch("allow_atomic"),
    switch("allow_msg_schedules"),
    stream("persist_mode", "async", ALWAYS),
    switch("allow_batched"),
    stream("consumer_limits", {"inactive_threshold": "1s"}, INTEREST),
    stream("consumer_limits", {"max_ack_pending": 60_000}),
    stream("metadata", {"team": "b"}),
]


@dataclass(frozen=True)
class Case:
    """A change, and the stream that it is applied to."""

    name: str
    retention: str
    change: Change

    def managed(self, url: str) -> Managed:
        """The configuration that has this change and no other."""
        settings: dict[str, Any] = {
            "stream": {"name": self.name},
            "source": {
                "stream": self.name,
                "consumer": "archive",
                "filter_subjects": [f"{self.name}.a", f"{self.name}.b"],
                "ack_wait": "2s",
                "consumer_config": {},
            },
        }
        change = json.loads(json.dumps(self.change.value).replace("NAME", self.name))
        if self.change.section == "stream":
            settings["stream"] |= {self.change.setting: change, **dict(self.change.with_it)}
        elif self.change.section == "source":
            settings["source"] |= {self.change.setting: change}
            if self.change.setting.startswith("start_"):
                settings["source"]["deliver_policy"] = f"by_{self.change.setting}"
        else:
            settings["source"]["consumer_config"] = {self.change.setting: change}
            if self.change.setting == "backoff":
                del settings["source"]["ack_wait"]
        return Managed.model_validate({"nats": {"servers": [url]}, **settings})


def cases(changes: Iterable[Change], retentions: Iterable[str]) -> list[Case]:
    return [
        Case(f"{retention}{number}", retention, change)
        for retention in retentions
        for number, change in enumerate(changes)
    ]


async def messages(client: Client, name: str) -> int:
    return int((await ask_with(client, f"STREAM.INFO.{name}"))["state"]["messages"])


def stored(url: str, name: str) -> int:
    return int(asyncio.run(ask(url, f"STREAM.INFO.{name}"))["state"]["messages"])


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async def repeat() -> None:
        while not await condition():
            await asyncio.sleep(0.05)

    await asyncio.wait_for(repeat(), 300)


async def add_consumer(client: Client, name: str, consumer: str, filters: list[str]) -> None:
    config = {
        "name": consumer,
        "durable_name": consumer,
        "ack_policy": "explicit",
        "ack_wait": 2 * SECOND,  # a consumer is idle only once this is over
        "max_ack_pending": 50_000,
        "filter_subjects": filters,
    }
    await ask_with(client, f"CONSUMER.CREATE.{name}.{consumer}", {"stream_name": name, "config": config})


async def receive(client: Client, name: str, consumer: str, count: int, acks: int) -> None:
    subscription = await client.jetstream().pull_subscribe_bind(consumer=consumer, stream=name)
    for message in (await subscription.fetch(count, timeout=30))[:acks]:
        await message.ack_sync(timeout=30)
    await subscription.unsubscribe()


async def fill(client: Client, case: Case, replicas: int = 1) -> None:
    """Create the stream and two consumers that have received some of its 24 messages and acknowledged fewer."""
    name = case.name
    config = {
        "name": name,
        "subjects": [f"{name}.>"],
        "retention": case.retention,
        "num_replicas": replicas,
        "max_msgs": 1000,
        "max_bytes": 1 << 20,
        "max_age": 86_400 * SECOND,
    }
    await ask_with(client, f"STREAM.CREATE.{name}", config)
    others = ["c"] if case.retention == "workqueue" else ["b", "c"]
    await add_consumer(client, name, "archive", [f"{name}.a", f"{name}.b"])
    await add_consumer(client, name, "other", [f"{name}.{token}" for token in others])
    for number in range(24):  # confirmed, because a cluster may drop others
        await client.jetstream().publish(f"{name}.{'abcd'[number % 4]}", b"x" * 100, timeout=30)
    await receive(client, name, "archive", 4, 2)
    await receive(client, name, "other", 3, 3)

    async def settled() -> bool:
        return await messages(client, name) == STORED[case.retention]

    await until(settled)


async def outcome(url: str, case: Case) -> bool:
    """Apply the change for real; whether it was refused."""
    try:
        return not all(each.plan.possible for each in await apply(case.managed(url), dry_run=False))
    except SourceError:
        return True


async def apply_all(url: str, chosen: list[Case], replicas: int = 1) -> None:
    """Apply every change to a stream of its own, and compare the number of messages and what is refused."""
    async with connection(url) as client:
        for case in chosen:
            await fill(client, case, replicas)
        refused = [case for case in chosen if await outcome(url, case)]
        assert await lost(client, chosen) == []
        assert refused == [case for case in chosen if case.retention in case.change.refused]


async def lost(client: Client, chosen: list[Case]) -> list[Case]:
    """The changes whose stream has fewer messages now."""
    return [case for case in chosen if await messages(client, case.name) < STORED[case.retention]]


async def lost_later(url: str, chosen: list[Case]) -> list[Case]:
    """The same once the server has deleted consumers for being idle."""
    (idle,) = (
        case.name for case in chosen if case.change.setting == "inactive_threshold" and case.retention == "workqueue"
    )
    async with connection(url) as client:

        async def deleted() -> bool:
            answer = await client.request(f"$JS.API.CONSUMER.INFO.{idle}.archive", timeout=10)
            return b"consumer not found" in answer.data

        await until(deleted)
        return await lost(client, chosen)


@pytest.mark.exhaustive
def test_no_change_of_a_setting_makes_the_server_delete_messages(nats_server: Start) -> None:
    changed = {(change.section, change.setting) for change in (*STREAM_CHANGES, *CONSUMER_CHANGES)}
    assert changed == {
        *(("stream", name) for name in StreamSection.model_fields if name != "name"),
        *(("consumer_config", name) for name in ConsumerSection.model_fields),
        *(("source", name) for name in SOURCE_SETTINGS),
    }
    server = nats_server()
    chosen = cases((*STREAM_CHANGES, *CONSUMER_CHANGES), RETENTIONS)
    asyncio.run(create(server.url, {"name": "ORIGIN", "subjects": ["origin.>"]}))
    asyncio.run(apply_all(server.url, chosen))
    server.stop()  # some settings take effect when a server starts
    server.start()
    assert asyncio.run(lost_later(server.url, chosen)) == []


def shown(managed: Managed, capsys: pytest.CaptureFixture[str], *, dry_run: bool = False) -> tuple[int, str]:
    code = show_one(run(managed, dry_run=dry_run))
    return code, capsys.readouterr().out


def test_filters_of_an_interest_stream_are_not_narrowed_while_messages_need_them(
    nats_server: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    url = nats_server().url

    def narrowed() -> Managed:
        source = {"stream": "I", "consumer": "archive", "filter_subjects": ["i.a"], "consumer_config": {}}
        return Managed.model_validate({"nats": {"servers": [url]}, "source": source})

    async def publish() -> None:
        await create(url, {"name": "I", "subjects": ["i.>"], "retention": "interest"})
        async with connection(url) as client:
            await add_consumer(client, "I", "archive", ["i.a", "i.b"])
            for number in range(200):
                await client.jetstream().publish(f"i.{'ab'[number % 2]}", b"x")

    asyncio.run(publish())
    for dry_run in (True, False):
        code, text = shown(narrowed(), capsys, dry_run=dry_run)
        assert code == 1
        assert "filter_subjects" in text
        assert "the server would delete 100 messages (i.b) that no other consumer is sure to need" in text
        assert "capture them first, or create another consumer for them" in text
    assert stored(url, "I") == 200

    async def add_second() -> None:  # as the refusal advises
        async with connection(url) as client:
            await add_consumer(client, "I", "second", ["i.b"])

    asyncio.run(add_second())
    assert shown(narrowed(), capsys)[0] == 0
    assert stored(url, "I") == 200


def test_a_consumer_does_not_take_a_threshold_of_the_stream_that_costs_messages(
    nats_server: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    url = nats_server().url
    limits = {"consumer_limits": {"inactive_threshold": SECOND}}
    config = {"name": "I", "subjects": ["i.>"], "retention": "interest"}
    asyncio.run(create(url, config, {"max_ack_pending": 70}, messages=20))
    asyncio.run(ask(url, "STREAM.UPDATE.I", {**config, **limits}))
    source = {"stream": "I", "consumer": "archive", "consumer_config": {"description": "new"}}
    code, text = shown(Managed.model_validate({"nats": {"servers": [url]}, "source": source}), capsys)
    assert code == 1
    assert "any change makes it take the stream's consumer_limits.inactive_threshold" in text
    assert "after 1s without pulls, and with it 20 messages" in text
    assert stored(url, "I") == 20


def test_a_mirror_keeps_messages_that_expired_at_their_origin(nats_server: Start) -> None:
    url = nats_server().url

    async def applied() -> list[Applied]:
        await create(url, {"name": "ORIGIN", "subjects": ["o.>"], "allow_msg_ttl": True})
        await create(url, {"name": "COPY", "mirror": {"name": "ORIGIN"}})
        async with connection(url) as client:
            for _ in range(10):
                await client.jetstream().publish("o.a", b"x", headers={"Nats-TTL": "1s"})

            async def expired() -> bool:
                return await messages(client, "ORIGIN") == 0 and await messages(client, "COPY") == 10

            await until(expired)
        text = {"nats": {"servers": [url]}, "stream": {"name": "COPY", "allow_msg_ttl": True}}
        return await apply(Managed.model_validate(text), dry_run=False)

    (result,) = asyncio.run(applied())
    assert "copied messages whose own TTL is over" in str(result.plan.changes[0].refusal)
    assert stored(url, "COPY") == 10


@pytest.mark.exhaustive
def test_no_change_of_a_consumer_makes_a_cluster_delete_messages(tmp_path: Path) -> None:
    servers = [NatsServer(tmp_path / f"n{number}", config) for number, config in enumerate(cluster_configs())]
    chosen = cases(CONSUMER_CHANGES, ("interest", "workqueue"))
    chosen = [
        replace(case, change=replace(case.change, value=3)) if case.change.setting == "num_replicas" else case
        for case in chosen
    ]

    async def ready() -> bool:
        with contextlib.suppress(AssertionError, TimeoutError, OSError):
            return bool(await ask(servers[0].url, "INFO"))
        return False

    async def applied() -> list[Case]:
        await until(ready)
        await apply_all(servers[0].url, chosen, replicas=3)
        for case in chosen:  # a new leader deletes what consumers no longer need
            await ask(servers[0].url, f"STREAM.LEADER.STEPDOWN.{case.name}")
        return await lost_later(servers[0].url, chosen)

    with contextlib.ExitStack() as stack:
        for server in servers:
            server.store_dir.mkdir()
            stack.enter_context(server)
        assert asyncio.run(applied()) == []
