"""Messages on their way from the socket to columns."""

from __future__ import annotations

import numpy as np

from jetcapture_py.jetstream.wire.inbox import Received

SIZE = b"NATS/1.0\r\nNats-Msg-Size: %d\r\n\r\n"


def received(*messages: tuple[bytes, bytes]) -> Received:
    """Messages by header block and payload; the subjects are their numbers."""
    headers, payloads = zip(*messages, strict=True)
    return Received.of([b"%d" % n for n in range(len(messages))], [b"r"] * len(messages), headers, payloads)


def test_an_empty_message_whose_header_has_a_size_may_lack_its_payload() -> None:
    empty = [b"", b"NATS/1.0\r\n\r\n", SIZE % 0, b"NATS/1.0\r\nX-Nats-Msg-Size: 7\r\n\r\n"]
    empty += [b"NATS/1.0\r\nOther: Nats-Msg-Size: 7\r\n\r\n"]
    for message in [(block, b"") for block in empty] + [(block, b"payload") for block in (b"", SIZE % 7)]:
        assert not received(message, message).lacks_payload()
    for before in (b"", b"A: 1\r\n", b"A: \xff\x00\r\n", b"Nats-Msg-Size: 0\r\n"):
        block = b"NATS/1.0\r\n" + before + b"Nats-Msg-Size: 7\r\n\r\n"
        assert received((b"", b"x"), (block, b""), (block, b"whole")).lacks_payload()


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
