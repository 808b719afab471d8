from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetcapture_py.archive import layout
from jetcapture_py.archive.schema import ENVELOPE, REPLY
from jetcapture_py.jetstream.acks import _checked_numbers, ack_numbers, unpacked
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.transform import envelope
from jetcapture_py.transform.envelope import Assembled, assemble, parse_headers

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NANOSECONDS = 1_700_000_000_123_456_789


def ack(seq: int | str, *, delivered: int | str = 1, time: int | str = NANOSECONDS, form: str = "short") -> bytes:
    """An ack subject as the server makes it, with sequence `seq`."""
    head = {"short": "", "domain": "hub.ACCHASH.", "token": "hub.ACCHASH.", "no domain": "_.ACCHASH."}[form]
    tail = ".rAnDoM" if form == "token" else ""
    return f"$JS.ACK.{head}S.C.{delivered}.{seq}.7.{time}.0{tail}".encode()


def assembled(*replies: bytes, headers: bytes = b"", subject: bytes = b"s.t") -> Assembled:
    count = len(replies)
    payloads = [b"payload %d" % i for i in range(count)]
    return assemble("S", "C", Received.of([subject] * count, list(replies), [headers] * count, payloads))


def column(result: Assembled, name: str) -> list[Any]:
    return list(result.batch.column(name).to_pylist())


def with_headers(*blocks: bytes, pinned: bool = False) -> Assembled:
    """Assemble messages with these header blocks; parsed together or one by one, they are the same."""
    count = len(blocks)
    received = Received.of([b"s"] * count, [ack(i) for i in range(count)], list(blocks), [b"p"] * count)
    alone = assemble("S", "C", received, pinned=pinned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envelope, "_MANY", 1)
        together = assemble("S", "C", received, pinned=pinned)
    assert together == alone
    together.batch.rows.validate(full=True)
    return together


@given(
    st.lists(st.integers(100, 999), min_size=1, max_size=5),
    st.sampled_from(["short", "domain", "token"]),
    st.integers(0, 4),
    st.integers(0, 80),
    st.sampled_from([*b".019/:- +_a\x00\xff"]),
)
def test_one_wrong_byte_changes_what_it_must(seqs: list[int], form: str, row: int, place: int, byte: int) -> None:
    replies = [bytearray(ack(seq, form=form)) for seq in seqs]
    changed = replies[row % len(replies)]
    changed[place % len(changed)] = byte
    texts = [bytes(reply) for reply in replies]
    numbers, keep = ack_numbers(pa.array(texts, pa.binary()), "S", "C")
    expected, real = _checked_numbers(texts, b"S", b"C", (2, 3, 5))
    assert [each.tolist() for each in numbers] == [each.tolist() for each in expected]
    assert (list(range(len(texts))) if keep is None else keep) == real


def test_an_empty_batch_has_all_columns() -> None:
    result = assembled()
    assert (len(result.batch), result.strays, result.failures, result.raw_headers) == (0, 0, (), {})
    assert result.batch.rows.schema == ENVELOPE


