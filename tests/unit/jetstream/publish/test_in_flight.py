from __future__ import annotations

from jetcapture_py.jetstream.publish.publisher import InFlight, Refusal
from tests.support.publishing import frame, header_block

OK, KNOWN = b'{"stream":"S", "seq":1}', b'{"stream":"S", "seq":1,"duplicate": true}'
ID = header_block([("Nats-Msg-Id", "1")])


def window(*numbers: int, block: bytes = b"") -> tuple[InFlight, list[bytes]]:
    """These messages, all written, and their frames."""
    under_way = InFlight()
    frames = [frame(f"s.{number}", b"r%d" % number, block, b"%d" % number) for number in numbers]
    under_way.add([b"r%d" % number for number in numbers], frames)
    assert under_way.take() == b"".join(frames)
    return under_way, frames


def answer(under_way: InFlight, **answers: bytes) -> list[tuple[str, Refusal]]:
    return list(under_way.acknowledge([reply.encode() for reply in answers], list(answers.values())))


def test_what_is_acknowledged_is_no_longer_under_way() -> None:
    under_way, frames = window(1, 2, 3)
    assert (len(under_way), under_way.size) == (3, sum(map(len, frames)))
    assert answer(under_way, r2=OK, r1=KNOWN, r7=KNOWN) == []
    assert answer(under_way, r1=KNOWN) == []  # a second time
    assert (len(under_way), under_way.size) == (1, len(frames[2]))
    assert (under_way.acknowledged, under_way.duplicates) == (2, 1)


def test_everything_is_written_again_in_order_with_what_waits() -> None:
    under_way, frames = window(1, 2, 3, block=ID)
    answer(under_way, r2=OK)
    under_way.add([b"r4"], [b"waiting"])
    assert under_way.again() == 0
    assert under_way.take() == frames[0] + frames[2] + b"waiting"
    assert under_way.take() == b""


def test_what_was_written_without_an_id_could_be_stored_twice() -> None:
    under_way, _ = window(1, 2)
    under_way.add([b"r3", b"r4"], [frame("s", b"r3", ID, b""), frame("s", b"r4", b"", b"")])
    assert under_way.again() == 2  # message 4 is not written yet
    under_way, _ = window(1, 2)
    answer(under_way, r1=b"")
    assert under_way.again() == 1  # and message 1 was refused
    under_way = InFlight()  # a payload that looks like an id is none
    forged = b"\r\nNats-Msg-Id: 1\r\n"
    under_way.add([b"r"], [frame("s", b"r", b"NATS/1.0\r\nA: 1\r\n\r\n", forged)])
    under_way.add([b"q"], [frame("s", b"q", b"", forged)])
    under_way.take()
    assert under_way.again() == 2


def test_what_is_refused_for_now_holds_everything_back_and_goes_first() -> None:
    under_way, frames = window(1, 2, 3)
    unavailable = b'{"error": {"code": 503, "description": "no leader", "err_code": 10008}}'
    assert answer(under_way, r3=b"", r1=unavailable, r2=OK) == [
        ("s.3", Refusal(times=1, temporary=True, text="no stream listens on it")),
        ("s.1", Refusal(times=1, temporary=True, text="no leader (10008)")),
    ]
    under_way.add([b"r4"], [b"later"])
    assert under_way.held
    assert under_way.take() == b""
    under_way.release()
    assert not under_way.held
    assert under_way.take() == frames[0] + frames[2] + b"later"
    assert answer(under_way, r1=b"") == [("s.1", Refusal(times=2, temporary=True, text="no stream listens on it"))]


def test_a_refusal_for_good_holds_nothing_back() -> None:
    for said, text in {
        b'{"error": {"code": 400, "description": "too large", "err_code": 7}}': "too large (7)",
        b'{"error": {}}': "no reason given (0)",
        b'{"error": "odd"}': 'unexpected answer b\'{"error": "odd"}\'',
        b'["error"]': "unexpected answer b'[\"error\"]'",
        b'"error" \xff': "unexpected answer b'\"error\" \\xff'",
    }.items():
        under_way, _ = window(1, 2)
        assert answer(under_way, r1=said) == [("s.1", Refusal(times=1, temporary=False, text=text))]
        assert not under_way.held
        assert answer(under_way, r2=b'{"stream": "S", "note": {"error": 1}, "error": null}') == []
        assert len(under_way) == 1
