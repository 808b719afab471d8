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
        """The header lines."""
        return self.headers.split(b"\r\n")[1:-2]

    def header(self, name: str) -> str | None:
        """The first value of a header."""
        values = (line.partition(b": ")[2] for line in self.lines if line.startswith(f"{name}: ".encode()))
        return next((value.decode() for value in values), None)


def add_stream(url: str, name: str = "REPLAY", *subjects: str, **config: Any) -> None:
    """Create a stream, by default over `replay.>`."""

    async def add() -> None:
        nc = await nats.connect(url, allow_reconnect=False)
        await nc.jetstream().add_stream(name=name, subjects=list(subjects or ["replay.>"]), **config)
        await nc.close()

    asyncio.run(add())


def ask(url: str, subject: str, body: object = None) -> dict[str, Any]:
    """An answer of the JetStream API."""

    async def request() -> dict[str, Any]:
        nc = await nats.connect(url, allow_reconnect=False)
        answer = await nc.request(f"$JS.API.{subject}", b"" if body is None else json.dumps(body).encode(), timeout=60)
        await nc.close()
        return dict(json.loads(answer.data))

    return asyncio.run(request())


def stored(url: str, stream: str = "REPLAY") -> list[Kept]:
    """Every message of a stream, in order."""

    async def read() -> list[Kept]:
        nc = await nats.connect(url, allow_reconnect=False)
        last = (await nc.jetstream().stream_info(stream)).state.last_seq
        found = []
        for seq in range(1, last + 1):
            answer = await nc.request(f"$JS.API.STREAM.MSG.GET.{stream}", json.dumps({"seq": seq}).encode())
            message = json.loads(answer.data)["message"]
            found.append(
                Kept(message["subject"], *(base64.b64decode(message.get(part, "")) for part in ("hdrs", "data")))
            )
        await nc.close()
        return found

    return asyncio.run(read())
