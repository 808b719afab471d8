"""Faults of the consumer and the stream, by somebody who may change them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tests.chaos.faults import fault
from tests.chaos.replica import ChaosError
from tests.chaos.world import World
from tests.support.running import CONSUMER, STREAM


@fault("consumer.delete")
async def delete_consumer(world: World, draw: random.Random) -> None:
    """Deleted under running daemons, which end, and create it again when they are restarted; or it is there at once."""
    info = await world.jetstream.consumer()
    if "error" in info:
        return
    at_once = draw.random() < 0.5
    world.say(f"the consumer is deleted{', and created again at once' if at_once else ''}", count="consumer deletions")
    await world.jetstream.insist(f"CONSUMER.DELETE.{STREAM}.{CONSUMER}")
    if at_once:
        body = {"stream_name": STREAM, "config": info["config"], "action": "create"}
        await world.jetstream.insist(f"CONSUMER.CREATE.{STREAM}.{CONSUMER}", body)


@fault("consumer.change")
async def change_consumer(world: World, draw: random.Random) -> None:
    """Its limits change for a while, or its filters, in ways that match the same messages."""
    halves = ["orders.0", "orders.1", "orders.2", "orders.3", "orders.4", "orders.5", "orders.6"]
    filters: list[dict[str, Any]] = [
        {"filter_subject": None, "filter_subjects": None},
        {"filter_subject": "orders.>", "filter_subjects": None},
        {"filter_subject": None, "filter_subjects": halves},
    ]
    changes = draw.choice(
        (
            {"max_ack_pending": draw.choice((100, 1000, 20_000))},
            {"ack_wait": int(draw.uniform(1, 8) * 1e9)},
            draw.choice(filters),
        )
    )
    world.say(f"the consumer changes: {changes}", count="consumer changes")
    await world.jetstream.change_consumer(**changes)
    await asyncio.sleep(world.hold(draw, 1, 6))
    await world.jetstream.change_consumer(**world.limits)


@fault("consumer.pause")
async def pause_consumer(world: World, draw: random.Random) -> None:
    """It delivers nothing for a while."""
    pause = world.hold(draw, 1, 6)
    world.say(f"the consumer is paused for {pause:.1f} s", count="consumer pauses")
    await world.jetstream.pause_consumer("2100-01-01T00:00:00Z")
    await asyncio.sleep(pause)
    await world.jetstream.pause_consumer(None)


async def _floor(world: World) -> int:
    """Up to this sequence the daemons have acknowledged everything."""
    info = await world.jetstream.insist(f"CONSUMER.INFO.{STREAM}.{CONSUMER}")
    return int(info.get("ack_floor", {}).get("stream_seq", 0))


@fault("stream.purge")
async def purge(world: World, draw: random.Random) -> None:
    """Everything is purged; what no daemon had acknowledged is gone."""
    async with world.publisher.quiet():
        floor = await _floor(world)
        info = await world.jetstream.insist(f"STREAM.INFO.{STREAM}")
        world.ledger.removing(range(1, info["state"]["last_seq"] + 1))
        answer = await world.jetstream.insist(f"STREAM.PURGE.{STREAM}")
        excused = world.ledger.excuse(range(floor + 1, 1 << 62))
    world.say(f"{answer.get('purged')} messages are purged, {excused} of them not captured", count="stream purges")


@fault("stream.delete_messages")
async def delete_messages(world: World, draw: random.Random) -> None:
    """Single messages are deleted, captured or not."""
    async with world.publisher.quiet():
        floor = await _floor(world)
        recent = {max(1, floor + draw.randrange(-50, 2000)) for _ in range(20)}
        gone = set(world.ledger.sample(draw, 10)) | recent
        world.ledger.removing(gone)
        for seq in gone:
            await world.jetstream.insist(f"STREAM.MSG.DELETE.{STREAM}", {"seq": seq, "no_erase": draw.random() < 0.5})
        excused = world.ledger.excuse({seq for seq in gone if seq > floor})
    world.say(f"up to {len(gone)} messages are deleted, {excused} of them not captured", count="message deletions")


@fault("stream.recreate")
async def recreate(world: World, draw: random.Random) -> None:
    """Deleted and created again, with sequences from 1."""
    pause = draw.choice((0, world.hold(draw, 0, 2)))
    async with world.publisher.quiet():
        floor = await _floor(world)
        answer = await world.jetstream.insist(f"STREAM.DELETE.{STREAM}")
        if "error" in answer:
            raise ChaosError(f"the stream could not be deleted: {answer['error']}")
        excused = world.ledger.excuse(range(floor + 1, 1 << 62))
        world.ledger.new_era()
        await asyncio.sleep(pause)
        await world.jetstream.create_stream()
    text = f"the stream is deleted and created again after {pause:.1f} s, {excused} messages not captured"
    world.say(text, count="stream recreations")
