from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jetcapture_py.jetstream.pulls import PullStatus, Reaction, parse_status


def parsed(line: str, headers: str = "") -> PullStatus:
    return parse_status(f"NATS/1.0 {line}\r\n{headers}\r\n".encode())


REACTIONS = {
    Reaction.ALIVE: ["100 Idle Heartbeat", "100 FlowControl Request"],
    Reaction.PULL_AGAIN: [
        *("404 No Messages", "408 Request Timeout", "408 Interest Expired", "409 Batch Completed"),
        "404 Consumer Deleted",  # only a conflict is told apart by its text
    ],
    Reaction.TOO_LARGE: ["409 Message Size Exceeds MaxBytes"],
    Reaction.PULL_LATER: [
        *("409 Server Shutdown", "409 Leadership Change", "409 Exceeded MaxWaiting", "503", "503 No Responders"),
        # unknown to any server
        *("409 Something New", "409", "500 Internal", "", "abc", "-1 x", "² x", "1e2", "0100x", "9" * 10_000 + " x"),
    ],
    Reaction.OTHER_CLIENT: ["423 Nats-Pin-Id mismatch"],
    Reaction.ADAPT: [
        f"409 Exceeded MaxRequest{limit}" for limit in ("Batch of 100", "Expires of 5s", "MaxBytes of 1024")
    ],
    Reaction.FATAL: [
        *("400 Bad Request - heartbeat value too large", "400 Consumer Deleted", "412 Nats-Min-Pending"),
        *("409 Consumer Deleted", "409 consumer deleted", "409 Consumer Deleted.", "409 Consumer is push based"),
    ],
}


def test_every_status_of_the_server_has_its_reaction_and_an_unknown_one_is_tried_again_later() -> None:
    assert {reaction: {parsed(line).reaction for line in lines} for reaction, lines in REACTIONS.items()} == {
        reaction: {reaction} for reaction in REACTIONS
    }
    assert parse_status(b"").reaction is Reaction.PULL_LATER
    pending = "Nats-Pending-Messages: 5\r\nNats-Pending-Bytes: 0\r\n"
    assert parsed("408 Request Timeout", pending) == PullStatus(408, "Request Timeout", Reaction.PULL_AGAIN, 5, 0)
    assert parsed("503") == PullStatus(503, "", Reaction.PULL_LATER)


@given(st.one_of(st.binary(max_size=60), st.binary(max_size=40).map(lambda noise: b"NATS/1.0 " + noise)))
def test_no_status_raises(block: bytes) -> None:
    assert isinstance(parse_status(block), PullStatus)


def test_a_status_says_how_many_messages_the_pull_will_not_bring() -> None:
    expected = {
        "Nats-Pending-Messages: 5\r\nNats-Pending-Bytes: 10\r\n": 5,
        "Nats-Pending-Bytes: 10\r\nnats-pending-messages:0\r\n": 0,
        "Nats-Pending-Messages: -1\r\n": None,
        "Nats-Pending-Messages: many\r\n": None,
        "Nats-Pending-Messages: 99999999999999999999\r\n": None,
        "": None,
    }
    assert {headers: parsed("408 Request Timeout", headers).undelivered for headers in expected} == expected
