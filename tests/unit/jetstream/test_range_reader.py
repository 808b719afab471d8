"""When a range of a stream has been read, and when something of it is missing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from jetcapture_py.jetstream.range_reader import RangeConsumer, RangeReader, StreamRange, next_at_once
from jetcapture_py.jetstream.wire.inbox import Inbox

PLAIN = "$JS.ACK.S.C.1.{seq}.{count}.1700000000000000000.{pending}"
LONG = "$JS.ACK.hub.ACCOUNT.S.C.1.{seq}.{count}.1700000000000000000.{pending}.random"


class Reader(RangeReader):
    """Reads 1 to 100 from a consumer that exists, message by message as the test says."""

    def __init__(self, *, imported: bool = False) -> None:
        connection = SimpleNamespace(new_inbox=lambda: "_INBOX.x")
        session = cast("Any", SimpleNamespace(connection=connection, api=SimpleNamespace(imported=imported)))
        super().__init__(session, StreamRange(stream="S", first=1, end=101))
        self.inbox = Inbox(self._on_data)
        self._consumer = RangeConsumer(session, "S", "C", self.inbox, max_batch=100)

    def receive(self, *replies: bytes) -> tuple[bool, str]:
        """Whether all has come, and what is wrong."""
        for reply in replies[:-1]:
            self.inbox.rows.append(self.inbox._memory, b"orders", reply, b"", b"")
            self.inbox.total += 1
        self.inbox.accept(1, b"orders", replies[-1], b"", b"")
        return self._complete or self._may_end, self._trouble

    @property
    def waiting(self) -> int:
        return len(self.inbox.rows)


def reply(form: str, seq: int, count: int, pending: int = 5) -> bytes:
    return form.format(seq=seq, count=count, pending=pending).encode()


def test_it_ends_at_or_beyond_the_last_sequence_or_with_nothing_pending() -> None:
    async def scenario() -> None:
        for form in (PLAIN, LONG):
            reader = Reader()
            assert reader.receive(*(reply(form, 48 + count, count) for count in (1, 2, 3))) == (False, "")
            assert reader.receive(reply(form, 103, 4)) == (True, "")
            assert Reader().receive(reply(form, 50, 1, pending=0)) == (True, "")

    asyncio.run(scenario())


def test_messages_that_the_server_sent_and_that_did_not_come_are_noticed() -> None:
    async def scenario() -> None:
        reader = Reader()
        assert reader.receive(*(reply(PLAIN, 48 + count, count) for count in (1, 2, 3))) == (False, "")
        missing = "messages sent by the server did not arrive"
        assert reader.receive(reply(PLAIN, 60, 4), reply(PLAIN, 70, 7)) == (False, missing)
        assert reader.receive(reply(PLAIN, 100, 8, pending=0)) == (False, missing)
        assert reader.waiting == 3  # nothing behind a gap is handed on: the next consumer brings it again

    asyncio.run(scenario())


def test_a_message_without_headers_and_payload_ends_a_pull_through_an_imported_api() -> None:
    async def scenario() -> None:
        first = reply(PLAIN, 49, 1)
        assert Reader(imported=True).receive(first) == (False, "an empty message ended the pull")
        assert Reader().receive(first) == (False, "")

    asyncio.run(scenario())


def test_large_messages_are_requested_few_at_once_so_that_the_server_does_not_drop_the_connection() -> None:
    """It does when more than its `max_pending`, 64 MB by default, waits to be read."""
    small, large = {"data": "x" * 100}, {"data": "x" * 11_000_000}
    assert [next_at_once(4, [small]), next_at_once(40, [small, {}]), next_at_once(50, [])] == [8, 50, 50]
    assert [next_at_once(50, [small, large]), next_at_once(1, [large]), next_at_once(1, [small])] == [1, 1, 2]
