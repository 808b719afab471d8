"""Faults of daemons and servers."""

from __future__ import annotations

import asyncio
import random
import signal

from tests.chaos.faults import fault
from tests.chaos.replica import Replica
from tests.chaos.world import World
from tests.support.nats_server import NatsServer
from tests.support.running import CONSUMER, STREAM


def _victims(world: World, draw: random.Random) -> list[Replica]:
    count = draw.choices(range(1, len(world.replicas) + 1), [4.0**-n for n in range(len(world.replicas))])[0]
    return draw.sample(world.replicas, count)


@fault("daemon.kill")
async def kill_daemons(world: World, draw: random.Random) -> None:
    """SIGKILL to one or several at once."""
    for replica in _victims(world, draw):
        await asyncio.sleep(draw.choice((0, 0, 0.3)))
        if replica.signal(signal.SIGKILL):
            world.say(f"kill -9 {replica}", count="daemon kills")


@fault("daemon.stop")
async def terminate_daemons(world: World, draw: random.Random) -> None:
    """SIGTERM: it drains, ends with 0, and is started again."""
    for replica in _victims(world, draw):
        if replica.signal(signal.SIGTERM):
            world.say(f"SIGTERM to {replica}", count="daemon SIGTERMs")


@fault("daemon.stop_twice")
async def terminate_daemon_twice(world: World, draw: random.Random) -> None:
    """SIGTERM and another one: it ends at once, whatever it holds."""
    replica, pause = draw.choice(world.replicas), draw.uniform(0, 0.2)
    if replica.signal(signal.SIGTERM):
        await asyncio.sleep(pause)
        replica.signal(signal.SIGTERM)
        world.say(f"SIGTERM to {replica}, and again after {pause:.2f} s", count="daemon double SIGTERMs")


@fault("daemon.freeze")
async def freeze_daemon(world: World, draw: random.Random) -> None:
    """SIGSTOP for longer than ack_wait: others get its messages; then it goes on as if nothing had been."""
    replica, pause = draw.choice(world.replicas), world.shape.ack_wait * draw.uniform(1.1, 3)
    if replica.signal(signal.SIGSTOP):
        world.say(f"SIGSTOP to {replica} for {pause:.1f} s", count="daemon SIGSTOPs")
        await asyncio.sleep(pause)
        replica.signal(signal.SIGCONT)


@fault("daemon.freeze_long")
async def freeze_daemon_until_dropped(world: World, draw: random.Random) -> None:
    """SIGSTOP for longer than a server waits for a client that does not read, 10 s if not configured."""
    replica, pause = draw.choice(world.replicas), world.hold(draw, 14, 14)
    if replica.signal(signal.SIGSTOP):
        world.say(f"SIGSTOP to {replica} for {pause:.1f} s", count="long daemon SIGSTOPs")
        await asyncio.sleep(pause)
        replica.signal(signal.SIGCONT)


@fault("daemon.stall")
async def stall_daemon(world: World, draw: random.Random) -> None:
    """SIGSTOP for three times ack_wait, while the others go on."""
    replica, pause = draw.choice(world.replicas), 3 * world.shape.ack_wait
    if replica.signal(signal.SIGSTOP):
        world.say(f"SIGSTOP to {replica} for {pause:.1f} s", count="daemon SIGSTOPs")
        await asyncio.sleep(pause)
        replica.signal(signal.SIGCONT)


def _name(world: World, server: NatsServer) -> str:
    return f"server-{world.servers.index(server)}"


@fault("server.kill")
async def kill_server(world: World, draw: random.Random) -> None:
    """SIGKILL, and a restart a moment later."""
    server, pause = draw.choice(world.servers), draw.choice((0, world.hold(draw, 0, 3)))
    world.say(f"kill -9 {_name(world, server)} for {pause:.1f} s", count="server kills")
    await asyncio.to_thread(server.kill)
    await asyncio.sleep(pause)
    await asyncio.to_thread(server.start)


@fault("server.stop")
async def stop_server(world: World, draw: random.Random) -> None:
    """SIGTERM, and a restart a moment later."""
    server, pause = draw.choice(world.servers), draw.choice((0, world.hold(draw, 0, 3)))
    world.say(f"SIGTERM to {_name(world, server)} for {pause:.1f} s", count="server SIGTERMs")
    await asyncio.to_thread(server.stop)
    await asyncio.sleep(pause)
    await asyncio.to_thread(server.start)


@fault("server.freeze")
async def freeze_server(world: World, draw: random.Random) -> None:
    """SIGSTOP for seconds: connections stay, nobody answers."""
    server, pause = draw.choice(world.servers), world.hold(draw, 1, 8)
    world.say(f"SIGSTOP to {_name(world, server)} for {pause:.1f} s", count="server SIGSTOPs")
    server.pause()
    await asyncio.sleep(pause)
    server.resume()


def _clustered(world: World) -> bool:
    return len(world.servers) >= 3


async def _leader(world: World) -> NatsServer | None:
    info = await world.jetstream.ask(f"STREAM.INFO.{STREAM}")
    name = info.get("cluster", {}).get("leader", "")
    return world.servers[int(name[1:])] if name else None


@fault("server.kill_leader", _clustered)
async def kill_leader(world: World, draw: random.Random) -> None:
    """SIGKILL to the stream's leader, and a restart a moment later."""
    pause = world.hold(draw, 0, 3)
    server = await _leader(world)
    if server is None or not server.running:
        return
    world.say(f"kill -9 {_name(world, server)}, the leader, for {pause:.1f} s", count="leader kills")
    world.counts["server kills"] += 1
    await asyncio.to_thread(server.kill)
    await asyncio.sleep(pause)
    await asyncio.to_thread(server.start)


@fault("server.step_down", _clustered)
async def step_down(world: World, draw: random.Random) -> None:
    """The stream's or the consumer's leader hands over."""
    what = draw.choice((f"STREAM.LEADER.STEPDOWN.{STREAM}", f"CONSUMER.LEADER.STEPDOWN.{STREAM}.{CONSUMER}"))
    answer = await world.jetstream.ask(what)
    world.say(f"{what}{' was refused' if 'error' in answer else ''}", count="leader step-downs")


@fault("server.lose_quorum", _clustered)
async def lose_quorum(world: World, draw: random.Random) -> None:
    """Two of three servers are away for a while."""
    gone, pause = draw.sample(world.servers, 2), world.hold(draw, 2, 6)
    world.say(f"kill -9 {' and '.join(_name(world, each) for each in gone)} for {pause:.1f} s", count="lost quorums")
    world.counts["server kills"] += 2
    for server in gone:
        await asyncio.to_thread(server.kill)
    await asyncio.sleep(pause)
    for server in gone:
        await asyncio.to_thread(server.start)
