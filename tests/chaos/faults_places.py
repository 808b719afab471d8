"""Faults of what lies between and below: the network, the store, the clock."""

from __future__ import annotations

import asyncio
import random

from tests.chaos.archive import LocalArchive
from tests.chaos.faults import fault
from tests.chaos.proxy import TROUBLES, Direction, Trouble
from tests.chaos.world import World


@fault("network.cut")
async def cut(world: World, draw: random.Random) -> None:
    """Every connection of the daemons is reset, and new ones refused for a moment."""
    proxy, pause = draw.choice(world.proxies), draw.choice((0, world.hold(draw, 0, 2)))
    world.say(f"the network is cut for {pause:.1f} s", count="cut networks")
    proxy.refusing = True
    proxy.cut()
    await asyncio.sleep(pause)
    proxy.heal()


@fault("network.delay")
async def delay(world: World, draw: random.Random) -> None:
    """Everything takes longer."""
    proxy, pause = draw.choice(world.proxies), world.hold(draw, 1, 5)
    proxy.delay = draw.uniform(0.05, 0.5)
    world.say(f"the network takes {proxy.delay:.2f} s longer for {pause:.1f} s", count="slow networks")
    await asyncio.sleep(pause)
    proxy.heal()


@fault("network.throttle")
async def throttle(world: World, draw: random.Random) -> None:
    """Few bytes pass a second."""
    proxy, pause = draw.choice(world.proxies), world.hold(draw, 1, 5)
    proxy.rate = draw.uniform(20_000, 500_000)
    world.say(f"the network carries {proxy.rate:,.0f} bytes/s for {pause:.1f} s", count="throttled networks")
    await asyncio.sleep(pause)
    proxy.heal()


@fault("network.half_close")
async def half_close(world: World, draw: random.Random) -> None:
    """One side is told that nothing more will come."""
    proxy = draw.choice(world.proxies)
    direction: Direction = draw.choice(("up", "down"))
    side = "server" if direction == "up" else "daemons"
    world.say(f"connections are half closed towards the {side}", count="half closes")
    proxy.half_close(direction)


@fault("network.freeze")
async def freeze_network(world: World, draw: random.Random) -> None:
    """Nothing passes in one direction or in both, while connections stay."""
    proxy, pause = draw.choice(world.proxies), draw.uniform(0.5, 2.5) * world.shape.ack_wait
    directions = draw.choice((("up",), ("down",), ("up", "down")))
    world.say(f"the network is frozen ({', '.join(directions)}) for {pause:.1f} s", count="frozen networks")
    proxy.freeze(*directions)
    await asyncio.sleep(pause)
    proxy.heal()


def _local(world: World) -> bool:
    return isinstance(world.archive, LocalArchive)


@fault("store.unwritable", _local)
async def make_unwritable(world: World, draw: random.Random) -> None:
    """A file stands where the archive's directory was."""
    assert isinstance(world.archive, LocalArchive)
    pause = world.hold(draw, 0.5, 5)
    world.say(f"the archive's directory cannot be written for {pause:.1f} s", count="store faults")
    world.archive.make_unwritable()
    await asyncio.sleep(pause)
    world.archive.heal()


@fault("store.full", lambda world: isinstance(world.archive, LocalArchive) and world.archive.disk > 0)
async def fill_disk(world: World, draw: random.Random) -> None:
    """The disk is full: not at once, but in the midst of an object, too."""
    assert isinstance(world.archive, LocalArchive)
    pause = world.hold(draw, 0.5, 5)
    world.say(f"the disk is full for {pause:.1f} s", count="store faults")
    world.archive.fill(draw.choice((0, 4096, 20_000)))
    await asyncio.sleep(pause)
    world.archive.heal()


def _s3_trouble(trouble: Trouble) -> None:
    @fault(f"store.{trouble.replace(' ', '_')}", lambda world: world.http is not None)
    async def spoil(world: World, draw: random.Random) -> None:
        assert world.http is not None
        pause, share = world.hold(draw, 1, 5), draw.choice((1.0, 0.5))
        world.say(f"S3: {trouble} for {share:.0%} of what is written, for {pause:.1f} s", count="store faults")
        world.http.spoil(trouble, share)
        await asyncio.sleep(pause)
        world.http.heal()


for _trouble in TROUBLES:
    _s3_trouble(_trouble)


@fault("clock.jump", lambda world: world.clock.can_jump)
async def jump(world: World, draw: random.Random) -> None:
    """The daemons' wall clock jumps by hours, and back."""
    hours, pause = draw.choice((-1, 1)) * draw.uniform(0.5, 30), world.hold(draw, 1, 6)
    world.say(f"the daemons' clock jumps by {hours:+.1f} h for {pause:.1f} s", count="clock jumps")
    world.clock.shift(hours * 3600)
    await asyncio.sleep(pause)
    world.clock.shift(0)
