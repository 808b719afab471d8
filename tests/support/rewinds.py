"""Servers that go back to an earlier state of their storage, as after a power failure or a restored disk."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from nats.js.errors import NotFoundError

from jetcapture_py.config.model import Config
from tests.support.nats_server import NatsServer
from tests.support.publishing import Publisher
from tests.support.replays import Kept, ask, stored
from tests.support.running import STREAM, Message, capture_all, config, connection, settings


@contextmanager
def rewound(server: NatsServer) -> Iterator[None]:
    """Let the server forget what happens inside the block, at whose end it is killed and gets its earlier data."""
    data = server.store_dir / "jetstream"
    kept = Path(f"{data}-kept")
    server.stop()
    shutil.copytree(data, kept)
    server.start()
    try:
        yield
    finally:
        server.kill()
        shutil.rmtree(data)
        kept.rename(data)
        server.start()


SECTIONS: dict[str, Any] = {"decode": {"format": "json", "columns": {"id": "int64"}}, "key": "{subject[1]}"}


def orders(first: int, last: int, name: str = "old") -> list[Message]:
    """Messages of several subjects, some without headers, every tenth not JSON."""
    return [
        (
            f"orders.{'abc'[index % 3]}",
            b"%s %d" % (name.encode(), index)
            if index % 10 == 4
            else b'{"id": %d, "of": "%s"}' % (index, name.encode()),
            [("Index", str(index))] if index % 2 else None,
        )
        for index in range(first, last + 1)
    ]


class Setting:
    """A server, the archive of its stream, and the capture's configuration, also as a file."""

    def __init__(self, server: NatsServer, directory: Path) -> None:
        self.server, self.root, self.path = server, directory / "archive", directory / "config.yaml"
        self.path.write_text(yaml.safe_dump(settings(server.url, self.root, **SECTIONS)))

    @property
    def config(self) -> Config:
        return config(self.server.url, self.root, **SECTIONS)

    def publish(self, *messages: Message) -> None:
        async def send() -> None:
            async with connection(self.server.url) as client:
                try:
                    await client.jetstream().stream_info(STREAM)
                except NotFoundError:
                    await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"])
                async with Publisher(client) as publisher:
                    for message in messages:
                        await publisher.publish(*message)

        asyncio.run(send())

    def capture(self) -> None:
        asyncio.run(capture_all(self.config))

    def delete(self, *seqs: int) -> None:
        async def delete() -> None:
            async with connection(self.server.url) as client:
                for seq in seqs:
                    await client.jetstream().delete_msg(STREAM, seq)

        asyncio.run(delete())

    def stored(self) -> list[Kept]:
        return stored(self.server.url, STREAM)

    @property
    def last(self) -> int:
        return int(ask(self.server.url, f"STREAM.INFO.{STREAM}")["state"]["last_seq"])
