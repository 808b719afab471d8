"""What becomes of messages that may lack their payload."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest

from jetcapture_py.jetstream.source import PayloadCheck
from jetcapture_py.jetstream.wire.inbox import REPLY, Received

BARE = b"NATS/1.0\r\nNats-Msg-Size: 5\r\n\r\n"


def received(*seqs: int, headers: bytes = b"", payload: bytes = b"") -> Received:
    replies = [b"$JS.ACK.ORDERS.archive.1.%d.%d.1700000000000000000.0" % (seq, seq) for seq in seqs]
    count = len(seqs)
    return Received.of([b"orders"] * count, replies, [headers] * count, [payload] * count)


@pytest.mark.parametrize(
    ("floor", "limited", "kept", "given_back"), [(0, False, 2, 1), (0, True, 3, 0), (None, False, 2, 1)]
)
def test_a_message_without_payload_is_given_back_unless_it_might_never_return(
    floor: int | None, limited: bool, kept: int, given_back: int
) -> None:
    returned: list[bytes] = []

    async def look_up() -> int | None:
        return floor

    async def nak(replies: pa.BinaryArray) -> None:
        returned.extend(replies.to_pylist())

    async def is_empty(seq: int) -> bool | None:
        pytest.fail("it came for the first time")

    async def scenario() -> Received:
        check = PayloadCheck("ORDERS", "archive", look_up, nak, is_empty, limited=limited)
        batch = received(1, 2, payload=b"whole")
        bare = received(3, headers=BARE)
        for part in bare.parts:
            batch.add(part.memory, part.rows[0], bare.size)
        return await check.only_whole(batch)

    whole = asyncio.run(scenario())
    assert len(whole) == kept
    assert len(returned) == given_back
    assert sorted([*whole.columns(REPLY)[0].to_pylist(), *returned]) == received(1, 2, 3).replies.to_pylist()


@pytest.mark.parametrize(("empty", "kept"), [(True, True), (None, True), (False, False)])
def test_a_message_that_comes_twice_without_payload_is_looked_up_in_the_stream(empty: bool | None, kept: bool) -> None:
    returned: list[bytes] = []

    async def look_up() -> int | None:
        return 0

    async def nak(replies: pa.BinaryArray) -> None:
        returned.extend(replies.to_pylist())

    async def is_empty(seq: int) -> bool | None:
        assert seq == 3
        return empty

    async def scenario() -> None:
        check = PayloadCheck("ORDERS", "archive", look_up, nak, is_empty)
        assert not await check.only_whole(received(3, headers=BARE))
        for times in (2, 3):
            found = await check.only_whole(received(3, headers=BARE))
            assert (len(found), len(returned)) == ((1, 1) if kept else (0, times))
            if kept:
                break

    asyncio.run(scenario())
