"""Cells: ways to a stream, and streams in a cluster."""

from __future__ import annotations

from typing import Any

from jetcapture_py.capture.pipeline import Capture
from tests.integration.matrix.cell import Cell, Scene
from tests.integration.matrix.stage import COUNT, Stage, connected
from tests.integration.matrix.streams import SECOND, fill_batch
from tests.support.running import CONSUMER, until


async def captured(stage: Stage, **source: Any) -> None:
    """Capture what the stream has, and check it."""
    await stage.look()
    await stage.capture(**source)
    await stage.check_archive()
    await stage.check_consumer()


def through(place: str, **login: Any) -> Scene:
    """A stream of the hub, captured through another address."""

    async def play(stage: Stage) -> None:
        await stage.create()
        await stage.fill()
        stage.url = getattr(stage.site, place)
        stage.login = {**login, "servers": [stage.url]}
        await captured(stage)

    return play


async def play_leaf_from_hub(stage: Stage) -> None:
    """A stream of the leaf node's domain, captured at the hub."""
    async with connected(stage.site.leaf) as client:
        stage.client = client
        await stage.create()
        await stage.fill()
        stage.login = {"domain": "leaf"}
        await captured(stage)


async def play_leaf_mirror(stage: Stage) -> None:
    """A mirror at the hub of a stream in the leaf node's domain."""
    async with connected(stage.site.leaf) as client:
        there = Stage(**{**vars(stage), "client": client, "stream": stage.own("{s}-leaf"), "seen": {}})
        await there.create()
        await there.fill()
    await stage.create(mirror={"name": "{s}-leaf", "external": {"api": "$JS.leaf.API"}})
    await stage.holds(COUNT)
    await captured(stage)


async def play_secure_websocket(stage: Stage) -> None:
    async with connected(stage.site.leaf) as client:
        stage.client = client
        await stage.create()
        await stage.fill()
        stage.url = stage.site.secure_websocket
        stage.login = {"servers": [stage.url], "tls": {"ca": stage.site.authority}}
        await captured(stage)


async def play_bare_messages(stage: Stage) -> None:
    """Those without headers and payload end a pull, and what follows in it is delivered again."""
    async with connected(stage.url, user="owner", password="o") as client:
        stage.client = client
        await stage.create()
        await stage.consumer(ack_wait=SECOND)
        await stage.fill(4 * COUNT)
        stage.login = {"user": "reader", "password": "r", "api_prefix": "JS.owner.API"}
        await captured(stage)


async def play_without_domain(stage: Stage) -> None:
    stage.url = stage.site.bare_leaf
    await stage.check_refused(NO_DOMAIN)


async def play_imported(stage: Stage) -> None:
    """A stream of another account, whose API is imported under a prefix."""
    async with connected(stage.url, user="owner", password="o") as client:
        stage.client = client
        await stage.create()
        await stage.fill(bare=False)
        stage.login = {"user": "reader", "password": "r", "api_prefix": "JS.owner.API"}
        await captured(stage)


NO_DOMAIN = "JetStream does not answer: it is not enabled, or has no leader"

WAYS = (
    Cell(name="Websocket, `ws://`", play=through("websocket")),
    Cell(name="Websocket with TLS, `wss://`", play=play_secure_websocket),
    Cell(name="Domain of the hub, from a leaf node (`nats.domain`)", play=through("leaf", domain="hub")),
    Cell(
        name="Domain of the hub, from a leaf node without JetStream (`nats.domain`)",
        play=through("bare_leaf", domain="hub"),
    ),
    Cell(name="Leaf node without JetStream, `nats.domain` not set", play=play_without_domain, refused=NO_DOMAIN),
    Cell(name="Domain of a leaf node, from the hub (`nats.domain`)", play=play_leaf_from_hub),
    Cell(name="Mirror at the hub of a leaf node's stream", play=play_leaf_mirror),
    Cell(name="Imported from another account (`nats.api_prefix`)", play=play_imported),
    Cell(
        name="Imported from another account: messages without headers and payload",
        note="Messages behind them may be delayed.",
        play=play_bare_messages,
    ),
)


# ------------------------------------------------------------------ clusters


async def leaders_changed(stage: Stage, state: Capture) -> None:
    """Both leaders step down, and messages follow."""
    await stage.ask(f"CONSUMER.LEADER.STEPDOWN.{stage.stream}.{CONSUMER}")
    await stage.ask(f"STREAM.LEADER.STEPDOWN.{stage.stream}")
    await stage.refill(state)


async def scale(stage: Stage, replicas: int) -> None:
    """Change the number of replicas, and wait until they are there."""
    await stage.update(num_replicas=replicas)

    async def there() -> bool:
        cluster = (await stage.ask(f"STREAM.INFO.{stage.stream}"))["cluster"]
        others = [each["current"] for each in cluster.get("replicas") or ()]
        return bool(cluster.get("leader")) and others == [True] * (replicas - 1)

    await until(there, f"the stream has {replicas} replicas")


async def scaled_up(stage: Stage, state: Capture) -> None:
    await scale(stage, 3)
    await stage.refill(state)


async def scaled_down(stage: Stage, state: Capture) -> None:
    await scale(stage, 1)
    await stage.refill(state)


CLUSTERS = (
    Cell(name="R3, file storage", stream={"num_replicas": 3}),
    Cell(name="R3, memory storage", stream={"num_replicas": 3, "storage": "memory"}),
    Cell(name="R3, work queue", stream={"num_replicas": 3, "retention": "workqueue"}),
    Cell(
        name="R3, consumer in memory on one server",
        stream={"num_replicas": 3},
        consumer={"num_replicas": 1, "mem_storage": True},
    ),
    Cell(name="R3, atomic batches", stream={"num_replicas": 3, "allow_atomic": True}, fill=fill_batch, since=(2, 12)),
    Cell(
        name="R3, leaders of stream and consumer change while it is captured",
        stream={"num_replicas": 3},
        during=leaders_changed,
    ),
    Cell(name="R1 scaled to R3 while it is captured", during=scaled_up),
    Cell(name="R3 scaled to R1 while it is captured", stream={"num_replicas": 3}, during=scaled_down),
)