def test_a_subject_that_is_not_utf8_fails_its_message_once_and_keeps_its_raw_headers() -> None:
    block = b"NATS/1.0\r\nbad\r\n\r\n"
    subjects = [rb"good.\xff", rb"bad.\xff.\y." + b"\xff\x80", "größe.日本".encode(), b"\xff"]
    received = Received.of(subjects, [ack(1), ack(2), ack(3), ack(4)], [b"", b"", b"", block], [b"1", b"2", b"3", b"4"])
    result = assemble("S", "C", received)
    assert {(failure.index, failure.stage) for failure in result.failures} == {(1, "subject"), (3, "subject")}
    assert len(result.failures) == 2
    assert column(result, layout.SUBJECT) == [r"good.\xff", r"bad.\x5cxff.\y.\xff\x80", "größe.日本", r"\xff"]
    assert column(result, layout.PAYLOAD) == [b"1", b"2", b"3", b"4"]
    assert column(result, layout.TIMESTAMP) == [EPOCH + timedelta(microseconds=NANOSECONDS // 1000)] * 4
    assert result.raw_headers == {3: block}


def test_the_pin_id_that_a_server_adds_on_delivery_is_removed_and_a_published_one_is_not() -> None:
    """It adds it before the last line break, or in a block of its own."""
    pin = b"Nats-Pin-Id: Yc7z\r\n"
    others = (b"A: 1\r\n", b"X-Nats-Pin-Id: 1\r\n", b"A: Nats-Pin-Id: 1\r\n", b"broken\r\n", b"A: \xff\r\n")
    others += (pin, pin + b"A: 1\r\n")
    plain = with_headers(b"", *(b"NATS/1.0\r\n" + lines + b"\r\n" for lines in others))
    delivered = [b"NATS/1.0\r\n" + x + pin + b"\r\n" for x in (b"", *others)]
    result = with_headers(*delivered, pinned=True)
    assert result.batch.rows.drop_columns([REPLY]) == plain.batch.rows.drop_columns([REPLY])
    assert (result.failures, result.raw_headers) == (plain.failures, plain.raw_headers)
    assert column(result, layout.HEADERS)[0] is None
    assert len(plain.failures) == 2
    assert column(plain, layout.HEADERS)[-2] == [("Nats-Pin-Id", ["Yc7z"])]


UNREADABLE = [b"NATS/1.0 503\r\n\r\n", b"HTTP/1.1\r\nA: 1\r\n\r\n", b"A: 1\r\n\r\n", b"\xff", b"\r\n"]
LINES = (b"A: \xff", b"\xff: a", b"no colon", b": no name", b"A: 1\r\nbad")
UNREADABLE += [b"NATS/1.0\r\nA: 1", *(b"NATS/1.0\r\n%b\r\n\r\n" % line for line in LINES)]


def test_headers_that_cannot_be_read_fail_their_message_only_and_keep_its_header_block() -> None:
    for block in UNREADABLE:
        good = b"NATS/1.0\r\nA: 1\r\n\r\n"
        result = with_headers(good, block, b"", block, good)
        assert [(failure.index, failure.stage) for failure in result.failures] == [(1, "headers"), (3, "headers")]
        assert all(failure.error and "\n" not in failure.error for failure in result.failures)
        assert result.raw_headers == {1: block, 3: block}
        assert column(result, layout.HEADERS) == [[("A", ["1"])], None, None, None, [("A", ["1"])]]


def test_an_empty_header_block_is_an_empty_map_and_a_line_break_alone_is_part_of_a_value() -> None:
    blocks = [b"", b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\n", b"NATS/1.0\r\nA: x\ny\r\n\r\n"]
    assert column(with_headers(*blocks), layout.HEADERS) == [None, [], [], [("A", ["x\ny"])]]


names = st.text(st.characters(exclude_characters=":\r\n", exclude_categories=["Cs"]), min_size=1, max_size=8)
values = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=8)
lines = st.lists(st.tuples(names, st.sampled_from(["", " ", "  ", "\t"]), values), max_size=8)


@given(st.lists(st.one_of(st.none(), lines), max_size=6))
def test_every_header_line_comes_back_in_its_place(batch: list[list[tuple[str, str, str]] | None]) -> None:
    blocks = [
        b""
        if message is None
        else b"NATS/1.0\r\n" + "".join(f"{n}:{space}{v}\r\n" for n, space, v in message).encode() + b"\r\n"
        for message in batch
    ]
    expected: list[dict[str, list[str]] | None] = []
    for message in batch:
        reference: dict[str, list[str]] = {}
        for name, _, value in message or []:
            reference.setdefault(name, []).append(value.lstrip(" \t"))
        expected.append(None if message is None else reference)
    result = with_headers(*blocks)
    assert not result.failures
    assert result.batch.column(layout.HEADERS).to_pylist(maps_as_pydicts="strict") == expected
    assert [parse_headers(block) if block else None for block in blocks] == expected


@given(st.lists(st.binary(max_size=30).map(lambda noise: b"NATS/1.0\r\n" + noise), max_size=5))
def test_no_header_block_is_lost_or_raises(blocks: list[bytes]) -> None:
    result = with_headers(*blocks)
    found = result.batch.column(layout.HEADERS).to_pylist()
    for index, block in enumerate(blocks):
        assert (found[index] is None) == (index in result.raw_headers)
        assert result.raw_headers.get(index, block) == block


def test_numbers_that_were_parsed_before_stay_with_their_messages() -> None:
    """The source of `mode: ordered` parses ack subjects, and such rows have positions in place of them."""
    replies = [ack(seq) for seq in range(5, 10)]
    received = Received.of([b"s"] * 5, replies, [b""] * 5, [b"p"] * 5)
    plain = assemble("S", "C", received, pinned=True).batch.rows
    received.numbers = ack_numbers(received.replies, "S", "C")[0]
    first, others = received.where(np.array([True, False, True, True, True])).split(1)
    assert assemble("S", "C", first, pinned=True).batch.rows == plain.slice(0, 1)
    assert assemble("S", "C", others, pinned=True).batch.rows == plain.slice(2)
    seqs, times = unpacked(plain.column(REPLY).slice(1))
    assert (seqs.tolist(), times.tolist()) == ([6, 7, 8, 9], [NANOSECONDS] * 4)
