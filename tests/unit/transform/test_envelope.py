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
    return assemble(
        "S",
        "C",
        Received.of(
            subjects=[subject] * count,
            replies=list(replies),
            headers=[headers] * count,
            payloads=[b"payload %d" % i for i in range(count)],
        ),
    )


def column(result: Assembled, name: str) -> list[Any]:
    return list(result.batch.column(name).to_pylist())


def with_headers(*blocks: bytes, pinned: bool = False) -> Assembled:
    """Assemble messages with these header blocks; parsed together or one by one, they are the same."""
    received = Received.of(
        subjects=[b"s"] * len(blocks),
        replies=[ack(i) for i in range(len(blocks))],
        headers=list(blocks),
        payloads=[b"p"] * len(blocks),
    )
    alone = assemble("S", "C", received, pinned=pinned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envelope, "_MANY", 1)
        together = assemble("S", "C", received, pinned=pinned)
    assert together == alone
    together.batch.rows.validate(full=True)
    return together


def header(block: bytes) -> Any:
    """What the header block of one message becomes, among messages with none."""
    result = with_headers(b"", block, b"")
    assert not result.failures
    before, found, after = result.batch.column(layout.HEADERS).to_pylist(maps_as_pydicts="strict")
    assert before is after is None
    return found


# ------------------------------------------------------------------ ack subjects


@pytest.mark.parametrize("form", ["short", "domain", "token", "no domain"])
def test_numbers_are_read_from_every_form_of_ack_subject(form: str) -> None:
    replies = [ack(seq, delivered=seq - 4, form=form) for seq in (5, 6, 1 << 62)]
    replies[2] = ack(1 << 62, delivered=3, form=form)
    result = assembled(*replies)
    assert result.strays == 0
    assert column(result, layout.SEQ) == [5, 6, 1 << 62]
    assert column(result, layout.NANOS) == [789, 789, 789]
    assert column(result, layout.DELIVERED) == [1, 2, 3]
    assert column(result, REPLY) == replies
    assert column(result, layout.PAYLOAD) == [b"payload 0", b"payload 1", b"payload 2"]
    assert result.batch.rows.schema == ENVELOPE
    result.batch.rows.validate(full=True)


def test_forms_of_ack_subjects_may_be_mixed_in_one_batch() -> None:
    forms = ["short", "token", "domain", "short", "no domain"]
    result = assembled(*(ack(seq, form=form) for seq, form in enumerate(forms, 1)))
    assert column(result, layout.SEQ) == [1, 2, 3, 4, 5]
    assert (result.strays, result.failures) == (0, ())


STRAYS = [
    b"x",
    b"_INBOX.abc.1",
    b"a.b.c.d.e.f.g.h.i",
    b"a.b.c.d.e.f.g.h.i.j",
    b"a.b.c.d.e.f.g.h.i.j.k",
    b"..........",
    ack(1).replace(b".S.", b".OTHER."),
    ack(1).replace(b".C.", b".other."),
    ack(1).replace(b"$JS.ACK", b"$JS.NAK"),
    ack(1).replace(b"$JS.ACK", b"sent.by.somebody"),
    ack(1).replace(b"$JS.ACK", b"our.app"),
    ack(1, form="token").replace(b"$JS.ACK", b"our.app"),
    ack(1, form="domain").replace(b".S.C.", b".T.C."),
    ack(1) + b".extra",
    ack("x"),
    ack(""),
    ack("-5"),
    ack("+5"),
    ack(" 5"),
    ack("0x10"),
    ack("1e3"),
    ack("1_000"),
    ack("\u0661"),
    ack(1 << 63),
    ack(10**30),
    ack(1, delivered="one"),
    ack(1, delivered=-1),
    ack(1, delivered=1 << 70),
    ack(1, time="now"),
    ack(1, time=1 << 64),
    ack(1, time=-1),
    b"$JS.ACK.S.C.\xff.1.1.1.0",
    b"\xff\xfe",
]


