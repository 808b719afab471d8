"""What a stream holds, as the server sends it: header blocks uninterpreted."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from nats.js.api import AckPolicy, ConsumerConfig

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.jetstream.connection import connect
from jetcapture_py.jetstream.wire.inbox import Inbox

_BATCH = 10_000


class Stored(NamedTuple):
    """One message; `headers` are the lines of the header block in their order."""

    seq: int
    subject: str
    headers: tuple[str, ...]
    payload: bytes


async def read_stream(url: str, stream: str) -> list[Stored]:
    """Every message of the stream, in order."""
    client = await connect(NatsConfig(servers=(url,)), "test reader", timeout=5)
    try:
        jetstream = client.jetstream()
        config = ConsumerConfig(name="test-reader", ack_policy=AckPolicy.NONE, inactive_threshold=30, mem_storage=True)
        left = (await jetstream.add_consumer(stream, config)).num_pending or 0
        arrived = asyncio.Event()
        inbox = Inbox(arrived.set)
        subject = client.new_inbox()
        client.register((await client.subscribe(subject))._id, inbox)
        found: list[Stored] = []
        while len(found) < left:
            pull = b'{"batch":%d,"expires":5000000000}' % _BATCH
            wanted = min(_BATCH, left - len(found)) + len(found)
            await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.test-reader", pull, reply=subject)
            while len(found) < wanted:
                arrived.clear()
                await asyncio.wait_for(arrived.wait(), 60)
                rows = inbox.take(1 << 30)
                for name, reply, block, payload in zip(*(each.to_pylist() for each in rows.columns()), strict=True):
                    lines = tuple(block.decode().split("\r\n")[1:-2]) if block else ()
                    found.append(Stored(int(reply.split(b".")[5]), name.decode(), lines, payload))
        await jetstream.delete_consumer(stream, "test-reader")
        return found
    finally:
        await client.close()
