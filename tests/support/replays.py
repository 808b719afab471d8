"""A server to replay to, and what its streams then hold, byte for byte."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any, NamedTuple

import nats


class Kept(NamedTuple):
    """A stored message; `headers` is its header block as it is."""

    subject: str
    headers: bytes
    payload: bytes

    @property
    def lines(self) -> list[bytes]:
        return self.headers.split(b"\r\n")[1:-2]

    def header(self, name: str) -> str | None:
        values = (line.partition(b": ")[2] for line in self.lines if line.startswith(f"{name}: ".encode()))
        return next((value.decode() for value in values), None)


def add_stream(url: str, name: str = "REPLAY", *subjects: str, **config: Any) -> None:
    async def add() -> None:
        nc = await nats.connect(url, allow_reconnect=False)
        await nc.jetstream().add_stream(name=name, subjects=list(subjects or ["replay.>"]), **config)
        await nc.close()

    asyncio.run(add())


def ask(url: str, subject: str, body: object = None) -> dict[str, Any]:
    async def request() -> dict[str, Any]:
        nc = await nats.connect(url, allow_reconnect=False)
        answer = await nc.request(f"$JS.API.{subject}", b"" if body is None else json.dumps(body).encode(), timeout=60)
        await nc.close()
        return dict(json.loads(answer.data))

    return asyncio.run(request())


async def messages(url: str, stream: str) -> list[tuple[int, Kept]]:
    """The messages of a stream with their sequences, in order."""
    nc = await nats.connect(url, allow_reconnect=False)
    last = (await nc.jetstream().stream_info(stream)).state.last_seq
    found = []
    for start in range(1, last + 1, 500):
        seqs = range(start, min(start + 500, last + 1))
        requests = (nc.request(f"$JS.API.STREAM.MSG.GET.{stream}", b'{"seq":%d}' % seq) for seq in seqs)
        for answer in await asyncio.gather(*requests):
            if (message := json.loads(answer.data).get("message")) is not None:
                parts = (base64.b64decode(message.get(part, "")) for part in ("hdrs", "data"))
                found.append((message["seq"], Kept(message["subject"], *parts)))
    await nc.close()
    return found


def stored(url: str, stream: str = "REPLAY") -> list[Kept]:
    return [kept for _, kept in asyncio.run(messages(url, stream))]
