"""Which messages a lost connection took with it, and which are given back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetcapture_py.jetstream.acks import AckPosition, position, subjects_like
from jetcapture_py.jetstream.consumer import ConsumerState, consumer_state
from jetcapture_py.jetstream.deliveries import ALONE_AFTER, MAX_SEQUENCES, Deliveries, Lost

PREFIXES = ["$JS.ACK", "$JS.ACK.hub.ACCOUNT"]


def reply(seq: int, delivery: int, prefix: str = PREFIXES[0]) -> bytes:
    return f"{prefix}.ORDERS.archive.1.{seq}.{delivery}.1700000000000000000.7".encode()


def replies(seqs: Iterable[int]) -> pa.BinaryArray:
    return pa.array([reply(seq, 1) for seq in seqs], pa.binary())


def state(deliveries: int = 0, delivered: int = 0, floor: int = 0, unacked: int = 0, pulls: int = 0) -> ConsumerState:
    info: dict[str, Any] = {
        "config": {},
        "delivered": {"consumer_seq": deliveries, "stream_seq": delivered},
        "ack_floor": {"stream_seq": floor},
        "num_ack_pending": unacked,
        "num_waiting": pulls,
    }
    return consumer_state(info)


def given_back(lost: Lost) -> list[int]:
    positions = [position(each, "ORDERS", "archive") for each in lost.replies.to_pylist()]
    return [each.seq for each in positions if each]


def alone(count: int, prefix: str = PREFIXES[0]) -> Deliveries:
    """One that has received every delivery so far, of the messages 1 to `count`."""
    deliveries = Deliveries("ORDERS", "archive", state())
    deliveries.received(count, reply(count, count, prefix), 0.0)
    return deliveries


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_gap_after_a_reconnect_is_given_back_in_the_servers_own_words(prefix: str) -> None:
    lost = alone(10, prefix).after_reconnect(state(15, 15, 3, unacked=12), replies(range(4, 11)), 1.0)
    assert lost.messages == 5
    assert given_back(lost) == [11, 12, 13, 14, 15]
    assert lost.replies[0].as_py() == reply(11, 15, prefix)


def test_without_a_gap_nothing_is_given_back() -> None:
    assert alone(10).after_reconnect(state(10, 10), replies(range(1, 11)), 1.0).messages == 0


def test_before_anything_has_come_the_gap_is_known_too() -> None:
    lost = Deliveries("ORDERS", "archive", state()).after_reconnect(state(5, 5, unacked=5), replies([]), 1.0)
    assert given_back(lost) == [1, 2, 3, 4, 5]


def test_what_was_lost_and_is_lost_again_is_given_back_again() -> None:
    deliveries = alone(10)
    deliveries.after_reconnect(state(15, 15, unacked=15), replies(range(1, 11)), 1.0)
    deliveries.received(12, reply(12, 17), 2.0)  # 11 and 12 have come again
    lost = deliveries.after_reconnect(state(20, 15, unacked=15), replies(range(1, 13)), 3.0)
    assert (lost.messages, given_back(lost)) == (3, [13, 14, 15])
    deliveries.received(15, reply(15, 23), 4.0)
    assert given_back(deliveries.after_reconnect(state(23, 15, 15), replies([]), 5.0)) == []


def test_giving_back_that_was_lost_itself_is_repeated() -> None:
    deliveries = alone(10)
    after = state(15, 15, unacked=15)
    held = replies(range(1, 11))
    first = given_back(deliveries.after_reconnect(after, held, 1.0))
    lost = deliveries.after_reconnect(after, held, 2.0)
    assert (lost.messages, given_back(lost)) == (0, first)


def test_while_another_replica_takes_part_the_loss_is_estimated_and_nothing_given_back() -> None:
    deliveries = Deliveries("ORDERS", "archive", state(unacked=4))
    deliveries.received(10, reply(20, 20), 0.0)
    deliveries.received(20, reply(37, 40), 10.0)  # 20 of 40 deliveries came here
    for _ in range(10):
        deliveries.record_state(state(unacked=32), held=20, pulls=0, now=10.0)
    lost = deliveries.after_reconnect(state(50, 50, unacked=40), replies(range(1, 21)), 11.0)
    assert (lost.messages, given_back(lost)) == (8, [])


def test_after_a_while_without_a_gap_a_replica_is_alone_again() -> None:
    deliveries = Deliveries("ORDERS", "archive", state(unacked=4))
    for second in range(int(ALONE_AFTER) + 1):
        deliveries.received(1 + second, reply(5 + second, 5 + second), float(second))
    lost = deliveries.after_reconnect(state(12, 12, unacked=12), replies(range(5, 11)), ALONE_AFTER)
    assert given_back(lost) == [11, 12]


def test_open_pulls_after_a_reconnect_are_another_replicas() -> None:
    lost = alone(10).after_reconnect(state(15, 15, unacked=15, pulls=1), replies(range(1, 11)), 1.0)
    assert (lost.messages, given_back(lost)) == (5, [])


def test_pulls_of_others_before_the_reconnect_count_too() -> None:
    for pulls, expected in ((10, [11, 12, 13, 14, 15]), (9, [])):
        deliveries = alone(10)
        deliveries.record_state(state(10, 10, unacked=10, pulls=10), held=10, pulls=pulls, now=1.0)
        after = state(15, 15, unacked=15)
        assert given_back(deliveries.after_reconnect(after, replies(range(1, 11)), 2.0)) == expected


def test_a_server_that_has_forgotten_deliveries_makes_no_loss() -> None:
    deliveries = alone(10)
    assert deliveries.after_reconnect(state(8, 8, unacked=8), replies(range(1, 11)), 1.0).messages == 0
    deliveries.received(12, reply(10, 10), 2.0)  # 9 and 10, with numbers that were there before
    assert given_back(deliveries.after_reconnect(state(13, 13), replies([]), ALONE_AFTER + 2)) == [11, 12, 13]


def test_messages_that_are_handed_on_after_the_reconnect_do_not_count_twice() -> None:
    deliveries = Deliveries("ORDERS", "archive", state())
    deliveries.received(10, reply(10, 10), 0.0)
    deliveries.after_reconnect(state(15, 15, unacked=15), replies(range(1, 11)), 1.0)
    deliveries.received(7, reply(7, 7), 2.0)
    lost = deliveries.after_reconnect(state(18, 18, unacked=18), replies(range(1, 11)), 3.0)
    assert given_back(lost) == list(range(11, 19))


def test_a_gap_too_wide_to_ask_for_is_only_counted() -> None:
    lost = alone(10).after_reconnect(state(15, 11 + MAX_SEQUENCES), replies(range(1, 11)), 1.0)
    assert (lost.messages, given_back(lost)) == (5, [])


@pytest.mark.parametrize(
    "other",
    [
        b"",
        b"nonsense",
        b"$JS.ACK.OTHER.archive.1.2.3.4.5",
        b"$JS.ACK.ORDERS.archive.1.x.3.4.5",
        b"$JS.ACK.ORDERS.archive.1",
    ],
)
def test_what_the_consumer_did_not_send_says_nothing(other: bytes) -> None:
    assert position(other, "ORDERS", "archive") is None
    deliveries = alone(10)
    deliveries.received(11, other, 1.0)
    assert given_back(deliveries.after_reconnect(state(11, 11, unacked=11), replies(range(1, 11)), 2.0)) == [11]


def test_an_ack_subject_for_another_message_differs_in_nothing_but_its_numbers() -> None:
    real = b"$JS.ACK._.hash.ORDERS.archive.3.100.200.1700000000000000000.7.token"
    assert position(real, "ORDERS", "archive") == AckPosition(100, 200, 7)
    (made,) = subjects_like(real, [5], 9).to_pylist()
    assert made == b"$JS.ACK._.hash.ORDERS.archive.1.5.9.1700000000000000000.7.token"


@given(st.data())
def test_nothing_is_given_back_that_is_held_or_acknowledged_or_was_never_delivered(data: st.DataObject) -> None:
    """Connections break at any time, with any number of messages on their way, received, and acknowledged."""
    deliveries = Deliveries("ORDERS", "archive", state())
    held: set[int] = set()
    on_the_way: list[int] = []
    waiting: list[int] = []  # for another delivery
    numbers = {"deliveries": 0, "delivered": 0, "received": 0, "last": 0}
    acked: set[int] = set()
    for step in range(data.draw(st.integers(1, 20))):
        for _ in range(data.draw(st.integers(0, 8))):
            seq = waiting.pop(0) if waiting else numbers["delivered"] + 1
            numbers["delivered"] = max(numbers["delivered"], seq)
            numbers["deliveries"] += 1
            on_the_way.append(seq)
        for _ in range(data.draw(st.integers(0, len(on_the_way)))):
            numbers["received"] += 1
            numbers["last"] += 1
            held.add(seq := on_the_way.pop(0))
            deliveries.received(numbers["received"], reply(seq, numbers["last"]), float(step))
        for seq in data.draw(st.lists(st.sampled_from(sorted(held)), unique=True)) if held else ():
            held.discard(seq)
            acked.add(seq)
        if data.draw(st.booleans()):
            floor = next((seq for seq in range(1, numbers["delivered"] + 2) if seq not in acked), 1) - 1
            pending = numbers["delivered"] - len(acked)
            after = state(numbers["deliveries"], numbers["delivered"], floor, pending)
            lost = deliveries.after_reconnect(after, replies(held), float(step))
            back = set(given_back(lost))
            assert lost.messages == len(on_the_way)
            assert not back & held
            assert all(floor < seq <= numbers["delivered"] for seq in back)
            assert set(on_the_way) <= back
            assert len(back) == len(lost.replies)
            waiting += [seq for seq in sorted(back - acked) if seq not in waiting]
            on_the_way.clear()
            numbers["last"] = numbers["deliveries"]
