"""The receive parser against nats-py's own: what both can read they read alike, however it arrives."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given
from nats.errors import ProtocolError

from tests.support.examples import examples
from tests.unit.jetstream.wire.test_client import ACK, HEADERS, REGISTERED, STATUS, Fast, Stock, looking_at

BLANKS = b" \t\r\n\x0b\x0c"  # to the stock parser
subjects = st.binary(min_size=1, max_size=12).filter(lambda subject: not set(subject) & set(BLANKS))
sids = st.sampled_from([*REGISTERED, *REGISTERED, 3, 0, 10**9]).map(lambda sid: b"%d" % sid) | st.sampled_from(
    [b"01", b"+1", b"1_7", b"x", b""]
)
replies = st.sampled_from([b"", ACK, ACK]) | subjects
blocks = st.sampled_from([None, None, HEADERS, STATUS, b""]) | st.binary(max_size=9)
payloads = st.binary(max_size=40) | st.sampled_from(
    [b"hello", b"\r\n", b"PING\r\n", b"MSG a 1 5\r\nhello\r\n", b"-ERR 'x'\r\n"]
)
lies = st.sampled_from([0, 0, 0, 0, 0, 0, -1, 1, 2, -50, 1000])
sizes = st.sampled_from([None] * 12 + [b"-1", b"00", b"1e2", b" 5", b"\xd9\xa3", b"9" * 40, b"", b"0x5"])


@st.composite
def frames(draw: st.DrawFn) -> tuple[bytes, bool]:
    """A frame, and whether its lengths are the true ones."""
    subject, sid, reply, block, payload = draw(subjects), draw(sids), draw(replies), draw(blocks), draw(payloads)
    lie, odd = draw(lies), draw(sizes)
    words = [b"MSG" if block is None else b"HMSG", subject, sid, *([reply] if reply else [])]
    if block is not None:
        words.append(b"%d" % len(block))
    words.append(b"%d" % (len(block or b"") + len(payload) + lie) if odd is None else odd)
    true = not lie and odd is None and sid.isdigit() and not sid.startswith(b"0")
    true &= bool(reply) or block is None or block.startswith(b"NATS")  # else nats-py may read digits in it as a length
    return b" ".join(words) + b"\r\n" + (block or b"") + payload + b"\r\n", true


others = st.sampled_from(
    [
        b"PING\r\n",
        b"PONG\r\n",
        b"+OK\r\n",
        b'INFO {"server_id": "a b", "x": "\\r\\n"}\r\n',
        b"-ERR 'Permissions Violation for Publish to \"a.b\"'\r\n",
        b"-ERR 'Stale Connection'\r\n",
    ]
)
streams = st.lists(frames() | others.map(lambda line: (line, True)), max_size=8)


def fed(parser: Fast | Stock, chunks: list[bytes]) -> str:
    """How feeding it ended."""
    try:
        parser.feed(*chunks)
    except ProtocolError:
        return "protocol error"
    return "fine"


@given(streams, st.lists(st.integers(0, 400), max_size=6), st.sampled_from([1, 1, 2, 64]))
def test_what_both_parsers_read_they_read_alike(stream: list[tuple[bytes, bool]], cuts: list[int], many: int) -> None:
    data = b"".join(frame for frame, _ in stream)
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    chunks = [data[start:stop] for start, stop in pairwise(edges)]
    fast, stock = Fast(), Stock()
    with looking_at(many):
        ends = fed(fast, chunks), fed(stock, chunks)
    if all(true for _, true in stream):
        assert ends == ("fine", "fine")
    if ends == ("fine", "fine"):
        assert fast.outcome() == stock.outcome()


@examples(cost=8)
@given(st.lists(frames().filter(lambda found: found[1]).map(lambda found: found[0]) | others, min_size=1, max_size=3))
def test_every_place_where_a_stream_can_be_cut_is_harmless(stream: list[bytes]) -> None:
    data = b"".join(stream)
    whole = Stock()
    whole.feed(data)
    for cut in range(len(data) + 1):
        for many in (1, 64):
            fast = Fast()
            with looking_at(many):
                fast.feed(data[:cut], data[cut:])
            assert fast.outcome() == whole.outcome(), cut