def test_a_frame_that_is_not_from_our_consumer_is_left_out_and_counted() -> None:
    for stray in STRAYS:
        alone = assembled(stray, stray)
        assert (alone.strays, len(alone.batch), len(alone.batch.column(layout.SEQ))) == (2, 0, 0), stray
        for form in ("short", "token"):
            result = assembled(ack(1, form=form), stray, ack(2, form=form), stray)
            assert result.strays == 2, stray
            assert column(result, layout.SEQ) == [1, 2], stray
            assert column(result, layout.PAYLOAD) == [b"payload 0", b"payload 2"], stray
            assert column(result, REPLY) == [ack(1, form=form), ack(2, form=form)], stray


@given(
    st.lists(st.integers(100, 999), min_size=1, max_size=5),
    st.sampled_from(["short", "domain", "token"]),
    st.integers(0, 4),
    st.integers(0, 80),
    st.sampled_from([*b".019/:- +_a\x00\xff"]),
)
def test_one_wrong_byte_changes_what_it_changes_read_one_by_one(
    seqs: list[int], form: str, row: int, place: int, byte: int
) -> None:
    replies = [bytearray(ack(seq, form=form)) for seq in seqs]
    changed = replies[row % len(replies)]
    changed[place % len(changed)] = byte
    texts = [bytes(reply) for reply in replies]
    numbers, keep = ack_numbers(pa.array(texts, pa.binary()), "S", "C")
    expected, real = _checked_numbers(texts, b"S", b"C", (2, 3, 5))
    assert [each.tolist() for each in numbers] == [each.tolist() for each in expected]
    assert (list(range(len(texts))) if keep is None else keep) == real


def test_a_delivery_count_that_its_column_cannot_hold_is_the_highest_it_can() -> None:
    assert column(assembled(ack(1, delivered=1 << 40)), layout.DELIVERED) == [(1 << 31) - 1]


def test_an_empty_batch_has_all_columns() -> None:
    result = assembled()
    assert (len(result.batch), result.strays, result.failures, result.raw_headers) == (0, 0, (), {})
    assert result.batch.rows.schema == ENVELOPE


