"""What may be acknowledged with `source.mode: ordered`, against a model of the server under many schedules."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from jetcapture_py.jetstream.ordered import OrderedAcks, Phase, Position
from tests.support.ordered_breaks import RULES, keeps, without
from tests.support.ordered_world import RADIX, failure, play, schedule, shrink


def check(seeds: Iterable[int]) -> None:
    for seed in seeds:
        if (reason := failure(schedule(seed))) is not None:
            steps = shrink(schedule(seed))
            pytest.fail(f"seed {seed}: {reason}; play({steps}) fails as well: {failure(steps)}")


def test_no_schedule_loses_a_message_or_stops_for_good() -> None:
    check(range(800))


@pytest.mark.exhaustive
def test_none_of_many_schedules_loses_a_message_or_stops_for_good() -> None:
    check(range(800, 100_000))


def test_whatever_rule_is_left_out_is_missed() -> None:
    for rule in RULES:
        assert keeps(OrderedAcks, rule)
        assert not keeps(without(rule), rule)


def test_without_faults_every_message_is_captured_once_and_one_reset_is_enough() -> None:
    publish, deliver, store, turn = range(4)
    world = play([publish + RADIX * 10, *([turn, deliver + RADIX * 16, turn + RADIX * 20, store] * 6)])
    captured = [message for replica in world.replicas for message in replica.captured]
    assert len(captured) == len(set(captured)) > 3
    assert sum(replica.acks.resets for replica in world.replicas) == 1


def test_what_is_held_when_a_run_ends_is_recognized_in_the_next_one() -> None:
    acks = OrderedAcks()
    numbers, seqs = np.arange(1, 6), np.array([2, 4, 6, 8, 10])
    assert not acks.received(numbers[:1], seqs[:1], seqs[:1], "pin").any()
    acks.reset(acks.run, 1, "")
    assert acks.received(numbers, seqs, seqs, "pin").all()
    acks.stored(seqs[[0, 1, 4]], seqs[[0, 1, 4]])
    acks.interrupt("reconnected")
    assert acks.next_ack(acks.mark(), Position(0, 0), "") is None
    acks.reset(acks.run, 1, "")
    again = np.append(seqs, 12)
    assert acks.received(np.arange(1, 7), again, again, "pin").tolist() == [False] * 5 + [True]
    first = acks.next_ack(acks.mark(), Position(0, 0), "")
    assert first is not None
    assert first.position == Position(1, 2)
    acks.acked(first)
    ack = acks.next_ack(acks.mark(), first.position, "")
    assert ack is not None
    assert ack.position == Position(2, 4)


def test_what_a_standby_dropped_is_captured_when_it_is_delivered_again_but_not_what_it_stored() -> None:
    acks = OrderedAcks()
    numbers, seqs = np.arange(1, 4), np.array([1, 2, 3])
    acks.received(numbers[:1], seqs[:1], seqs[:1], "pin")
    acks.reset(acks.run, 1, "")
    assert acks.received(numbers, seqs, seqs, "pin").all()
    acks.stored(seqs[1:2], seqs[1:2])
    acks.unpinned("pin")
    acks.forget()
    acks.received(numbers[:1], seqs[:1], seqs[:1], "again")
    acks.reset(acks.run, 1, "")
    assert acks.received(numbers, seqs, seqs, "again").tolist() == [True, False, True]


def test_messages_that_arrive_after_the_floor_was_asked_for_wait_for_the_next_ack() -> None:
    acks = OrderedAcks()
    seqs = np.arange(1, 9)
    acks.received(seqs[:1], seqs[:1], seqs[:1], "pin")
    acks.reset(acks.run, 1, "")
    acks.received(seqs[:4], seqs[:4], seqs[:4], "pin")
    mark = acks.mark()
    acks.received(seqs[4:], seqs[4:], seqs[4:], "pin")
    acks.stored(seqs, seqs)
    first = acks.next_ack(mark, Position(0, 0), "")
    assert first is not None
    acks.acked(first)
    ack = acks.next_ack(mark, first.position, "")
    assert ack is not None
    assert ack.position == Position(4, 4)
    assert acks.phase is Phase.RUNNING
