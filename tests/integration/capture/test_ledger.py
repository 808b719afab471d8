"""The ledger of a capture: nothing is held after a drain, a crash, a reload or a takeover."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pyarrow as pa
import pytest

from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.model import Config
from jetcapture_py.ledger import Memory
from jetcapture_py.store import LocalStore
from tests.support.nats_server import NatsServer
from tests.support.publishing import Publisher
from tests.support.running import STREAM, config, connection, until

MEMORY = 32 << 20
IN_ORDER = {"deny_delete": True, "deny_purge": True}


class Unreliable(LocalStore):
    """Fails now and then, and always once it is `broken`."""

    def __init__(self, url: str, chance: random.Random) -> None:
        super().__init__(url)
        self._chance, self.broken = chance, False

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        if self.broken or self._chance.random() < 0.05:
            raise OSError("no answer")
        return super().put(name, data)


async def send(url: str, chance: random.Random, count: int) -> None:
    async with connection(url) as client:
        await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"], **IN_ORDER)
        async with Publisher(client) as publisher:
            for _ in range(count):
                payload = chance.randbytes(chance.choice((0, 100, 20_000, 200_000)))
                await publisher.publish(f"orders.{chance.randrange(5)}", payload, None)
            await publisher.flush()


async def run(chance: random.Random, configuration: Config, memory: Memory, others: list[Capture]) -> None:
    """Run a capture until something ends it; nothing of it is left in its ledger, nor in the memory that it shares."""
    store = Unreliable(configuration.store.url, chance)
    capture, stop = Capture(configuration, store=store, memory=memory), asyncio.Event()
    others.append(capture)
    task = asyncio.create_task(capture.run(stop))
    await until(lambda: task.done() or capture.opened, "it has started", 60)
    if chance.random() < 0.8:
        wanted = chance.randrange(1, 400)
        done = [task.done, lambda: capture.stats.received >= wanted, lambda: capture.source.state.pending == 0]
        await until(lambda: any(check() for check in done), "it captures", 120)
    store.broken = chance.random() < 0.3
    stop.set()
    ended = (await asyncio.gather(task, return_exceptions=True))[0]
    others.remove(capture)
    if ended is None:
        assert (capture.ledger.total, capture.ledger.unacked) == (0, 0)
    else:  # the store crashed
        assert "no answer" in repr(ended) or "drain" in repr(ended)
    left = sum((other.ledger.total for other in others if other.ledger.memory is memory), 0)
    assert memory.bytes.total() == left


@pytest.mark.parametrize("mode", ["shared", "ordered"])
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.exhaustive] * (seed > 0)) for seed in range(4)])
async def test_nothing_is_held_after_a_capture_has_ended(
    server: NatsServer, archive: Path, seed: int, mode: str
) -> None:
    chance, memory, running = random.Random(seed), Memory(MEMORY), list[Capture]()

    async def replica() -> None:
        """One process after another; what was configured before is drained, or has crashed."""
        for _ in range(3):
            configuration = config(
                server.url,
                archive,
                source={"mode": mode, **({"takeover": "2s"} if mode == "ordered" else {})},
                block={"max_age": chance.choice(("50ms", "1m")), "max_messages": chance.choice((50, 10_000))},
                store={"retry_for": "1s"},
                limits={"memory": MEMORY, "open_blocks": chance.choice((2, 100))},
            )
            await run(chance, configuration, memory, running)

    await send(server.url, chance, 1000)
    await asyncio.wait_for(asyncio.gather(replica(), replica()), 300)
    assert memory.captures == memory.bytes.total() == 0
