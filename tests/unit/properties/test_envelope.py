"""Ack subjects: numbers are read from those that our consumer's server made, and no others make a row."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import pyarrow as pa
from hypothesis import given

from jetcapture_py.archive import layout
from jetcapture_py.archive.schema import REPLY
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.transform.envelope import assemble

STREAM, CONSUMER = "ORDERS", "archive"
NUMBER = re.compile(rb"[0-9]{1,19}")

digits = st.one_of(
    st.integers(0, 100).map(str),
    st.integers(0, 2**63 + 2).map(str),
    st.sampled_from(["", "-1", "+1", " 1", "0x1", "1e3", "1.", "٣", "9" * 19, "0" * 19, str(2**63)]),
).map(str.encode)
tokens = st.sampled_from(
    [b"$JS", b"ACK", STREAM.encode(), CONSUMER.encode(), b"hub", b"h4sh", b"x", b"", b"\xff", b"_"]
)
real = st.builds(
    lambda ack, head, names, numbers, tail: b".".join([*ack, *head, *names, *numbers, *tail]),
    st.sampled_from([[b"$JS", b"ACK"]] * 6 + [[b"$JS", b"NAK"], [b"our", b"app"]]),
    st.sampled_from([[], [b"hub", b"h4sh"], [b"_", b"h4sh"], [b"hub"]]),
    st.sampled_from([[STREAM.encode(), CONSUMER.encode()]] * 6 + [[b"S", CONSUMER.encode()], [STREAM.encode(), b"c"]]),
    st.lists(digits, min_size=5, max_size=5)
    | st.lists(st.integers(1, 99).map(lambda n: b"%d" % n), min_size=5, max_size=5),
    st.sampled_from([[], [], [b"r4nd0m"], [b"a", b"b"]]),
)
replies = real | st.lists(tokens | digits, max_size=13).map(b".".join) | st.binary(max_size=30)


def reference(reply: bytes) -> tuple[int, int, int] | None:
    """Deliveries, sequence and nanoseconds; None for what our consumer has not sent.

    `$JS.ACK.stream.consumer.delivered.sseq.cseq.time.pending`, or with domain and account in front of the stream, and
    then possibly more behind it. A number is decimal digits below 2**63.
    """
    parts = reply.split(b".")
    if parts[:2] != [b"$JS", b"ACK"]:
        return None
    if len(parts) != 9:
        if len(parts) < 11:
            return None
        del parts[2:4]
    if parts[2:4] != [STREAM.encode(), CONSUMER.encode()]:
        return None
    delivered, seq, time = parts[4], parts[5], parts[7]
    if not all(NUMBER.fullmatch(part) and int(part) < 2**63 for part in (delivered, seq, time)):
        return None
    return int(delivered), int(seq), int(time)


@given(st.lists(replies, max_size=8))
def test_a_reply_gives_its_own_numbers_or_none_whatever_comes_beside_it(batch: list[bytes]) -> None:
    received = Received.of([b"s"] * len(batch), batch, [b""] * len(batch), [b"%d" % n for n in range(len(batch))])
    found = assemble(STREAM, CONSUMER, received)
    expected = [(n, numbers) for n, reply in enumerate(batch) if (numbers := reference(reply)) is not None]
    rows = found.batch.rows
    assert rows.column(layout.PAYLOAD).to_pylist() == [b"%d" % n for n, _ in expected]
    assert rows.column(REPLY).to_pylist() == [batch[n] for n, _ in expected]
    assert rows.column(layout.SEQ).to_pylist() == [seq for _, (_, seq, _) in expected]
    assert rows.column(layout.DELIVERED).to_pylist() == [min(times, 2**31 - 1) for _, (times, _, _) in expected]
    assert rows.column(layout.TIMESTAMP).cast(pa.int64()).to_pylist() == [time // 1000 for _, (_, _, time) in expected]
    assert rows.column(layout.NANOS).to_pylist() == [time % 1000 for _, (_, _, time) in expected]
    assert found.strays == len(batch) - len(expected)
    assert not found.failures
