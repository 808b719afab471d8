"""What happens in cells of the matrix: how streams are filled, what changes during a capture, and whole plays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from nats.js.api import KeyValueConfig

from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.manage.check import check
from jetcapture_py.verify.proof import verify
from tests.integration.matrix.stage import COUNT, ServerRefusedError, Stage, StreamMessage
from tests.integration.security import leaves
from tests.support.proofs import unchecked
from tests.support.running import CONSUMER, until

Scene = Callable[[Stage], Awaitable[None]]
Change = Callable[[Stage, Capture], Awaitable[None]]
SECOND = 10**9
LATER = "2100-01-01T00:00:00Z"


# ------------------------------------------------------------------ what a capture selects


def last_of_each_subject(messages: list[StreamMessage]) -> list[StreamMessage]:
    newest = {message.subject: message for message in messages}
    return [message for message in messages if newest[message.subject] is message]


def of_two_subjects(messages: list[StreamMessage]) -> list[StreamMessage]:
    return [message for message in messages if message.subject.endswith((".1", ".3"))]


# ------------------------------------------------------------------ how a stream is filled


async def fill_nothing(stage: Stage) -> None:
    """Leave the stream empty for now."""


async def fill_past_the_limit(stage: Stage) -> None:
    """Messages up to the limit of `discard: new`."""
    await stage.fill()
    with pytest.raises(ServerRefusedError, match="maximum messages"):
        await stage.send("{p}.0", b"too many")


async def fill_unconfirmed(stage: Stage) -> None:
    for number in range(COUNT):
        await stage.client.publish(f"{stage.prefix}.a", b"%d" % number)
    await stage.holds(COUNT)


async def fill_with_duplicates_and_rollup(stage: Stage) -> None:
    for number in range(COUNT):
        await stage.send(f"{{p}}.{number % 4}", b"%d" % number, {"Nats-Msg-Id": str(number // 2)})
    await stage.send("{p}.2", b"all that remains of {p}.2", {"Nats-Rollup": "sub"})


async def fill_counters(stage: Stage) -> None:
    for number in range(COUNT):
        await stage.send(f"{{p}}.{number % 3}", b"", {"Nats-Incr": f"+{number + 1}"})


async def fill_batch(stage: Stage) -> None:
    await stage.send("{p}.a", b"1", {"Nats-Batch-Id": "batch", "Nats-Batch-Sequence": "1"})
    for number in range(2, COUNT):
        headers = {"Nats-Batch-Id": "batch", "Nats-Batch-Sequence": str(number)}
        await stage.client.publish(f"{stage.prefix}.a", b"%d" % number, headers=headers)
    commit = {"Nats-Batch-Id": "batch", "Nats-Batch-Sequence": str(COUNT), "Nats-Batch-Commit": "1"}
    await stage.send("{p}.a", b"last", commit)


async def fill_fast_batch(stage: Stage) -> None:
    inbox = stage.client.new_inbox()
    answers = await stage.client.subscribe(f"{inbox}.>")
    for number in range(1, COUNT + 1):
        operation = 0 if number == 1 else 2 if number == COUNT else 1
        reply = f"{inbox}.batch.10.fail.{number}.{operation}.$FI"
        await stage.client.publish(f"{stage.prefix}.a", b"%d" % number, reply=reply)
        if number == 1:
            await answers.next_msg(30)
    await stage.holds(COUNT)


async def fill_shared(stage: Stage) -> None:
    """Messages of a work queue, some of them for another consumer."""
    await stage.consumer("other", filter_subjects=["{p}.0", "{p}.2", "{p}.4"])
    await stage.fill()


async def fill_key_value(stage: Stage) -> None:
    bucket = f"b{stage.number}"
    stage.stream = f"KV_{bucket}"
    store = await stage.client.jetstream().create_key_value(KeyValueConfig(bucket=bucket, history=5))
    for number in range(COUNT):
        await store.put(f"key.{number % 3}", b"%d" % number)
    await store.delete("key.0")
    await store.purge("key.1")


async def fill_object_store(stage: Stage) -> None:
    bucket = f"o{stage.number}"
    stage.stream = f"OBJ_{bucket}"
    store = await stage.client.jetstream().create_object_store(bucket)
    await store.put("large", bytes(300_000))


# ------------------------------------------------------------------ what else there is before a capture


# ------------------------------------------------------------------ what changes under a capture


async def expire_by_age(stage: Stage, state: Capture) -> None:
    await stage.update(max_age=200_000_000, duplicate_window=100_000_000)
    await stage.holds(0)


async def expire_with_marker(stage: Stage, state: Capture) -> None:
    await stage.send("{p}.a", b"short", {"Nats-TTL": "1s"})
    await stage.looked(lambda messages: len(messages) == 2, "the message has made way for a delete marker")
    assert dict(stage.seen[2].headers or []).keys() >= {"Nats-Marker-Reason", "Nats-TTL"}
    await stage.received(state)


async def fall_due(stage: Stage, state: Capture) -> None:
    """Of two schedules one falls due."""
    target, now = f"{stage.prefix}.due", datetime.now(UTC)
    for name, due in (("waits", now + timedelta(hours=1)), ("due", now + timedelta(seconds=1))):
        headers = {"Nats-Schedule": f"@at {due:%Y-%m-%dT%H:%M:%SZ}", "Nats-Schedule-Target": target}
        await stage.send(f"{{p}}.schedule.{name}", name.encode(), headers)
    await stage.looked(lambda messages: any(message.subject == target for message in messages), "one falls due")
    await stage.received(state)
    assert "Nats-Scheduler" in dict(stage.expected[-1].headers or [])


async def edit(stage: Stage, state: Capture) -> None:
    await stage.update(max_msgs=1000, subjects=["{p}.>", "{p}-more.>"], compression="s2")
    await stage.update(
        subject_transform={"src": "{p}.>", "dest": "changed.{p}.>"}, republish={"src": ">", "dest": "again.{p}.>"}
    )
    await stage.update(retention="interest")
    await stage.refill(state)


async def remove_messages(stage: Stage, state: Capture) -> None:
    await stage.ask("STREAM.MSG.DELETE.{stream}", {"seq": 4})
    await stage.ask("STREAM.PURGE.{stream}", {"filter": "{p}.1"})
    await stage.refill(state)
    await stage.ask("STREAM.PURGE.{stream}")
    await stage.holds(0)
    await stage.refill(state)


async def seal(stage: Stage, state: Capture) -> None:
    await stage.update(sealed=True)
    with pytest.raises(ServerRefusedError, match="sealed"):
        await stage.send("{p}.a", b"no more")


async def reset(stage: Stage, state: Capture) -> None:
    """Everything is delivered again, and read once."""
    before = state.source.fetched
    await stage.ask("CONSUMER.RESET.{stream}.{consumer}", {})
    await until(lambda: state.source.fetched >= 2 * before, "everything has been delivered again")
    await stage.fill(3)
    await stage.look()
    await until(lambda: state.source.fetched >= 2 * before + 3, "what follows is received")


async def change_leaders(stage: Stage, state: Capture) -> None:
    await stage.ask("CONSUMER.LEADER.STEPDOWN.{stream}.{consumer}")
    await stage.ask("STREAM.LEADER.STEPDOWN.{stream}")
    await stage.refill(state)


async def scale(stage: Stage, state: Capture) -> None:
    for replicas in (3, 1):
        await stage.update(num_replicas=replicas)

        async def complete(others: int = replicas - 1) -> bool:
            cluster = (await stage.ask("STREAM.INFO.{stream}"))["cluster"]
            current = [replica["current"] for replica in cluster.get("replicas") or ()]
            return bool(cluster.get("leader")) and current == [True] * others

        await until(complete, f"the stream has {replicas} replicas")
        await stage.refill(state)


# ------------------------------------------------------------------ what is checked in the end


async def check_warns(stage: Stage) -> None:
    """`check` warns of both settings."""
    warnings = [item.text for item in (await check(stage.config())).items if item.level == "warning"]
    for setting in ("max_deliver", "inactive_threshold"):
        assert any(setting in text for text in warnings), warnings


# ------------------------------------------------------------------ plays


def play_copied(count: int, **settings: Any) -> Scene:
    async def play(stage: Stage) -> None:
        for suffix in "ab":
            await stage.create(f"{{s}}-{suffix}", subjects=[f"{{p}}-{suffix}.>"])
            for number in range(COUNT):
                await stage.send(f"{{p}}-{suffix}.{number % 3}", b"%d" % number, {"From": suffix})
        await stage.create(**settings)
        if "subjects" in settings:
            await stage.fill()
        await stage.holds(count)
        await stage.capture()
        await stage.check_archive()

    return play


async def play_promoted(stage: Stage) -> None:
    await stage.create("{s}-A", subjects=["{p}-a.>"])
    for number in range(COUNT):
        await stage.send(f"{{p}}-a.{number}", b"%d" % number)
    await stage.create(mirror={"name": "{s}-A"})
    await stage.holds(COUNT)
    async with stage.capturing() as state:
        await stage.update(mirror=None, subjects=["{p}.>"])
        await stage.refill(state)
    await stage.check_archive()


def play_ended(subject: str, *messages: str) -> Scene:
    """Something that the capture needs is deleted; it stores what it holds, and ends with one of the messages."""

    async def delete(stage: Stage) -> None:
        async with stage.capturing() as state:
            await stage.ask(subject)
            await until(lambda: state.source.failure is not None, "the capture has noticed")

    async def play(stage: Stage) -> None:
        await stage.create()
        await stage.fill()
        with pytest.raises(JetcaptureError) as caught, leaves():
            await asyncio.wait_for(delete(stage), 120)
        assert str(caught.value) in [text.format(stream=stage.stream, consumer=CONSUMER) for text in messages]
        await stage.check_archive(proven=False)

    return play


def play_restored(*, consumers: bool, stream: str = "{s}") -> Scene:
    """Captured, deleted, restored from a backup (with its consumers, under a name), and captured again."""

    async def play(stage: Stage) -> None:
        await stage.create()
        await stage.fill()
        if stream == "{s}":
            await stage.capture()
        inbox = stage.client.new_inbox()
        arriving = await stage.client.subscribe(inbox)
        request = {"deliver_subject": inbox, "no_consumers": not consumers}
        backup = await stage.ask("STREAM.SNAPSHOT.{stream}", request)
        chunks = []
        while (chunk := await arriving.next_msg(30)).data:
            chunks.append(chunk.data)
            if chunk.reply:
                await stage.client.publish(chunk.reply)
        await stage.ask("STREAM.DELETE.{stream}")
        stage.stream = stage.own(stream)
        request = {"config": {**backup["config"], "name": stage.stream}, "state": backup["state"]}
        target = (await stage.ask("STREAM.RESTORE.{stream}", request))["deliver_subject"]
        for data in [*chunks, b""]:
            answer = await stage.client.request(target, data, 30)
            assert b'"error"' not in answer.data, answer.data
        await stage.fill()
        await stage.capture()
        await stage.check_archive()

    return play


async def play_given_up(stage: Stage) -> None:
    """Another client has taken messages as often as they are delivered: no capture gets them."""
    await stage.create()
    await stage.consumer(max_deliver=1, ack_wait=SECOND)
    await stage.fill()
    other = await stage.client.jetstream().pull_subscribe_bind(CONSUMER, stage.stream)
    taken = {message.metadata.sequence.stream for message in await other.fetch(3)}
    await stage.capture()

    async def given_up() -> bool:
        return (await stage.consumer_state())["num_ack_pending"] == 0

    await until(given_up, "the server has given up on what was taken")
    stage.selects = lambda messages: [message for message in messages if message.seq not in taken]
    await stage.check_archive(proven=False)
    report = await verify(stage.config())
    assert report.missing in (0, len(taken)), "the ack floor may stay below them, or pass them"
    assert any("whether the server gave up on messages" in note for note in unchecked(report))


async def play_paused(stage: Stage) -> None:
    await stage.create()
    await stage.consumer(pause_until=LATER)
    await stage.fill()
    problems = (await check(stage.config())).problems
    assert [item.text for item in problems] == [f"it is paused until {LATER}; resume it"]
    capture = asyncio.create_task(stage.capture())

    async def waits() -> bool:
        return bool((await stage.consumer_state())["num_waiting"])

    await until(waits, "the capture pulls")
    assert not capture.done()
    await stage.ask("CONSUMER.PAUSE.{stream}.{consumer}", {})
    await capture
    await stage.check_archive()
