"""Streams that are captured, and then injured on the server's disk, or changed as their owners may.

Many streams share a server, because each injury needs a restart.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nats.aio.client import Client

from jetcapture_py.config.model import Config
from tests.support.nats_server import NatsServer
from tests.support.publishing import Publisher
from tests.support.running import capture_all, config, connection

MESSAGES = 400
SMALL_BLOCKS = 125_000
"""`max_bytes` with which a server writes blocks of 32 kB; the limit is lifted after the stream is created."""
SECOND = 1_000_000_000


async def api(client: Client, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Call the JetStream API. Raises AssertionError when the server refuses."""
    data = json.dumps(body).encode() if body else b""
    answer = json.loads((await client.request(f"$JS.API.{subject}", data, timeout=30)).data)
    assert "error" not in answer, (subject, answer["error"])
    return dict(answer)


@dataclass(slots=True)
class Subject:
    """A stream of a test: its configuration, and what it held when it was captured."""

    number: int
    server: NatsServer
    root: Path
    config: dict[str, Any]
    published: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"S{self.number}"

    @property
    def settings(self) -> Config:
        # a server that was killed delivers what was acknowledged last again after ack_wait
        source = {"stream": self.name, "consumer": "archive", "ack_wait": "10s"}
        return config(self.server.url, self.root / self.name, source=source, key="{subject[1]}")

    @property
    def blocks(self) -> list[Path]:
        found = self.server.store_dir.glob(f"**/streams/{self.name}/msgs/*.blk")
        return sorted(found, key=lambda path: int(path.stem))

    async def create(self, client: Client) -> None:
        await api(client, f"STREAM.CREATE.{self.name}", {"name": self.name, **self.config})
        if self.config.get("max_bytes") == SMALL_BLOCKS:
            await api(client, f"STREAM.UPDATE.{self.name}", {"name": self.name, **self.config, "max_bytes": -1})

    async def publish(self, client: Client, count: int = MESSAGES, *, mark: bytes = b"a") -> None:
        """Publish messages on three subjects, some with headers."""
        async with Publisher(client) as publisher:
            for index in range(count):
                headers = [("X-Number", str(index))] if index % 5 == 0 else None
                await publisher.publish(f"{self.name}.{index % 3}", b"%s %06d " % (mark, index) * 12, headers)
            await publisher.flush()

    async def capture(self) -> None:
        await capture_all(self.settings)

    async def held(self) -> dict[int, tuple[str, ...]]:
        async with connection(self.server.url) as client:
            state = (await api(client, f"STREAM.INFO.{self.name}"))["state"]
            seqs = range(max(1, state["first_seq"]), state["last_seq"] + 1)
            found: dict[int, tuple[str, ...]] = {}
            for seq in seqs:
                body = json.dumps({"seq": seq}).encode()
                answer = json.loads(
                    (await client.request(f"$JS.API.STREAM.MSG.GET.{self.name}", body, timeout=30)).data
                )
                if (message := answer.get("message")) is not None:
                    found[seq] = tuple(message.get(part, "") for part in ("subject", "hdrs", "data", "time"))
            return found


def plain(number: int, server: NatsServer, root: Path, **changes: Any) -> Subject:
    """A stream with files of 32 kB, so that it has several."""
    settings = {"subjects": [f"S{number}.>"], "max_bytes": SMALL_BLOCKS, "storage": "file", **changes}
    return Subject(number, server, root, settings)


# ------------------------------------------------------------------ injuries, while the server is down


def truncate(subject: Subject, chance: random.Random) -> None:
    path = chance.choice(subject.blocks)
    os.truncate(path, chance.randrange(path.stat().st_size))


def flip(subject: Subject, chance: random.Random) -> None:
    path = chance.choice(subject.blocks)
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def remove_last(subject: Subject, chance: random.Random) -> None:
    for path in subject.blocks[-chance.choice((1, 2)) :]:
        path.unlink()


def remove_inside(subject: Subject, chance: random.Random) -> None:
    chance.choice(subject.blocks[:-1]).unlink()


