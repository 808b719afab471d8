"""What may be acknowledged with `source.mode: ordered`, against a model of the server under many schedules."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from jetcapture_py.jetstream.ordered import OrderedAcks
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
@pytest.mark.parametrize("first", range(0, 100_000, 20_000))
def test_none_of_many_schedules_loses_a_message_or_stops_for_good(first: int) -> None:
    check(range(first, first + 20_000))


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