@given(st.lists(st.integers(0, (1 << 63) - 1), min_size=1, max_size=20))
def test_timestamps_are_floored_to_microseconds(times: list[int]) -> None:
    result = assembled(*(ack(1, time=time) for time in times))
    stored = result.batch.column(layout.TIMESTAMP)
    assert stored.cast(pa.int64()).to_pylist() == [time // 1000 for time in times]


def test_timestamps_are_points_in_time_in_utc() -> None:
    moment = EPOCH + timedelta(microseconds=NANOSECONDS // 1000)
    assert column(assembled(ack(1)), layout.TIMESTAMP) == [moment]


# ------------------------------------------------------------------ subjects


def test_subjects_keep_their_unicode() -> None:
    assert column(assembled(ack(1), subject="größe.ü.日本".encode()), layout.SUBJECT) == ["größe.ü.日本"]


def test_a_subject_that_is_not_utf8_fails_its_message_only() -> None:
    received = Received.of(
        subjects=[rb"good.\xff", rb"bad.\xff.\y." + b"\xff\x80", "größe".encode()],
        replies=[ack(1), ack(2), ack(3)],
        headers=[b"", b"", b""],
        payloads=[b"1", b"2", b"3"],
    )
    result = assemble("S", "C", received)
    assert [(failure.index, failure.stage) for failure in result.failures] == [(1, "subject")]
    assert column(result, layout.SUBJECT) == [r"good.\xff", r"bad.\x5cxff.\y.\xff\x80", "größe"]
    assert column(result, layout.PAYLOAD) == [b"1", b"2", b"3"]


def test_a_message_with_bad_subject_and_bad_headers_fails_once_and_keeps_its_raw_headers() -> None:
    block = b"NATS/1.0\r\nbad\r\n\r\n"
    received = Received.of(subjects=[b"\xff"], replies=[ack(1)], headers=[block], payloads=[b""])
    result = assemble("S", "C", received)
    assert [failure.index for failure in result.failures] == [0]
    assert result.raw_headers == {0: block}


# ------------------------------------------------------------------ headers


def test_the_pin_id_that_a_server_adds_on_delivery_is_removed_and_a_published_one_is_not() -> None:
    """It adds it before the last line break, or in a block of its own."""
    pin = b"Nats-Pin-Id: Yc7z\r\n"
    others = (
        b"A: 1\r\n",
        b"X-Nats-Pin-Id: 1\r\n",
        b"A: Nats-Pin-Id: 1\r\n",
        b"broken\r\n",
        b"A: \xff\r\n",
        pin,
        pin + b"A: 1\r\n",
    )
    plain = with_headers(b"", *(b"NATS/1.0\r\n" + lines + b"\r\n" for lines in others))
    delivered = [b"NATS/1.0\r\n" + x + pin + b"\r\n" for x in (b"", *others)]
    result = with_headers(*delivered, pinned=True)
    assert result.batch.rows.drop_columns([REPLY]) == plain.batch.rows.drop_columns([REPLY])
    assert (result.failures, result.raw_headers) == (plain.failures, plain.raw_headers)
    assert column(result, layout.HEADERS)[0] is None
    assert len(plain.failures) == 2
    assert column(plain, layout.HEADERS)[-2] == [("Nats-Pin-Id", ["Yc7z"])]


def test_a_batch_without_headers_has_nulls() -> None:
    assert column(with_headers(b"", b""), layout.HEADERS) == [None, None]


def test_an_empty_header_block_is_an_empty_map_and_not_null() -> None:
    assert header(b"NATS/1.0\r\n\r\n") == {}
    assert header(b"NATS/1.0\r\n") == {}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (b"A: 1\r\n", {"A": ["1"]}),
        (b"A: 1\r\nB: 2\r\nA: 3\r\n", {"A": ["1", "3"], "B": ["2"]}),
        (b"A: 1\r\na: 2\r\n", {"A": ["1"], "a": ["2"]}),
        (b"A:\r\nB: \r\n", {"A": [""], "B": [""]}),
        (b"A:1\r\n", {"A": ["1"]}),
        (b"A: \t  1\r\n", {"A": ["1"]}),
        (b"A:" + b" " * 12 + b"1\r\n", {"A": ["1"]}),
        (b"Nats-Msg-Id: 0123456789abcdef\r\n", {"Nats-Msg-Id": ["0123456789abcdef"]}),
        (b"A: 1 \t\r\n", {"A": ["1 \t"]}),
        (b"A: b: c\r\n", {"A": ["b: c"]}),
        (b"A: ::\r\n", {"A": ["::"]}),
        (b"A: x\ny\r\n", {"A": ["x\ny"]}),
        ("Ä: ö日\r\n".encode(), {"Ä": ["ö日"]}),
        (b"A: 1\r\n" * 3, {"A": ["1", "1", "1"]}),
    ],
)
def test_header_lines_become_lists_of_values_in_order(lines: bytes, expected: dict[str, list[str]]) -> None:
    found = header(b"NATS/1.0\r\n" + lines + b"\r\n")
    assert found == expected
    assert list(found) == list(expected)


@pytest.mark.parametrize(
    "block",
    [
        b"NATS/1.0\r\nA: \xff\r\n\r\n",
        b"NATS/1.0\r\n\xff: a\r\n\r\n",
        b"NATS/1.0\r\nno colon\r\n\r\n",
        b"NATS/1.0\r\n: no name\r\n\r\n",
        b"NATS/1.0\r\nA: 1\r\nbad\r\n\r\n",
        b"NATS/1.0\r\nA: 1",
        b"NATS/1.0 503\r\n\r\n",
        b"HTTP/1.1\r\nA: 1\r\n\r\n",
        b"A: 1\r\n\r\n",
        b"\xff",
        b"\r\n",
    ],
    ids=repr,
)
def test_headers_that_cannot_be_read_fail_their_message_only_and_keep_its_header_block(block: bytes) -> None:
    good = b"NATS/1.0\r\nA: 1\r\n\r\n"
    result = with_headers(good, block, b"", block, good)
    assert [(failure.index, failure.stage) for failure in result.failures] == [(1, "headers"), (3, "headers")]
    assert all(failure.error and "\n" not in failure.error for failure in result.failures)
    assert result.raw_headers == {1: block, 3: block}
    assert column(result, layout.HEADERS) == [[("A", ["1"])], None, None, None, [("A", ["1"])]]
    result.batch.rows.validate(full=True)


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
