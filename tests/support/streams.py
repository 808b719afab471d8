"""What a stream holds, as the server sends it: header blocks uninterpreted."""

from __future__ import annotations

from typing import NamedTuple

from tests.support.replays import messages


class Stored(NamedTuple):
    """One message; `headers` are the lines of the header block in their order."""

    seq: int
    subject: str
    headers: tuple[str, ...]
    payload: bytes


async def read_stream(url: str, stream: str) -> list[Stored]:
    return [
        Stored(seq, kept.subject, tuple(line.decode() for line in kept.lines), kept.payload)
        for seq, kept in await messages(url, stream)
    ]
