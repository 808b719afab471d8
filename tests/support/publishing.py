"""Publish message by message, as the product's publisher does in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from jetcapture_py.jetstream.publish import publisher
from jetcapture_py.jetstream.wire.client import Connection

Headers = Sequence[tuple[str, str]]
_ROWS, _BYTES = 500, 1 << 20


async def connect(url: str, **options: Any) -> Connection:
    client = Connection()
    await client.connect(url, **options)
    return client


def header_block(headers: Headers) -> bytes:
    """Headers as NATS sends them, in this order, repeated names included."""
    return "".join(["NATS/1.0\r\n", *(f"{name}: {value}\r\n" for name, value in headers), "\r\n"]).encode()


def frame(subject: str, reply: bytes, block: bytes, payload: bytes) -> bytes:
    """The command that publishes one message; an empty block means no headers."""
    if block:
        sizes = b"%d %d" % (len(block), len(block) + len(payload))
        return b"HPUB %b %b %b\r\n%b%b\r\n" % (subject.encode(), reply, sizes, block, payload)
    return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply, len(payload), payload)


class Publisher(publisher.Publisher):
    """Messages wait until there are enough for a batch, or for `flush`."""

    def __init__(self, client: Any, **how: Any) -> None:
        super().__init__(client, **how)
        self._rows: list[tuple[bytes, bytes, bytes | None]] = []
        self._size = 0

    async def publish(self, subject: str, payload: bytes, headers: Headers | None = None) -> None:
        if self._error is not None:
            raise self._error
        block = None
        if headers is not None:
            block = "".join(["NATS/1.0\r\n", *(f"{name}: {value}\r\n" for name, value in headers), "\r\n"]).encode()
        self._rows.append((subject.encode(), payload, block))
        self._size += len(payload)
        if len(self._rows) >= _ROWS or self._size >= _BYTES:
            await self._publish_rows()

    async def flush(self) -> None:
        await self._publish_rows()
        await super().flush()

    async def _publish_rows(self) -> None:
        rows, self._rows, self._size = self._rows, [], 0
        if rows:
            await self.publish_batch(*(pa.array(column, pa.binary()) for column in zip(*rows, strict=True)))
