from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetcapture_py.jetstream.pulls import PullStatus, Reaction, parse_status

EXPECTED = [
    ("100 Idle Heartbeat", Reaction.ALIVE),
    ("100 FlowControl Request", Reaction.ALIVE),
    ("404 No Messages", Reaction.PULL_AGAIN),
    ("408 Request Timeout", Reaction.PULL_AGAIN),
    ("408 Interest Expired", Reaction.PULL_AGAIN),
    ("409 Message Size Exceeds MaxBytes", Reaction.TOO_LARGE),
    ("409 Batch Completed", Reaction.PULL_AGAIN),
    ("409 Server Shutdown", Reaction.PULL_LATER),
    ("409 Leadership Change", Reaction.PULL_LATER),
    ("409 Exceeded MaxWaiting", Reaction.PULL_LATER),
    ("423 Nats-Pin-Id mismatch", Reaction.OTHER_CLIENT),
    ("503", Reaction.PULL_LATER),
    ("503 No Responders", Reaction.PULL_LATER),
    ("409 Exceeded MaxRequestBatch of 100", Reaction.ADAPT),
    ("409 Exceeded MaxRequestExpires of 5s", Reaction.ADAPT),
    ("409 Exceeded MaxRequestMaxBytes of 1024", Reaction.ADAPT),
    ("400 Bad Request - heartbeat value too large", Reaction.FATAL),
    ("412 Nats-Min-Pending", Reaction.FATAL),
    ("409 Consumer Deleted", Reaction.FATAL),
    ("409 Consumer is push based", Reaction.FATAL),
]


@pytest.mark.parametrize("headers", ["", "Nats-Pending-Messages: 5\r\nNats-Pending-Bytes: 0\r\n"])
@pytest.mark.parametrize(("line", "reaction"), EXPECTED)
def test_every_status_of_the_server_has_its_reaction(line: str, reaction: Reaction, headers: str) -> None:
    status = parse_status(f"NATS/1.0 {line}\r\n{headers}\r\n".encode())
    code, _, text = line.partition(" ")
    assert status == PullStatus(int(code), text, reaction, *((5, 0) if headers else ()))


@pytest.mark.parametrize("line", ["409 consumer deleted", "409 CONSUMER DELETED", "409 Consumer Deleted."])
def test_the_case_and_the_end_of_a_conflicts_text_do_not_matter(line: str) -> None:
    assert parse_status(f"NATS/1.0 {line}\r\n\r\n".encode()).reaction is Reaction.FATAL


@pytest.mark.parametrize("line", ["409 Something New", "409", "500 Internal", "", "abc", "-1 x", "² x", "1e2", "0100x"])
def test_what_no_server_is_known_to_send_is_tried_again_after_a_pause(line: str) -> None:
    assert parse_status(f"NATS/1.0 {line}\r\n\r\n".encode()).reaction is Reaction.PULL_LATER


@pytest.mark.parametrize("line", ["400 Consumer Deleted", "404 Consumer Deleted"])
def test_only_a_conflict_is_told_apart_by_its_text(line: str) -> None:
    expected = Reaction.FATAL if line.startswith("400") else Reaction.PULL_AGAIN
    assert parse_status(f"NATS/1.0 {line}\r\n\r\n".encode()).reaction is expected


@given(st.one_of(st.binary(max_size=60), st.binary(max_size=40).map(lambda noise: b"NATS/1.0 " + noise)))
def test_no_status_raises(block: bytes) -> None:
    assert isinstance(parse_status(block), PullStatus)


def test_a_number_of_any_length_does_not_raise() -> None:
    assert parse_status(b"NATS/1.0 " + b"9" * 10_000 + b" x\r\n\r\n").reaction is Reaction.PULL_LATER


def test_a_status_without_any_headers_is_passing() -> None:
    assert parse_status(b"").reaction is Reaction.PULL_LATER


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ("Nats-Pending-Messages: 5\r\nNats-Pending-Bytes: 10\r\n", 5),
        ("Nats-Pending-Bytes: 10\r\nnats-pending-messages:0\r\n", 0),
        ("Nats-Pending-Messages: -1\r\n", None),
        ("Nats-Pending-Messages: many\r\n", None),
        ("Nats-Pending-Messages: 99999999999999999999\r\n", None),
        ("", None),
    ],
)
def test_a_status_says_how_many_messages_the_pull_will_not_bring(headers: str, expected: int | None) -> None:
    assert parse_status(f"NATS/1.0 408 Request Timeout\r\n{headers}\r\n".encode()).undelivered == expected