def wipe(subject: Subject, chance: random.Random) -> None:
    """Remove the stream's directory; it is created again afterwards."""
    shutil.rmtree(subject.blocks[0].parents[1])


INJURIES: tuple[Callable[[Subject, random.Random], None], ...] = (truncate, flip, remove_last, remove_inside, wipe)


# ------------------------------------------------------------------ harmless histories, while the server runs

History = Callable[[Subject, Client, random.Random], Awaitable[None]]


async def _aged(subject: Subject, client: Client, chance: random.Random) -> None:
    await api(client, f"STREAM.UPDATE.{subject.name}", {**_now(subject), "max_age": chance.choice((1, 2)) * SECOND})
    await asyncio.sleep(chance.choice((0.2, 2.5)))


async def _trimmed(subject: Subject, client: Client, chance: random.Random) -> None:
    limit = chance.choice(({"max_msgs": 50}, {"max_bytes": 20_000}, {"max_msgs_per_subject": 7}))
    await api(client, f"STREAM.UPDATE.{subject.name}", {**_now(subject), **limit})
    await subject.publish(client, chance.randrange(50), mark=b"b")


async def _purged(subject: Subject, client: Client, chance: random.Random) -> None:
    one = f"{subject.name}.{chance.randrange(3)}"
    options: tuple[dict[str, Any], ...] = (
        {},
        {"filter": one},
        {"keep": 10},
        {"filter": one, "keep": 3},
        {"seq": chance.randrange(2, MESSAGES)},
        {"filter": one, "seq": chance.randrange(2, MESSAGES)},
    )
    await api(client, f"STREAM.PURGE.{subject.name}", chance.choice(options))


async def _deleted(subject: Subject, client: Client, chance: random.Random) -> None:
    start = chance.randrange(1, MESSAGES - 40)
    runs = (range(start, start + 40), [1, 2, 3], [MESSAGES, MESSAGES - 1], chance.sample(range(1, MESSAGES), 50))
    for seq in chance.choice(runs):
        no_erase = chance.random() < 0.5
        await api(client, f"STREAM.MSG.DELETE.{subject.name}", {"seq": seq, "no_erase": no_erase})


async def _expired(subject: Subject, client: Client, chance: random.Random) -> None:
    for index in range(40):
        ttl = {"Nats-TTL": "1s"} if index % 2 else None
        await client.jetstream().publish(f"{subject.name}.{index % 5}", b"x", headers=ttl)
    if chance.random() < 0.7:
        await subject.capture()
    await asyncio.sleep(1.5)


async def _rolled_up(subject: Subject, client: Client, chance: random.Random) -> None:
    kind = chance.choice(("sub", "all"))
    await client.jetstream().publish(f"{subject.name}.1", b"sum", headers={"Nats-Rollup": kind})


async def _nothing(subject: Subject, client: Client, chance: random.Random) -> None:
    """Only the restart that all of them have."""


HISTORIES: tuple[tuple[History, dict[str, Any]], ...] = (
    (_aged, {}),
    (_trimmed, {}),
    (_purged, {}),
    (_deleted, {}),
    (_deleted, {"compression": "s2"}),
    (_expired, {"allow_msg_ttl": True}),
    (_expired, {"allow_msg_ttl": True, "subject_delete_marker_ttl": SECOND, "allow_rollup_hdrs": True}),
    (_rolled_up, {"allow_rollup_hdrs": True}),
    (_deleted, {"discard": "new", "max_msgs": 10_000}),
    (_nothing, {"retention": "workqueue"}),
    (_nothing, {"retention": "interest"}),
    (_purged, {"max_msgs_per_subject": 20, "deny_delete": True, "allow_rollup_hdrs": True}),
    (_rolled_up, {"max_msgs_per_subject": 3, "deny_delete": True, "allow_rollup_hdrs": True}),
    (_aged, {"max_age": 3600 * SECOND}),
)
"""What happens to a stream, and its configuration, of which some are those of KV buckets."""


def _now(subject: Subject) -> dict[str, Any]:
    return {"name": subject.name, **subject.config, "max_bytes": -1}
