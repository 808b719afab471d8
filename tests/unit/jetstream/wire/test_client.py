from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from nats.errors import Error, ProtocolError
from nats.protocol.parser import Parser

from jetcapture_py.jetstream.wire import parser as wire_parser
from jetcapture_py.jetstream.wire.client import Connection
from jetcapture_py.jetstream.wire.inbox import MESSAGE_OVERHEAD, Inbox, Received
from jetcapture_py.jetstream.wire.parser import FrameParser

REGISTERED = (1, 2, 17)
ANSWERED = 4
"""A subscription that takes messages without a reply, such as acknowledgements of publications, as messages."""
Message = tuple[bytes, bytes, bytes, bytes]  # subject, reply, headers, payload


def finish(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that has nothing to wait for."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("the parser waited")


def messages_in(received: Received) -> list[Message]:
    """What was received, message by message."""
    return list(zip(*(column.to_pylist() for column in received.columns()), strict=True))


class Fast(Connection):
    """The connection under test, without a socket: what it delivers to inboxes, by sid, and what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.seen: defaultdict[int, list[Message]] = defaultdict(list)
        for sid in REGISTERED:
            self.register(sid, self._inbox(sid))
        self.register(ANSWERED, Inbox(lambda: None, statuses=False))

    def _inbox(self, sid: int) -> Inbox:
        inbox = Inbox(lambda: None)

        def on_status(subject: bytes, headers: bytes) -> None:
            self._collect(sid)
            self.seen[sid].append((subject, b"", headers, b""))

        inbox.on_status = on_status
        return inbox

    def _collect(self, sid: int) -> None:
        taken = self.inboxes[sid].take(1 << 40)
        self.seen[sid] += messages_in(taken)

    def outcome(self) -> tuple[dict[int, list[Message]], list[Any]]:
        for sid in (*REGISTERED, ANSWERED):
            self._collect(sid)
        return {sid: messages for sid, messages in self.seen.items() if messages}, self.calls

    def feed(self, *chunks: bytes) -> None:
        for chunk in chunks:
            finish(self._ps.parse(chunk))

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        if sid in self.inboxes:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            self.seen[sid].append((subject, reply, headers or b"", data))

    async def _process_ping(self) -> None:
        self.calls.append("ping")

    async def _process_pong(self) -> None:
        self.calls.append("pong")

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        self.calls.append(info)

    async def _process_err(self, err_msg: str) -> None:
        self.calls.append(err_msg)


class Stock:
    """What nats-py's own parser makes of the same bytes."""

    def __init__(self) -> None:
        self.parser = Parser(self)
        self.calls: list[Any] = []
        self.seen: defaultdict[int, list[Message]] = defaultdict(list)

    def outcome(self) -> tuple[dict[int, list[Message]], list[Any]]:
        return dict(self.seen), self.calls

    def feed(self, *chunks: bytes) -> None:
        for chunk in chunks:
            finish(self.parser.parse(chunk))

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        status = sid in REGISTERED and not reply  # an inbox is told a status' headers and nothing else
        self.seen[sid].append((subject, reply, headers or b"", b"" if status else data))

    _process_ping = Fast._process_ping
    _process_pong = Fast._process_pong
    _process_info = Fast._process_info
    _process_err = Fast._process_err


def outcomes(*chunks: bytes) -> tuple[Any, Any]:
    """What the parser makes of this, always looking at many frames together and never, and what the stock one does."""
    stock = Stock()
    stock.feed(*chunks)
    found = []
    for many in (1, 1 << 40):
        with looking_at(many):
            fast = Fast()
            fast.feed(*chunks)
            found.append(fast.outcome())
    assert found[0] == found[1]
    return found[0], stock.outcome()


@contextmanager
def looking_at(many: int) -> Iterator[None]:
    """Have parsers look at frames together from so many on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_parser, "MANY", many)
        yield


def frame(sid: int, subject: bytes, payload: bytes, reply: bytes = b"", headers: bytes = b"") -> bytes:
    words = [b"HMSG" if headers else b"MSG", subject, b"%d" % sid, *([reply] if reply else [])]
    if headers:
        words.append(b"%d" % len(headers))
    return b" ".join([*words, b"%d" % (len(headers) + len(payload))]) + b"\r\n" + headers + payload + b"\r\n"


ACK = b"$JS.ACK.S.C.1.2.3.4.5"
HEADERS = b"NATS/1.0\r\nA: 1\r\nA: 2\r\nB:\r\n\r\n"
STATUS = b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 3\r\n\r\n"
PERMISSION = b"-ERR 'Permissions Violation for Subscription to \"secret.>\"'\r\n"
LOOKALIKES = [b"\r\n", b"\r\n\r\n", b"\r", b"PING\r\n", b"-ERR 'no'\r\n", b"MSG inner 1 r 99999\r\n", bytes(range(256))]
LOOKALIKES += [frame(1, b"inner", b"hello", ACK), frame(2, b"inner", b"x" * 40, ACK, HEADERS)[:30]]
FRAMES = [
    b'INFO {"server_id": "X", "max_payload": 1048576}\r\n',
    b"+OK\r\n",
    b"PING\r\n",
    frame(1, b"orders.1", b"hello", ACK),
    frame(1, b"orders.2", b"", ACK),
    frame(2, b"orders.3", b"payload", ACK, HEADERS),
    frame(17, b"orders.4", b"", ACK, HEADERS),
    frame(1, b"inbox.1", b"", b"", STATUS),
    frame(1, b"orders.5", b"a\r\nPING\r\nMSG x 1 r 3\r\nabc\r\n", ACK),
    frame(3, b"other", b"not ours", b"reply.to"),
    frame(ANSWERED, b"_INBOX.1", b'{"seq": 1}'),
    frame(ANSWERED, b"_INBOX.2", b"data", b"", b"NATS/1.0 503\r\n\r\n"),
    frame(3, b"other", b"not ours\r\n", b"", HEADERS),
    frame(99, b"other", b"", b""),
    b"PONG\r\n",
    frame(2, b"inbox.2", b"text", b""),
    PERMISSION,
    frame(2, b"orders.6", b"\r\n", ACK),
]
STREAM = b"".join(FRAMES)


def test_all_frames_arrive_as_from_the_stock_parser_wherever_they_are_cut() -> None:
    (messages, calls), stock = outcomes(STREAM)
    assert (messages, calls) == stock
    assert [len(messages[sid]) for sid in (1, 2, 3, ANSWERED, 17, 99)] == [4, 3, 2, 2, 1, 1]
    assert messages[1][2] == (b"inbox.1", b"", STATUS, b"")
    assert messages[2][0] == (b"orders.3", ACK, HEADERS, b"payload")
    assert len(calls) == 4
    for many in (1, 1 << 40):
        with looking_at(many):
            for cut in range(len(STREAM)):
                fast = Fast()
                fast.feed(STREAM[:cut], STREAM[cut:])
                assert fast.outcome() == (messages, calls), cut


payloads = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(LOOKALIKES),
    st.lists(st.sampled_from(LOOKALIKES), max_size=4).map(b"".join),
    st.integers(1000, 90_000).map(lambda size: b"large \r\n" * (size // 8)),
)
messages = st.builds(
    frame,
    st.sampled_from([*REGISTERED, *REGISTERED, ANSWERED, 3, 171]),
    st.sampled_from([b"a", b"orders.eu.1", "größe.ü".encode(), b"\xff\xfe", b"x" * 300]),
    payloads,
    st.sampled_from([b"", ACK, ACK, b"r"]),
    st.one_of(st.just(b""), st.sampled_from([HEADERS, STATUS, b"NATS/1.0\r\n\r\n", b"\x00\xff garbage"])),
)
others = st.sampled_from(
    [b"PING\r\n", b"PONG\r\n", b"+OK\r\n", PERMISSION, b'INFO {"a": "b c", "d": [1, 2]}\r\n', b"INFO {}\r\n"]
)
streams = st.lists(st.one_of(messages, messages, others), max_size=12).map(b"".join)


def parts(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:stop] for start, stop in pairwise(places)]


@given(streams, st.lists(st.integers(0, 1 << 20), max_size=12))
def test_any_stream_in_any_parts_gives_what_the_stock_parser_gives(data: bytes, cuts: list[int]) -> None:
    fast, stock = outcomes(*parts(data, cuts))
    assert fast == stock


def test_a_large_payload_is_looked_at_once_when_it_is_whole() -> None:
    payload = bytes(range(256)) * 8192
    for sid, reply in ((1, ACK), (1, b""), (3, b"r")):
        data = frame(sid, b"big", payload, reply, HEADERS) + frame(1, b"next", b"n", ACK)
        *chunks, last = [data[start : start + (1 << 15)] for start in range(0, len(data), 1 << 15)]
        fast = Fast()
        parser = fast._ps
        assert isinstance(parser, FrameParser)
        with mock.patch.object(parser, "_take", wraps=parser._take) as take:
            fast.feed(*chunks)
            assert take.call_count == 1
            fast.feed(last)
        seen, _ = fast.outcome()
        status = sid == 1 and not reply
        assert seen[sid][0] == (b"big", reply, HEADERS, b"" if status else payload)
        assert seen[1][-1] == (b"next", ACK, b"", b"n")
        assert not len(parser._memory)


def test_reset_drops_the_tail_of_the_old_connection() -> None:
    fast = Fast()
    fast.feed(frame(1, b"whole", b"1", ACK) + frame(1, b"cut", b"x" * 5000, ACK)[:2500])
    fast._ps.reset()
    fast.feed(frame(1, b"new", b"2", ACK))
    assert [message[0] for message in fast.outcome()[0][1]] == [b"whole", b"new"]
    fast.feed(b"INFO {")
    fast._ps.reset()
    fast.feed(b"PING\r\n")
    assert fast.calls == ["ping"]


def test_a_reset_in_the_middle_drops_what_followed_on_the_lost_connection() -> None:
    class Resetting(Fast):
        async def _process_err(self, err_msg: str) -> None:
            await super()._process_err(err_msg)
            self._ps.reset()  # as nats-py does for a stale connection

    fast = Resetting()
    before, after = frame(1, b"before", b"", ACK), frame(1, b"after", b"", ACK)
    fast.feed(before + b"-ERR 'Stale Connection'\r\n" + after + b"PING\r\nMSG cut 1 r 10\r\nabc")
    fast.feed(frame(1, b"new", b"", ACK))
    seen, calls = fast.outcome()
    assert [message[0] for message in seen[1]] == [b"before", b"new"]
    assert calls == ["'stale connection'"]


LONG = b"9" * 5000
MALFORMED = [b"\r\n", b"HELLO\r\n", b"MSG\r\n", b"MSG a 1\r\n", b"MSG a one r 5\r\n", b"MSG a 1 r five\r\n"]
MALFORMED += [b"MSG a 1 r -5\r\n", b"MSG a 1 r %b\r\n" % LONG, b"MSG a 3 %b\r\n" % LONG[:4000], b"MSG a 3\r\n5\r\n"]
MALFORMED += [b"MSG a %b r 5\r\nhello\r\n" % LONG, b"HMSG a 1 r five 5\r\n", b"HMSG a 1 r 5 -5\r\n", b" PING\r\n"]
MALFORMED += [b"HMSG a 1 r -1 5\r\nhello\r\n", b"msg a 1 r 5\r\nhello\r\n", b"-ERR \r\n", b"-ERR '\xff'\r\n"]
MALFORMED += [b"INFO not json\r\n", b"INFO \xff\r\n", b"INFO %b\r\n" % (b"[" * 100_000), b"X" * 5000 + b"\r\n"]


def test_a_malformed_frame_is_a_protocol_error_and_what_came_before_it_is_kept() -> None:
    for malformed in MALFORMED:
        for following in (frame(1, b"after", b"", ACK), b"PING\r\n" * 3):
            fast = Fast()
            with pytest.raises(ProtocolError):
                finish(fast._ps.parse(frame(1, b"before", b"", ACK) + malformed + following))
            assert fast.inboxes[1].total == 1, malformed[:24]
            assert [message[0] for message in fast.outcome()[0][1]] == [b"before"]
    before = frame(1, b"before", b"12", ACK)
    for chunks in ([before + b"M" * (2 << 20)], [before + b"MSG ", *[b"x" * (1 << 15)] * 100]):
        fast = Fast()
        with pytest.raises(ProtocolError):
            fast.feed(*chunks)
        assert (fast.inboxes[1].total, fast.inboxes[1].rows.size) == (1, 2)


def damaged(data: bytes, damages: Sequence[tuple[int, bytes]]) -> bytes:
    for place, noise in damages:
        at = place % (len(data) + 1)
        data = data[:at] + noise + data[at + len(noise) :]
    return data


words = st.sampled_from([b"MSG ", b"HMSG ", b"a ", b"1 ", b"3 ", b"0 ", b"5", b"\r\n", b"-1 ", b"PING", b"INFO "])


@given(
    st.one_of(
        st.binary(max_size=200),
        st.builds(damaged, streams, st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(max_size=6)), max_size=4)),
        st.lists(words, max_size=12).map(b"".join),
    ),
    st.lists(st.integers(0, 1 << 16), max_size=4),
    st.sampled_from([1, 64]),
)
@example(b"-ERR \r\n", [], 64)
def test_no_bytes_make_the_parser_raise_anything_but_a_protocol_error(data: bytes, cuts: list[int], many: int) -> None:
    fast = Fast()
    with looking_at(many), suppress(ProtocolError):
        for part in parts(data, cuts):
            fast.feed(part)
    for inbox in fast.inboxes.values():
        held = messages_in(inbox.rows)
        assert inbox.total_bytes >= inbox.rows.size == sum(len(headers + payload) for _, _, headers, payload in held)


def test_an_exception_in_a_call_of_the_stock_parser_becomes_a_protocol_error() -> None:
    class Failing(Fast):
        async def _process_ping(self) -> None:
            raise RuntimeError("the transport is gone")

    with pytest.raises(ProtocolError) as caught:
        finish(Failing()._ps.parse(b"PING\r\n"))
    assert isinstance(caught.value.__cause__, RuntimeError)


def row(number: int, size: int) -> Message:
    return b"s%d" % number, b"r%d" % number, b"h" * (number % 3), b"p" * size


def test_messages_are_accepted_while_those_before_them_are_still_read() -> None:
    inbox = Inbox(lambda: None)
    for number in range(10):
        inbox.accept(1, b"s", b"r%d" % number, b"x" * 10, b"")
    taken = inbox.take(MESSAGE_OVERHEAD)
    with memoryview(taken.parts[0].memory):  # as a thread has it that makes columns
        inbox.accept(1, b"s", b"r10", b"y" * (5 << 20), b"")
    rest = inbox.take(1 << 40)
    assert len(taken) < 10
    assert len(messages_in(taken) + messages_in(rest)) == 11


@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(0, 20_000))
def test_taking_in_parts_keeps_order_and_totals(sizes: list[int], memory: int) -> None:
    heard: list[int] = []
    inbox = Inbox(lambda: heard.append(inbox.total))
    given_ = [row(number, size) for number, size in enumerate(sizes)]
    for subject, reply, headers, payload in given_:
        inbox.accept(1, subject, reply, payload, headers)
    total = sum(len(headers) + len(payload) for _, _, headers, payload in given_)
    assert (inbox.total, inbox.total_bytes, inbox.rows.size) == (len(sizes), total, total)
    taken: list[Message] = []
    while len(inbox.rows):
        part = inbox.take(memory)
        assert len(part)
        found = messages_in(part)
        assert part.size == sum(len(headers + payload) for _, _, headers, payload in found)
        assert part.memory == part.size + len(part) * MESSAGE_OVERHEAD
        assert len(part) == 1 or len(set(sizes)) > 1 or part.memory <= memory
        taken += found
    assert taken == given_
    assert (inbox.total, inbox.total_bytes, inbox.rows.size) == (len(sizes), total, 0)
    assert heard == list(range(1, len(sizes) + 1))


def test_messages_of_several_subscriptions_come_in_their_order_and_are_counted_apart() -> None:
    connection = Fast()
    inbox = Inbox(lambda: None)
    for sid in (5, 6):
        connection.register(sid, inbox)
    sids = [5, 6, 6, 5, 5] * 30
    with looking_at(10):
        connection.feed(b"".join(frame(sid, b"s%d" % number, b"xy", ACK) for number, sid in enumerate(sids)))
    names = {5: 0, 6: 0}
    for number, sid in enumerate(sids):
        names[sid] += len(b"s%d" % number) + len(ACK)
    assert dict(inbox.by_sid) == {5: (90, 180 + names[5]), 6: (60, 120 + names[6])}
    assert inbox.largest == len(b"s149") + len(b"xy") + len(ACK)
    assert [subject for subject, _, _, _ in messages_in(inbox.take(1 << 20))] == [b"s%d" % n for n in range(150)]


def test_a_run_ends_with_its_piece_of_memory() -> None:
    connection, number = Fast(), 0
    while len(connection.inboxes[1].rows.parts) < 2:
        connection.feed(frame(1, b"s%d" % number, b"x" * 100_000, ACK))
        number += 1
    inbox = connection.inboxes[1]
    assert inbox.rows.last_reply() == ACK
    first = messages_in(inbox.take_run(1 << 30))
    assert 1 < len(first) < number
    assert [m[0] for m in first + messages_in(inbox.take(1 << 30))] == [b"s%d" % each for each in range(number)]


SIZE = b"NATS/1.0\r\nNats-Msg-Size: %d\r\n\r\n"


def sized(*messages: tuple[bytes, bytes]) -> Received:
    """Messages by header block and payload; the subjects are their numbers."""
    headers, payloads = zip(*messages, strict=True)
    return Received.of([b"%d" % n for n in range(len(messages))], [b"r"] * len(messages), headers, payloads)


def test_an_empty_message_whose_header_has_a_size_may_lack_its_payload() -> None:
    empty = [b"", b"NATS/1.0\r\n\r\n", SIZE % 0, b"NATS/1.0\r\nX-Nats-Msg-Size: 7\r\n\r\n"]
    empty += [b"NATS/1.0\r\nOther: Nats-Msg-Size: 7\r\n\r\n"]
    for message in [(block, b"") for block in empty] + [(block, b"payload") for block in (b"", SIZE % 7)]:
        assert not sized(message, message).lacks_payload()
    for before in (b"", b"A: 1\r\n", b"A: \xff\x00\r\n", b"Nats-Msg-Size: 0\r\n"):
        block = b"NATS/1.0\r\n" + before + b"Nats-Msg-Size: 7\r\n\r\n"
        assert sized((b"", b"x"), (block, b""), (block, b"whole")).lacks_payload()


def test_messages_in_the_order_of_their_subjects_keep_their_values_and_their_order() -> None:
    for last in (b"", b"x", b"a subject of over twelve bytes"):
        subjects = [b"second subject", last, b"second subject", b"third", last]
        contents = [(b"h%d" % n, b"p" * n) for n in range(len(subjects))]
        messages = Received.of(subjects, [b"r%d" % n for n in range(len(subjects))], *zip(*contents, strict=True))
        messages.numbers = (np.arange(len(subjects)),)
        ordered = messages.by_subject()
        assert ordered.numbers is not None
        order = ordered.numbers[0].tolist()
        assert order == [0, 2, 1, 4, 3]
        assert [column.to_pylist() for column in ordered.columns()] == [
            [column[row].as_py() for row in order] for column in messages.columns()
        ]


def test_a_server_without_tls_is_refused_when_tls_is_demanded_before_credentials_are_sent() -> None:
    heard = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        writer.write(b"INFO " + json.dumps({"server_id": "X", "max_payload": 1 << 20, "headers": True}).encode())
        writer.write(b"\r\n")
        heard += await reader.read()
        writer.close()

    async def attempt() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            connection = Connection(require_tls=True)
            once: dict[str, Any] = {"allow_reconnect": False, "max_reconnect_attempts": 1, "connect_timeout": 2}
            with pytest.raises(Error, match="TLS is configured, but the server does not offer it"):
                await connection.connect(url, user="u", password="s3cret", **once)
            await connection.close()

    asyncio.run(attempt())
    assert b"s3cret" not in heard
    assert b"CONNECT" not in heard
